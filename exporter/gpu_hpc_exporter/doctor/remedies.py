"""What to do, where no source of the exporter says it itself. Sentences of runbooks stand there in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HUNG: Final = "Drain the node and reboot it; processes that are stuck in the driver cannot be killed."
LOST: Final = (
    "Drain the node. Reboot it; if the GPU is still missing, power-cycle it (a warm reboot does not reset a dead link)."
)
MISSING: Final = "reload the driver or reboot, then act on the kernel log's Xid."
HONOR_LABELS: Final = (
    "Set `honor_labels: true` in this scrape job (`honorLabels: true` in a ServiceMonitor) and reload Prometheus."
)
RESET: Final = (
    "If that does not help: reset the GPU (`gpu-hpc-exporter release --for 60s`, `nvidia-smi -i UUID --gpu-reset`)."
)
AGAIN: Final = f"try again in a minute. {RESET}"
RUNBOOKS: Final[Mapping[str, str]] = {
    "GpuHpcDriverCallHung": HUNG,
    "GpuHpcGpuLost": LOST,
    "GpuHpcGpusMissing": MISSING,
    "GpuHpcSourceStale": RESET,
}
"""Which runbook says the same."""

NO_GPU: Final = (
    "there is nothing to measure here: in a container or virtual machine give it a GPU; "
    "`gpu-hpc-exporter --source=replay` plays a recording of an H200 on any machine"
)
NO_DEVICE_FILES: Final = (
    "`nvidia-modprobe -u -c=0` makes them on a host; a container needs NVIDIA's container toolkit, a systemd unit "
    "PrivateDevices=no and DeviceAllow= for them"
)
CRASHED: Final = "the driver's library is broken or foreign: install the driver anew, and report this line if it stays"
OWN_FAULT: Final = (
    "a fault of this exporter, not of the driver: report what `gpu-hpc-exporter --log.level=debug doctor` prints"
)
FOREIGN: Final = (
    "the file is damaged, or not NVIDIA's for this machine: install the driver anew, or give the container NVIDIA's "
    "runtime instead of the file"
)
OLD_LIBRARY: Final = "update the driver: without these functions their series are absent"
BUSY: Final = "end the other profiler: sampling begins by itself; or set pm_sampling.mode: off, GPM goes on"
AGENT: Final = "install a wheel that was built where a C compiler is, or set CC and build it again"
SCRAPE: Final = "add this node to the targets of the scrape job, as deploy/prometheus/scrape-*.yml show"
RULES: Final = "copy all of alert-rules/*.yml into a directory that rule_files names, and reload Prometheus"

_OTHER_AGENTS: Final = "install `nvidia-cuda-cupti` for the job's CUDA version (PyTorch's wheels bring it along)."
_UPDATE: Final = "update the exporter and its agent together."
_REPORT: Final = "report it with the agent's line and the versions of driver and CUDA."
AGENT_REASONS: Final[Mapping[str, str]] = {
    "no_cuda": "libcuda.so.1 lacks functions that the agent needs: the driver is too old",
    "no_cupti": _OTHER_AGENTS,
    "missing_function": _OTHER_AGENTS,
    "unknown_version": _UPDATE,
    "unknown": _UPDATE,
    "windows_discarded": "see GpuHpcCollectiveHung, and kernels that run for minutes (persistent kernels); after a "
    "profiler the program's next start.",
    "no_heartbeat": "the agent's thread has not run for 30 s: the process is stopped, starved of CPU, or hangs in a "
    "driver call",
    "cupti_error": _REPORT,
    "invalid_records": _REPORT,
    "buffers": _REPORT,
}
"""By reason of an agent that errs; the runbook GpuHpcAgentPaused has them all."""
