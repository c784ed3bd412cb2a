"""The kit that plugin authors test with: builders, a clock that stands still, assertions, checks of the contracts."""

from fairlead.testing.asserting import assert_refused, assert_routed, choose
from fairlead.testing.builders import busy, cycle, endpoint, fleet, holds, request
from fairlead.testing.checks import check_filter, check_picker, check_policy, check_scorer
from fairlead.testing.clock import SimClock

__all__ = [
    "SimClock",
    "assert_refused",
    "assert_routed",
    "busy",
    "check_filter",
    "check_picker",
    "check_policy",
    "check_scorer",
    "choose",
    "cycle",
    "endpoint",
    "fleet",
    "holds",
    "request",
]
