"""Builders of requests, endpoints and fleets in one line each, and a clock with virtual time."""

from collections.abc import Iterable, Mapping
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from fairlead.core.clock import VirtualClock
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Context, Cycle
from fairlead.core.prefix import ChainHasher
from fairlead.core.request import NO_PREFIX, Request

#: Bytes per token of the prompts that `request` makes.
BYTES_PER_TOKEN = 4
_NUMBERS = count(1)


def endpoint(name: str = "e0", address: str = "", labels: Mapping[str, str] | None = None) -> Endpoint:
    """An endpoint. If no address is given, it is derived from the name (`e3` → 10.0.0.3:8000)."""
    digits = "".join(c for c in name if c.isdigit()) or "0"
    return Endpoint(name, address or f"10.0.{int(digits) // 256 % 256}.{int(digits) % 256}:8000", dict(labels or {}))


def request(prompt: str = "", *, model: str = "", **fields: Any) -> Request:
    """A request with a prompt. `fields` are those of `core.request.Request`; each request has its own id."""
    raw = prompt.encode()
    chain = ChainHasher().chain(model.encode(), memoryview(raw)) if raw else NO_PREFIX
    made = Request(
        id=next(_NUMBERS),
        arrived=0.0,
        api="chat",
        model=model,
        body_bytes=len(raw),
        prompt_bytes=len(raw),
        prompt_tokens=len(raw) // BYTES_PER_TOKEN,
        prefix=chain,
    )
    return replace(made, **fields)


def fleet(*endpoints: Endpoint | str, samples: Mapping[str, Mapping[str, Any]] | None = None) -> Fleet:
    """A fleet with these endpoints (given as objects or names; none = e0, e1, e2) and their last scrapes.

    `samples` maps names of endpoints to fields of `core.endpoint.Sample`, for example `{"e0": {"waiting": 3}}`. The
    scrapes are of clock time 0. Raises `ValueError` for an unknown name.
    """
    made = Fleet()
    for item in endpoints or ("e0", "e1", "e2"):
        made.up(endpoint(item) if isinstance(item, str) else item)
    for name, fields in (samples or {}).items():
        _slot(made, name)
        made.sampled(name, 0.0, 0.0, Sample(**fields))
    return made


def _slot(known: Fleet, name: str) -> int:
    slot = known.table.slot(name)
    if slot is None:
        raise ValueError(f"there is no endpoint {name!r}")
    return slot


def holds(known: Fleet, name: str, *prompts: Request) -> None:
    """Make the fleet believe that endpoint `name` has the prompts of these requests in its KV cache."""
    slot = _slot(known, name)
    for prompt in prompts:
        known.prefix.insert(slot, prompt.prefix)
    known.table.free_cache[slot] = known.prefix.free(slot)


def busy(known: Fleet, name: str, requests: Iterable[Request]) -> None:
    """Charge leases for these requests at endpoint `name`, as if they were in flight and before their first token."""
    slot = _slot(known, name)
    for sent in requests:
        known.charge(sent, slot, 0.0, 0, 0.0)


def cycle(now: float = 0.0, seed: int = 0) -> Cycle:
    """The scratch space of one decision, for calling a plugin directly."""
    return Cycle(Context(now, Random(seed)))


class SimClock(VirtualClock):
    """A clock that starts at 1,000,000 s, so that code which confuses it with another clock fails visibly.

    Timers due at the same moment fire in the order in which they were set.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        super().__init__(start)

    def advance(self, seconds: float) -> None:
        """Advance the time and fire the timers that are due, each at its own moment."""
        until = self.now + seconds
        self.run(lambda: True, until)
        self.now = until
