"""A model server as a pure state machine: continuous batching, chunked prefill, paged prefix cache, latency presets."""
