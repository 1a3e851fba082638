"""Two GPUs at once: nothing that is per GPU may need the driver's library for itself. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter_process import Exporter, Samples, run_exporter

WORKLOAD = Path(__file__).parent / "workload.py"
GPUS = len([*Path("/dev").glob("nvidia[0-9]*")])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

SECONDS, MIDDLE = 20.0, 14.0
"""Of copies, and of those that are measured, from when so many bytes have been copied: the ends are left out."""
BEGUN = 400e9
OBSERVED = "gpu_hpc_observed_seconds_total"
WAYS = ("transmitted", "received")


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """It has sampled all GPUs with GPM and with PM sampling for a while."""
    with run_exporter(tmp_path_factory.mktemp("exporter")) as running:
        running.wait_for(lambda s: windows(s, "gpm") > 100 * GPUS and windows(s, "pm_sampling") > 20 * GPUS, timeout=60)
        yield running


def windows(samples: Samples, source: str) -> float:
    """Of all GPUs together."""
    return sum(samples.all("gpu_hpc_windows_total", source=source, result="valid").values())


def test_the_exporter_lives_and_samples_every_gpu(exporter: Exporter) -> None:
    """Half a minute, a thread per GPU; where two of them sampled at once the driver's library died in seconds."""
    before = exporter.scrape()
    begin = time.monotonic()
    after = exporter.wait_for(lambda s: windows(s, "gpm") - windows(before, "gpm") > 300 * GPUS, timeout=45)
    took = time.monotonic() - begin
    each = {
        source: {
            gpu: after.grown(before, "gpu_hpc_windows_total", gpu=gpu, source=source, result="valid")
            for gpu in map(str, range(GPUS))
        }
        for source in ("gpm", "pm_sampling")
    }
    print(f"windows in {took:.1f} s: {each}")  # noqa: T201  measured
    for of_source in each.values():
        assert min(of_source.values()) >= max(of_source.values()) - 12
        assert min(of_source.values()) >= 10 * took - 25


def test_doctor_finds_nothing_wrong(exporter: Exporter) -> None:
    """Its probe samples the GPUs alike, beside an exporter."""
    command = [sys.executable, "-m", "gpu_hpc_exporter", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    print(done.stdout)  # noqa: T201  measured
    checks = json.loads(done.stdout)["checks"]
    driver = [check for check in checks if check["group"] == "driver and GPUs"]
    assert [check for check in driver if check["name"] == "GPU 1"]
    assert not [check for check in driver if check["status"] == "broken"]
    assert exporter.scrape()


def test_nvlink_bytes_are_the_copys_own_count(exporter: Exporter, tmp_path: Path) -> None:
    """What one GPU sends the other receives, and it is what the program copied."""
    counts = tmp_path / "counts"
    command = [sys.executable, str(WORKLOAD), "--seconds", str(SECONDS), "--phases", "peer", "--counts", str(counts)]
    idle = exporter.scrape()
    with subprocess.Popen(command):
        early = exporter.wait_for(lambda s: all(moved(idle, s, gpu) > BEGUN for gpu in ("0", "1")))
        late = exporter.wait_for(lambda s: all(s.grown(early, OBSERVED, gpu=gpu) > MIDDLE for gpu in ("0", "1")))
    count = json.loads(counts.read_text())
    own = count["peer_bytes"] / (count["end"] - count["begin"])
    sent, received = ([rate(early, late, f"gpu_hpc_nvlink_{way}_bytes_total", gpu=gpu) for gpu in "01"] for way in WAYS)
    limit = late.one("gpu_hpc_nvlink_bandwidth_limit_bytes_per_second", gpu="0")
    print(f"copied {own:.4e} B/s of {limit:.4e}; sent {sent}, received {received}")  # noqa: T201  measured
    assert sent[0] == pytest.approx(own, rel=0.02)
    assert received[1] == pytest.approx(own, rel=0.02)
    assert (sent[1], received[0]) == (0, 0)
    for gpu in ("0", "1"):
        assert rate(early, late, "gpu_hpc_bottleneck_seconds_total", gpu=gpu, **{"class": "nvlink_bound"}) > 0.95


def moved(before: Samples, after: Samples, gpu: str) -> float:
    """Bytes over NVLink, either way."""
    return sum(after.grown(before, f"gpu_hpc_nvlink_{way}_bytes_total", gpu=gpu) for way in WAYS)


def rate(before: Samples, after: Samples, name: str, *, gpu: str, **labels: str) -> float:
    """Growth per observed second."""
    return after.grown(before, name, gpu=gpu, **labels) / after.grown(before, OBSERVED, gpu=gpu)
