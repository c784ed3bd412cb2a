"""Requests, endpoints and fleets in one line each."""

from collections.abc import Iterable, Mapping
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from fairlead.fleet.fleet import Fleet
from fairlead.fleet.prefix import ChainHasher
from fairlead.model.endpoint import Endpoint, Sample
from fairlead.model.request import NO_PREFIX, Request
from fairlead.schedule.cycle import Context, Cycle

#: Bytes per token of the prompts below.
BYTES_PER_TOKEN = 4
_NUMBERS = count(1)


def endpoint(name: str = "e0", address: str = "", labels: Mapping[str, str] | None = None) -> Endpoint:
    """An endpoint; the address follows from the name if none is given (`e3` → 10.0.0.3:8000)."""
    digits = "".join(c for c in name if c.isdigit()) or "0"
    return Endpoint(name, address or f"10.0.{int(digits) // 256 % 256}.{int(digits) % 256}:8000", dict(labels or {}))


def request(prompt: str = "", *, model: str = "", **fields: Any) -> Request:
    """A request with a prompt. `fields` are those of `model.request.Request`; each request has an id of its own."""
    raw = prompt.encode()
    chain = ChainHasher().chain(model.encode(), [memoryview(raw)]) if raw else NO_PREFIX
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
    """A fleet that knows these endpoints (or names of some), and what they last said.

    `samples` has fields of `model.endpoint.Sample` by endpoint, for example `{"e0": {"waiting": 3, "kv_usage": 0.5}}`.
    Everything happened at clock time 0.
    """
    made = Fleet()
    for one in endpoints or ("e0", "e1", "e2"):
        made.up(endpoint(one) if isinstance(one, str) else one)
    for name, fields in (samples or {}).items():
        if made.table.slot(name) is None:
            raise ValueError(f"there is no endpoint {name!r}")
        made.sampled(name, 0.0, 0.0, Sample(**fields))
    return made


def holds(known: Fleet, name: str, *prompts: Request) -> None:
    """From here on the endpoint is believed to hold the prompts of these requests."""
    slot = known.table.slot(name)
    if slot is None:
        raise ValueError(f"there is no endpoint {name!r}")
    for one in prompts:
        known.prefix.insert(slot, one.prefix)


def busy(known: Fleet, name: str, requests: Iterable[Request]) -> None:
    """From here on these requests are in flight at the endpoint, before their first token."""
    slot = known.table.slot(name)
    if slot is None:
        raise ValueError(f"there is no endpoint {name!r}")
    for one in requests:
        known.charge(one, slot, 0.0, 0, 0.0)


def cycle(now: float = 0.0, seed: int = 0) -> Cycle:
    """The scratch space of one decision, for calling a plugin directly."""
    return Cycle(Context(now, Random(seed)))
