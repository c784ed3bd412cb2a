"""The model-server stub: the API of vLLM 0.32 over a simulated engine. Many replicas fit in one process."""
