"""Prefill/decode pairs: when a prompt is computed elsewhere, where, and what the ledger makes of it."""

from collections.abc import Mapping
from random import Random

import pytest

from fairlead.core import events as ev
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.explain import explain, why_split
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Instruction, Record, Route
from fairlead.core.policy import Context, Picked
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.core.snapshot import Snapshots
from fairlead.core.tokens import TokenEstimator
from fairlead.plugins.filters.ability import Role, RoleParams
from fairlead.plugins.filters.availability import Health, HealthParams
from fairlead.plugins.filters.load import QueueDepth, QueueDepthParams
from fairlead.plugins.policies.prefill_decode import PrefillDecode, PrefillDecodeParams
from fairlead.testing import SimClock, assert_refused, busy, check_policy, endpoint, fleet, holds, request

LONG = "a long beginning that is worth a transfer " * 1500
BUSY = {"waiting": 0, "running": 60}


def labelled(name: str, role: str) -> Endpoint:
    return endpoint(name, labels={"llm-d.ai/role": role} if role else None)


def pool(*roles: str, running: int = 60) -> Fleet:
    """`e0`, `e1`, … of these roles; those that decode are busy doing so."""
    endpoints = [labelled(f"e{i}", role) for i, role in enumerate(roles)]
    samples = {f"e{i}": {**BUSY, "running": running} for i, role in enumerate(roles) if role != "prefill"}
    return fleet(*endpoints, samples=samples)


def pick(known: Fleet, asked: Request, **params: float) -> Picked:
    policy = PrefillDecode(PrefillDecodeParams(**params), filters=[Role(RoleParams())])
    return policy.choose(asked, known, Context(1.0, Random(1)))


def test_keeps_the_contract_of_policies() -> None:
    check_policy(PrefillDecode())


@pytest.mark.parametrize("roles", [("", ""), ("decode", "prefill-decode"), ("both", "both")])
def test_pools_without_pure_prefill_endpoints_are_not_split(roles: tuple[str, ...]) -> None:
    assert pick(pool(*roles), request(LONG)).prefill_slot == -1


def test_a_long_prompt_is_computed_where_no_answers_run() -> None:
    found = pick(pool("prefill", "decode", "decode"), request(LONG))
    assert found.prefill_slot == 0
    assert found.slot in (1, 2)


def test_a_short_prompt_is_not_worth_a_transfer() -> None:
    found = pick(pool("prefill", "decode", running=2), request("hello", prompt_tokens=20))
    assert (found.slot, found.prefill_slot) == (1, -1)


def test_a_prompt_that_the_decoder_holds_stays_there() -> None:
    known, asked = pool("prefill", "decode", "decode"), request(LONG)
    holds(known, "e2", asked)
    found = pick(known, asked)
    assert (found.slot, found.prefill_slot) == (2, -1)


def test_the_best_decoder_is_not_chosen_if_it_computes_the_prompt() -> None:
    idle = {"waiting": 0, "running": 0}
    endpoints = labelled("e0", "prefill"), labelled("e1", "both"), labelled("e2", "decode")
    known = fleet(*endpoints, samples={"e0": idle, "e1": idle, "e2": BUSY})
    busy(known, "e0", [request(prompt_tokens=3000, stream=True)])
    asked = request(LONG)
    picked = pick(known, asked, always=True)
    assert picked.trace is not None
    picked.trace.snapshot = Snapshots()(known, 1.0)
    filters = [Role(RoleParams())]
    said = explain(lambda: PrefillDecode(PrefillDecodeParams(always=True), filters=filters), asked, picked.trace, "e2")
    assert said.why[0].startswith("e1 computes the prompt and e2 decodes")
    assert said.why[1].endswith("It was not chosen because it computes the prompt")


@pytest.mark.parametrize(
    ("asked", "split"), [(request(LONG), True), (request("hello", prompt_tokens=20), False)], ids=["split", "alone"]
)
def test_what_both_ways_would_have_cost_is_explained(asked: Request, split: bool) -> None:
    known = pool("prefill", "decode")
    found = pick(known, asked)
    assert found.trace is not None and found.trace.split is not None
    costs = found.trace.split
    assert (costs.taken, costs.prefill) == (split, "e0")
    found.trace.snapshot = Snapshots()(known, 1.0)
    said = explain(lambda: PrefillDecode(filters=[Role(RoleParams())]), asked, found.trace, "e1")
    assert (said.reproduced, said.split, said.unit) == (True, costs, "ms")
    pair, alone = f"{costs.pair_ms:,.1f} ms", f"{costs.alone_ms:,.1f} ms"
    assert said.why[0] == (
        f"e0 computes the prompt and e1 decodes: {pair} together, {alone} at one endpoint"
        if split
        else f"it was not split: {alone} at one endpoint, {pair} if e0 computed the prompt"
    )


@pytest.mark.parametrize("always", [True, False])
def test_endpoints_that_only_prefill_are_not_said_to_be_filtered_out(always: bool) -> None:
    known = pool("prefill", "prefill", "decode", "encode", running=0)
    busy(known, "e1", [request(prompt_tokens=3000, stream=True)])
    asked = request(prompt_tokens=20)
    trace = pick(known, asked, always=always).trace
    assert trace is not None
    trace.snapshot = Snapshots()(known, 1.0)
    said = explain(lambda: PrefillDecode(filters=[Role(RoleParams())]), asked, trace, "e2")
    assert said.why[1:] == ("1 of 4 endpoints were filtered out by role",)
    first = "computes the prompt" if always else "could compute the prompt"
    parts = {row.endpoint: row.part for row in said.candidates}
    assert parts == {"e0": first, "e1": "could compute the prompt", "e2": "", "e3": ""}


@pytest.mark.parametrize(
    ("roles", "alone"),
    [
        (("prefill", "decode"), True),
        (("prefill", "decode", "prefill"), False),
        (("prefill", "both", "both"), False),
        (("prefill", "both"), True),
        (("prefill", "decode", "decode"), True),
    ],
)
def test_the_only_prefill_server_is_said_to_be_the_only_one(roles: tuple[str, ...], alone: bool) -> None:
    known, asked = pool(*roles), request(LONG)
    found = pick(known, asked, always=True)
    assert found.trace is not None and found.trace.split is not None
    found.trace.snapshot = Snapshots()(known, 1.0)
    policy = PrefillDecode(PrefillDecodeParams(always=True), filters=[Role(RoleParams())])
    said = explain(lambda: policy, asked, found.trace, known.table.ids[found.slot])
    reason = f"{found.trace.split.prefill} was the only endpoint that could compute the prompt for others"
    assert (reason in said.why) is alone


def test_a_slow_transfer_is_avoided() -> None:
    asked = request(LONG)
    assert pick(pool("prefill", "decode"), asked, transfer_ms_per_1k_tokens=1e5).prefill_slot == -1


def test_the_pair_is_the_better_of_each_kind() -> None:
    known = pool("prefill", "prefill", "decode", "decode")
    busy(known, "e0", [request(prompt_tokens=30_000, stream=True)])
    known.sampled("e3", 0.0, 0.0, Sample(waiting=0, running=5))
    found = pick(known, request(LONG))
    assert (found.prefill_slot, found.slot) == (1, 3)


def test_prefill_follows_the_cache() -> None:
    known, asked = pool("prefill", "prefill", "decode"), request(LONG)
    holds(known, "e1", asked)
    found = pick(known, asked)
    assert found.prefill_slot == 1
    assert found.hit_share == found.best_share > 0.9


def test_an_endpoint_that_does_both_is_never_both_ends() -> None:
    found = pick(pool("prefill-decode", "prefill"), request(LONG))
    assert found.slot == 0
    assert found.prefill_slot in (-1, 1)


def test_prefill_endpoints_alone_serve_nobody() -> None:
    assert_refused(PrefillDecode(filters=[Role(RoleParams())]), request(LONG), pool("prefill", "prefill"))


@pytest.mark.parametrize(
    ("failures", "waiting", "prefill"),
    [((0, 0), 0, 0), ((3, 0), 0, 1), ((3, 3), 0, -1), ((0, 0), 500, 0)],
    ids=["well", "one failed", "both failed", "full"],
)
@pytest.mark.parametrize("always", [True, False])
def test_a_prefill_endpoint_that_failed_is_not_asked(
    failures: tuple[int, int], waiting: int, prefill: int, always: bool
) -> None:
    """Not even if none is left: the decode endpoint then computes the prompt. One that is only full is asked."""
    known = pool("prefill", "prefill", "decode")
    holds(known, "e0", request(LONG))
    for slot, count in enumerate(failures):
        known.sampled(f"e{slot}", 1.0, 1.0, Sample(waiting=waiting, running=0))
        known.table.failures[slot] = count
    known.table.judge_trouble()
    filters = [Role(RoleParams()), Health(HealthParams()), QueueDepth(QueueDepthParams())]
    policy = PrefillDecode(PrefillDecodeParams(always=always, margin=0.0), filters=filters)
    answer = policy.choose(request(LONG), known, Context(1.0, Random(1)))
    assert isinstance(answer, Picked)
    assert (answer.slot, answer.prefill_slot) == (2, prefill if always or not waiting else -1)


class Run:
    """A pipeline over a prefill and a decode endpoint."""

    def __init__(self, stream: bool = True, always: bool = False) -> None:
        self.clock, self.stream = SimClock(), stream
        policy = PrefillDecode(PrefillDecodeParams(always=always), filters=[Role(RoleParams())])
        self.pipeline = Pipeline(self.clock, Random(1), Fleet(lease_ttl=100.0), policy, TokenEstimator())
        for name, role in (("p", "prefill"), ("d", "decode")):
            self.pipeline.handle(ev.EndpointUp(labelled(name, role)))
        self.table = self.pipeline.fleet.table
        self.table.active[1] = 60.0
        self.route, decision = self.send(7)
        assert isinstance(decision, DecisionRecord)
        self.decision = decision

    def send(self, number: int) -> tuple[Route, Instruction]:
        asked = request(LONG, id=number, stream=self.stream)
        route, decision = self.pipeline.handle(ev.RequestArrived(asked))
        assert isinstance(route, Route)
        self.pipeline.validate()
        return route, decision

    def scraped(self, name: str, sample: Sample) -> None:
        self.pipeline.handle(ev.MetricsSampled(name, self.clock.time(), sample))
        self.pipeline.validate()

    def loads(self) -> list[tuple[float, float]]:
        self.pipeline.validate()
        return [(self.table.pending_tokens[slot], self.table.inflight[slot]) for slot in (0, 1)]


def test_both_ends_are_charged_each_for_its_part() -> None:
    run = Run()
    assert (run.route.endpoint.id, run.route.prefill) == ("d", "10.0.0.0:8000")
    assert (run.decision.endpoint, run.decision.prefill) == ("d", "p")
    (prefill, at_p), (decode, at_d) = run.loads()
    assert (at_p, at_d, decode) == (1, 1, 1)
    assert prefill > 10_000


def test_the_first_token_frees_the_prefill_endpoint_and_the_end_the_other() -> None:
    run = Run()
    run.pipeline.handle(ev.FirstTokenSeen(7))
    assert run.loads() == [(0, 0), (0, 1)]
    records = run.pipeline.handle(ev.ResponseEnded(request_id=7, status=200))
    assert run.loads() == [(0, 0), (0, 0)]
    assert len(records) == 1


@pytest.mark.parametrize("event", [ev.StreamLost(7), ev.ResponseEnded(request_id=7, status=500)])
def test_every_other_end_frees_both(event: ev.Event) -> None:
    run = Run()
    records = run.pipeline.handle(event)
    assert run.table.inflight.sum() == 0
    assert [type(one) for one in records if isinstance(one, Record)] == [OutcomeRecord]
    run.pipeline.validate()


def test_a_decode_endpoint_that_leaves_frees_both_and_may_still_answer() -> None:
    run = Run()
    assert run.pipeline.handle(ev.EndpointDown("d")) == []
    assert run.table.inflight.sum() == 0
    run.pipeline.validate()
    (record,) = run.pipeline.handle(ev.ResponseEnded(request_id=7, status=200))
    assert isinstance(record, OutcomeRecord) and record.cause == "natural"
    run.pipeline.validate()


def test_an_expired_pair_ends_in_one_record() -> None:
    run = Run()
    run.clock.advance(500.0)
    records = [one for one in run.pipeline.handle(ev.TimerFired("expire-leases")) if isinstance(one, Record)]
    assert len(records) == 1
    assert run.loads() == [(0, 0), (0, 0)]


def test_a_prefill_endpoint_that_leaves_ends_no_request() -> None:
    run = Run()
    assert run.pipeline.handle(ev.EndpointDown("p")) == []
    run.pipeline.validate()
    assert run.table.inflight.sum() == 1
    run.pipeline.handle(ev.ResponseEnded(request_id=7, status=200))
    assert run.table.inflight.sum() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_the_page_no_longer_shows_is_computed(stream: bool) -> None:
    """The answer may take minutes, and nobody sees its first token before the end if it is not streamed."""
    run = Run(stream)
    page = Sample(waiting=0.0, running=1.0, generation_tokens=0.0)
    run.scraped("p", page)
    assert run.table.inflight[0] == 1, "it computes the prompt"
    run.clock.advance(60.0)
    run.scraped("p", page)
    assert run.table.inflight[0] == 1, "it still does"
    run.scraped("p", Sample(waiting=0.0, running=0.0, generation_tokens=1.0))
    assert run.loads()[0] == (0, 0)
    for _ in range(30):
        run.clock.advance(1.0)
        run.scraped("p", Sample(waiting=0.0, running=0.0, generation_tokens=1.0))
    run.send(8)
    assert run.table.suspicion[0] == 0.0, "it has nothing to do"
    run.pipeline.handle(ev.ResponseEnded(request_id=7, status=200))
    run.pipeline.validate()


def test_a_decoder_neither_hangs_nor_loses_requests_while_their_prompts_are_computed_elsewhere() -> None:
    run = Run(always=True)
    idle = Sample(waiting=0.0, running=0.0, generation_tokens=0.0)
    for second in range(45):
        run.clock.advance(1.0)
        run.scraped("p", Sample(waiting=1.0, running=1.0, prefix_queries=float(second)))
        run.scraped("d", idle)
        if not second:
            run.send(8)
    assert run.table.suspicion.tolist()[:2] == [0.0, 0.0]
    assert run.table.inflight.tolist()[:2] == [2.0, 2.0]
    run.scraped("p", idle)
    run.clock.advance(1.0)
    run.scraped("d", idle)
    assert run.table.inflight.tolist()[:2] == [0.0, 2.0], "the caches may be on the way"
    for _ in range(40):
        run.clock.advance(1.0)
        run.scraped("d", idle)
    assert run.table.inflight.tolist()[:2] == [0.0, 0.0]
    run.pipeline.validate()


def test_a_prefill_endpoint_with_a_queue_has_no_limit_of_sequences() -> None:
    """It runs one prompt at a time, because a step has a limit of tokens."""
    run = Run(always=True)
    for number in range(8, 28):
        run.send(number)
        run.clock.advance(5.0)
        run.scraped("p", Sample(waiting=float(number), running=1.0))
        run.scraped("d", Sample(waiting=float(number), running=1.0))
    assert run.table.max_seqs.tolist()[:2] == [0.0, 1.0]


def test_prompts_that_wait_for_a_prefill_endpoint_make_no_step_longer_there() -> None:
    run = Run(always=True)
    for number in range(8, 28):
        run.send(number)
    assert run.table.kv_tokens[0] < 100.0 < run.table.kv_tokens[1]


def test_a_decoder_that_runs_a_whole_answer_has_its_prompt() -> None:
    run = Run(stream=False)
    run.clock.advance(60.0)
    run.scraped("d", Sample(waiting=0.0, running=1.0, generation_tokens=0.0))
    assert run.table.inflight[0] == 0


def test_a_prefill_endpoint_that_fails_is_avoided_and_the_decoders_are_not() -> None:
    clock, filters = SimClock(), [Role(RoleParams()), Health(HealthParams())]
    policy = PrefillDecode(PrefillDecodeParams(always=True), filters=filters)
    pipeline = Pipeline(clock, Random(1), Fleet(), policy, TokenEstimator())
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        pipeline.handle(ev.EndpointUp(labelled(name, role)))
    failed = 0
    for number in range(1, 101):
        clock.advance(0.1)
        asked = request(f"{number} {LONG}", id=number, stream=True)
        _, decision = pipeline.handle(ev.RequestArrived(asked))
        assert isinstance(decision, DecisionRecord)
        if decision.prefill == "p0":
            failed += 1
            pipeline.handle(ev.ResponseEnded(request_id=number, status=500))
        else:
            pipeline.handle(ev.FirstTokenSeen(number))
            pipeline.handle(ev.ResponseEnded(request_id=number, status=200))
    table = pipeline.fleet.table
    assert failed < 15, "three at first, and one or two every three seconds"
    assert max(table.errors[1:4]) < 3.0 <= table.errors[0]


def test_who_broke_off_an_answer_is_the_decoder() -> None:
    run = Run()
    run.pipeline.handle(ev.FirstTokenSeen(7))
    run.pipeline.handle(ev.ResponseEnded(request_id=7, upstream_reset=True))
    assert run.table.errors.tolist()[:2] == [0.0, 1.0]


def test_the_decoder_is_the_one_that_runs_the_adapter() -> None:
    known = pool("prefill", "decode", "decode", running=5)
    for slot, names in ((1, {"sql"}), (2, {"chat"})):
        known.sampled(f"e{slot}", 0.0, 0.0, Sample(waiting=0, running=5, adapters=frozenset(names), max_adapters=1))
    known.sampled("e1", 0.0, 0.0, Sample(waiting=0, running=9, adapters=frozenset({"sql"}), max_adapters=1))
    found = pick(known, request(LONG, model="sql"), always=True)
    assert (found.prefill_slot, found.slot) == (0, 1), "busier, and it need not wait for a slot"


@pytest.mark.parametrize(
    "api", ["responses_stored", "embeddings", "rerank", "tokenize", "count_tokens", "audio", "other", "grpc"]
)
def test_what_no_decode_endpoint_hands_over_is_not_split(api: str) -> None:
    found = pick(pool("prefill", "decode"), request(LONG, api=api), always=True)
    assert (found.slot, found.prefill_slot) == (1, -1)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_what_decode_endpoints_hand_over_is_split(api: str) -> None:
    found = pick(pool("prefill", "decode"), request(LONG, api=api), always=True)
    assert (found.slot, found.prefill_slot) == (1, 0)


def test_a_flow_is_charged_for_a_prompt_that_is_computed_elsewhere() -> None:
    run = Run()
    (lease,) = [lease for lease in run.pipeline.fleet.ledger if not lease.auxiliary]
    assert lease.uncached_tokens == 1.0
    assert lease.computed > 10_000.0
    run.pipeline.handle(ev.FirstTokenSeen(7))
    assert lease.computed > 10_000.0, "as a request that is counted later"


def test_a_prompt_that_is_computed_goes_on_while_a_newer_one_is_not_shown_yet() -> None:
    known = pool("prefill", "decode")
    first, second = (known.charge(request(LONG, stream=True), 0, at, 0, 0.0, auxiliary=True) for at in (0.0, 59.99))
    known.ledger.reconcile(0, 60.0, 0.0, 1.0)
    assert first.held and second.held, "the first runs, the second is still read by the server"
    known.ledger.reconcile(0, 120.0, 0.0, 1.0)
    assert (first.held, second.held) == (False, True)
    assert (known.table.queue[0], known.table.active[0]) == (0.0, 1.0), "what is left runs"


def sent_in_turn(
    prefill_s: Mapping[str, float],
    step_s: float = 0.0135,
    tokens: int = 20,
    stream: bool = True,
    handover: float = 1.0,
    **params: float,
) -> tuple[Pipeline, list[str]]:
    """Send 40 prompts one after the other to two prefill endpoints, which need `prefill_s`; handovers take `handover`
    times as long as is expected, further tokens `step_s`. Return the pipeline, and which endpoint computed each prompt.
    """
    clock = SimClock()
    policy = PrefillDecode(PrefillDecodeParams(always=True, **params), filters=[Role(RoleParams())])
    pipeline = Pipeline(clock, Random(1), Fleet(), policy, TokenEstimator())
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d", "decode")):
        pipeline.handle(ev.EndpointUp(labelled(name, role)))
    chosen = []
    for number in range(1, 41):
        asked = request(f"{number} {LONG}", id=number, stream=stream)
        _, decision = pipeline.handle(ev.RequestArrived(asked))
        assert isinstance(decision, DecisionRecord)
        (part,) = [lease for lease in pipeline.fleet.ledger if lease.auxiliary]
        clock.advance(prefill_s[decision.prefill])
        page = Sample(waiting=0.0, running=0.0)
        pipeline.handle(ev.MetricsSampled(decision.prefill, clock.time(), page))  # it may end the prefill part
        clock.advance(handover * part.handover_ms * 1e-3)
        if stream:
            pipeline.handle(ev.FirstTokenSeen(number))
        clock.advance(step_s * (tokens - 1))
        usage = Usage(prompt_tokens=asked.prompt_tokens, completion_tokens=tokens)
        pipeline.handle(ev.ResponseEnded(request_id=number, status=200, usage=usage))
        pipeline.validate()
        chosen.append(decision.prefill)
        clock.advance(1.0)  # blind requests teach once a second
    return pipeline, chosen


@pytest.mark.parametrize(("stream", "tokens"), [(True, 20), (False, 2), (False, 20)])
def test_a_slow_prefill_endpoint_is_learned_from_its_pairs(stream: bool, tokens: int) -> None:
    pipeline, chosen = sent_in_turn({"p0": 6.0, "p1": 0.9}, tokens=tokens, stream=stream)
    assert chosen[20:].count("p0") <= 2, "as a test"
    assert pipeline.fleet.predictor.rates.step[2] < 1.2, "the decoder is not slow"


@pytest.mark.parametrize("handover_ms", [30.0, 3000.0])
@pytest.mark.parametrize("tokens", [2, 20, 200])
@pytest.mark.parametrize("stream", [True, False])
def test_neither_end_of_a_pair_is_blamed_for_the_time_of_the_other(
    handover_ms: float, tokens: int, stream: bool
) -> None:
    pipeline, chosen = sent_in_turn({"p0": 0.9, "p1": 0.9}, tokens=tokens, stream=stream, transfer_ms=handover_ms)
    assert 8 <= chosen.count("p0") <= 32
    rates = pipeline.fleet.predictor.rates
    for factors in rates.prefill, rates.step:
        assert 0.7 < min(factors) <= max(factors) < 1.3


@pytest.mark.parametrize(
    ("transfer_ms", "handover", "prefill_s"),
    [(30.0, 0.05, 0.9), (30.0, 5.0, 0.9), (30.0, 0.1, 0.27), (3000.0, 0.01, 0.9), (3000.0, 0.01, 0.27)],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_handover_of_another_length_than_expected_hardly_changes_what_is_learned(
    transfer_ms: float, handover: float, prefill_s: float, stream: bool
) -> None:
    times = {"p0": prefill_s, "p1": prefill_s}
    step_s = 0.0135 * prefill_s / 0.9
    pipeline, _ = sent_in_turn(times, step_s, stream=stream, handover=handover, transfer_ms=transfer_ms)
    factors = pipeline.fleet.predictor.rates.prefill[:2] / (prefill_s / 0.9)
    assert 1 / 1.6 < min(factors) <= max(factors) < 1.6


@pytest.mark.parametrize("stream", [True, False])
def test_the_steps_of_a_decoder_are_learned_from_pairs(stream: bool) -> None:
    pipeline, _ = sent_in_turn({"p0": 0.9, "p1": 0.9}, step_s=0.04, tokens=200, stream=stream)
    assert pipeline.fleet.predictor.rates.step[2] > 1.8


@pytest.mark.parametrize(("ttft_ms", "split"), [(0.0, True), (1500.0, False), (800.0, True)])
def test_an_objective_counts_for_the_pair_as_a_whole(ttft_ms: float, split: bool) -> None:
    """Only e1 and e2 could begin within 1500 ms, because prompts are queued at e0; nobody could within 800."""
    known = pool("prefill", "decode", "decode")
    busy(known, "e0", [request(f"{number} {LONG}", stream=True) for number in range(3)])
    found = pick(known, request(LONG, slo_ttft_ms=ttft_ms))
    assert (found.prefill_slot == 0) is split
    assert found.trace is not None and found.trace.split is not None
    assert found.trace.split.by_objective is (ttft_ms == 1500.0)
    assert ("latency objective" in why_split(found.trace.split, "e1")) is (ttft_ms == 1500.0)


def test_a_pair_may_keep_an_objective_that_one_endpoint_misses() -> None:
    known = pool("prefill", "decode", running=0)
    busy(known, "e1", [request(f"other {LONG}", stream=True)])
    asked = request(LONG)
    taken = pick(known, asked, margin=0.99)
    assert taken.prefill_slot == -1, "it does not save enough"
    taken = pick(known, request(LONG, slo_ttft_ms=1300.0), margin=0.99)
    assert (taken.prefill_slot, taken.slot) == (0, 1)


@pytest.mark.parametrize("roles", [("both", "prefill", "decode"), ("both", "prefill"), ("prefill-decode", "prefill")])
def test_an_endpoint_that_is_the_best_for_both_stages_gets_one_of_them(roles: tuple[str, ...]) -> None:
    known, asked = pool(*roles, running=5), request(LONG)
    known.sampled("e0", 0.0, 0.0, Sample(waiting=0, running=0))
    holds(known, "e0", asked)
    found = pick(known, asked, always=True)
    assert found.prefill_slot not in (-1, found.slot)
    assert pick(known, asked).prefill_slot == -1, "it has the prompt"
