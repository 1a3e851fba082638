"""The NVIDIA Management Library through pynvml: inventory, GPM windows and slow readings."""
