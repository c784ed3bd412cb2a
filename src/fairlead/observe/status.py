"""What the fleet looks like at one moment, for gauges and debug pages. Made by whoever knows, read by all."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class EndpointStatus(Struct, frozen=True, kw_only=True):
    """One endpoint. `None` = never reported."""

    id: str
    address: str
    labels: Mapping[str, str] = {}
    #: Whether its last good scrape is recent enough to be believed.
    fresh: bool = False
    #: Seconds since that scrape.
    age_s: float | None = None
    #: Why scrapes fail now; empty = they do not, or only just began to.
    last_error: str = ""
    #: As the engine reported.
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    #: Our own requests in flight, and their prompt tokens that are not prefilled yet.
    leases: int = 0
    pending_tokens: float = 0
    adapters: Sequence[str] = ()


class ScrapeTotals(Protocol):
    """Totals of scraping since the start; `fairlead.io.scrape_state.ScrapeStats` is one."""

    ok: int
    failed: int
    suppressed: int
    bytes: int
    seconds: float


class FleetStatus(Struct, frozen=True, kw_only=True):
    """The whole pool."""

    endpoints: Sequence[EndpointStatus] = ()
    #: Entries of the prefix index.
    index_size: int = 0
    leases: int = 0
    scrapes: ScrapeTotals | None = None
