"""The fleet as policies and plugins see it."""

from typing import Protocol

from fairlead.core.columns import FloatColumn
from fairlead.core.predictor import Predictor
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable


class FleetView(Protocol):
    """All endpoints, read-only: the columns of `table` and of `predictor` are live and must not be written.

    `fairlead.testing` checks that a plugin changes nothing.
    """

    @property
    def table(self) -> EndpointTable:
        """The columns, one entry per slot."""
        ...

    @property
    def predictor(self) -> Predictor:
        """What was learned about the endpoints' speed."""
        ...

    @property
    def staleness(self) -> float:
        """Seconds after which a scrape is too old to count."""
        ...

    def match(self, request: Request) -> FloatColumn | None:
        """Return the estimated share of the prompt (0..1) that each endpoint has cached; `None` = none has any."""
        ...

    def loading(self, request: Request) -> FloatColumn | None:
        """Return the milliseconds until each endpoint can run the request's adapter; `None` = it has none, or all are
        equal. Only useful if `table.lora`."""
        ...

    def stale(self, slot: int, now: float) -> bool:
        """Whether the last good scrape is too old."""
        ...

    def age(self, slot: int, now: float) -> float:
        """Return the seconds since the last good scrape; infinite if there was none."""
        ...
