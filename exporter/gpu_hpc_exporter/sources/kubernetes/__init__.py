"""Who holds which GPU on this node, by the kubelet, and what the API server knows of its pods."""
