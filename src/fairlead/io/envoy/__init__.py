"""The embedded gateway: a real Envoy as a child process, configured so that a dead scheduler costs no request."""
