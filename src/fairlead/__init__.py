"""Fairlead: decides for every LLM request when it runs and which replica runs it."""

__version__ = "0.1.0"
