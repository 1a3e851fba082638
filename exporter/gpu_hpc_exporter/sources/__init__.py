"""All input and output: the driver, recordings, later /proc and the kubelet. Everything above is pure."""
