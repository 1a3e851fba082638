"""Slurm's jobs: files that a prolog writes for each GPU, and the controller where it may be asked."""
