"""gpu-hpc-exporter: finds out why a GPU is slow, continuously, in production."""

__version__ = "0.1.0"
