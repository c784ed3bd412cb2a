"""Leases whose session has left, and whose end only the gateway can tell: by its access log, or by its death.

The access log names the lease, with two exceptions that this module is for.

* The client went away just when the pick was answered. The gateway has thrown the answer away, and its entry carries no
  lease (nor an upstream, or that of the fallback route). So a gateway of ours gives each request an id of its own
  (`GATEWAY_ID`, made at entry, never taken from a client) that the scheduler sees with the headers and the log repeats:
  an entry that has this id and no lease ends the lease that was given under it.
* The gateway died. Then nobody tells anything, but all its connections end at once: that of the access log, and those
  that carried the requests. A gateway that lives may lose one of them, and its next entries come on a new one.

Rules
* Entries come on another connection than requests, so one may be read before the request that it is about. What is
  over is remembered for that, `_REMEMBERED` entries long.
* An id that came twice is not the gateway's work (somebody forwards the header of a client): it ends nothing.
* Nothing is removed when a lease ends in the common way, for that would cost every request. What is dead is swept out
  when it may be the greater part; so memory is bounded by the living leases.
"""

from fairlead.io.receive.driver import Driver
from fairlead.io.receive.stream import ServerStream
from fairlead.model.events import StreamLost

#: Seconds within which we notice the end of all connections of a process that died.
GRACE = 1.0
#: Departures up to which nothing is swept.
_FEW = 4096
#: Ids of entries without a lease that are kept, in case their request has yet to be read.
_REMEMBERED = 4096
_AMBIGUOUS = -1


class Departures:
    """One per process."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        #: Request id to the stream that its session left.
        self._streams: dict[int, ServerStream] = {}
        #: The gateway's id to ours.
        self._requests: dict[str, int] = {}
        self._over: dict[str, None] = {}
        self._sweep_at = _FEW

    def __len__(self) -> int:
        return len(self._streams)

    def left(self, request_id: int, gateway_id: str, stream: ServerStream) -> None:
        """A session has left. `gateway_id` is empty when the gateway gives none, or when its entry will name the lease
        for certain: a response was seen."""
        self._streams[request_id] = stream
        if gateway_id:
            self._requests[gateway_id] = _AMBIGUOUS if gateway_id in self._requests else request_id
            if gateway_id in self._over:
                # Not at once: the decision is still being carried out, and its outcome comes after it.
                self._driver.later(0.0, self.over, gateway_id)
        if len(self._streams) > self._sweep_at:
            self._sweep()

    def over(self, gateway_id: str) -> None:
        """The gateway's entry for a request has its id and no lease: whatever we chose for it, nobody uses."""
        request_id = self._requests.get(gateway_id)
        if request_id is not None:
            self._driver.feed(StreamLost(request_id))
            return
        self._over[gateway_id] = None
        if len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def log_lost(self) -> None:
        """An access log broke off. If its gateway died, the connections of its requests have ended too."""
        self._driver.later(GRACE, self._bury)

    def _bury(self) -> None:
        for request_id in [number for number, stream in self._streams.items() if not stream.connected()]:
            del self._streams[request_id]
            self._driver.feed(StreamLost(request_id))

    def _sweep(self) -> None:
        alive = self._driver.pipeline.fleet.ledger.get
        self._streams = {number: stream for number, stream in self._streams.items() if alive(number) is not None}
        self._requests = {key: number for key, number in self._requests.items() if number in self._streams}
        self._sweep_at = max(_FEW, 2 * len(self._streams))
