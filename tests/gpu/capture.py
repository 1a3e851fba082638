"""Record the demo: all workloads, by two jobs that use the GPU in turn and, for one phase, together.

    python tests/gpu/capture.py exporter/gpu_hpc_exporter/recordings/nvidia-h200__580.159.04.jsonl.gz

Needs PyTorch with CUDA and the exporter installed, on a GPU of Hopper or later, as root: `bert_finetune` is a plain
process with JOB_NAME, `llama_pretrain` a Slurm job by its cgroup and the environment that Slurm gives its tasks. Both
run with the kernel agent, which traces one second in three, whatever that costs: phases are short.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.slurm_cgroup import slurm_cgroup
from gpu.workload import RECORDED
from gpu_hpc_exporter.config import Agent

SECOND = ("shared", "train", "inference_graph")
FIRST = tuple(make.__name__ for make in RECORDED if make.__name__ not in SECOND)
EXPORTER = [sys.executable, "-m", "gpu_hpc_exporter"]
WORKLOAD = [*EXPORTER, "run", "--", sys.executable, str(Path(__file__).parent / "workload.py")]
AGENT = {"GPU_HPC_AGENT_PERIOD_SECONDS": "3", "GPU_HPC_AGENT_BUDGET": "1"}
SLURM_JOB = 4242


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=20, help="length of each phase")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        marks = Path(directory) / "marks"
        marks.touch()
        command = [*EXPORTER, "record", "--duration", "10m", "--marks", str(marks)]
        with subprocess.Popen([*command, str(args.file)]) as recorder:
            wait_for_directory(Path(Agent().directory), recorder)
            workloads(marks, args.seconds)
            recorder.terminate()
    sys.exit(recorder.returncode)


def workloads(marks: Path, seconds: float) -> None:
    """Run both jobs to their ends; the first one keeps its memory through the second one's first phase."""
    options = ["--seconds", str(seconds), "--marks", str(marks)]
    environment = {**os.environ, **AGENT, "JOB_NAME": "bert_finetune"}
    command = [*WORKLOAD, *options, "--hold", "--phases", *FIRST]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin
        assert first.stdout
        first.stdout.readline()
        with slurm_cgroup(SLURM_JOB) as cgroup:
            if cgroup is None:
                sys.exit("capture: no cgroup can be made here: run as root where /sys/fs/cgroup is writable")
            slurm = {"SLURM_JOB_ID": str(SLURM_JOB), "SLURM_JOB_NAME": "llama_pretrain", "SLURM_PROCID": "0"}
            environment = {**os.environ, **AGENT, **slurm}
            with subprocess.Popen([*WORKLOAD, *options, "--phases", *SECOND], env=environment) as second:
                (cgroup / "cgroup.procs").write_text(str(second.pid))
                wait_for_end(marks, SECOND[0], second)
                first.stdin.close()


def wait_for_directory(directory: Path, recorder: subprocess.Popen[bytes]) -> None:
    """Wait until the recorder has made the agents' directory."""
    while not directory.is_dir():
        if recorder.poll() is not None:
            sys.exit("capture: the recorder ended before the workloads began")
        time.sleep(0.05)


def wait_for_end(marks: Path, phase: str, workload: subprocess.Popen[bytes]) -> None:
    """Wait until a phase is over."""
    while f" {phase}\n" not in (text := marks.read_text()) or not text.endswith(" between\n"):
        if workload.poll() is not None:
            sys.exit(f"capture: the workload ended before {phase}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
