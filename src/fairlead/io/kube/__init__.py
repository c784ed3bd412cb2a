"""Kubernetes: a small client of our own, made for watching."""
