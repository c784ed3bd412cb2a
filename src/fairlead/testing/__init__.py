"""Helpers for testing plugins: builders, a clock that the test controls, assertions, and checks of plugin contracts."""

from fairlead.testing.builders import SimClock, busy, cycle, endpoint, fleet, holds, request
from fairlead.testing.checks import (
    assert_refused,
    assert_routed,
    check_filter,
    check_picker,
    check_policy,
    check_scorer,
    choose,
)

__all__ = [
    "SimClock", "assert_refused", "assert_routed", "busy", "check_filter", "check_picker", "check_policy",
    "check_scorer", "choose", "cycle", "endpoint", "fleet", "holds", "request",
]  # fmt: skip
