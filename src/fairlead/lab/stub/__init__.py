"""The model-server stub: speaks like vLLM 0.32, thinks with `fairlead.engine`. Many replicas fit in one process."""
