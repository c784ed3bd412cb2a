"""Replicas whose facts are words, for tests of what carries facts from one to another."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fairlead.config.schema import ReplicaSettings
from fairlead.core.events import PeerHeard, PeerLost, PeerSnapshot
from fairlead.server.replicas import Facts, Own, Replicas
from fairlead.server.replicas_files import FileReplicas
from fairlead.server.replicas_valkey import ValkeyReplicas

#: Seconds; generous, for a busy machine.
PATIENCE = 90.0
LEASE = 1.5


class Teller:
    """A replica whose facts are words. What it knows of another is the list of that one's words."""

    def __init__(
        self, name: str, url: str, waits: bool = False, worker: int = 0, workers: int = 1, **settings: Any
    ) -> None:
        self.words: list[str] = []
        self._sequence = self._fetched = 0
        #: By origin, what it said, and the lost ones.
        self.known: dict[str, list[str]] = {}
        self._heard: dict[str, int] = {}
        self.lost: list[str] = []
        self.snapshots = 0
        #: Whether it cannot take in what others say.
        self.fails = False
        #: Whose facts it cannot use, whatever they say.
        self.lacks: list[str] = []
        #: Why, by origin.
        self.problems: dict[str, str] = {}
        #: Events in their order.
        self.fed: list[Any] = []
        sequence, newest = lambda: self._fetched, lambda name: self._heard.get(name, 0)
        facts = Facts(
            self.told,
            self.snapshot,
            self.gaps,
            sequence,
            newest,
            lambda: waits,
            lambda name: self.problems.get(name, ""),
        )
        configured = ReplicaSettings(via=url, lease=LEASE, interval=0.005, **settings)
        #: How many replicas there were, from change to change.
        self.counted: list[int] = []
        kind = FileReplicas if url.startswith("file:") else ValkeyReplicas
        own = Own(
            settings=configured,
            pool="pool",
            origin=name,
            facts=facts,
            feed=self.feed,
            counted=self.counted.append,
            worker=worker,
            workers=workers,
        )
        self.replicas: Replicas = kind(own)

    def say(self, word: str) -> None:
        self.words.append(word)

    def told(self) -> bytes:
        fresh, self._fetched = self.words[self._fetched :], len(self.words)
        return f"{self._fetched - len(fresh)} {' '.join(fresh)}".encode() if fresh else b""

    def snapshot(self) -> tuple[bytes, ...]:
        return b"", " ".join(self.words).encode()

    def gaps(self) -> list[str]:
        behind = [origin for origin, ahead in self._heard.items() if ahead != len(self.known.get(origin, ()))]
        return [*self.lacks, *behind]

    def feed(self, event: Any) -> None:
        if self.fails and isinstance(event, PeerHeard):
            self._heard[event.origin] = len(self.known.get(event.origin, ())) + 1
            raise RuntimeError
        self.fed.append(event)
        if isinstance(event, PeerLost):
            self.lost.append(event.origin)
            self.known.pop(event.origin, None)
            self._heard.pop(event.origin, None)
            return
        if isinstance(event, PeerSnapshot):
            self.snapshots += 1
            self.known[event.origin] = event.payload.decode().split()
            self._heard[event.origin] = max(len(self.known[event.origin]), self._heard.get(event.origin, 0))
            return
        if not isinstance(event, PeerHeard):
            return
        begin, *words = event.payload.decode().split(" ")
        known = self.known.setdefault(event.origin, [])
        if int(begin) == len(known):
            known += words
        self._heard[event.origin] = max(self._heard.get(event.origin, 0), int(begin) + len(words))


@asynccontextmanager
async def running(*tellers: Teller) -> AsyncIterator[None]:
    for teller in tellers:
        await teller.replicas.start()
    try:
        yield
    finally:
        for teller in tellers:
            await teller.replicas.close()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.01)


def agree(*tellers: Teller) -> bool:
    """Whether each knows all that the others said, and lacks nothing."""
    return all(
        one.known.get(other.replicas.origin, []) == other.words and not one.replicas.missing
        for one in tellers
        for other in tellers
        if one is not other
    )
