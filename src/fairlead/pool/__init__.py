"""Discover and observe endpoints: files, Kubernetes, scraping, KV events."""
