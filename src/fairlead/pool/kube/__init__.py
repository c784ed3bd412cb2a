"""The Kubernetes API: what is watched, and what is written."""
