"""Generators: seeded, shaped as asked for, and what shares a beginning shares its block ids."""

from collections import Counter
from itertools import islice, pairwise
from random import Random
from statistics import fmean

import msgspec
import pytest

from fairlead.lab.workload import adversarial
from fairlead.lab.workload.arrivals import bursty, constant, poisson, ramp, tides, times
from fairlead.lab.workload.conversation import Conversation, SharedPrefix, conversation, shared_prefix
from fairlead.lab.workload.describe import describe, ideal_hit
from fairlead.lab.workload.generate import CATALOGUE, KINDS, PACED, Pace, generate
from fairlead.lab.workload.record import Record, Workload, problem_of


def gaps(arrivals, count=4000, seed=1):
    at = list(islice(arrivals(Random(seed)), count))
    assert at == sorted(at)
    return [later - earlier for earlier, later in pairwise(at)]


def cv(values):
    mean = fmean(values)
    return fmean((v - mean) ** 2 for v in values) ** 0.5 / mean


def test_arrivals_have_the_rate_and_the_variation_asked_for():
    assert fmean(gaps(poisson(5))) == pytest.approx(0.2, rel=0.06)
    assert cv(gaps(poisson(5))) == pytest.approx(1.0, rel=0.08)
    assert fmean(gaps(bursty(5, 3.0), 20_000)) == pytest.approx(0.2, rel=0.12)
    assert cv(gaps(bursty(5, 3.0), 20_000)) == pytest.approx(3.0, rel=0.15)
    assert gaps(constant(4), 5) == pytest.approx([0.25] * 4)


def test_a_ramp_climbs_and_stays():
    at = times(ramp(2, 20, 100), Random(0), seconds=200)
    counts = [sum(lo <= t < lo + 50 for t in at) for lo in (0, 50, 100, 150)]
    assert counts[0] < counts[1] < counts[2]
    assert counts[2] == pytest.approx(1000, rel=0.12)
    assert counts[3] == pytest.approx(1000, rel=0.12)
    assert counts[0] == pytest.approx(50 * (2 + 11) / 2, rel=0.2)


def test_tides_rise_and_fall():
    found = times(tides(2.0, 20.0, 100.0), Random(3), seconds=200.0)
    counts = [sum(begin <= offset_s < begin + 20.0 for offset_s in found) for begin in (0, 40, 80, 100, 140, 180)]
    night, noon = 2.0 + 18.0 * 0.2, 20.0 - 18.0 * 0.1
    assert counts == pytest.approx([20 * rate for rate in (night, noon, night) * 2], rel=0.25)


def test_endless_arrivals_need_an_end():
    with pytest.raises(ValueError, match="count or a duration"):
        times(poisson(1), Random(0))
    with pytest.raises(ValueError, match="above 0"):
        poisson(0)
    assert len(times(poisson(1), Random(0), count=3, seconds=1e9)) == 3


def test_shared_prefix_is_the_anchor_workload():
    workload = shared_prefix(SharedPrefix(), rate=10, count=1500, seed=3)
    records = workload.records
    assert {(r.in_tokens, r.out_tokens, len(r.hash_ids)) for r in records} == {(7200, 1000, 90)}
    first = [r.hash_ids for r in records[:750]]
    assert len(set(first)) == 750
    assert len({ids[:75] for ids in first}) == 150
    assert len({ids[75] for ids in first}) == 750
    assert [r.hash_ids for r in records[750:]] == first
    assert fmean(b.arrival_us - a.arrival_us for a, b in pairwise(records)) == pytest.approx(1e5, rel=0.1)
    assert workload == shared_prefix(SharedPrefix(), rate=10, count=1500, seed=3)
    assert workload != shared_prefix(SharedPrefix(), rate=10, count=1500, seed=4)


def test_a_conversation_grows_by_what_was_said():
    spec = Conversation(systems=2, system_tokens=640, turns=6, first_tokens=100, turn_tokens=50, output_tokens=80)
    workload = conversation(spec, sessions=30, rate=1.0, seed=5)
    assert workload.dispatch == "think"
    by_id = {record.id: record for record in workload.records}
    followers = [record for record in workload.records if record.parent]
    assert followers
    for record in followers:
        before = by_id[record.parent]
        assert record.in_tokens > before.in_tokens + before.out_tokens
        assert record.hash_ids[: len(before.hash_ids)] == before.hash_ids
        assert record.session == before.session
        assert record.arrival_us > before.arrival_us
    systems = {record.hash_ids[:10] for record in workload.records}
    assert len(systems) == 2
    beyond = [record.hash_ids[10] for record in workload.records if not record.parent]
    assert len(set(beyond)) == len(beyond) == 30


def test_a_session_ends_or_compacts_when_its_context_is_full():
    values = {"systems": 1, "system_tokens": 640, "turns": 30, "first_tokens": 500, "turn_tokens": 300, "gap_s": 1}
    ending = conversation(Conversation(**values, max_tokens=4000), sessions=20)
    going = conversation(Conversation(**values, max_tokens=4000, compact_to=1000), sessions=20)
    for workload in (ending, going):
        assert max(r.in_tokens + r.out_tokens for r in workload.records) < 4600
    assert len(going) > 1.5 * len(ending)
    drops = [(a, b) for a, b in pairwise(going.records) if b.parent == a.id and b.in_tokens < a.in_tokens]
    assert all(b.hash_ids[:10] == a.hash_ids[:10] and b.hash_ids[10] != a.hash_ids[10] for a, b in drops)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_has_the_published_means(name):
    kind = CATALOGUE[name]
    records = conversation(kind.spec, sessions=8 if name == "code-generation" else 500, seed=1).records
    assert fmean(r.in_tokens for r in records) == pytest.approx(kind.mean_in, rel=0.25)
    assert fmean(r.out_tokens for r in records) == pytest.approx(kind.mean_out, rel=0.1)
    assert max(r.in_tokens + r.out_tokens for r in records) <= 200_000


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_sound_records_from_its_seed(kind):
    pace = Pace(rate=5.0, count=3, seconds=60.0, seed=2) if kind in PACED else Pace(seed=2)
    workload = generate(kind, pace, {})
    assert workload.records
    assert len({record.id for record in workload.records}) == len(workload)
    assert all(problem_of(record) is None for record in workload.records)
    assert generate(kind, pace, {}) == workload


def test_parameters_are_words():
    workload = generate("shared-prefix", Pace(count=10), {"groups": "2", "system_tokens": "160"})
    assert {record.in_tokens for record in workload.records} == {1360}
    assert generate("interactive-chat", Pace(count=3, dispatch="timestamp"), {}).dispatch == "timestamp"
    for kind, parameters, message in (
        ("shared-prefix", {"gruops": "2"}, "unknown parameter 'gruops'"),
        ("shared-prefix", {"groups": "two"}, "int"),
        ("shared-prefix", {"groups": "0"}, "at least 1"),
        ("overload", {"groups": "2"}, "takes no parameters"),
        ("nothing", {}, "unknown kind"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(kind, Pace() if kind == "overload" else Pace(count=1), parameters)
    for pace in (Pace(rate=3.0), Pace(count=10), Pace(seconds=5.0), Pace(dispatch="think")):
        with pytest.raises(ValueError, match="no pace"):
            generate("overload", pace, {})
    with pytest.raises(ValueError, match="unknown arrivals"):
        generate("shared-prefix", Pace(count=1, arrivals="tidal"), {})
    with pytest.raises(ValueError, match="a ramp goes from --rate to --to-rate within --seconds"):
        generate("shared-prefix", Pace(count=1, arrivals="ramp", to_rate=20.0), {})
    with pytest.raises(ValueError, match="--requests or --seconds"):
        generate("shared-prefix", Pace(), {})


def test_the_adversarial_set_is_what_it_says():
    burst = adversarial.cold_bursts()
    starts = [r.arrival_us for r in burst.records]
    assert starts[15] - starts[0] < 100_000 < starts[16] - starts[15]
    assert len({r.hash_ids[:125] for r in burst.records}) == 24
    paced = adversarial.paced_prefix()
    assert [r.parent for r in paced.records[:4]] == ["", "0", "1", "2"]
    assert len({r.hash_ids[:100] for r in paced.records}) == 1
    storm = adversarial.cancel_storm()
    leaving = [r for r in storm.records if r.cancel_after_ms]
    assert leaving
    assert all(45.0 <= r.arrival_us / 1e6 + r.cancel_after_ms / 1e3 <= 45.2 for r in leaving)
    overload = adversarial.overload()
    assert 0.4 < fmean(r.priority == -1 for r in overload.records) < 0.6
    hot = Counter(r.hash_ids[:50] for r in adversarial.hot_prefix().records)
    assert hot.most_common(1)[0][1] == pytest.approx(0.4 * hot.total(), rel=0.1)
    assert len(hot) == 61
    same = Counter(r.hash_ids for r in adversarial.same_prompts().records)
    assert {count % 24 for count in same.values() if count > 1} == {0}
    assert max(same.values()) > 24
    lengths = [r.in_tokens for r in adversarial.rare_giants().records]
    assert fmean(tokens >= 100_000 for tokens in lengths) == pytest.approx(0.02, rel=0.3)
    hog = [r for r in adversarial.one_hog().records if r.tenant == "hog"]
    assert all(25.0 <= r.arrival_us / 1e6 <= 55.0 for r in hog)
    assert len(hog) == pytest.approx(1200, rel=0.1)
    asked = Counter(r.lora for r in adversarial.adapters(base=0.2).records)
    assert len(asked) == 7 and asked["adapter-0"] > 2 * asked["adapter-5"] > 0 < asked[""]


def test_the_ideal_hit_counts_repeated_beginnings_only():
    def record(name, ids):
        return Record(id=name, in_tokens=10 * len(ids), out_tokens=1, block_size=10, hash_ids=ids)

    workload = Workload(name="w", records=[record("a", (1, 2)), record("b", (1, 3)), record("c", (4, 2))])
    assert ideal_hit(workload) == pytest.approx(10 / 60)
    assert describe(workload)[0].startswith("w: 3 requests")
    assert describe(Workload(name="w", records=[])) == ["w: no requests"]
    turn, elsewhere = record("d", (1, 2, 5, 6)), record("e", (9, 2, 5, 6))
    for later, hits in ((turn, 21), (elsewhere, 0)):  # the answer of `a`, too, if the prompt continues it
        workload.records[1:] = [msgspec.structs.replace(later, parent="a")]
        assert ideal_hit(workload) == pytest.approx(hits / 60)
