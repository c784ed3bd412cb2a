"""Contracts of plugins beside the policy.

Those of filters, scorers, pickers and policies are in `schedule.framework`, of fairness and ordering in
`admit.framework`. What goes wrong in those of other distributions is done without, see `plugins.guarding`.
"""

from collections.abc import Mapping
from typing import Protocol

from fairlead.fleet.fleet import Fleet
from fairlead.model.endpoint import Endpoint
from fairlead.parse.request import ParsedRequest


class MetricSource(Protocol):
    """Reads further columns from metrics pages. They stand beside those of `metrics.engines.NAME.extra`."""

    name: str
    #: Names of all columns that it may give.
    provides: tuple[str, ...]

    def measure(self, endpoint: Endpoint, page: bytes) -> Mapping[str, float]:
        """Called for every page that was read. What is absent keeps its older value; NaN takes it away."""
        ...


class Parser(Protocol):
    """Understands request bodies of paths that Fairlead does not know, or knows otherwise."""

    name: str
    #: Ends of request paths, without the query: `/v1/rank`. The longest that fits decides.
    paths: tuple[str, ...]

    def parse(self, path: str, body: bytes) -> ParsedRequest:
        """Raises `ClientError` for a body that no model server could read. After any other exception the request is
        scheduled unread."""
        ...


class Saturation(Protocol):
    """How full the pool is."""

    name: str

    def level(self, fleet: Fleet, now: float) -> float:
        """1 = the set point at which requests begin to wait; above it, oversubscribed."""
        ...
