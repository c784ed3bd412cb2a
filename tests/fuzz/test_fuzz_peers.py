"""Whatever other schedulers tell: nothing raises, the books balance, and nothing is left of who goes."""

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import (
    EndpointUp,
    Event,
    MetricsSampled,
    PeerHeard,
    PeerLost,
    PeerSnapshot,
    RequestArrived,
    ResponseEnded,
    TimerFired,
)
from fairlead.core.facts import (
    BROKEN,
    CHAIN_BLOCKS,
    VERSION,
    Avoided,
    Batch,
    Charged,
    Ended,
    FirstToken,
    Held,
    Sent,
    Snapshot,
    endpoint_hash,
)
from fairlead.core.instructions import Route
from fairlead.core.prefix import ChainHasher
from fairlead.core.reports import SharedFleet
from fairlead.core.request import Request
from fairlead.core.scheduler import EXPIRY_TIMER, Pipeline
from fairlead.testing import SimClock

pytestmark = pytest.mark.fuzzer("facts of other schedulers")

ENDPOINTS, ORIGINS = 3, ("a", "b", "")
#: For as long as leases are believed.
TTL_S = 60.0


def around(least: int, most: int) -> st.SearchStrategy[int]:
    """Mostly small, often the most; what is beyond makes the whole message wrong, so bytes are changed for that."""
    return st.integers(least, min(least + 8, most)) | st.integers(least, most) | st.just(most)


counts, tokens = around(0, 1 << 53), around(0, 1_000_000_000)
ages, works = around(0, 1 << 53), around(0, 1_000_000_000_000)
hashes = st.sampled_from([endpoint_hash(f"e{i}") for i in range(ENDPOINTS)]) | st.integers(0, (1 << 64) - 1)
places = st.integers(0, 3)
names = st.sampled_from(["", "m", "a\x00b", "ü" * 300]) | st.text(max_size=8)
charged = st.builds(
    Charged, places, ages, tokens, tokens, tokens, works, st.booleans(), tokens, names, around(1, 1 << 20)
)
first_tokens, ended = st.builds(FirstToken, counts, ages), st.builds(Ended, counts, around(BROKEN, 1_000_000_000))
held = st.builds(
    Held, around(-(1 << 53), 1 << 53), names, names, counts, ages, counts,
    st.floats(0.0, 1e15) | st.sampled_from([0.0, 1e15]),
)  # fmt: skip
avoided = st.builds(Avoided, places, tokens)
parents = st.integers(0, 3) | st.integers(0, (1 << 64) - 1)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[tuple[Sent, ...], bytes, bytes]:
    """Prompts with their blocks and sizes, which usually fit each other."""
    sent = tuple(
        draw(st.lists(st.builds(Sent, places, parents, st.integers(0, 5) | st.just(CHAIN_BLOCKS)), max_size=3))
    )
    count = sum(each.blocks for each in sent)
    blocks = Random(draw(st.integers(0, 9))).randbytes(8 * count)
    sizes = draw(st.sampled_from([b"", bytes(2 * count), b"\xff" * 2 * count, b"\x10\x00" * count]))
    return sent, blocks, sizes


def some(values: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(values, max_size=3).map(tuple)


@st.composite
def messages(draw: st.DrawFn) -> Event:
    """A batch or a snapshot; some are cut or changed on the way."""
    origin = draw(st.sampled_from(ORIGINS))
    version, sequence, number = VERSION, draw(st.integers(1, 8) | counts), draw(st.integers(0, 8) | counts)
    named = tuple(draw(st.lists(hashes, min_size=4, max_size=4)))
    leases, (sent, blocks, sizes) = draw(some(charged)), draw(prompts())
    flows, avoiding = draw(some(held)), draw(some(avoided))
    message: Batch | Snapshot
    if batch := draw(st.booleans()):
        message = Batch(
            version, sequence, draw(counts), named, number, leases, draw(some(first_tokens)), draw(some(ended)), sent,
            blocks, sizes, flows, draw(some(places)), draw(st.sampled_from([None, avoiding])),
        )  # type: ignore[arg-type]  # fmt: skip
    else:
        first = draw(st.integers(0, 8) | counts)
        numbers = tuple(range(first, first + len(leases)))
        message = Snapshot(
            version, sequence, named, number, numbers, leases, draw(some(counts)), sent, blocks, sizes, flows, avoiding
        )  # type: ignore[arg-type]  # fmt: skip
    payload = bytearray(msgspec.msgpack.encode(message))
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 3]))):
        payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
    data = bytes(payload)
    lag_s = draw(st.sampled_from([0.0, 0.01, 5.0]))
    return PeerHeard(origin, data, lag_s, "c") if batch else PeerSnapshot(origin, data)


steps = (
    messages()
    | st.sampled_from(["request", "end", "second", "scrape", "timer"])
    | st.sampled_from(ORIGINS).map(PeerLost)
)


class Site:
    """A scheduler with the default policy and flow control, which holds the books to their rules after every event."""

    def __init__(self) -> None:
        self.clock = SimClock()
        config = load("policy: default", need_endpoints=False)
        self.pipeline: Pipeline = build_pipeline(config, self.clock, Random(1), fleet=SharedFleet(lease_ttl=TTL_S))
        self.routed: list[int] = []
        self.requests = 0
        for i in range(ENDPOINTS):
            self.feed(EndpointUp(Endpoint(f"e{i}", f"10.0.0.{i}:80")))
        self.scrape()

    def feed(self, event: Event) -> None:
        self.routed += [each.request_id for each in self.pipeline.handle(event) if isinstance(each, Route)]
        self.pipeline.validate()
        table = self.pipeline.fleet.table
        assert not np.isnan(table.floats).any()
        for name in ("queue", "active", "kv_tokens", "queued_tokens", "inflight", "growth_tokens"):
            column = getattr(table, name)
            assert (np.isfinite(column) & (column >= 0.0)).all(), (name, column)

    def scrape(self) -> None:
        for i in range(ENDPOINTS):
            page = Sample(waiting=0.0, running=float(len(self.routed)), block_size=16, num_blocks=10_000)
            self.feed(MetricsSampled(f"e{i}", self.clock.time(), page))

    def step(self, what: Event | str) -> None:
        if not isinstance(what, str):
            self.feed(what)
        elif what == "request":
            self.requests += 1
            chain = HASHER.chain(b"m", Random(self.requests % 3).randbytes(4000))
            self.feed(RequestArrived(Request(self.requests, self.clock.time(), prompt_tokens=1000, prefix=chain)))
        elif what == "end" and self.routed:
            self.feed(ResponseEnded(request_id=self.routed.pop(), status=200))
        elif what == "second":
            self.clock.advance(1.0)
        elif what == "scrape":
            self.scrape()
        elif what == "timer":
            self.feed(TimerFired(EXPIRY_TIMER))


HASHER = ChainHasher()


@given(st.lists(steps, max_size=12))
@settings(max_examples=100, deadline=None)
def test_any_facts(happened: list[Event | str]) -> None:
    site = Site()
    for what in happened:
        site.step(what)
    for origin in ORIGINS:
        site.feed(PeerLost(origin))
    site.clock.advance(2.0 * TTL_S)
    site.step("timer")
    site.scrape()
    while site.routed:
        site.step("end")
    assert site.pipeline.fleet.table.inflight.tolist() == [0.0] * ENDPOINTS
    site.step("request")
    assert len(site.routed) == 1, "decisions go on"
