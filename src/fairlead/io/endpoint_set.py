"""A listed set of endpoints that is kept up: differences become events, host names become addresses.

Rules
* `EndpointUp` only for what is new or changed, `EndpointDown` only for what is gone. An entry that is listed but wrong
  keeps its last good state; if a wrong entry cannot even be named, nothing is taken down, for it might be that one.
* A host name is resolved outside of `apply`, again each `resolve_s`. Of several addresses the first is used, and kept
  for as long as the name still has it: a resolver that rotates its answers must not move an endpoint about.
* If the first is `::1`, one of IPv4's own loopback addresses goes before it: hosts files list `::1 localhost`, and
  model servers listen on `0.0.0.0` or `127.0.0.1` unless told otherwise. Nothing is dialled to find out.
* A name that cannot be resolved (any more) keeps the last address; it is tried again after `RETRY_S`.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from fairlead.model.endpoint import Endpoint
from fairlead.model.events import EndpointDown, EndpointUp
from fairlead.wire.endpoint_entry import Listed
from fairlead.wire.endpoint_list import Listing
from fairlead.wire.problem import Problem

RETRY_S = 1.0
RESOLVE_TIMEOUT_S = 5.0
_AT_ONCE = 16

Feed = Callable[[EndpointUp | EndpointDown], object]
Report = Callable[[Problem], object]
#: Host name and port to addresses, the preferred first. Raises `OSError`.
Resolver = Callable[[str, int], Awaitable[list[str]]]


async def resolve_host(host: str, port: int) -> list[str]:
    """Addresses by the system's resolver. Link-local ones with a zone are left out: the gateway could not dial them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(info[4][0]) for info in found]
    return [address for address in dict.fromkeys(addresses) if "%" not in address]


def preferred(addresses: Sequence[str]) -> str:
    """Which of a name's addresses to use; see the module's rules. There must be one."""
    first = addresses[0]
    return next((one for one in addresses if one.startswith("127.")), first) if first == "::1" else first


class EndpointSet:
    """Feed it listings; it feeds events. All calls on the loop's thread."""

    def __init__(
        self, feed: Feed, report: Report, *, resolver: Resolver = resolve_host, resolve_s: float = 30.0
    ) -> None:
        self._feed = feed
        self._report = report
        self._resolver = resolver
        self._resolve_s = resolve_s
        self._listed: dict[str, Listed] = {}
        self._up: dict[str, Endpoint] = {}
        #: Host to its current address, and to why it has none.
        self._addresses: dict[str, str] = {}
        self._failing: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._new_names = asyncio.Event()

    def apply(self, listing: Listing) -> None:
        """Take a listing over. One that could not be read (`ok` false) changes nothing; problems are reported."""
        for problem in listing.problems:
            self._report(problem)
        if not listing.ok:
            return
        wanted = {entry.endpoint.id: entry for entry in listing.entries}
        for endpoint_id in list(self._listed):
            if endpoint_id not in wanted and endpoint_id not in listing.broken and not listing.nameless:
                del self._listed[endpoint_id]
                if self._up.pop(endpoint_id, None) is not None:
                    self._emit(EndpointDown(endpoint_id))
        for endpoint_id, entry in wanted.items():
            if self._listed.get(endpoint_id) != entry:
                self._listed[endpoint_id] = entry
                self._bring_up(entry)
        self._forget_names()

    async def start(self) -> None:
        """Resolve what needs it, for `RESOLVE_TIMEOUT_S` at most, and keep resolving in the background."""
        first = asyncio.create_task(self._resolve_all())
        self._task = asyncio.create_task(self._keep_resolving(first))
        await asyncio.wait((first,), timeout=RESOLVE_TIMEOUT_S)

    async def close(self) -> None:
        """Stop resolving. What is up stays up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def endpoints(self) -> list[Endpoint]:
        """What is up."""
        return list(self._up.values())

    def _bring_up(self, entry: Listed) -> None:
        if entry.literal:
            endpoint = entry.endpoint
        elif entry.host in self._addresses:
            endpoint = entry.at(self._addresses[entry.host])
        else:
            self._new_names.set()
            return
        if self._up.get(endpoint.id) != endpoint:
            self._up[endpoint.id] = endpoint
            self._emit(EndpointUp(endpoint))

    def _emit(self, event: EndpointUp | EndpointDown) -> None:
        try:
            self._feed(event)
        except Exception as error:  # following the list goes on after a broken consumer
            context = {"message": f"the consumer of {event!r} raised", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _names(self) -> dict[str, int]:
        return {entry.host: entry.port for entry in self._listed.values() if not entry.literal}

    def _forget_names(self) -> None:
        names = self._names()
        for table in (self._addresses, self._failing):
            for host in [host for host in table if host not in names]:
                del table[host]

    async def _keep_resolving(self, first: "asyncio.Task[None]") -> None:
        await first
        while True:
            if self._new_names.is_set():
                delay = 0.0
            elif self._failing:
                delay = RETRY_S
            else:
                delay = self._resolve_s
            try:
                async with asyncio.timeout(delay):  # `wait_for` of Python 3.11 may swallow a cancellation
                    await self._new_names.wait()
            except TimeoutError:
                pass
            await self._resolve_all()

    async def _resolve_all(self) -> None:
        self._new_names.clear()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(host: str, port: int) -> None:
            async with gate:
                await self._resolve(host, port)

        await asyncio.gather(*(one(host, port) for host, port in self._names().items()))

    async def _resolve(self, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                addresses = await self._resolver(host, port)
            reason = "" if addresses else "it has no address"
        except TimeoutError:
            addresses, reason = [], "no answer"
        except (OSError, ValueError) as error:  # ValueError: a name that IDNA cannot encode
            addresses, reason = [], str(error)
        if host not in self._names():
            return
        if reason:
            if self._failing.get(host) != reason:
                self._failing[host] = reason
                self._report(Problem("", 0, f"cannot resolve {host}: {reason}"))
            return
        self._failing.pop(host, None)
        if self._addresses.get(host) not in addresses:
            self._addresses[host] = preferred(addresses)
        for entry in list(self._listed.values()):
            if entry.host == host and not entry.literal:
                self._bring_up(entry)
