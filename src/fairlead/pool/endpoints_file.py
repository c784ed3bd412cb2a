"""Endpoints from a file or a list in the configuration: discovery without Kubernetes.

Rules
* A file is followed as described in `watched_files`.
* A file that cannot be read or parsed changes nothing and is reported, once per cause.
* A list that has become empty changes nothing either, unless `allow_empty`: more often than not, the program that
  writes the list has lost its source.
"""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from fairlead.config.endpoint_list import Listed, Listing, parse_endpoints_text
from fairlead.config.problems import Problem
from fairlead.config.schema import EndpointSource
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.pool.aio import Turns, call_consumer, cancelled, set_within
from fairlead.pool.watched_files import WatchedFiles, read_regular

# Keeps a set of endpoints as listed: differences become events, and host names become addresses.
#
# Rules
# * `EndpointUp` is sent only for new or changed endpoints, `EndpointDown` only for removed ones. An endpoint whose
#   entry is wrong keeps its last good state. If a wrong entry has no readable name, no endpoint is taken down, because
#   the entry might be any endpoint's. An entry with the address of an endpoint that stays so changes nothing.
# * Endpoints that come are sent before those that go: the pool never gets small, and no model loses its last endpoint,
#   meanwhile. Those that go wait until the names of those that come were tried once.
# * Host names are resolved outside of `apply`, and again every `resolve_s`. If a name has several addresses, one is
#   used, and kept as long as the name has it: a resolver that rotates its answers must not move the endpoint.
# * That is the first IPv4 address to which this machine has a route, because model servers listen on `0.0.0.0` or
#   `127.0.0.1` by default (vLLM, SGLang, TGI), while resolvers prefer IPv6; else the first. No connection is tried.
# * A name that cannot be resolved keeps its last address and is tried again after `RETRY_S`. A lookup that takes long
#   goes on, and no other one of its name is begun: its answer counts whenever it comes.
# * Last addresses are kept in a file, `kept`, from which a scheduler that replaces one begins. Else it would take
#   endpoints that serve from the gateway, where their names cannot be resolved at once.
# * If many endpoints change at once, their events are sent in several turns of the event loop (`Turns`).

RETRY_S = 1.0
#: A host name that has no answer after so many seconds is reported; a start waits shorter. The C library asks the next
#: name server after 5 s.
RESOLVE_TIMEOUT_S, START_S = 6.0, 2.0
_AT_ONCE = 16

Feed = Callable[[EndpointUp | EndpointDown], object]
Report = Callable[[Problem], object]
#: Resolves a host name and port to addresses, the preferred address first. Raises `OSError`.
Resolver = Callable[[str, int], Awaitable[list[str]]]


async def resolve_host(host: str, port: int) -> list[str]:
    """Resolve with the system's resolver. Addresses with a zone are dropped: the gateway cannot connect to them."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(info[4][0]) for info in infos]
    return [address for address in dict.fromkeys(addresses) if "%" not in address]


def preferred(addresses: Sequence[str]) -> str:
    """Which of a name's `addresses` to use (there must be at least one); see the rules above."""
    return next((address for address in addresses if ":" not in address and _has_route(address)), addresses[0])


def _has_route(address: str) -> bool:
    """Whether this machine knows a way to an IPv4 address. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return True
    return False


class EndpointSet:
    """Turns listings of endpoints into events. Make all calls on the loop's thread."""

    def __init__(
        self,
        feed: Feed,
        report: Report,
        *,
        resolver: Resolver = resolve_host,
        resolve_s: float = 30.0,
        kept: Path | None = None,
    ) -> None:
        self._feed = feed
        self._kept, self._written = kept, dict[str, str]()
        self._turns = Turns()
        self._report = report
        self._resolver = resolver
        self._resolve_s = resolve_s
        self._listed: dict[str, Listed] = {}
        self._up: dict[str, Endpoint] = {}
        #: By host name: the current address, and why resolving it fails.
        self._addresses: dict[str, str] = {}
        self._failing: dict[str, str] = {}
        #: The lookups that run, by host name.
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._new_names = asyncio.Event()
        #: Ids of endpoints that are up and not listed any more, by address.
        self._leaving: dict[str, list[str]] = {}

    def apply(self, listing: Listing) -> None:
        """Apply a listing. A listing that could not be read (`ok` false) changes nothing. Problems are reported."""
        for problem in listing.problems:
            self._report(problem)
        if not listing.ok:
            return
        wanted, had = {entry.endpoint.id: entry for entry in listing.entries}, bool(self._listed)
        for endpoint_id in list(self._listed):
            if endpoint_id not in wanted and endpoint_id not in listing.broken and not listing.nameless:
                del self._listed[endpoint_id]
        stay = self._staying(wanted, listing.broken if had else frozenset())
        self._leaving.clear()
        for endpoint_id, endpoint in self._up.items():
            if endpoint_id not in self._listed and endpoint_id not in wanted:
                self._leaving.setdefault(endpoint.address, []).append(endpoint_id)
        for endpoint_id, entry in wanted.items():
            if self._listed.get(endpoint_id) != entry and endpoint_id not in stay:
                self._listed[endpoint_id] = entry
                self._bring_up(entry)
        self._take_down()
        names = self._names()
        for table in (self._addresses, self._failing):
            for host in [host for host in table if host not in names]:
                del table[host]

    def _staying(self, wanted: Mapping[str, Listed], broken: frozenset[str]) -> set[str]:
        """Ids that stay as they are: what is `broken`, listed and not wanted, or has an address of one of these."""
        by_address = {entry.endpoint.address: endpoint_id for endpoint_id, entry in wanted.items()}
        stay = {*broken, *(self._listed.keys() - wanted.keys())}
        queue = [self._listed[endpoint_id] for endpoint_id in sorted(stay & self._listed.keys())]
        for kept in queue:  # it grows: who may not have an address keeps its own
            address = kept.endpoint.address
            endpoint_id = by_address.get(address)
            if endpoint_id is None or endpoint_id in stay:
                continue
            stay.add(endpoint_id)
            queue += [self._listed[endpoint_id]] if endpoint_id in self._listed else []
            self._report(Problem("", 0, f"{address} stays with {kept.endpoint.id}: nothing changes for {endpoint_id}"))
        return stay

    async def start(self, within_s: float = START_S) -> None:
        """Resolve all host names, and keep resolving in the background. Waits for at most `within_s` seconds, and until
        the events of all endpoints so far were sent."""
        known = await asyncio.to_thread(_addresses_in, self._kept) if self._kept else {}
        for host in self._names().keys() & known.keys():
            self._use(host, known[host])
        first = asyncio.create_task(self._resolve_names())
        self._task = asyncio.create_task(self._keep_resolving(first))
        await asyncio.wait((first,), timeout=within_s)
        await self._turns.made()

    async def close(self) -> None:
        """Stop resolving. The endpoints stay up."""
        self._turns.close()
        await cancelled(self._task, *self._lookups.values())
        self._task = None

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints that are up."""
        return list(self._up.values())

    def _bring_up(self, entry: Listed) -> None:
        if entry.literal:
            endpoint = entry.endpoint
        elif entry.host in self._addresses:
            endpoint = entry.resolved(self._addresses[entry.host])
        else:
            self._new_names.set()
            return
        if self._up.get(endpoint.id) != endpoint:
            self._up[endpoint.id] = endpoint
            self._emit(EndpointUp(endpoint))
            self._down(self._leaving.pop(endpoint.address, ()))  # it would be one server twice

    def _take_down(self) -> None:
        """Take down what is not listed any more, unless names of those that come are still to be tried."""
        if self._names().keys() <= self._addresses.keys() | self._failing.keys():
            for endpoint_ids in self._leaving.values():
                self._down(endpoint_ids)
            self._leaving.clear()

    def _down(self, endpoint_ids: Iterable[str]) -> None:
        for endpoint_id in endpoint_ids:
            del self._up[endpoint_id]
            self._emit(EndpointDown(endpoint_id))

    def _emit(self, event: EndpointUp | EndpointDown) -> None:
        self._turns.make(lambda: call_consumer(lambda: self._feed(event), f"the consumer of {event!r}"))

    def _names(self) -> dict[str, int]:
        return {entry.host: entry.port for entry in self._listed.values() if not entry.literal}

    async def _keep_resolving(self, first: "asyncio.Task[None]") -> None:
        await first
        loop = asyncio.get_running_loop()
        due = loop.time() + self._resolve_s
        while True:
            left = max(due - loop.time(), 0.0)
            await set_within(self._new_names, min(left, RETRY_S) if self._failing else left)
            if loop.time() < due:
                await self._resolve_names(known=self._addresses.keys() - self._failing.keys())
            else:
                await self._resolve_names()
                due = loop.time() + self._resolve_s

    async def _resolve_names(self, known: Set[str] = frozenset()) -> None:
        """Resolve all names but those `known`."""
        self._new_names.clear()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def resolve(host: str, port: int) -> None:
            async with gate:
                await self._resolve(host, port)

        skipped = known | (self._lookups.keys() & self._failing.keys())  # a lookup that is late is not waited for again
        names = [(host, port) for host, port in self._names().items() if host not in skipped]
        await asyncio.gather(*(resolve(host, port) for host, port in names))
        self._take_down()
        if self._kept and self._written != self._addresses:
            self._written = dict(self._addresses)
            with suppress(OSError):  # a full disk: another file is written there too, and that is reported
                await asyncio.to_thread(_keep_addresses, self._kept, self._written)

    async def _resolve(self, host: str, port: int) -> None:
        if host not in self._lookups:
            self._lookups[host] = asyncio.create_task(self._look_up(host, port))
        _, pending = await asyncio.wait((self._lookups[host],), timeout=RESOLVE_TIMEOUT_S)
        if pending:
            self._failed(host, "no answer")

    async def _look_up(self, host: str, port: int) -> None:
        try:
            addresses = await self._resolver(host, port)
            reason = "" if addresses else "it has no address"
        except (OSError, ValueError) as error:  # ValueError: a name that IDNA cannot encode
            addresses, reason = [], str(error) or type(error).__name__
        finally:
            del self._lookups[host]
        if reason:
            self._failed(host, reason)
        else:
            self._succeeded(host, addresses)

    def _failed(self, host: str, reason: str) -> None:
        if host in self._names() and self._failing.get(host) != reason:
            self._failing[host] = reason
            self._report(Problem("", 0, f"cannot resolve {host}: {reason}"))

    def _succeeded(self, host: str, addresses: Sequence[str]) -> None:
        if host in self._names():
            self._failing.pop(host, None)
            old = self._addresses.get(host, "")
            self._use(host, old if old in addresses else preferred(addresses))

    def _use(self, host: str, address: str) -> None:
        self._addresses[host] = address
        for entry in self._listed.values():
            if entry.host == host and not entry.literal:
                self._bring_up(entry)

    @property
    def problem(self) -> str:
        """A host name that cannot be resolved, and why, or two that are one server; empty = there are none."""
        for host, reason in self._failing.items():
            return f"cannot resolve {host}: {reason}"
        owners: dict[str, str] = {}
        for endpoint_id in self._listed if self._addresses else ():
            endpoint = self._up.get(endpoint_id)
            if endpoint and (owner := owners.setdefault(endpoint.address, endpoint_id)) != endpoint_id:
                return f"{owner} and {endpoint_id} are one server, {endpoint.address}, which gets requests for two"
        return ""


def _addresses_in(kept: Path) -> dict[str, str]:
    try:
        return {str(host): str(address) for host, address in json.loads(kept.read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _keep_addresses(kept: Path, addresses: Mapping[str, str]) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = kept.with_suffix(f".{os.getpid()}.new")  # several workers keep the same
    aside.write_text(json.dumps(addresses), encoding="utf-8")
    aside.replace(kept)


_EMPTY = "endpoints.allowEmpty: true takes them away"


class EndpointsFile:
    """Feeds `EndpointUp` and `EndpointDown` for the endpoints that a YAML or JSON file lists."""

    def __init__(
        self,
        path: str | Path,
        feed: Feed,
        report: Report,
        *,
        watch: bool = True,
        allow_empty: bool = False,
        poll_s: float = 0.5,
        resolve_s: float = 30.0,
        resolver: Resolver = resolve_host,
        kept: Path | None = None,
    ) -> None:
        self._path = Path(path)
        self._report = report
        self._watch = watch
        self._allow_empty = allow_empty
        self._set = EndpointSet(feed, report, resolver=resolver, resolve_s=resolve_s, kept=kept)
        self._watched = WatchedFiles(lambda: [str(self._path)], self._load, poll_s, "endpoints")
        self._text: bytes | None = None
        self._complaint = self._unusable = ""
        #: The file was read and parsed at least once.
        self.loaded = False

    async def start(self, resolve_s: float = START_S) -> tuple[Problem, ...]:
        """Load the file, resolve names within `resolve_s`, and start watching. Return the first load's problems."""
        await self._watched.note()
        listing = await self._load()
        await self._set.start(resolve_s)
        if self._watch:
            self._watched.start()
        return listing.problems if listing else (Problem("", 0, self._complaint),)

    async def close(self) -> None:
        """Stop watching. The endpoints stay up."""
        await self._watched.close()
        await self._set.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints that are up."""
        return self._set.endpoints

    @property
    def problem(self) -> str:
        """Which part of the file is not in force, and why; empty = the whole file is in force."""
        return self._complaint or self._unusable or self._set.problem

    async def _load(self) -> Listing | None:
        """Read the file and apply it if it has changed. `None` = it could not be read, or is unchanged."""
        try:
            text = await asyncio.to_thread(read_regular, self._path)
        except OSError as error:
            self._watched.retry()
            self._complain(f"cannot read {self._path}: {error.strerror or error}")
            return None
        self._complaint = ""
        if text == self._text:
            return None
        self._text = text
        listing = await asyncio.to_thread(parse_endpoints_text, text)  # 0.3 s for 2,000 endpoints
        self.loaded = self.loaded or listing.ok
        self._unusable = str(listing.problems[0]) if listing.problems else ""
        if self.endpoints and not (listing.entries or listing.problems or self._allow_empty):
            known = len(self.endpoints)
            problem = Problem("", 0, f"{self._path} is empty: its {known} endpoints stay", _EMPTY)
            self._unusable = str(problem)
            self._report(problem)
            return listing
        self._set.apply(listing)
        return listing

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            self._complaint = message
            self._report(Problem("", 0, message))


async def follow_endpoints(
    stack: AsyncExitStack,
    source: EndpointSource,
    feed: Feed,
    report: Report,
    required: bool = True,
    resolve_s: float = START_S,
    kept: Path | None = None,
) -> EndpointSet | EndpointsFile:
    """Feed the present endpoints, and all changes while `stack` is open. Waits `resolve_s` seconds for host names.
    Their last addresses are `kept` in a file.

    Returns an `EndpointSet` for a list in the configuration (`apply` replaces the list), or the `EndpointsFile`.
    Raises `ConfigError` if the file cannot be read or parsed at the start and is `required`.
    """
    if not source.file:
        listed = EndpointSet(feed, report, kept=kept)
        stack.push_async_callback(listed.close)
        listed.apply(Listing(source.static))
        await listed.start(resolve_s)
        return listed
    files = EndpointsFile(source.file, feed, report, watch=source.watch, allow_empty=source.allow_empty, kept=kept)
    stack.push_async_callback(files.close)
    problems = await files.start(resolve_s)
    if required and not files.loaded:
        raise ConfigError("; ".join(str(problem) for problem in problems), "$.endpoints.file", source.file)
    return files
