"""Every threshold of the diagnosis, once, so that alert rules can be held against them.

All are ratios 0-1 and come from the project's diagnosis table, which was set on measured H200 workloads.
"""

from __future__ import annotations

from typing import Final

DRAM_REACHABLE: Final = 0.8
"""Share of the nominal DRAM peak that real code reaches (a copy kernel on an H200: 0.88)."""
LINK_REACHABLE: Final = 0.7
"""Share of a link's nominal peak that real code reaches (all-reduce over NV18: 0.68; pinned copy: 0.93)."""
L2_MIN_TRAFFIC: Final = 0.05
"""L2 traffic, as a share of the DRAM peak, below which the share that went to DRAM says nothing."""

MEDIA_BUSY: Final = 0.50
MEDIA_SM_ACTIVE: Final = 0.10
THROTTLED_SM_ACTIVE: Final = 0.01
IDLE_SM_ACTIVE: Final = 0.0001
"""An idle H200 reads exactly 0, a loop of 125,000 launches/s of 1,024 elements 0.0002-0.0003: that GPU is
starved, not idle, and telling its owner to release it would be wrong."""
IDLE_SHARE: Final = 0.01
LINK_BOUND: Final = 0.85
COPY_ONLY_SM_ACTIVE: Final = 0.10
COPY_ONLY_LINK: Final = 0.05
COMPUTE_BOUND: Final = 0.60
DRAM_BOUND: Final = 0.75
L2_BOUND: Final = 0.55
"""Of L2's nominal peak. On an H200 kernels that do nothing else reach 0.57-0.61 with reads, 0.72 with copies and 0.49
with writes; eager copies of 8 MiB, between which L2 rests, reach 0.46."""
L2_THRASH_SHARE: Final = 0.5
L2_THRASH_SM_ACTIVE: Final = 0.50
L2_THRASH_SM: Final = 0.30
L2_THRASH_DRAM: Final = (0.40, 0.75)
STARVED_SM_ACTIVE: Final = 0.50
MIXED: Final = 0.50

# What the verdict on a GPU asks beyond its class; alerts ask the same of longer times.
DRAM_SATURATED: Final = 0.9
MISLEADING_NVML: Final = 0.8
IDLE_TIME: Final = 0.9
"""Share of the time from which on a GPU is called idle, whatever else it did; no alert asks this."""
SMALL_COPIES_PER_S: Final = 100.0
SMALL_COPY_BYTES: Final = 65_536.0
SMALL_COPIES_PER_KERNEL: Final = 0.1
PAGEABLE_BYTES_PER_S: Final = 1e9
MANY_SHORT: Final = 0.3
QUEUE_S: Final = 0.01
HOST_WAIT: Final = 0.1
HOST_WAIT_BUSY: Final = 0.7
HOST_WAIT_SM_ACTIVE: Final = 0.6
COMMUNICATION_EXPOSED: Final = 0.3
JITTERY: Final = 0.05
"""Share of the time in kernels."""
HUNG_SM_ACTIVE: Final = 0.02
HUNG_DEVIATION: Final = 0.01
HUNG_SM: Final = 0.05
HUNG_NVML: Final = 0.95
HUNG_GPUS: Final = 2
MEMORY_NEARLY_FULL: Final = 0.97
MEMORY_WAS_FULL: Final = 0.8
"""Half an hour ago."""
MEMORY_RISE: Final = 0.005
"""Since then; a server that reserves all memory at its start is flat."""
