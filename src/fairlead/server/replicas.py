"""The common part of sharing facts between the schedulers of one pool: the known replicas, missing facts, and the state
of the link as metrics, notes and troubles.

`replicas_valkey` carries facts between machines, `replicas_files` between processes of one machine.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import asdict

from fairlead.config.schema import ReplicaSettings
from fairlead.core.events import Event, PeerHeard, PeerLost, PeerSnapshot
from fairlead.pool.aio import in_turns
from fairlead.server.observe.log import get
from fairlead.server.observe.troubles import named

log = get("replicas")

#: Hexadecimal digits in a replica's name that distinguish its runs.
RUN_DIGITS = 8
#: How many other replicas are followed at most, and the most letters of their names, which are kept and sent.
MOST_PEERS, _LONGEST = 64, 256
#: Seconds between two requests for a replica's snapshot: first, and at most. The pause doubles, because a snapshot does
#: not help while the facts are about an endpoint that is unknown here.
ASK_FIRST_S, ASK_CAP_S = 0.5, 30.0
#: The least seconds between two snapshots of one replica.
SNAPSHOT_PAUSE_S = 0.25
#: Lines that say within so many seconds that a replica joined or left, at most: as many as when all are replaced.
#: Whoever may write where facts are shared could otherwise cause thousands a second.
MOST_CHANGES, CHANGES_S = 2 * MOST_PEERS, 60.0
#: Seconds that a start waits for the snapshots of other replicas.
JOIN_S = 2.0
#: A lag of more seconds is reported as a trouble.
SLOW_S = 1.0
#: A worker that was away for longer than a lease counts again once it has been heard for so many seconds.
STEADY_S = 10.0
#: Seconds beyond its own length for which a lag counts, because nothing measures it while nothing happens.
LAG_KEPT_S = 5.0


def _gateway_of(origin: str) -> tuple[str, str]:
    """The host and the gateway's mark in a replica's name. The mark is empty if there is only one worker, or if an
    older version made the name."""
    host, _, run = origin.rpartition("-")
    return host, run[:-RUN_DIGITS]


class Facts(Struct, frozen=True):
    """Callables of the core: the facts to send, and the facts that are missing."""

    #: A batch of what happened here since the last call; empty = nothing happened.
    batch: Callable[[], bytes]
    #: Everything that other replicas should know about this one now, in parts that are made one after the other.
    snapshot: Callable[[], Iterable[bytes]]
    #: The names of replicas whose batches are missing.
    gaps: Callable[[], Iterable[str]]
    #: The number of our last batch, and of the last batch received from another replica (0 = none).
    sequence: Callable[[], int]
    newest: Callable[[str], int]
    #: Whether a request is queued here. It may be sent when a request of another replica ends.
    waits: Callable[[], bool] = lambda: False
    #: Why the facts of another replica cannot be used; empty = they can.
    problem: Callable[[str], str] = lambda name: ""
    #: How another replica decides, if it decides otherwise than this one; empty = it does not.
    difference: Callable[[str], str] = lambda name: ""


class Via(Struct, frozen=True):
    """The parts of `replicas.via`. `user`: with password and @. `places`: HOST:PORT, several with Sentinel."""

    scheme: str
    user: str
    places: tuple[str, ...]
    path: str


def split_via(url: str) -> Via:
    """The parts of a valid `replicas.via`. `urlsplit` refuses several hosts of which one is an IPv6 address."""
    scheme, _, remainder = url.partition("://")
    authority, slash, path = remainder.partition("/")
    user, sign, places = authority.rpartition("@")
    return Via(scheme, user + sign, tuple(places.split(",")), slash + path)


class Peer(Struct):
    """Another replica. Times in seconds of `time.monotonic`."""

    since: float
    heard_at: float
    batches: int = 0
    #: The number of its last batch, according to its lease when that was last read.
    sequence: int = 0
    #: When to ask for its snapshot; 0 = none of its facts are missing.
    ask_at: float = 0.0
    #: How long to wait before asking again.
    pause_s: float = ASK_FIRST_S


class Counts(Struct):
    """Counts since the start. `sent` and `received`: batches."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    #: Batches that were not sent: the server was away for too long, or a batch was too large for a file.
    dropped: int = 0
    snapshots_sent: int = 0
    snapshots_received: int = 0
    #: How many times a replica's facts were missing, and how many times the link was lost.
    gaps: int = 0
    outages: int = 0


class Own(Struct, frozen=True, kw_only=True):
    """This replica: its settings, its name, and the callables of its scheduler."""

    settings: ReplicaSettings
    pool: str
    #: A name that is unique among all replicas and all former runs of this one: HOST-[MARK]RUN, with the same mark for
    #: all workers of a gateway.
    origin: str
    facts: Facts
    feed: Callable[[Event], object]
    #: Receives the number of replicas, this one included, whenever it changes.
    counted: Callable[[int], object]
    #: The number of this scheduler, from 0, among the workers of its gateway.
    worker: int = 0
    workers: int = 1


class Replicas:
    """The link to the other replicas. Call `await start()`, and `await close()` at the end. All methods run on the
    event loop's thread."""

    def __init__(self, own: Own) -> None:
        self._settings, self._facts, self.origin = own.settings, own.facts, own.origin
        self._feed, self._counted = own.feed, own.counted
        self._worker, self._workers = own.worker, own.workers
        #: The replicas that hold a lease, by name.
        self.peers: dict[str, Peer] = {}
        self.counts = Counts()
        #: Why there is no link to other replicas; empty = there is one.
        self.problem = "not connected yet"
        self._unheard_since = time.monotonic()
        #: The lag as last measured, and when.
        self._lag = 0.0, self._unheard_since
        #: How many replicas joined and left since when, within `CHANGES_S`.
        self._changes = 0, self._unheard_since
        #: When all workers were last known (`time.monotonic`).
        self._complete_at = self._unheard_since
        #: Workers were missing for longer than a lease, and since then not all have run steadily.
        self._incomplete = False
        #: Whether to write a snapshot: a replica asked for one, or batches were dropped.
        self._owes_snapshot = False
        self._snapshot_at = 0.0

    @property
    def missing(self) -> list[str]:
        """The replicas whose batches or snapshot are missing."""
        return sorted(name for name, peer in self.peers.items() if peer.ask_at)

    @property
    def count(self) -> int:
        """The number of schedulers of the pool, including workers that are not known at the moment."""
        return max(self._workers, 1 + len(self.peers))

    @property
    def lag_s(self) -> float:
        """Seconds from writing facts to reading them, as last measured; 0 = not for a while."""
        lag_s, measured_at = self._lag
        return lag_s if time.monotonic() - measured_at < LAG_KEPT_S + lag_s else 0.0

    def _delayed(self, lag_s: float) -> None:
        self._lag = lag_s, time.monotonic()

    @property
    def unheard_s(self) -> float:
        """Seconds since the last other replica was lost; 0 = there is one."""
        return 0.0 if self.peers else time.monotonic() - self._unheard_since

    @property
    def where(self) -> str:
        """The URL in `replicas.via` without user and password."""
        via = split_via(self._settings.via)
        return f"{via.scheme}://{','.join(via.places)}{via.path.partition('?')[0]}"

    def trouble(self) -> str:
        """What is wrong with the link, as a text for people; empty = nothing."""
        if self.problem:
            return f"this replica decides alone: {self.problem}"
        for name in sorted(self.peers):
            if problem := self._facts.problem(name):
                return f"the facts of {name} cannot be used: {problem}"
        if self.lag_s > SLOW_S:
            return (
                f"messages of the other replicas arrive {self.lag_s:.1f} s late: {self.where} or this process is slow"
            )
        here = self._workers_here()
        if here < self._workers:
            why = "one does not run, hangs or keeps restarting, see the log"
            return f"only {here} of {self._workers} workers are heard: {why}"
        lacking = [name for name, peer in self.peers.items() if peer.pause_s >= ASK_CAP_S]
        if lacking:
            return f"facts of {named(lacking)} stay missing: do they have the same endpoints, and the same pool?"
        return next(filter(None, map(self._facts.difference, sorted(self.peers))), "")

    def _workers_here(self) -> int:
        """The number of workers that run, this one included. A worker that left within the last lease still counts,
        because it may be restarting. After a longer absence it counts once it has run for `STEADY_S`: one that fails at
        every start would come and go."""
        (host, mark), now = _gateway_of(self.origin), time.monotonic()
        ages = [
            now - peer.since for name, peer in self.peers.items() if _gateway_of(name) in ((host, mark), (host, ""))
        ]
        steady = 1 + sum(age >= STEADY_S for age in ages)
        if (steady if self._incomplete else 1 + len(ages)) >= self._workers:
            self._complete_at, self._incomplete = now, False
        elif now - self._complete_at > self._settings.lease:
            self._incomplete = True
        return steady if self._incomplete else self._workers

    def note(self) -> str:
        """The state of the link, as a text for people, while there is no trouble."""
        count = len(self.peers)
        if not count:  # the lag is that of our own messages
            return f"no other scheduler heard for {self.unheard_s:.0f} s"
        peers = f"{count} other{'' if count == 1 else 's'}, heard {self.lag_s * 1e3:.0f} ms late"
        return peers + (f"; facts of {named(self.missing)} are missing" if self.missing else "")

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
        """Connect. Returns once the facts of all other replicas are known, when the first attempt has failed, or after
        `JOIN_S`."""
        raise NotImplementedError

    async def _joined(self) -> None:
        """Wait until the facts of all other replicas are known, at most `JOIN_S`."""
        until = time.monotonic() + JOIN_S
        while self.missing and time.monotonic() < until:
            await asyncio.sleep(self._settings.interval)

    async def close(self) -> None:
        """Send the remaining facts and leave."""
        raise NotImplementedError

    # ---- other replicas ----

    def _lose(self, name: str) -> None:
        del self.peers[name]
        self._unheard_since = time.monotonic()
        self._counted(len(self.peers) + 1)
        self._log_change("a replica left", name)
        self._feed(PeerLost(name))

    def _meet(self, name: str) -> Peer | None:
        """Return the replica of this name, and add it if it is new; `None` = there are already `MOST_PEERS`, or no
        replica has such a name."""
        peer = self.peers.get(name)
        if peer is None and len(self.peers) < MOST_PEERS and len(name) <= _LONGEST:
            now = time.monotonic()
            peer = self.peers[name] = Peer(now, now)
            self._counted(len(self.peers) + 1)
            self._log_change("a replica joined", name)
            self._want(name)
        return peer

    def _log_change(self, message: str, name: str) -> None:
        now, (count, since) = time.monotonic(), self._changes
        count, since = (count + 1, since) if now - since < CHANGES_S else (1, now)
        self._changes = count, since
        if count <= MOST_CHANGES:
            log.info(message, replica=name)
        elif count == MOST_CHANGES + 1:
            log.warning("replicas join and leave so often that most of it is not logged", replica=name)

    def _want(self, name: str) -> None:
        """Note that batches or the snapshot of this replica are missing."""
        peer = self.peers.get(name)
        if peer is not None and not peer.ask_at:
            self.counts.gaps += 1
            peer.ask_at = time.monotonic() + peer.pause_s - ASK_FIRST_S
            self._look_soon()

    def _look_soon(self) -> None:
        """Called when there is a replica to ask, or a snapshot to write."""

    def _to_ask(self) -> bytes:
        """The names of the replicas to ask for a snapshot now, separated by spaces; empty = none. Sets the times at
        which they are asked next."""
        now = time.monotonic()
        asked = {name: peer for name, peer in self.peers.items() if 0.0 < peer.ask_at <= now}
        for peer in asked.values():
            peer.ask_at, peer.pause_s = now + peer.pause_s, min(peer.pause_s * 2, ASK_CAP_S)
        return " ".join(asked).encode()

    async def _snapshot(self) -> bytes:
        """Make our snapshot. Requests go on between its parts."""
        return b"".join(await in_turns(self._facts.snapshot()))

    def _asked(self, name: str, wanted: bytes) -> None:
        """Handle a request for snapshots from the replica `name`. `wanted`: the names of the replicas that it asks,
        separated by spaces."""
        self._meet(name)
        if b" %s " % self.origin.encode() in b" %s " % wanted:  # not `split`: nothing bounds the length
            self._owes_snapshot = True
            self._look_soon()

    def _received(self, name: str, peer: Peer, payload: bytes, lag_s: float, at_once: bool = False) -> None:
        """Feed a received batch to the pipeline."""
        peer.heard_at = time.monotonic()
        peer.batches += 1
        self.counts.received += 1
        self.counts.received_bytes += len(payload)
        self._feed(PeerHeard(name, payload, lag_s, self.origin, at_once))

    def _caught_up(self, name: str, peer: Peer, snapshot: bytes) -> None:
        """Feed a received snapshot to the pipeline. It was asked for because facts were missing."""
        peer.heard_at = time.monotonic()
        self.counts.snapshots_received += 1
        self.counts.received_bytes += len(snapshot)
        self._feed(PeerSnapshot(name, snapshot))
        peer.ask_at = 0.0
        if name not in self._facts.gaps():
            peer.pause_s = ASK_FIRST_S
