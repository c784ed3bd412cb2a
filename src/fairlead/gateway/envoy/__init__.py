"""The embedded Envoy: its configuration and its process."""
