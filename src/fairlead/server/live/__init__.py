"""The composition root: configuration → objects → one running scheduler → graceful stop."""

from fairlead.server.live.scheduler import Live

__all__ = ["Live"]
