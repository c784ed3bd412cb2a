"""The Kubernetes API: watching objects and writing them."""
