"""Records: every event, decision and outcome comes back as it was; what cannot be read is said."""

import typing

import msgspec
import numpy as np
import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import BaseModels, Endpoint, Sample
from fairlead.core.fleet import Fleet
from fairlead.core.models import InferenceModel, ModelSet, Origin
from fairlead.core.records import DecisionRecord, SplitCosts, Trace
from fairlead.core.request import PrefixChain, Request, Usage
from fairlead.core.snapshot import Restored, Snapshots
from fairlead.server.journal.blocks import sampled
from fairlead.server.journal.records import EVENTS, POLICY, Packer, Unknown, Unpacker, decode, encode, joined

REQUEST = Request(
    id=7,
    arrived=1.5,
    model="m",
    prefix=PrefixChain((2**64 - 1, 5), (256, 512)),
    subset=frozenset({"10.0.0.1"}),
    session="s",
)
SAMPLE = Sample(waiting=1.0, adapters=frozenset({"a"}), max_adapters=1, extra={"heat": 3.0})
MODEL = InferenceModel(origin=Origin(namespace="n", name="o"), model="m")


def back(kind: str, body: object) -> object:
    ((found, at, value),) = decode(bytes(joined([encode((kind, 2.25, body))], 1)))
    assert (found, at) == (kind, 2.25)
    return value


@pytest.mark.parametrize(
    "event",
    [
        ev.RequestArrived(REQUEST),
        ev.FirstTokenSeen(7),
        ev.ResponseBegan(7),
        ev.ResponseEnded(request_id=7, status=200, usage=Usage(prompt_tokens=3), ttft_ms=4.5),
        ev.UsageReported(7, Usage(cached_tokens=2)),
        ev.StreamLost(7),
        ev.GatewayAnswered(),
        ev.EndpointUp(Endpoint("e", "10.0.0.1:80", {"role": "decode"})),
        ev.EndpointDown("e"),
        ev.MetricsSampled("e", 1.0, SAMPLE),
        ev.MetricsFailed("e", "timeout"),
        ev.ModelsChanged(ModelSet(models=(MODEL,))),
        ev.StopAsked(),
        ev.TimerFired("t"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_comes_back(event: ev.Event) -> None:
    assert back(type(event).__name__, event) == event


def test_there_is_a_kind_for_every_event() -> None:
    assert set(EVENTS.values()) == set(typing.get_args(ev.Event))
    assert [kind for kind, event in EVENTS.items() if kind != event.__name__] == [POLICY]


def test_a_reload_comes_back_with_the_plain_values_of_its_document() -> None:
    ((kind, _, event),) = decode(bytes(joined([encode((POLICY, 2.25, {"lease_ttl": 7.0}))], 1)))
    assert (kind, event) == (POLICY, ev.Reconfigured({"lease_ttl": 7.0}))


def test_a_name_that_is_no_text_is_written_with_its_escapes() -> None:
    odd = ev.RequestArrived(Request(id=1, arrived=0.0, model="half \ud800 a pair"))
    found = back("RequestArrived", odd)
    assert isinstance(found, ev.RequestArrived)
    assert found.request.model == "half \\ud800 a pair"


def test_what_cannot_be_read_is_said_and_the_rest_is_read() -> None:
    rows = [
        encode(("StreamLost", 1.0, {"request_id": "seven"})),
        encode(("of-tomorrow", 2.0, [1])),
        encode(("StreamLost", 3.0, ev.StreamLost(4))),
    ]
    first, second, third = decode(bytes(joined(rows, 3)))
    assert isinstance(first[2], Unknown)
    assert second == ("of-tomorrow", 2.0, [1])
    assert third[2] == ev.StreamLost(4)
    with pytest.raises(msgspec.DecodeError):
        list(decode(b"\xc1 no msgpack"))


def test_the_sample_is_a_share_and_the_same_everywhere() -> None:
    chosen = [number for number in range(1, 20_001) if sampled(number, 0.1)]
    assert 0.09 < len(chosen) / 20_000 < 0.11
    assert chosen == [number for number in range(1, 20_001) if sampled(number, 0.1)]
    assert all(sampled(number, 1.0) for number in range(100))
    assert not any(sampled(number, 0.0) for number in range(1, 100))


def fleet() -> Fleet:
    made = Fleet()
    for i in range(5):
        made.up(Endpoint(f"e{i}", f"10.0.0.{i}:80"))
    made.down("e2")
    made.sampled("e1", 0.0, 1.0, SAMPLE)
    made.adapters_listed("e1", frozenset(), BaseModels(frozenset({"m"}), {"m": 512}))
    made.adapters_listed("e3", None, BaseModels(frozenset({"m"}), {"m": 2048}))
    made.predictor.kappa[3] = 1.75
    for slot in (0, 3):
        made.table.sampled(slot, Sample(extra={"heat": 7.0 + slot}))
    return made


def decided(number: int, there: Fleet, take: Snapshots, at: float) -> DecisionRecord:
    total = np.array([1.0, -np.inf, 0.0, np.pi, 2.0])
    trace = Trace(
        endpoints=there.table.ids,
        filters=[("health", np.array([True, False, True, True, True]))],
        scorers=[("cost", 1.0, total)],
        total=total,
        outcome="picked",
        held=np.array([0.1, 0.2, 0.0, 0.0, 0.5]),
        snapshot=take(there, at),
        split=SplitCosts(None, 12.5, "e2", True),
    )
    request = msgspec.structs.replace(REQUEST, id=number)
    return DecisionRecord(request=request, at=at, policy="p", endpoint="e3", trace=trace)


def test_details_come_back_to_the_last_bit_and_say_only_what_changed() -> None:
    there, take, packer, unpacker = fleet(), Snapshots(), Packer(), Unpacker()
    sizes = []
    for number in range(1, 5):
        record = decided(number, there, take, float(number))
        packed = encode(("detail", 1.0, packer.pack(record)))
        sizes.append(len(packed))
        ((_, _, body),) = decode(bytes(joined([packed], 1)))
        found = unpacker.unpack(body)
        assert found.request == record.request
        ours, theirs = record.trace, found.trace
        assert ours is not None
        assert theirs.snapshot is not None
        assert ours.snapshot is not None
        assert theirs.endpoints == ours.endpoints
        assert theirs.candidates is None
        assert theirs.split == ours.split
        assert np.array_equal(theirs.filters[0][1], ours.filters[0][1])
        assert np.array_equal(theirs.total, ours.total)
        assert np.array_equal(theirs.held, ours.held)
        assert theirs.snapshot.endpoints == ours.snapshot.endpoints
        assert theirs.snapshot.based == ours.snapshot.based == tuple(there.table.based)
        assert np.array_equal(theirs.snapshot.floats, ours.snapshot.floats)
        assert np.array_equal(theirs.snapshot.learned, ours.snapshot.learned)
        assert np.array_equal(theirs.snapshot.gauges["heat"], there.table.extra("heat"), equal_nan=True)
        waiting = theirs.snapshot.waiting_adapters
        assert waiting == ours.snapshot.waiting_adapters == there.table.waiting_adapters
        assert waiting[0] == ({"sql"} if number == 2 else set())
        there.table.queue[1] += 1.0
        there.table.sampled(
            0,
            Sample(
                extra={"heat": float(number)} | ({"fans": 2.0} if number == 3 else {}),
                waiting_adapters=frozenset({"sql"} if number == 1 else ()),
            ),
        )
    assert np.array_equal(theirs.snapshot.gauges["fans"], [2.0, *[np.nan] * 4], equal_nan=True)
    assert max(sizes[1:3]) < 0.6 * sizes[0] < sizes[3], "a new gauge is written for all"


def test_a_detail_alone_in_the_middle_is_refused_not_made_up() -> None:
    there, take, packer = fleet(), Snapshots(), Packer()
    packer.pack(decided(1, there, take, 1.0))
    second = packer.pack(decided(2, there, take, 2.0))
    with pytest.raises(ValueError, match="without what it changes"):
        Unpacker().unpack(second)
    with pytest.raises(ValueError, match="no detail"):
        Unpacker().unpack({"request": 5})


def test_a_restored_fleet_reads_as_the_real_one() -> None:
    there = fleet()
    snapshot = Snapshots()(there, 5.0)
    again = Restored(snapshot, np.zeros(5))
    assert again.table.ids == there.table.ids
    assert again.table.endpoints == there.table.endpoints
    assert again.table.count == there.table.count == 4
    assert np.array_equal(again.table.alive, there.table.alive)
    assert np.array_equal(again.table.floats, there.table.floats)
    assert again.table.holders("a") is not None
    assert again.table.based == there.table.based
    assert np.array_equal(again.table.contexts("m"), there.table.contexts("m"))
    assert again.table.extra("heat")[[0, 1, 3]].tolist() == [7.0, 3.0, 10.0]
    assert np.isnan(again.table.extra("heat")[4]) and np.isnan(again.table.extra("unknown")).all()
    there.table.queue[0] = 99.0
    there.table.sampled(0, Sample(extra={"heat": 99.0}))
    assert np.nanmax(snapshot.gauges["heat"]) < 99.0
    assert snapshot.floats.max() < 99.0, "a snapshot is a copy"


def test_a_journal_from_before_ranks_were_read_is_read_as_one_of_single_engines() -> None:
    """Its samples and snapshots lack the number."""
    sample = msgspec.msgpack.encode({"waiting": 2.0, "running": 1.0, "block_size": 16, "num_blocks": 100})
    old = msgspec.msgpack.decode(sample, type=Sample)
    there = Fleet()
    there.up(Endpoint("e", "10.0.0.1:80"))
    there.sampled("e", 1.0, 1.0, old)
    assert there.table.per_rank is None
    snapshot = Snapshots()(there, 1.0)
    restored = Restored(msgspec.structs.replace(snapshot, floats=snapshot.floats[:-1]), None)
    assert restored.table.per_rank is None
    assert restored.table.floats.tolist() == there.table.floats.tolist()


def test_a_restored_fleet_knows_how_many_engines_share_an_address() -> None:
    there = Fleet()
    there.up(Endpoint("e", "10.0.0.1:80"))
    there.sampled("e", 1.0, 1.0, Sample(waiting=2.0, running=1.0, ranks=4))
    restored = Restored(Snapshots()(there, 1.0), None)
    assert restored.table.per_rank is not None and restored.table.per_rank.tolist() == [0.25]
