"""The exporter with both fakes beside each other: PM sampling on /metrics, and what becomes of it in trouble."""

from __future__ import annotations

import json
import os
import select
import signal
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

import fake_cupti
import fake_nvml
from e2e.machine import PATIENT_HELPER, observed, state, uuid_of
from exporter_process import Exporter, Samples, run_exporter
from proc_tree import ProcTree

NVML = "device 0 sm 0.5 dram 0.25\n"
CUPTI = """
costs none
device 0
value 0 *pct* 50
value 0 dram__bytes_*.sum 1e12/s
value 0 lts__t_sectors.sum 2e11/s
value 0 *srcnode_fbp* 25
value 0 pcie__*.sum 1e9/s
"""


EXPORTER = ("-m", "gpu_hpc_exporter")
PATIENT = """
import sys
from gpu_hpc_exporter import cli
from gpu_hpc_exporter.samplers import pm_sampling
from gpu_hpc_exporter.sources.pm_sampling import process
process._EXIT_S = pm_sampling._STOP_S = 20  # a helper that a busy machine holds up must end by itself all the same
sys.exit(cli.main())
"""


@dataclass(frozen=True)
class Machine:
    """Both fakes and the exporter."""

    nvml: fake_nvml.Scenario
    cupti: fake_cupti.CuptiScenario
    exporter: Exporter

    def helper(self) -> int:
        """Pid of the helper process, 0 without one."""
        for task in Path(f"/proc/{self.exporter.process.pid}/task").iterdir():
            with suppress(ProcessLookupError, FileNotFoundError):  # thread or child may end meanwhile
                for pid in (task / "children").read_text().split():
                    if "gpu_hpc_exporter.pm_helper" in Path(f"/proc/{pid}/cmdline").read_text():
                        return int(pid)
        return 0

    def wait_for_state(self, wanted: str, reason: str = "") -> Samples:
        """Wait until PM sampling of the GPU is in a state, for a reason that has this in it."""
        return self.exporter.wait_for(
            lambda s: state(s, "pm_sampling", uuid_of(0)) == wanted and reason in self.reason(s)
        )

    @staticmethod
    def reason(samples: Samples) -> str:
        """Why PM sampling of the GPU is in the state it is in."""
        infos = samples.all("gpu_hpc_source_state_info", source="pm_sampling", uuid=uuid_of(0))
        return "".join(dict(labels)["reason"] for labels in infos)

    def log(self) -> list[Mapping[str, str]]:
        """The log, each line of which must be JSON, whoever wrote it."""
        return [json.loads(line) for line in self.exporter.log.read_text().splitlines()]


class Start(Protocol):
    """Starts a machine that ends with the test."""

    def __call__(
        self, cupti: str = CUPTI, *flags: str, settings: str = "yield_to: []", program: Sequence[str] = EXPORTER
    ) -> Machine: ...


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both fakes in one directory, as drivers have it."""
    return fake_cupti.build(fake_nvml.build(tmp_path_factory.mktemp("fakes")))


@pytest.fixture
def start(tmp_path: Path, libraries: Path) -> Iterator[Start]:
    """Start the exporter with PM sampling at 10 ms."""
    with ExitStack() as stack:

        def starter(
            cupti: str = CUPTI, *flags: str, settings: str = "yield_to: []", program: Sequence[str] = EXPORTER
        ) -> Machine:
            config = tmp_path / "config.yaml"
            library = libraries / "libcupti.so.12"
            config.write_text(f"sampling_interval_ms: 10\npm_sampling: {{library: {library}, {settings}}}\n")
            driver = fake_nvml.Scenario(tmp_path, libraries, NVML)
            profiler = fake_cupti.CuptiScenario(tmp_path, libraries, textwrap.dedent(cupti))
            flags = ("--log.format=json", f"--config.file={config}", *flags)
            env = driver.env | profiler.env
            exporter = stack.enter_context(run_exporter(tmp_path, *flags, env=env, program=program))
            return Machine(driver, profiler, exporter)

        yield starter


def pm_seconds(samples: Samples) -> float:
    """Time that PM windows cover so far."""
    seconds = samples.get("gpu_hpc_source_observed_seconds_total", uuid=uuid_of(0), source="pm_sampling")
    return seconds or 0.0


def test_what_only_pm_sampling_serves(start: Start) -> None:
    """L2 sectors and DRAM bytes rise at the rate of the hardware, the miss rate follows; libcupti is elsewhere."""
    machine = start()
    before = machine.exporter.wait_for(lambda s: pm_seconds(s) > 0.5)
    after = machine.exporter.wait_for(lambda s: pm_seconds(s) > pm_seconds(before) + 1.5)
    seconds = pm_seconds(after) - pm_seconds(before)

    def rate(name: str) -> float:
        return (after.one(name, uuid=uuid_of(0)) - before.one(name, uuid=uuid_of(0))) / seconds

    assert rate("gpu_hpc_l2_sectors_total") == pytest.approx(1.5e11, rel=0.01)
    assert rate("gpu_hpc_l2_missed_sectors_total") == pytest.approx(2e12 / 32, rel=0.01)
    for direction in ("read", "written"):
        assert rate(f"gpu_hpc_dram_{direction}_bytes_total") == pytest.approx(1e12, rel=0.01)
    assert after.one("gpu_hpc_l2_cache_miss_rate", uuid=uuid_of(0)) == pytest.approx(2e12 / 32 / 1.5e11, rel=0.01)
    assert state(after, "pm_sampling", uuid_of(0)) == "active"
    assert after.one("gpu_hpc_window_seconds", uuid=uuid_of(0), source="pm_sampling") == pytest.approx(0.01)
    maps = Path(f"/proc/{machine.exporter.process.pid}/maps").read_text()
    assert "libnvidia-ml" in maps
    assert "cupti" not in maps
    assert "libcuda" not in maps


ONLY_PM = ("gpu_hpc_l2_sectors_total", "gpu_hpc_dram_read_bytes_total", "gpu_hpc_dram_written_bytes_total")


def assert_nothing_is_zero(machine: Machine) -> None:
    """What only PM sampling serves stands still where it was, or is absent: nowhere does it fall to 0."""
    machine.exporter.wait_for(lambda s: s.get("gpu_hpc_l2_cache_miss_rate", uuid=uuid_of(0)) is None)
    samples = machine.exporter.scrape()
    assert all((samples.get(name, uuid=uuid_of(0)) or 1) > 0 for name in ONLY_PM)
    assert samples.get("gpu_hpc_bottleneck_intensity_ratio", uuid=uuid_of(0), unit="l2") is None


def test_j01_busy_counters_are_absent(start: Start, tmp_path: Path, libraries: Path) -> None:
    """J01: while another process has the counters nothing of them is served; GPM's go on, then all is there."""
    with fake_cupti.CuptiScenario(tmp_path, libraries, "device 0").other_owner(0):
        machine = start()
        busy = machine.wait_for_state("busy")
        later = machine.exporter.wait_for(lambda s: observed(s, uuid_of(0)) > observed(busy, uuid_of(0)) + 0.5)
        assert state(later, "pm_sampling", uuid_of(0)) == "busy"
        assert pm_seconds(later) == 0
        assert not any(later.all(name) for name in (*ONLY_PM, "gpu_hpc_l2_cache_miss_rate"))
        assert later.one("gpu_hpc_sm_active_ratio", uuid=uuid_of(0)) == pytest.approx(0.5, abs=1e-6)
    machine.exporter.wait_for(lambda s: pm_seconds(s) > 0.2)


def test_pause_over_http(start: Start) -> None:
    """J01: the helper is gone when the answer comes, GPM goes on, and a resume brings windows back."""
    machine = start()
    machine.exporter.wait_for(lambda s: pm_seconds(s) > 0.2)
    assert machine.exporter.post("/-/pause?seconds=600") == 200
    assert machine.helper() == 0
    paused = machine.wait_for_state("paused", "paused on request")
    after = machine.exporter.wait_for(lambda s: observed(s, uuid_of(0)) > observed(paused, uuid_of(0)) + 0.5)
    assert pm_seconds(after) == pm_seconds(paused)
    assert_nothing_is_zero(machine)
    assert machine.exporter.post("/-/resume") == 200
    machine.exporter.wait_for(lambda s: pm_seconds(s) > pm_seconds(paused) + 0.2)


def test_j01_the_hosts_profilers(start: Start, tmp_path: Path) -> None:
    """J01: in a container they are in the /proc that is mounted there; they get the counters while they run."""
    host = ProcTree(tmp_path / "proc")
    machine = start(CUPTI, f"--path.procfs={host.root}", settings="mode: auto")
    machine.exporter.wait_for(lambda s: pm_seconds(s) > 0.2)
    host.add(4711, comm=b"ncu")
    machine.wait_for_state("paused", "ncu runs")
    assert machine.helper() == 0
    host.remove(4711)
    machine.wait_for_state("active")


@pytest.mark.parametrize(
    ("fault", "wanted", "reason"),
    [
        ("fault cuptiPmSamplingDecodeData crash", "failed", "the helper process has ended"),
        ("fault cuptiPmSamplingSetConfig 35", "no_permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("version 130101\ndriver_cuda 12090", "unsupported", "CUPTI 13.1"),
    ],
)
def test_gpm_goes_on_whatever_cupti_does(start: Start, fault: str, wanted: str, reason: str) -> None:
    """K10, J01, J02: a state with a reason; the time is observed without a hole, no L2 value is made up."""
    machine = start(CUPTI + fault)
    samples = machine.wait_for_state(wanted, reason)
    before = observed(samples, uuid_of(0))
    samples = machine.exporter.wait_for(lambda s: observed(s, uuid_of(0)) > before + 0.5)
    assert samples.one("gpu_hpc_windows_total", uuid=uuid_of(0), source="gpm", result="lost") == 0
    assert samples.get("gpu_hpc_l2_cache_miss_rate", uuid=uuid_of(0)) is None
    assert samples.one("gpu_hpc_sm_active_ratio", uuid=uuid_of(0)) == pytest.approx(0.5, abs=1e-6)
    assert machine.exporter.fetch("/-/ready")[0] == 200
    assert machine.log()


def test_sigterm_ends_the_helper_first(start: Start) -> None:
    """A14: sampling is stopped in order before the exporter ends, soon, with status 0 and without a warning."""
    helper_command = json.dumps(PATIENT_HELPER)
    machine = start(settings=f"yield_to: [], helper: {helper_command}", program=("-c", PATIENT))
    machine.exporter.wait_for(lambda s: pm_seconds(s) > 0.2)
    helper = os.pidfd_open(machine.helper())
    # As a service manager does: the helper is signalled as well.
    signal.pidfd_send_signal(helper, signal.SIGTERM)
    assert machine.exporter.stop() == 0
    assert select.select([helper], [], [], 0)[0], "the helper outlives the exporter"
    os.close(helper)
    assert machine.cupti.calls()["cuptiPmSamplingStop"] == 1
    assert [line for line in machine.log() if line["level"] in ("warning", "error")] == []
