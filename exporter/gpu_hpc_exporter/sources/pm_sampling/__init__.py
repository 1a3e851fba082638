"""CUPTI PM sampling: hardware-timed windows with L2, DRAM and PCIe, read by a helper process."""
