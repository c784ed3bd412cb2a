"""Scraping: reads every endpoint's metrics page, often enough to notice traffic from elsewhere, for almost no CPU."""

import asyncio
import heapq
import os
import random
import ssl
from collections.abc import Callable, Mapping
from itertools import count
from math import floor
from time import thread_time
from typing import Protocol
from urllib.parse import quote, urlsplit

import aiohttp
from msgspec import Struct
from msgspec.structs import replace

from fairlead import __version__
from fairlead.apis.engine_metrics import DEFAULT_ENGINE, ENGINES, EngineMetrics, EngineSpecs, compile_engine, engine_of
from fairlead.apis.prometheus import PageReader, Reading
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import MetricsFailed, MetricsSampled
from fairlead.pool.aio import read_at_most
from fairlead.pool.scrape_http import RECEIVE_BYTES, PageConnection, answers, request_bytes

USER_AGENT = f"fairlead/{__version__}"


class ScrapeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and how carefully. Times in seconds."""

    #: Interval for an endpoint with work of ours, or that reports work.
    fast_s: float = 0.1
    #: Interval for all others. Traffic that does not pass through here shows after at most this and one scrape.
    idle_s: float = 0.2
    #: How long an endpoint stays fast after `wake`.
    hold_s: float = 1.0
    #: An idle endpoint's unchanged sample is repeated this often; in between it is not reported.
    repeat_s: float = 1.0
    timeout_s: float = 1.0
    #: Interval of reading `/v1/models`, see `fairlead.pool.served_models`; 0 = never.
    models_s: float = 30.0
    #: Failures double the interval up to this.
    backoff_cap_s: float = 2.0
    #: Scrapes per second over all endpoints; above it every interval is stretched alike.
    max_rate: float = 1000.0
    #: Larger pages fail, bytes.
    max_page: int = 4 << 20
    #: Sent as `Authorization: Bearer`, read again when the file changes. Also used over plain http if that is the URL.
    token_file: str = ""
    #: PEM bundle for https; empty = the system's.
    ca_file: str = ""
    #: False = accept any certificate. An explicit opt-out, for test beds.
    verify: bool = True


class PageAddress(Struct, frozen=True):
    """A metrics URL taken apart."""

    url: str
    scheme: str
    host: str
    port: int
    request: bytes


def page_address(url: str) -> PageAddress:
    """Raises `ValueError` with a reason for anything but a plain http(s) URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"the metrics URL {url!r} is neither http nor https")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the metrics URL carries credentials; use a token file")
    host = parts.hostname or ""
    if not host.isascii() or not host or any(c <= " " for c in host):
        raise ValueError(f"the metrics URL {url!r} has no usable host")
    port = parts.port if parts.port is not None else (443 if parts.scheme == "https" else 80)
    if not port:
        raise ValueError(f"the metrics URL {url!r} has port 0")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    shown = f"[{host}]" if ":" in host else host
    return PageAddress(url, parts.scheme, host, port, request_bytes(f"{shown}:{port}", target, USER_AGENT))


# The state of scraping one endpoint, and the scraper's totals.


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


class Pace:
    """How many endpoints are scraped, and how many of them fast: by all scrapers that share the limits."""

    def __init__(self) -> None:
        self.targets = self.fast = 0
        #: What is received, by one at a time.
        self.received = memoryview(bytearray(RECEIVE_BYTES))


class Owner(Protocol):
    """Who schedules targets and takes what comes of them."""

    def page(self, target: "Target", page: bytes) -> None: ...

    def lost(self, target: "Target", reason: str, retry: bool, answered: bool = False) -> None: ...


class Target:
    """One endpoint and the state of its scraping."""

    __slots__ = (
        "address", "awake_until", "connection", "cost_s", "due", "endpoint", "engine", "fails", "fast", "fed_at",
        "full_at", "in_flight", "more", "owner", "problems", "reader", "reading", "rests_until", "retried", "silent",
        "started", "task",
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
        #: CPU time that its pages take to read, as a moving average, and until when it is left alone for that.
        self.cost_s = 0.0
        self.rests_until = -1.0
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


# The careful way to a metrics page, for https and bearer tokens: aiohttp, certificates checked, no redirects.

_MAX_TOKEN = 65_536


class ScrapeError(Exception):
    """A page could not be had; the message says why. `answered`: the server did, see `scrape_http.answers`."""

    def __init__(self, reason: str, answered: bool = False) -> None:
        super().__init__(reason)
        self.answered = answered


class SecureFetcher:
    """One session for all endpoints that need it. `keep`: hold connections for the next time."""

    def __init__(self, options: ScrapeOptions, accept: str = "text/plain", keep: bool = True) -> None:
        self._options = options
        self._accept = accept
        self._keep = keep
        self._session: aiohttp.ClientSession | None = None
        self._ssl: ssl.SSLContext | bool = True
        self._token = ""
        self._token_stamp: tuple[int, int] | None = None

    async def fetch(self, url: str) -> bytes:
        """The page. Raises `ScrapeError`; the caller bounds the time."""
        try:
            headers = await asyncio.to_thread(self._headers) if self._options.token_file else {}
            session = self._session or self._open()
            async with session.get(url, headers=headers, ssl=self._ssl, allow_redirects=False) as response:
                if response.status != 200:
                    raise ScrapeError(f"status {response.status}", answers(response.status))
                most = self._options.max_page
                large = ScrapeError(f"the page is larger than {most} bytes")
                return await read_at_most(response.content, most, large)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ScrapeError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if not self._options.verify:
            self._ssl = False
        elif self._options.ca_file:
            self._ssl = ssl.create_default_context(cafile=self._options.ca_file)
        kept = 30 if self._keep else None
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=1, keepalive_timeout=kept, force_close=not self._keep)
        agent = {"User-Agent": USER_AGENT, "Accept": self._accept, "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(
            connector=connector, headers=agent, timeout=aiohttp.ClientTimeout(), cookie_jar=aiohttp.DummyCookieJar()
        )
        return self._session

    def _headers(self) -> dict[str, str]:
        path = self._options.token_file
        status = os.stat(path)
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._token_stamp:
            with open(path, encoding="ascii") as file:
                token = file.read(_MAX_TOKEN).strip()
            if not token.isprintable() or not token:
                raise ScrapeError(f"no usable token in {path}")
            self._token, self._token_stamp = token, stamp
        return {"Authorization": f"Bearer {self._token}"}


# Rules of the scraper
# * Every endpoint is scraped each `idle_s`, and each `fast_s` while it has work: ours (`wake`) or reported by itself.
# * One timer serves all endpoints: due times lie on a 50 ms grid in one heap, and endpoints share a slot of it in
#   groups, so one wake-up starts several scrapes. A scrape never overlaps the endpoint's last one.
# * A failure, time-outs included, doubles the interval (with jitter) up to `backoff_cap_s`, and is fed each time.
#   A kept connection that turns out to be closed is replaced and asked again at once, without counting as a failure.
# * The page of an engine that sleeps counts as a failure: it processes no requests.
# * What is fed: every sample that differs from the last, every sample while the endpoint is busy or awake, and at
#   least one within `repeat_s` + `idle_s`, which is what judging freshness by events must allow for. In between, an
#   idle endpoint's identical sample is dropped: it is worth one event per second.
# * Each `repeat_s` the whole page is read; in between only the known families are compared where they stood.
# * Several schedulers that tell each other what they send (`share`) together scrape as often as one alone, up to
#   an interval of `repeat_s` each: a page takes a real vLLM server 8 to 12 ms of CPU time.
# * An endpoint whose pages take long to read is scraped less often, so that reading takes a share of `READING`, but
#   each `backoff_cap_s` at least. A page of 4 MB that is made for it takes 0.1 s.
# * Above `max_rate` scrapes per second all intervals are stretched alike: CPU stays bounded, news gets older.
#   With the defaults that begins at 200 idle endpoints. Measured with bench/idle.py: 100 idle endpoints with 58 kB
#   pages cost 0.045 core, and one that gets busy is seen after 200 ms at most, 110 ms on average.

#: The share of the time that reading the pages of one endpoint may take.
READING = 0.05
#: Due times are rounded down to this grid (seconds) so that timers fall together.
GRID = 0.05
#: So many endpoints are scraped in the same turn of the grid before the next one is used: their answers come together
#: too, and a wake-up costs more than reading an unchanged page.
GROUP = 16
#: Failures in a row that are worth a word: one alone is common, and changes nothing.
TOLD_AFTER = 3

Feed = Callable[[MetricsSampled | MetricsFailed], object]
#: Called with an endpoint id and what its page lacks, whenever that changes; empty = all is well again.
Report = Callable[[str, tuple[str, ...]], object]
#: Called with an endpoint id and why several scrapes in a row have failed, whenever that changes; empty = no longer.
Silence = Callable[[str, str], object]
#: Reads further gauges from a page, for `Sample.extra`. Must not raise.
Measure = Callable[[Endpoint, bytes], Mapping[str, float]]


class Scraper:
    """Feeds `MetricsSampled` and `MetricsFailed` of all endpoints that are up. All calls on the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        feed: Feed,
        engines: Mapping[str, EngineMetrics] = ENGINES,
        options: ScrapeOptions | None = None,
        *,
        default_engine: str = DEFAULT_ENGINE,
        rng: random.Random | None = None,
        report: Report | None = None,
        measure: Measure | None = None,
        silence: Silence | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`pace`: shared with other scrapers. Raises `ConfigError` for a bad spec in `engines`, which must have
        `default_engine`."""
        self.stats = ScrapeStats()
        self.specs = {name: compile_engine(metrics, f"$.engines.{name}") for name, metrics in engines.items()}
        self._engines = engines
        self._default_engine = default_engine
        self._loop = loop
        self._feed = feed
        self._report = report
        self._measure = measure
        self._silence = silence
        self._options = options or ScrapeOptions()
        self._rng = rng or random.Random()
        self._pace = pace or Pace()
        self._schedulers = 1
        self._secure = SecureFetcher(self._options)
        self._targets: dict[str, Target] = {}
        self._heap: list[tuple[float, int, Target]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        #: Ids of endpoints that were woken since their last scrape began.
        self.awake: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def share(self, schedulers: int) -> None:
        """From now on so many schedulers scrape these endpoints, this one included."""
        self._schedulers = schedulers

    def up(self, endpoint: Endpoint) -> None:
        """Begin to scrape an endpoint, or take note that it changed."""
        engine = engine_of(endpoint.labels, self._engines, self._default_engine)
        old = self._targets.get(endpoint.id)
        if old is not None and old.endpoint.scrape_url == endpoint.scrape_url and old.engine == engine:
            old.endpoint = endpoint
            return
        self.down(endpoint.id)
        try:
            address = page_address(endpoint.scrape_url)
        except ValueError as error:
            self._emit(MetricsFailed(endpoint.id, str(error)))
            return
        target = Target(self, endpoint, address, engine, self.specs[engine])
        target.silent = old.silent if old is not None else ""  # what was told must be taken back
        self._targets[endpoint.id] = target
        self._pace.targets += 1
        slots = max(int(self._interval(target) / GRID), 1)
        among = self._pace.targets
        slot = among // GROUP % slots if among <= GROUP * slots else self._rng.randrange(slots)
        self._schedule(target, self._loop.time() + (1 + slot) * GRID)

    def down(self, endpoint_id: str) -> None:
        """Stop scraping it. Nothing is fed about it any more."""
        target = self._targets.pop(endpoint_id, None)
        if target is not None:
            self._pace.targets -= 1
            self._set_fast(target, False)
            self.awake.discard(endpoint_id)
            target.due = -1.0
            target.drop()

    def wake(self, endpoint_id: str) -> None:
        """It was just sent a request: scrape it fast for a while. To be called again once it is not in `awake`."""
        target = self._targets.get(endpoint_id)
        if target is None:
            return
        self.awake.add(endpoint_id)
        now = self._loop.time()
        target.awake_until = now + self._options.hold_s
        if target.fast:
            return
        self._set_fast(target, True)
        due = max(now + self._interval(target), target.rests_until)
        if not target.in_flight and not target.fails and due < target.due:
            self._schedule(target, due)

    async def close(self) -> None:
        for endpoint_id in list(self._targets):
            self.down(endpoint_id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._secure.close()

    # ---------------- timing ----------------

    def _interval(self, target: Target) -> float:
        options, pace = self._options, self._pace
        demand = pace.fast / options.fast_s + (pace.targets - pace.fast) / options.idle_s
        interval = options.fast_s if target.fast else options.idle_s
        return max(interval * max(demand / options.max_rate, 1.0), min(interval * self._schedulers, options.repeat_s))

    def _set_fast(self, target: Target, fast: bool) -> None:
        if fast != target.fast:
            target.fast = fast
            self._pace.fast += 1 if fast else -1

    def _schedule(self, target: Target, when: float) -> None:
        when = floor(when / GRID + 1e-3) * GRID  # sums of grid times fall just below the grid
        target.due = when
        heapq.heappush(self._heap, (when, next(self._order), target))
        if self._heap[0][2] is target:
            self._arm(when)

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        heap = self._heap
        now = self._loop.time()
        while heap and heap[0][0] <= now + GRID / 4:
            when, _, target = heapq.heappop(heap)
            if when != target.due:
                continue  # scheduled anew since, or down
            if target.in_flight:
                target.drop()
                self._failed(target, f"no answer within {self._options.timeout_s:g} s")
            else:
                target.retried = False
                self._start(target, now)
        while heap and heap[0][0] != heap[0][2].due:
            heapq.heappop(heap)
        if heap:
            self._arm(heap[0][0])

    # ---------------- one scrape ----------------

    def _start(self, target: Target, now: float) -> None:
        target.started = now
        target.in_flight = True
        self.awake.discard(target.endpoint.id)
        self._schedule(target, now + self._options.timeout_s)
        if target.address.scheme == "https" or self._options.token_file:
            self._spawn(target, self._fetch(target))
        elif target.connection is not None and target.connection.open:
            target.connection.get(target.address.request, target)
        else:
            self._spawn(target, self._connect(target))

    def _spawn(self, target: Target, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(work)
        target.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, target: Target) -> None:
        address = target.address
        connection = PageConnection(self._pace.received, self._options.max_page)
        try:
            await self._loop.create_connection(lambda: connection, address.host, address.port)
        except (OSError, ValueError) as error:  # ValueError: a host name that IDNA cannot encode
            target.task = None
            code = error.errno if isinstance(error, OSError) else None
            self.lost(target, f"cannot connect: {os.strerror(code) if code and code > 0 else error}", retry=False)
        else:
            target.task = None
            target.connection = connection
            if connection.open:
                connection.get(address.request, target)
            else:
                self.lost(target, "connection closed at once", retry=False)

    async def _fetch(self, target: Target) -> None:
        try:
            page = await self._secure.fetch(target.address.url)
        except ScrapeError as error:
            target.task = None
            self.lost(target, str(error), retry=False, answered=error.answered)
        else:
            target.task = None
            self.page(target, page)

    def lost(self, target: Target, reason: str, retry: bool, answered: bool = False) -> None:
        """No page came."""
        target.in_flight = False
        if target.due < 0:
            return
        if retry and not target.retried:
            target.retried = True
            self._start(target, self._loop.time())
        else:
            self._failed(target, reason, answered)

    def _failed(self, target: Target, reason: str, answered: bool = False) -> None:
        options = self._options
        self.stats.failed += 1
        target.fails += 1
        if target.fails >= TOLD_AFTER:
            self._silent(target, reason)
        delay = min(self._interval(target) * 2.0 ** min(target.fails, 16), options.backoff_cap_s)
        self._schedule(target, self._loop.time() + delay * self._rng.uniform(0.75, 1.25))
        self._emit(MetricsFailed(target.endpoint.id, reason, answered))

    def _silent(self, target: Target, reason: str) -> None:
        if reason != target.silent:
            target.silent = reason
            if self._silence is not None:
                self._silence(target.endpoint.id, reason)

    def page(self, target: Target, page: bytes) -> None:
        """A page came."""
        options, stats = self._options, self.stats
        now = self._loop.time()
        target.in_flight = False
        full = now - target.full_at >= options.repeat_s
        if full:
            target.full_at = now
        began = thread_time()
        reading = target.reader.read(page, full)
        if reading.problems != target.problems:
            target.problems = reading.problems
            if self._report is not None:
                self._report(target.endpoint.id, reading.problems)
        if reading.empty:
            self._failed(target, f"the page has no load metric of engine {target.engine!r}", answered=True)
            return
        if reading.asleep:
            self._failed(target, "the engine sleeps; wake it with POST /wake_up")
            return
        self._silent(target, "")
        stats.ok += 1
        stats.bytes += len(page)
        stats.seconds += now - target.started
        news = reading is not target.reading or target.fails > 0
        target.fails = 0
        sample = reading.sample
        if self._measure is not None:
            more = self._measure(target.endpoint, page)
            news = news or more != target.more
            target.more = more
            sample = replace(sample, extra={**sample.extra, **more})
        self._set_fast(target, now < target.awake_until or bool(sample.waiting or sample.running))
        interval = self._interval(target)
        target.cost_s += 0.5 * (thread_time() - began - target.cost_s)
        target.rests_until = now + min(target.cost_s / READING, options.backoff_cap_s)
        self._schedule(target, max(target.started + interval, now + GRID, target.rests_until))
        if news or target.fast or now - target.fed_at + interval >= options.repeat_s + options.idle_s - GRID:
            target.reading = reading
            target.fed_at = now
            self._emit(MetricsSampled(target.endpoint.id, target.started, sample))
        else:
            stats.suppressed += 1

    def _emit(self, event: MetricsSampled | MetricsFailed) -> None:
        try:
            self._feed(event)
        except Exception as error:  # the scraper outlives a broken consumer
            self._loop.call_exception_handler({"message": f"the consumer of {event!r} raised", "exception": error})
