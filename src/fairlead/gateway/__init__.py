"""Envoy's side: ext_proc over HTTP/2, the access log, the embedded gateway."""
