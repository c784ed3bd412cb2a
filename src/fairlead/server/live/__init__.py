"""The composition root: builds a running scheduler from its configuration, and stops it gracefully."""

from fairlead.server.live.scheduler import Live

__all__ = ["Live"]
