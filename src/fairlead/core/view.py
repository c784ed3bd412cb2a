"""What policies and plugins see of the fleet."""

from typing import Protocol

from fairlead.core.columns import FloatColumn
from fairlead.core.predictor import Predictor
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable


class FleetView(Protocol):
    """All endpoints, to be read: columns of `table` and what `predictor` has learned are live and not to be written.

    `fairlead.testing` checks that a plugin changes nothing.
    """

    @property
    def table(self) -> EndpointTable:
        """The columns, one entry per slot."""
        ...

    @property
    def predictor(self) -> Predictor:
        """What was learned of the endpoints' speed."""
        ...

    @property
    def staleness(self) -> float:
        """Seconds after which a scrape no longer counts."""
        ...

    def match(self, request: Request) -> FloatColumn | None:
        """Share of the prompt (0..1) that each endpoint is believed to hold; `None` = nobody anything."""
        ...

    def loading(self, request: Request) -> FloatColumn | None:
        """Milliseconds until each endpoint can run the request's adapter; `None` = there is none, or no difference.
        Worth asking only where `table.lora`."""
        ...

    def stale(self, slot: int, now: float) -> bool:
        """Whether the last good scrape is too old."""
        ...

    def age(self, slot: int, now: float) -> float:
        """Seconds since the last good scrape; infinite when there was none."""
        ...
