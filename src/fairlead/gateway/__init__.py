"""The interface to Envoy: ext_proc over HTTP/2, the access log, and the embedded gateway."""
