"""What schedulers of one pool have in common that share facts: whom one hears, and what it says about that.

`replicas_valkey` carries facts between machines, `replicas_files` between processes of one machine.
"""

import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import asdict

from fairlead.config.schema import ReplicaSettings
from fairlead.core.events import Event, PeerHeard, PeerLost, PeerSnapshot
from fairlead.server.observe.log import get

log = get("replicas")

#: Digits of the run in a replica's name.
RUN_DIGITS = 8
#: How many other replicas are followed at most.
MOST_PEERS = 64
#: Pause between two requests for a replica's snapshot. It doubles: the cause may be an endpoint unknown here.
ASK_FIRST_S, ASK_CAP_S = 0.5, 30.0
#: The least time between two snapshots of one replica.
SNAPSHOT_PAUSE_S = 0.25
#: How long a start waits for the others' snapshots.
JOIN_S = 2.0
#: Lag from which on there is a trouble.
_SLOW_S = 1.0


def _gateway_of(origin: str) -> tuple[str, str]:
    """The host, and the mark of the gateway; it is empty where an older version gave the name."""
    host, _, run = origin.rpartition("-")
    return host, run[:-RUN_DIGITS]


class Facts(Struct, frozen=True):
    """What the core has to send, and what it lacks."""

    #: A batch of what happened here since the last call; empty = nothing did.
    batch: Callable[[], bytes]
    #: All that others should know of this replica now.
    snapshot: Callable[[], bytes]
    #: The names of replicas whose batches are missing.
    gaps: Callable[[], Iterable[str]]
    #: The number of our last batch, and of the last batch received from another replica.
    sequence: Callable[[], int]
    newest: Callable[[str], int]
    #: Whether a request waits here, for which the end of a peer's request may be the turn.
    waits: Callable[[], bool] = lambda: False
    #: Why what another replica says cannot be used; empty = it can.
    problem: Callable[[str], str] = lambda name: ""


class Peer(Struct):
    """Another replica. Times in seconds of `time.monotonic`."""

    since: float
    heard_at: float
    batches: int = 0
    #: The number of its last batch, according to its lease when last read.
    sequence: int = 0
    #: When to ask for its snapshot; 0 = nothing of it is missing.
    ask_at: float = 0.0
    #: How long to wait before asking again.
    pause_s: float = ASK_FIRST_S


class Counts(Struct):
    """Counts since the start: batches sent, and received from peers."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    #: Batches that were dropped because the server was away for too long.
    dropped: int = 0
    snapshots_sent: int = 0
    snapshots_received: int = 0
    #: How often a replica's batches were missing, and how often the server went away.
    gaps: int = 0
    outages: int = 0


class Own(Struct, frozen=True, kw_only=True):
    """This replica, and what it does with what it hears."""

    settings: ReplicaSettings
    pool: str
    #: A name that is unique among all replicas and all former runs of this one: HOST-[MARK]RUN, with the same mark for
    #: all workers of a gateway.
    origin: str
    facts: Facts
    feed: Callable[[Event], object]
    #: Hears how many replicas there are, this one included, when that changes.
    counted: Callable[[int], object]
    #: The number of this scheduler among those of one gateway.
    worker: int = 0
    workers: int = 1


class Replicas:
    """The link to the other replicas: `await start()`, `await close()`. All calls happen on the event loop's thread."""

    def __init__(self, own: Own) -> None:
        self._settings, self._facts, self.origin = own.settings, own.facts, own.origin
        self._feed, self._counted = own.feed, own.counted
        self._worker, self._workers = own.worker, own.workers
        #: The replicas that hold a lease, by name.
        self.peers: dict[str, Peer] = {}
        self.counts = Counts()
        #: Why there is no link to others; empty = there is one.
        self.problem = "not connected yet"
        #: Seconds from writing facts to reading them.
        self.lag_s = 0.0
        self._unheard_since = time.monotonic()
        #: When all workers were last there.
        self._complete_at = self._unheard_since
        #: Whether to write a snapshot: a replica asked for one, or batches were dropped.
        self._owes_snapshot = False
        self._snapshot_at = 0.0

    @property
    def missing(self) -> list[str]:
        """The replicas whose batches or snapshot are missing."""
        return sorted(name for name, peer in self.peers.items() if peer.ask_at)

    @property
    def count(self) -> int:
        """Schedulers of the pool, workers that are not heard included."""
        return max(self._workers, 1 + len(self.peers))

    @property
    def unheard_s(self) -> float:
        """Seconds without any other replica."""
        return 0.0 if self.peers else time.monotonic() - self._unheard_since

    @property
    def where(self) -> str:
        """The server's URL without user and password."""
        parts = urlsplit(self._settings.via)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def trouble(self) -> str:
        """What is wrong, for people; empty = nothing."""
        if self.problem:
            return f"this replica decides alone: {self.problem}"
        for name in sorted(self.peers):
            if problem := self._facts.problem(name):
                return f"what {name} says cannot be used: {problem}"
        if self.lag_s > _SLOW_S:
            return (
                f"messages of the other replicas arrive {self.lag_s:.1f} s late: {self.where} or this process is slow"
            )
        here = self._workers_here()
        if here < self._workers:
            return f"only {here} of {self._workers} workers are heard: one does not run or hangs, see the log"
        lacking = [name for name, peer in self.peers.items() if peer.pause_s >= ASK_CAP_S]
        if lacking:
            return f"facts of {', '.join(lacking)} stay missing: do they have the same endpoints, and the same pool?"
        return ""

    def _workers_here(self) -> int:
        """The number of workers, this one included. One that was heard within the last lease counts: it may be starting
        again."""
        (host, mark), now = _gateway_of(self.origin), time.monotonic()
        here = 1 + sum(_gateway_of(name) in ((host, mark), (host, "")) for name in self.peers)
        if here >= self._workers:
            self._complete_at = now
        return here if now - self._complete_at > self._settings.lease else self._workers

    def note(self) -> str:
        """The state of the link, for people, while there is no trouble."""
        count = len(self.peers)
        peers = f"{count} other{'' if count == 1 else 's'}, heard {self.lag_s * 1e3:.0f} ms late"
        return peers + (f"; facts of {', '.join(self.missing)} are missing" if self.missing else "")

    def page(self) -> dict[str, object]:
        """The page `/debug/replicas`."""
        now = time.monotonic()
        return {
            "replica": self.origin,
            "worker": self._worker,
            "workers": self._workers,
            "via": self.where,
            "connected": not self.problem,
            "problem": self.problem,
            "trouble": self.trouble(),
            "lag_ms": round(self.lag_s * 1e3, 3),
            "missing": self.missing,
            **asdict(self.counts),
            "replicas": {
                name: {
                    "since_s": round(now - peer.since, 3),
                    "silent_s": round(now - peer.heard_at, 3),
                    "batches": peer.batches,
                    "problem": self._facts.problem(name),
                }
                for name, peer in sorted(self.peers.items())
            },
        }

    async def start(self) -> None:
        """Returns once all others are known, the first attempt has failed, or the time for it is over."""
        raise NotImplementedError

    async def close(self) -> None:
        """Send what is left and leave."""
        raise NotImplementedError

    # ---- other replicas ----

    def _lose(self, name: str) -> None:
        del self.peers[name]
        self._unheard_since = time.monotonic()
        self._counted(len(self.peers) + 1)
        log.info("a replica left", replica=name)
        self._feed(PeerLost(name))

    def _meet(self, name: str) -> Peer | None:
        """The replica of this name, which may be new; `None` = there are too many."""
        peer = self.peers.get(name)
        if peer is None and len(self.peers) < MOST_PEERS:
            now = time.monotonic()
            peer = self.peers[name] = Peer(now, now)
            self._counted(len(self.peers) + 1)
            log.info("a replica joined", replica=name)
            self._want(name)
        return peer

    def _want(self, name: str) -> None:
        """Note that batches or the snapshot of this replica are missing."""
        peer = self.peers.get(name)
        if peer is not None and not peer.ask_at:
            self.counts.gaps += 1
            peer.ask_at = time.monotonic() + peer.pause_s - ASK_FIRST_S
            self._look_soon()

    def _look_soon(self) -> None:
        """There is a replica to ask, or a snapshot to write."""

    def _to_ask(self) -> bytes:
        """The names of the replicas to ask for a snapshot now, with spaces between; empty = none."""
        now = time.monotonic()
        asked = {name: peer for name, peer in self.peers.items() if 0.0 < peer.ask_at <= now}
        for peer in asked.values():
            peer.ask_at, peer.pause_s = now + peer.pause_s, min(peer.pause_s * 2, ASK_CAP_S)
        return " ".join(asked).encode()

    def _asked(self, name: str, wanted: bytes) -> None:
        """A replica asks those for snapshots."""
        self._meet(name)
        if self.origin.encode() in wanted.split():
            self._owes_snapshot = True
            self._look_soon()

    def _received(self, name: str, peer: Peer, payload: bytes, lag_s: float, at_once: bool = False) -> None:
        """A batch has come."""
        peer.heard_at = time.monotonic()
        peer.batches += 1
        self.counts.received += 1
        self.counts.received_bytes += len(payload)
        self._feed(PeerHeard(name, payload, lag_s, self.origin, at_once))

    def _caught_up(self, name: str, peer: Peer, snapshot: bytes) -> None:
        """A snapshot has come that was asked for."""
        peer.heard_at = time.monotonic()
        self.counts.snapshots_received += 1
        self.counts.received_bytes += len(snapshot)
        self._feed(PeerSnapshot(name, snapshot))
        peer.ask_at = 0.0
        if name not in self._facts.gaps():
            peer.pause_s = ASK_FIRST_S
