"""The composition root: configuration → objects → one running scheduler → graceful stop."""

from fairlead.live.scheduler import DRAIN_SECONDS, ENDING, Live

__all__ = ["DRAIN_SECONDS", "ENDING", "Live"]
