"""`gpu-hpc-exporter doctor`: what is right and wrong with this machine, and what to do about it."""
