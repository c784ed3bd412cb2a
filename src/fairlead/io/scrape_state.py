"""The state of scraping one endpoint, and the scraper's totals."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from fairlead.io.scrape_http import PageConnection
from fairlead.io.scrape_target import PageAddress
from fairlead.model.endpoint import Endpoint
from fairlead.wire.engine_metrics import EngineSpecs
from fairlead.wire.promtext import PageReader, Reading


class ScrapeStats:
    """Totals since the start."""

    __slots__ = ("bytes", "failed", "ok", "seconds", "suppressed")

    def __init__(self) -> None:
        self.ok = 0
        self.failed = 0
        #: Of `ok`, those that fed no event because nothing had changed.
        self.suppressed = 0
        self.bytes = 0
        #: Time from request to page, summed over `ok`.
        self.seconds = 0.0


class Owner(Protocol):
    """Who schedules targets and takes what comes of them."""

    def page(self, target: "Target", page: bytes) -> None: ...

    def lost(self, target: "Target", reason: str, retry: bool, answered: bool = False) -> None: ...


class Target:
    """One endpoint and the state of its scraping."""

    __slots__ = (
        "address", "awake_until", "connection", "due", "endpoint", "engine", "fails", "fast", "fed_at", "full_at",
        "in_flight", "more", "owner", "problems", "reader", "reading", "retried", "silent", "started", "task",
    )  # fmt: skip

    def __init__(self, owner: Owner, endpoint: Endpoint, address: PageAddress, engine: str, specs: EngineSpecs) -> None:
        self.owner = owner
        self.endpoint = endpoint
        self.address = address
        self.engine = engine
        self.reader = PageReader(specs)
        self.reading: Reading | None = None
        self.problems: tuple[str, ...] = ()
        #: What metric sources read from the last page.
        self.more: Mapping[str, float] = {}
        self.connection: PageConnection | None = None
        self.task: asyncio.Task[None] | None = None
        #: When the scraper looks at it next: to scrape it, or, with a scrape in flight, to give that up.
        self.due = -1.0
        self.started = 0.0
        self.in_flight = False
        self.retried = False
        self.fast = False
        self.fails = 0
        #: What was told of its failures; empty = nothing, or that they are over.
        self.silent = ""
        self.awake_until = -1.0
        self.fed_at = -1e9
        self.full_at = -1e9

    def on_page(self, page: bytes) -> None:
        self.owner.page(self, page)

    def on_failure(self, reason: str, *, retry: bool, answered: bool = False) -> None:
        self.owner.lost(self, reason, retry, answered)

    def drop(self) -> None:
        """Stop whatever is under way."""
        self.in_flight = False
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
        if self.task is not None:
            self.task.cancel()
            self.task = None
