"""The kit that plugin authors test with: a clock that stands still, and builders."""

from fairlead.testing.clock import SimClock

__all__ = ["SimClock"]
