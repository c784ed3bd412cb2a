"""Scrape every endpoint's metrics page, often enough to notice traffic from elsewhere, with little CPU time."""

import asyncio
import errno
import heapq
import os
import random
import ssl
from collections.abc import Callable, Mapping
from itertools import count
from math import floor
from time import thread_time
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from msgspec import Struct
from msgspec.structs import replace

from fairlead import __version__
from fairlead.apis.engine_metrics import DEFAULT_ENGINE, ENGINES, EngineMetrics, compile_engine, engine_of
from fairlead.apis.prometheus import PageReader, Reading, came_instead
from fairlead.config.endpoint_list import url_fault
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import MetricsFailed, MetricsSampled
from fairlead.pool.aio import read_at_most
from fairlead.pool.authorities import FollowedAuthorities
from fairlead.pool.scrape_http import RECEIVE_BYTES, PageConnection, answers, request_bytes

USER_AGENT = f"fairlead/{__version__}"


class ScrapeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Intervals, limits and credentials of scraping. Times are in seconds."""

    #: Interval for an endpoint that has requests from this scheduler, or reports waiting or running requests.
    fast_s: float = 0.1
    #: Interval for idle endpoints. Traffic that bypasses this scheduler shows after this time plus one scrape at most.
    idle_s: float = 0.2
    #: How long an endpoint is scraped at `fast_s` after `wake`.
    hold_s: float = 1.0
    #: An idle endpoint's unchanged sample is fed once per interval of this length, and dropped in between.
    repeat_s: float = 1.0
    timeout_s: float = 1.0
    #: Interval of reading `/v1/models`, see `fairlead.pool.served_models`; 0 = never.
    models_s: float = 30.0
    #: Each failure in a row doubles the interval, up to this value.
    backoff_cap_s: float = 2.0
    #: Scrapes per second over all endpoints. If the intervals demand more, all are stretched by the same factor.
    max_rate: float = 1000.0
    #: A larger page counts as a failure, bytes.
    max_page: int = 4 << 20
    #: The file with the token that is sent as `Authorization: Bearer`; empty = none. It is read again when it changes.
    #: The token is sent over plain http too, if the URL is http.
    token_file: str = ""
    #: The file with the token that model servers require, for `/v1/models`; empty = `token_file` where that fits.
    upstream_token_file: str = ""
    #: PEM bundle for https, followed; empty = the system's authorities.
    ca_file: str = ""
    #: False = accept any certificate, for test beds.
    verify: bool = True


class PageAddress(Struct, frozen=True):
    """The parts of a metrics URL, and the bytes of the request for it."""

    url: str
    scheme: str
    host: str
    port: int
    request: bytes


def page_address(url: str) -> PageAddress:
    """Parse a metrics URL. Raises `ValueError` with a reason for anything but a plain http(s) URL."""
    if fault := url_fault(url):
        raise ValueError(fault)
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    shown = f"[{host}]" if ":" in host else host
    return PageAddress(url, parts.scheme, host, port, request_bytes(f"{shown}:{port}", target, USER_AGENT))


# The state of scraping one endpoint, and the scraper's totals.


class ScrapeStats(Struct):
    """Counts of scrapes since the start."""

    ok: int = 0
    failed: int = 0
    bytes: int = 0
    #: Seconds from request to page, summed over the scrapes in `ok`.
    seconds: float = 0.0


class Pace:
    """The numbers of endpoints that are scraped, and scraped fast, over all scrapers that share `max_rate`."""

    def __init__(self) -> None:
        self.targets = self.fast = 0
        #: The receive buffer that all connections share; one connection uses it at a time.
        self.received = memoryview(bytearray(RECEIVE_BYTES))


class Target(Struct, eq=False):
    """One endpoint and the state of its scraping."""

    scraper: "Scraper"
    endpoint: Endpoint
    address: PageAddress
    engine: str
    reader: PageReader
    reading: Reading | None = None
    problems: tuple[str, ...] = ()
    #: The gauges that `Measure` read from the last page.
    more: Mapping[str, float] = {}
    connection: PageConnection | None = None
    task: asyncio.Task[None] | None = None
    #: When the next scrape starts or, while a scrape is in flight, times out (loop time); negative = none.
    due: float = -1.0
    started: float = 0.0
    in_flight: bool = False
    #: Whether the scrape in flight has its time once more.
    extended: bool = False
    retried: bool = False
    fast: bool = False
    fails: int = 0
    #: The last reason passed to `Silence` for this endpoint; empty = its scrapes do not fail.
    silent: str = ""
    awake_until: float = -1.0
    #: CPU seconds to read one page, as a moving average, and the loop time before which no scrape may start.
    cost_s: float = 0.0
    rests_until: float = -1.0
    fed_at: float = -1e9
    full_at: float = -1e9

    def on_page(self, page: bytes) -> None:
        self.scraper.page(self, page)

    def on_failure(self, reason: str, *, retry: bool, answered: bool = False) -> None:
        self.scraper.lost(self, reason, retry, answered)

    def drop(self) -> None:
        """Abort the scrape in flight, if any, and close the connection."""
        self.in_flight = False
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
        if self.task is not None:
            self.task.cancel()
            self.task = None


# Fetches metrics pages over https or with a bearer token: aiohttp, certificates are verified, no redirects.

_MAX_TOKEN = 65_536


class ScrapeError(Exception):
    """A page could not be fetched; the message says why. `answered`: the server itself answered with an error, see
    `scrape_http.answers`."""

    def __init__(self, reason: str, answered: bool = False) -> None:
        super().__init__(reason)
        self.answered = answered


class TokenFile:
    """A file with a bearer token, which is read again when it changes. `path`: empty = no token is sent."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._token = ""
        self._stamp: tuple[int, int] | None = None

    async def headers(self) -> dict[str, str]:
        """The header that sends the token. Raises `OSError`, or `ValueError` with the reason."""
        return {"Authorization": f"Bearer {await asyncio.to_thread(self.read)}"} if self._path else {}

    def read(self) -> str:
        """The token. Raises `OSError`, or `ValueError` with the reason."""
        status = os.stat(self._path)
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            with open(self._path, encoding="ascii") as file:
                token = file.read(_MAX_TOKEN + 1).strip()
            if not token.isprintable() or not 0 < len(token) <= _MAX_TOKEN:
                raise ValueError(f"no usable token in {self._path}")
            self._token, self._stamp = token, stamp
        return self._token


NO_TOKEN = TokenFile("")


class LazySession:
    """An aiohttp session that is opened on first use. It keeps no cookies and sets no timeouts: callers set their own.
    `connector`: arguments of `aiohttp.TCPConnector`."""

    def __init__(self, headers: Mapping[str, str], **connector: Any) -> None:
        self._headers, self._connector = headers, connector
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(**self._connector),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class SecureFetcher:
    """Fetches pages with one aiohttp session for all endpoints. `keep`: keep connections open between fetches."""

    def __init__(self, options: ScrapeOptions, accept: str = "text/plain", keep: bool = True) -> None:
        self._options = options
        agent = {"User-Agent": USER_AGENT, "Accept": accept, "Accept-Encoding": "identity"}
        kept = 30 if keep else None
        self._session = LazySession(agent, limit=0, limit_per_host=1, keepalive_timeout=kept, force_close=not keep)
        self._authorities: FollowedAuthorities | None = None  # `None` = the system's
        self._token = TokenFile(options.token_file)

    async def fetch(self, url: str) -> bytes:
        """Fetch a page. Raises `ScrapeError`. There is no timeout; the caller sets one."""
        try:
            headers = await self._token.headers()
        except ValueError as error:
            raise ScrapeError(str(error)) from None
        except OSError as error:
            raise ScrapeError(f"{type(error).__name__}: {error}") from error
        try:
            trusted: ssl.SSLContext | bool = self._options.verify
            if trusted and self._options.ca_file:
                self._authorities = self._authorities or FollowedAuthorities(self._options.ca_file)
                trusted = self._authorities.context()
            async with self._session.open().get(url, headers=headers, ssl=trusted, allow_redirects=False) as response:
                if response.status != 200:
                    raise ScrapeError(f"status {response.status}", answers(response.status))
                most = self._options.max_page
                large = ScrapeError(f"the page is larger than {most} bytes")
                return await read_at_most(response.content, most, large)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ScrapeError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._session.close()


# Rules of the scraper
# * Every endpoint is scraped every `idle_s`. It is scraped every `fast_s` while it has work: this scheduler sent it a
#   request (`wake`), or its page reports waiting or running requests.
# * One timer serves all endpoints: due times lie on a 50 ms grid in one heap. Groups of endpoints share a due time, so
#   one wake-up starts several scrapes. An endpoint never has two scrapes in flight.
# * A failure (a timeout is one) doubles the interval, with jitter, up to `backoff_cap_s`. Every failure is fed.
#   If the timer of a timeout is late, the scrape has the time once more: the page may be there, and this process slow.
#   If the server has closed a kept connection, the request is repeated at once on a new one; this is no failure.
# * The page of an engine that sleeps counts as a failure: the engine processes no requests.
# * A sample is fed if it differs from the last one, if the endpoint is busy or awake, and at least once within
#   `repeat_s` + `idle_s`. What judges freshness by these events must allow that long. In between, an idle endpoint's
#   identical samples are dropped.
# * Every `repeat_s` the whole page is parsed. In between, only the known metrics are compared at their known offsets.
# * Several schedulers that report their requests to each other (`share`) together scrape as often as one alone, but
#   each at least every `repeat_s`: making a page takes a real vLLM server 8 to 12 ms of CPU time.
# * An endpoint whose pages take long to read is scraped less often, so that reading takes the share `READING` of the
#   time. It is scraped at least every `repeat_s`, or it would look stale. A 4 MB page crafted to be slow takes 0.1 s.
# * Above `max_rate` scrapes per second, all intervals are stretched by the same factor: CPU time stays bounded, and
#   samples get older. With the defaults that begins at 200 idle endpoints. Measured with bench/idle.py: 100 idle
#   endpoints with 58 kB pages cost 0.045 core. An endpoint that gets busy is noticed after 110 ms on average, 200 ms
#   at most.

#: The largest share of CPU time for reading the pages of one endpoint.
READING = 0.05
#: Due times are rounded down to multiples of this (seconds), so that one timer serves several endpoints.
GRID = 0.05
#: This many endpoints share a grid time before the next grid time is used. Their answers then arrive together, and a
#: wake-up of the loop costs more than reading an unchanged page.
GROUP = 16
#: From this many failures in a row on, `Silence` is called. A single failure is common and harmless.
TOLD_AFTER = 3

Feed = Callable[[MetricsSampled | MetricsFailed], object]
#: Called with an endpoint id and the problems of its page, whenever they change; empty = none any more.
Report = Callable[[str, tuple[str, ...]], object]
#: Called with an endpoint id and why `TOLD_AFTER` or more scrapes in a row have failed, whenever the reason changes;
#: empty = the last scrape succeeded.
Silence = Callable[[str, str], object]
#: Reads further gauges from a page, for `Sample.extra`. Must not raise.
Measure = Callable[[Endpoint, bytes], Mapping[str, float]]


class Scraper:
    """Feeds `MetricsSampled` and `MetricsFailed` of all endpoints that are up. Make all calls on the loop's thread."""

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
        """`pace`: shared with other scrapers; `None` = there are none. `engines` must contain `default_engine`. Raises
        `ConfigError` for a bad spec in `engines`."""
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
        #: Ids of endpoints for which `wake` was called since their last scrape began.
        self.awake: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def share(self, schedulers: int) -> None:
        """Set how many schedulers scrape these endpoints, this one included. With more, each scrapes less often."""
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
        target = Target(self, endpoint, address, engine, PageReader(self.specs[engine]))
        target.silent = old.silent if old is not None else ""  # a reported failure must be reported as over later
        self._targets[endpoint.id] = target
        self._pace.targets += 1
        slots = max(int(self._interval(target) / GRID), 1)
        among = self._pace.targets
        slot = among // GROUP % slots if among <= GROUP * slots else self._rng.randrange(slots)
        self._schedule(target, self._loop.time() + (1 + slot) * GRID)

    def down(self, endpoint_id: str) -> None:
        """Stop scraping an endpoint. No more events are fed for it."""
        target = self._targets.pop(endpoint_id, None)
        if target is not None:
            self._pace.targets -= 1
            self._set_fast(target, False)
            self.awake.discard(endpoint_id)
            target.due = -1.0
            target.drop()

    def reads(self, endpoint_id: str) -> bool:
        """Whether the last scrape of an endpoint succeeded."""
        target = self._targets.get(endpoint_id)
        return target is not None and target.reading is not None and not target.fails

    def wake(self, endpoint_id: str) -> None:
        """Scrape an endpoint at `fast_s` for `hold_s`, because it was just sent a request. For further requests, call
        again only if the endpoint is not in `awake`."""
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
                continue  # an outdated entry: the target was rescheduled or removed
            if target.in_flight and now - when > GRID and not target.extended:
                target.extended = True
                self._schedule(target, now + self._options.timeout_s)
            elif target.in_flight:
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
        target.in_flight, target.extended = True, False
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
            reason = f"cannot connect: {os.strerror(code) if code and code > 0 else error}"
            # That this process has no descriptor left says nothing about the endpoint.
            self.lost(target, reason, retry=False, answered=code in (errno.EMFILE, errno.ENFILE))
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
        """End a scrape that brought no page. `retry`: ask once more, on a new connection."""
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
        """Read a page that arrived, feed the sample if the rules say so, and schedule the next scrape."""
        options, stats = self._options, self.stats
        now = self._loop.time()
        target.in_flight = False
        full = now - target.full_at >= options.repeat_s
        if full:
            target.full_at = now
        began = thread_time()
        reading = target.reader.read(page, full)
        instead = came_instead(page) if reading.empty else ""
        if reading.problems != target.problems and not instead:
            target.problems = reading.problems
            if self._report is not None:
                self._report(target.endpoint.id, reading.problems)
        if reading.empty:
            reason = f"the page has no load metric of engine {target.engine!r}"
            self._failed(target, f"{instead} came instead of metrics" if instead else reason, answered=True)
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
        target.rests_until = now + min(target.cost_s / READING, options.repeat_s)
        self._schedule(target, max(target.started + interval, now + GRID, target.rests_until))
        further = max(now + interval, target.rests_until) - target.fed_at
        if news or target.fast or further >= options.repeat_s + options.idle_s - GRID:
            target.reading = reading
            target.fed_at = now
            self._emit(MetricsSampled(target.endpoint.id, target.started, sample))

    def _emit(self, event: MetricsSampled | MetricsFailed) -> None:
        try:
            self._feed(event)
        except Exception as error:  # the scraper outlives a broken consumer
            self._loop.call_exception_handler({"message": f"the consumer of {event!r} raised", "exception": error})
