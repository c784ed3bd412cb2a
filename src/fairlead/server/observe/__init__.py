"""Metrics, records, logs and traces."""
