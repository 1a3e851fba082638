"""What the kernel agents in processes tell: one file a process, each of which may be anybody's making."""
