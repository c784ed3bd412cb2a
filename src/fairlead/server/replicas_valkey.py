"""Shares facts between the schedulers of one pool through a Valkey or Redis server.

    {fairlead:POOL}:told            one stream of all replicas; an entry has its sender and (kind → payload)
    {fairlead:POOL}:replicas        the set of replicas that may exist
    {fairlead:POOL}:alive:ORIGIN    a replica's lease, with the number of its last batch; expires if not renewed
    {fairlead:POOL}:snapshot:ORIGIN everything that the replica knows of itself, for half a minute after it was asked

Rules
* No decision waits for the server. Every few milliseconds this replica's facts are written as one entry, if there are
  any, and the entries of other replicas are read and fed to the pipeline as events. Both happen in one round trip,
  because each round trip wakes this process. While nothing happens, the read waits at the server. The core defines the
  payloads.
* It is a stream, not pub/sub: a reader that was away for a moment continues where it stopped, and a reader that hangs
  costs the server nothing. The stream keeps a few leases' time; a replica that was away for longer needs snapshots
  anyway. All replicas use one stream, so one read receives from all others, and our own entries that come back show the
  lag by our own clock.
* Positions in the stream are times of the server's clock, which may be set. So the stream is trimmed up to a position
  (MINID) that we read long enough ago by our own clock.
* A full server refuses the entries that would trim the stream, as one does after an entry with the highest position or
  where a key has another type, so whoever is refused deletes the stream and the set of replicas. The others notice the
  missing batches. If the clock was set back before that, new positions are below those read before. A writer notices
  that, reads on from its own entry, and asks all others for snapshots.
* A new replica asks all others for a snapshot and reads the stream meanwhile. A replica that finds a gap does the same.
  A snapshot is written after the batches that it includes and before all later ones.
* A set of replicas with too many names, or that the server does not send in time, is deleted: each replica adds itself
  again with its next renewal, and meanwhile those that are known keep their leases.
* A replica that does not renew its lease is lost. All other replicas are lost when the server has been away for longer
  than a lease.
* While the server is away, full or slow, each replica continues alone. Unsent batches are kept and sent later. A
  snapshot replaces them beyond `MOST_UNSENT` bytes, and also after a lease: then the other replicas have lost this one
  and need a snapshot anyway.
* All keys share a hash tag, so that in a cluster they are on the same node.
* Where sentinels are named instead of a server, all are asked for the primary before each connection, and what most of
  them say counts: one that is cut off may still name the former primary. That one refuses writes once it is a replica,
  which ends the connection.

Measured per batch of 1.5 kB, written and read: valkey with libvalkey takes 72-108 µs of CPU; valkey-glide takes
123-213 µs and twice the memory (50 MB instead of 27); libvalkey under a protocol of our own takes 21-44 µs. There are
at most 200 batches a second, so the library that supports TLS, users and databases is worth its CPU time. Round trips
use only its lower layer, the connections: four replicas that write and read every 10 ms take 3 % of a core each instead
of 5 %.
"""

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fairlead.core.endpoint import host_port
from fairlead.core.errors import ConfigError
from fairlead.pool.authorities import trusting
from fairlead.server.replicas import SNAPSHOT_PAUSE_S, Own, Peer, Replicas, log, split_via

#: `valkey.asyncio.Valkey`, whose type hints do not allow bytes as keys.
Client = Any

BATCH, SNAPSHOT, WANTED, GONE = b"batch", b"snapshot", b"wanted", b"gone"
ORIGIN = b"from"
#: Schemes of URLs, and the end of those that name sentinels.
TLS, SENTINEL = ("valkeys", "rediss"), "+sentinel"
#: The port of sentinels, unless the URL has another; seconds that they get to answer.
_SENTINEL_PORT, _SENTINEL_S = 26379, 1.0
_CLOSED = re.compile("Connection (closed|lost|reset)")
#: For how many leases the stream keeps an entry, at least.
LEASES_KEPT = 3
#: At most this many bytes of batches wait for a server that is away.
MOST_UNSENT = 1 << 20
#: The most entries that are read together, and the seconds of feeding them after which other work gets as many.
_AT_ONCE, _TURN_S = 256, 0.005
#: The most names that the set of replicas may have; those that died without anybody who noticed it are there too.
_MOST_MEMBERS = 1024
#: The errors of a stream in which somebody added an entry with the highest position, and of a key that somebody made
#: anew with another type.
_SPOILED = re.compile("exhausted the last possible ID|WRONGTYPE")
#: Different reasons of one outage that are logged at most.
_MOST_LOGGED = 8
#: A server that is silent for more seconds is away.
TIMEOUT_S = 2.0
#: Seconds: a read waits at the server; pause before another attempt to connect, first and at most; leaving.
_BLOCK_S, _AGAIN_FIRST_S, _AGAIN_CAP_S, _FAREWELL_S = 1.0, 0.1, 0.5, 1.0
#: A server that was away must answer an attempt within this many seconds. The limit is short, because the server may
#: come back just after an attempt began.
_BACK_S = 1.0
#: Milliseconds that the server keeps a snapshot.
_SNAPSHOT_KEPT_MS = 30_000
#: The most digits that the number in a lease may have, since the lease is not trusted.
_DIGITS = 18


class ValkeyReplicas(Replicas):
    """Shares facts through Valkey or Redis."""

    def __init__(self, own: Own) -> None:
        """Raises `ConfigError` if the client is not installed."""
        super().__init__(own)
        try:
            from valkey.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError, ValkeyError
        except ImportError as error:
            why = f"replicas need a client of Valkey ({error}): pip install 'fairlead[replicas]'"
            raise ConfigError(why, "$.replicas.via") from None
        self._failures, self._full = (ValkeyError, OSError, TimeoutError, UnicodeError), OutOfMemoryError
        self._read_only, self._refused = ReadOnlyError, ResponseError
        scheme = split_via(own.settings.via).scheme
        self._kind = scheme.removesuffix(SENTINEL)
        self._asks_sentinels = scheme.endswith(SENTINEL)
        #: The server was too slow for the last connection, maybe because the set of replicas has millions of names.
        self._unread = False
        #: How often a connection ended or failed.
        self._failed = 0
        self._alone_since = time.monotonic()
        #: The reasons of the present outage that were logged. The first is often only a closed connection.
        self._logged: set[str] = set()
        self._untold: deque[bytes] = deque()
        self._untold_bytes = 0
        #: The number of our last batch, read from the core while no batch waits to be sent.
        self._sequence = 0
        #: `_tick` is set every `interval`, `_something` when there is something to send before the next tick.
        self._tick, self._something = asyncio.Event(), asyncio.Event()
        #: Whether a read waits at the server until the stream gets an entry, from this replica or another.
        self._waits = False
        #: Held while batches or a snapshot are written, to keep them in order.
        self._writing = asyncio.Lock()
        #: The position of the last entry of the stream that was read; 0-0 = none yet.
        self._position = b"0-0"
        #: Positions that were read, a lease apart, oldest first; the stream is trimmed up to the first. The last is of
        #: `_marked_at`.
        self._marks: deque[bytes] = deque(maxlen=LEASES_KEPT + 1)
        self._marked_at = -inf
        self._joined_at = 0.0
        #: An entry of ours that has not been read back yet, and when it was written.
        self._written, self._written_at = b"", 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = own.origin.encode()
        keys = f"{{fairlead:{own.pool}}}:".encode()
        self._stream, self._members = keys + b"told", keys + b"replicas"
        self._alive, self._snapshots = keys + b"alive:", keys + b"snapshot:"

    # ---- life ----

    def _look_soon(self) -> None:
        self._something.set()

    async def start(self) -> None:
        tried = asyncio.Event()
        self._tasks = {asyncio.create_task(self._collect()), asyncio.create_task(self._run(tried))}
        await tried.wait()
        await self._joined()

    async def close(self) -> None:
        """Send the remaining batches and leave, if the server answers within `_FAREWELL_S`, and sentinels before it."""
        await _cancelled(self._tasks)
        if not self._tasks or self.problem:
            return
        self._take()
        with suppress(*self._failures):
            farewell_s = _FAREWELL_S + (_SENTINEL_S if self._asks_sentinels else 0.0)
            async with asyncio.timeout(farewell_s), self._client() as client:
                await self._tell_batches(client)
                await client.delete(self._alive + self._name)
                await client.srem(self._members, self._name)
                if await client.smembers(self._members):
                    await self._write(client, GONE, b"")
                else:
                    await client.delete(self._stream)

    async def _collect(self) -> None:
        """Take facts from the core every `interval`, even while the server is away."""
        while True:
            await asyncio.sleep(self._settings.interval)
            self._take()
            for name in self._facts.gaps():
                self._want(name)
            self._tick.set()

    def _take(self) -> None:
        batch = self._facts.batch()
        if not batch:
            return
        self._untold.append(batch)
        self._untold_bytes += len(batch)
        if self._untold_bytes > MOST_UNSENT:
            self._drop()
        if self._waits:
            self._something.set()

    def _drop(self) -> None:
        self.counts.dropped += len(self._untold)
        self._untold.clear()
        self._untold_bytes = 0
        self._owes_snapshot = True

    async def _run(self, tried: asyncio.Event) -> None:
        pause_s = _AGAIN_FIRST_S
        while True:
            began = time.monotonic()
            try:
                async with self._client() as client:
                    async with asyncio.timeout(_BACK_S if self.counts.outages else TIMEOUT_S):
                        await self._join(client)
                    tried.set()
                    await self._together(client)
            except Exception as error:
                if not isinstance(error, self._failures):
                    log.error("could not send to the other replicas", error=f"{type(error).__name__}: {error}")
                self._alone(error)
                if isinstance(error, self._full) or _SPOILED.search(str(error)):
                    await self._clear()
            tried.set()
            if time.monotonic() - began > self._settings.lease:
                pause_s = _AGAIN_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _AGAIN_CAP_S)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        """A client of the server. Raises `OSError` if the file with the password, the certificate authorities or our
        certificate cannot be read or no sentinel names the server, `ValueError` for a bad URL."""
        from valkey.asyncio import Valkey

        via, options = self._settings.via, self._options()
        if self._asks_sentinels:
            via = await self._primary(options)
        async with Valkey.from_url(via, **options) as client:
            yield client

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        # No `socket_timeout`: with it, the client would start a task for each command.
        options: dict[str, Any] = {"socket_connect_timeout": TIMEOUT_S}
        # Without a name, which the client would send by a command that needs one more right (CLIENT SETINFO).
        options |= {"lib_name": None, "lib_version": None}
        if settings.password_file:
            options["password"] = Path(settings.password_file).read_text(encoding="utf-8").strip()
        if self._kind in TLS:
            options["ssl_check_hostname"] = True
            trusting(settings.ca_file, settings.cert_dir)  # else the client's error would be one of the connection
            options["ssl_ca_certs"] = settings.ca_file or None
            if settings.cert_dir:
                own = {"ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
                options |= {option: str(Path(settings.cert_dir, file)) for option, file in own.items()}
        return options

    async def _primary(self, options: dict[str, Any]) -> str:
        """Ask the sentinels in `replicas.via` for the primary, and return its URL. Where as many name one as another,
        the next attempt takes the other. Raises `OSError`."""
        via = split_via(self._settings.via)
        _, name, *database = via.path.split("/")
        asked = [self._sentinel(place, via.user, name, options) for place in via.places]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        named = Counter(answer for answer in answers if isinstance(answer, str))
        if not named:
            why = "; ".join(str(answer) for answer in answers[:_MOST_LOGGED])
            raise OSError(f"no sentinel names a primary {name}: {why}")
        most = max(named.values())
        likely = [place for place in named if named[place] == most]
        return f"{self._kind}://{via.user}{likely[self._failed % len(likely)]}/{''.join(database)}"

    async def _sentinel(self, where: str, user: str, name: str, options: dict[str, Any]) -> str:
        """Ask one sentinel for HOST:PORT of the primary. Many have no password although the servers have one, so the
        first attempt is without. Raises `OSError` if it knows none or cannot be asked."""
        from valkey.exceptions import AuthenticationError

        parts = urlsplit(f"//{where}")
        place = host_port(parts.hostname or "", parts.port or _SENTINEL_PORT)
        anonymous = {option: value for option, value in options.items() if option != "password"}
        try:
            async with asyncio.timeout(_SENTINEL_S):
                try:
                    primary = await self._ask(place, name, anonymous)
                except AuthenticationError:
                    primary = await self._ask(user + place, name, options)
        except self._failures as error:
            raise OSError(f"{place}: {str(error) or 'no answer in time'}") from error
        if primary is None:
            raise OSError(f"{place} knows no such primary")
        return host_port(*primary)

    async def _ask(self, where: str, name: str, options: dict[str, Any]) -> tuple[str, int] | None:
        from valkey.asyncio import Valkey

        async with Valkey.from_url(f"{self._kind}://{where}", decode_responses=True, **options) as client:
            primary: tuple[str, int] | None = await client.sentinel_get_master_addr_by_name(name)
            return primary

    async def _clear(self) -> None:
        with suppress(*self._failures):
            async with asyncio.timeout(TIMEOUT_S), self._client() as client:
                await client.delete(self._stream, self._members)

    def _alone(self, error: Exception) -> None:
        now = time.monotonic()
        self._failed += 1
        silent = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        problem = f"{self.where}: {str(error) or silent}"
        if isinstance(error, self._read_only):
            why = "this is a replica: name the primary, its sentinels, or an address that follows it"
            problem = f"{self.where}: {'the sentinels name a replica as the primary' if self._asks_sentinels else why}"
        if self.problem and self._kind in TLS and _CLOSED.search(problem):  # again, so it is no restart
            why = "the server closes each connection; if it demands client certificates, see replicas.certDir"
            problem = f"{self.where}: {why}"
        if not self.problem:
            self.counts.outages += 1
            self._alone_since = now
            self._logged.clear()
        if problem not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(problem)
            log.warning("lost the connection to the other replicas", problem=problem)
        self.problem = problem
        self._unread = isinstance(error, TimeoutError)
        if now - self._alone_since > self._settings.lease:
            for name in list(self.peers):
                self._lose(name)

    # ---- while the server is available ----

    async def _join(self, client: Client) -> None:
        """Find our position in the stream, and announce this replica. Fails if a right is missing."""
        self._joined_at = time.monotonic()
        if self._unread:
            await client.delete(self._members)
        if self.counts.outages and self._joined_at - self._alone_since > self._settings.lease:
            self._take()
            self._drop()
        position = self._position
        if not await client.xrange(self._stream, position, position):
            newest = await client.xrevrange(self._stream, count=1)
            self._read_from(newest[0][0] if newest else b"0-0")
        self._written = b""
        await client.xread({self._stream: b"$"})
        # Rights that are used later: of a key and a member that no replica has.
        async with client.pipeline(transaction=False) as pipe:  # in one round trip: far servers answer late
            pipe.get(self._snapshots)
            pipe.delete(self._snapshots)
            pipe.srem(self._members, b"")
            await pipe.execute()
        await self._write(client, WANTED, b"")
        await self._renew(client)
        self._something.set()
        self.problem = ""
        log.info("connected to the other replicas", server=self.where, replica=self.origin, others=len(self.peers))

    def _read_from(self, position: bytes) -> None:
        """Read the stream from this position, and ask all others for what was before it."""
        self._position, self._written = position, b""
        self._marks.clear()
        for name in self.peers:
            self._want(name)

    async def _together(self, client: Client) -> None:
        """Exchange entries, send what is urgent, and renew the lease, until one of these fails."""
        tasks = {asyncio.create_task(work(client)) for work in (self._exchange, self._tell, self._stay)}
        self._tasks |= tasks
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            await _cancelled(tasks)
            self._tasks -= tasks

    async def _stay(self, client: Client) -> None:
        while True:
            await asyncio.sleep(self._settings.lease / 3)
            async with asyncio.timeout(TIMEOUT_S):
                await self._renew(client)
            self._something.set()

    async def _renew(self, client: Client) -> None:
        """Renew our lease, and find the leases that have expired."""
        if not self._untold:
            self._sequence = self._facts.sequence()
        async with client.pipeline(transaction=False) as pipe:
            pipe.set(self._alive + self._name, self._sequence, px=int(self._settings.lease * 1000))
            pipe.sadd(self._members, self._name)
            pipe.smembers(self._members)
            members: set[bytes] = set((await pipe.execute())[2])
        if len(members) > _MOST_MEMBERS:
            await client.delete(self._members)
            members = set()
        members = (members | {name.encode() for name in self.peers}) - {self._name}
        read = await client.mget([self._alive + name for name in members]) if members else []
        leases = dict(zip(members, read, strict=True))
        dead = [name for name, lease in leases.items() if lease is None]
        if dead:
            await client.srem(self._members, *dead)
        there = {name.decode(errors="replace"): lease for name, lease in leases.items() if lease is not None}
        # For one lease after joining, keep peers without a lease: a server that was away may have lost its data, and
        # the other replicas must first connect and renew their leases too. For as long after meeting one, keep it: it
        # announces itself before its first lease.
        now, lasts = time.monotonic(), self._settings.lease
        if now - self._joined_at > lasts:
            for name in self.peers.keys() - there:
                if now - self.peers[name].since > lasts:
                    self._lose(name)
        for name, lease in there.items():
            peer = self._meet(name)
            if peer is not None:
                # Compare with the number in the lease: otherwise the loss of a last batch would be noticed only at the
                # replica's next batch.
                if self._facts.newest(name) < peer.sequence:
                    self._want(name)
                peer.sequence = int(lease[:_DIGITS]) if lease.isdigit() else 0

    async def _exchange(self, client: Client) -> None:
        """Write batches and read entries, once per `interval`."""
        connection = await client.connection_pool.get_connection("XREAD")
        try:
            quiet = False
            while True:
                await self._tick.wait()
                self._tick.clear()
                sends, entries = bool(self._untold), await self._round_trip(connection, quiet)
                quiet = not sends and not entries
                began = time.thread_time()
                for position, fields in entries:
                    self._position = position
                    await self._entry(client, position, dict(zip(fields[::2], fields[1::2], strict=True)))
                    if (spent := time.thread_time() - began) > _TURN_S:
                        await asyncio.sleep(spent)
                        began = time.thread_time()
                if len(entries) == _AT_ONCE:
                    self._tick.set()
        finally:
            self._waits = False
            await connection.disconnect(nowait=True)

    async def _round_trip(self, connection: Any, quiet: bool) -> list[tuple[bytes, list[bytes]]]:
        """Write waiting batches and read the entries after our position: (position, fields and values). `quiet`: if
        there is nothing to write, wait at the server for an entry."""
        batches = [] if self._writing.locked() else list(islice(self._untold, _AT_ONCE))
        self._waits = quiet and not self._untold
        block = (b"BLOCK", int(_BLOCK_S * 1000)) if self._waits else ()
        commands = [(b"XREAD", b"COUNT", _AT_ONCE, *block, b"STREAMS", self._stream, self._position)]
        commands += [self._addition(BATCH, batch) for batch in batches]
        async with asyncio.timeout(TIMEOUT_S), self._writing if batches else nullcontext():
            began, before = time.monotonic(), self._position
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            read = await connection.read_response()
            for batch in batches:
                position = await connection.read_response()
                self._added(position, before)
                self._stored(batch, position, began)
        self._waits = False
        return read[0][1] if read else []

    async def _tell(self, client: Client) -> None:
        """Write what must not wait for the next round trip: batches, requests for snapshots, our snapshot."""
        while True:
            await self._something.wait()
            self._something.clear()
            async with self._writing:
                await self._tell_batches(client)
            wanted = self._to_ask()
            if wanted:
                await self._write(client, WANTED, wanted)
            if self._owes_snapshot:
                await asyncio.sleep(max(self._snapshot_at + SNAPSHOT_PAUSE_S - time.monotonic(), 0.0))
                async with self._writing:
                    await self._tell_snapshot(client)

    async def _tell_batches(self, client: Client) -> None:
        while self._untold:
            began, batch = time.monotonic(), self._untold[0]
            self._stored(batch, await self._write(client, BATCH, batch), began)

    def _stored(self, batch: bytes, position: bytes, began: float) -> None:
        """Note that the batch was written at this position of the stream. `began`: when writing it began."""
        self.counts.sent += 1
        self.counts.sent_bytes += len(batch)
        if self._untold and self._untold[0] is batch:  # it was not dropped meanwhile
            self._untold.popleft()
            self._untold_bytes -= len(batch)
        if not self._written and _place(position) > _place(self._position):
            self._written, self._written_at = position, began

    async def _tell_snapshot(self, client: Client) -> None:
        self._take()  # batches that the snapshot includes are sent before it
        snapshot = await self._snapshot()
        self._owes_snapshot, self._snapshot_at = False, time.monotonic()
        try:
            await self._tell_batches(client)
            async with asyncio.timeout(TIMEOUT_S):
                await client.set(self._snapshots + self._name, snapshot, px=_SNAPSHOT_KEPT_MS)
            await self._write(client, SNAPSHOT, b"")
        except BaseException:
            self._owes_snapshot = True
            raise
        self.counts.snapshots_sent += 1
        self.counts.sent_bytes += len(snapshot)

    def _addition(self, kind: bytes, payload: bytes) -> tuple[bytes | int, ...]:
        now = time.monotonic()
        if now - self._marked_at >= self._settings.lease:
            self._marks.append(self._position)
            self._marked_at = now
        oldest = self._marks[0] if len(self._marks) > LEASES_KEPT else b"0-0"
        return b"XADD", self._stream, b"MINID", b"~", oldest, b"*", ORIGIN, self._name, kind, payload

    async def _write(self, client: Client, kind: bytes, payload: bytes) -> bytes:
        """Write an entry. Returns its position in the stream."""
        async with asyncio.timeout(TIMEOUT_S):
            before = self._position
            position: bytes = await client.execute_command(*self._addition(kind, payload))
        self._added(position, before)
        return position

    def _added(self, position: bytes, before: bytes) -> None:
        """Notice a new stream by the position of an entry that we added. `before`: where we had read to before that."""
        if _place(position) <= _place(before):
            self._read_from(position)

    async def _entry(self, client: Client, position: bytes, entry: dict[bytes, bytes]) -> None:
        origin = entry.pop(ORIGIN, b"")
        if origin == self._name:
            if position == self._written:
                self._delayed(0.5 * (time.monotonic() - self._written_at))
                self._written = b""
            return
        name = origin.decode(errors="replace")
        for kind, payload in entry.items():
            if kind == WANTED:
                self._asked(name, payload)
            elif kind == GONE:
                if name in self.peers:
                    self._lose(name)
            elif (peer := self._meet(name)) is not None:
                if kind == BATCH:
                    self._received(name, peer, payload, self.lag_s)
                elif kind == SNAPSHOT and peer.ask_at:
                    await self._fetch(client, name, peer)

    async def _fetch(self, client: Client, name: str, peer: Peer) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            try:
                snapshot = await client.get(self._snapshots + name.encode())
            except self._refused:  # somebody made a key of another type
                snapshot = None
        if snapshot is not None:  # else it will be requested again
            self._caught_up(name, peer, snapshot)


def _place(position: bytes) -> tuple[int, ...]:
    """A position in the stream as numbers that can be compared: milliseconds, and a number within the millisecond."""
    return tuple(map(int, position.split(b"-")))


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel the tasks until all have ended. Once may not be enough: before Python 3.12, `asyncio.wait_for` in the
    client may swallow a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_AGAIN_FIRST_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved
