"""Loading what serves, the short way to write a scheduler, and the session's rules."""

from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fairlead.core.endpoint import ROLE_LABEL
from fairlead.core.errors import ConfigError
from fairlead.core.events import Outcome
from fairlead.core.policy import Context, Refused
from fairlead.core.records import OutcomeRecord
from fairlead.server.remote.messages import Ask, Asked, Batch, EndpointState, Hello, decode_answer, encode_ask
from fairlead.server.sdk import EndpointView, RefusedRequest
from fairlead.server.sdk.check import Dialogue
from fairlead.server.sdk.server import SchedulerStats, Session, policy_maker
from fairlead.server.sdk.simple import PASSED, SimplePolicy
from fairlead.testing import builders

MODULE = """
from fairlead.core.policy import Picked
from fairlead.plugins.policies.ranked import Ranked
from fairlead.server.sdk import RefusedRequest

class Least:
    def pick(self, request, endpoints):
        return min(endpoints, key=lambda one: one.queue).id

def none(request, endpoints):
    return None

class Policy:
    name = "mine"
    def choose(self, request, fleet, context):
        raise RuntimeError("not today")

class Nowhere:
    name = "nowhere"
    def choose(self, request, fleet, context):
        return Picked(-1)

class Fails(Ranked):
    type = "fails"
    def cost(self, request, fleet, cycle):
        raise SystemExit(3)

class Shortest(Ranked):
    type = "default"
    def cost(self, request, fleet, cycle):
        return fleet.table.waiting

class Learns(Least):
    heard = []
    def ended(self, outcome):
        self.heard.append((outcome.request.id, outcome.endpoint, outcome.ttft_ms))

class LearnsNothing(Shortest):
    type = "learns-nothing"
    def ended(self, outcome):
        raise SystemExit(4)

class Pair:
    name = "pair"
    def choose(self, request, fleet, context):
        table = fleet.table
        slot = min((2, 3), key=lambda slot: table.kv_tokens[slot])
        return Picked(slot, prefill_slot=min((0, 1), key=lambda slot: table.queued_tokens[slot]))

class Needs:
    def __init__(self, something): ...

class Nameless:
    def choose(self, request, fleet, context): ...

nothing = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "scheduler_of_a_test"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_what_may_be_served(module: str, tmp_path: Path) -> None:
    assert policy_maker("cost-model")().name == "cost-model"
    assert policy_maker(f"{module}:Least")().name == "Least"
    assert policy_maker(f"{module}:none")().name == "none"
    assert policy_maker(f"{module}:Policy")().name == "mine"
    file = tmp_path / "a.yaml"
    file.write_text("policy: round-robin\n")
    assert policy_maker(str(file))().name == "round-robin"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("lpwll", "MODULE:NAME"),
        ("mine/least.py", "write least:CLASS"),
        ("no_such_module_here:X", "cannot be imported"),
        ("{module}:Absent", "has no 'Absent'"),
        ("{module}:Needs", "could not be made"),
        ("{module}:Nameless", "no name"),
        ("{module}:nothing", "neither"),
    ],
)
def test_what_may_not_says_what_to_do(module: str, target: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        policy_maker(target.format(module=module))


def test_a_simple_scheduler_sees_what_can_serve_the_request() -> None:
    seen: list[list[EndpointView]] = []

    def pick(request: Any, endpoints: Any) -> str:
        seen.append(endpoints)
        return endpoints[-1].id

    fleet = builders.fleet("e0", "e1", "e2", samples={"e2": {"waiting": 4.0, "running": 2.0, "kv_usage": 0.5}})
    request = builders.request("word " * 1000)
    builders.holds(fleet, "e1", request)
    policy = SimplePolicy(pick, "p")
    context = Context(1.0, Random(0))
    assert policy.choose(request, fleet, context).slot == 2
    assert [one.id for one in seen[0]] == ["e0", "e1", "e2"]
    assert (seen[0][2].queue, seen[0][2].active, seen[0][2].kv) == (4.0, 2.0, 0.5)
    assert seen[0][0].hit_tokens == 0.0 and seen[0][1].hit_tokens > 0.9 * request.prompt_tokens
    assert seen[0][1].ttft_ms < seen[0][0].ttft_ms
    narrow = builders.request("x", subset=frozenset({"10.0.0.1:8000"}))
    policy.choose(narrow, fleet, context)
    assert [one.id for one in seen[1]] == ["e1"]


@pytest.mark.parametrize(
    ("said", "slots"),
    [
        (["e1", "e2", "e0"], (1, 2)),
        (("e1", "e1", "gone", "e0"), (1, 0)),
        (["e1"], (1, -1)),
        ("e1", (1, -1)),
    ],
)
def test_a_simple_scheduler_may_name_several(said: Any, slots: tuple[int, int]) -> None:
    fleet, context = builders.fleet("e0", "e1", "e2"), Context(1.0, Random(0))
    pick = SimplePolicy(lambda request, endpoints: said, "p").choose(builders.request(), fleet, context)
    assert (pick.slot, pick.fallback_slot) == slots


def test_it_may_pass_refuse_and_fail() -> None:
    fleet, context = builders.fleet(), Context(1.0, Random(0))
    request = builders.request()

    def refuse(request: Any, endpoints: Any) -> None:
        raise RefusedRequest("full")

    assert SimplePolicy(lambda r, e: None, "p").choose(request, fleet, context).reason == PASSED
    refused = SimplePolicy(refuse, "p").choose(request, fleet, context)
    assert isinstance(refused, Refused) and refused.message == "full"
    with pytest.raises(ValueError, match="not an endpoint"):
        SimplePolicy(lambda r, e: "x", "p").choose(request, fleet, context)


class Stream:
    """The transport's side."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.code: int | None = None
        self.why = ""

    def send(self, *messages: bytes) -> None:
        self.sent += messages

    def finish(self, code: int = 0, message: str = "") -> None:
        self.code, self.why = code, message


def session(target: str = "round-robin") -> tuple[Session, Stream, SchedulerStats]:
    stream, stats = Stream(), SchedulerStats()
    return Session(stream, {}, policy_maker(target), stats), stream, stats  # type: ignore[arg-type]


def endpoints(count: int) -> list[EndpointState]:
    return [EndpointState(slot=i, id=f"e{i}", address=f"10.0.0.{i}:1") for i in range(count)]


@pytest.mark.parametrize(("target", "named"), [("cost-model", True), ("{module}:Least", False)])
def test_the_runner_up_is_told_as_an_alternative(module: str, target: str, named: bool) -> None:
    one, stream, _ = session(target.format(module=module))
    one.on_message(encode_ask(Ask(hello=Hello(), state=Dialogue().state(endpoints(2)))))
    one.on_message(encode_ask(Ask(batch=Batch(number=1, requests=[Asked(request=builders.request("x"))]))))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None
    (pick,) = picks.picks
    other = {"e0": "e1", "e1": "e0"}[pick.endpoint]
    assert [name for name, _ in pick.alternatives] == [other] * named


@pytest.mark.parametrize(("wanted", "most"), [(0, 2), (3, 3), (1000, 4)])
def test_a_caller_gets_as_many_endpoints_as_it_takes_for_a_state_of_its_own_in_one_message(
    wanted: int, most: int
) -> None:
    """Hello, the caller's state and a batch of two: all of a call."""
    one, stream, _ = session("cost-model")
    state = replace(Dialogue().state(endpoints(4)), slots=np.arange(4), columns={6: np.array([90.0, 0.0, 30.0, 60.0])})
    requests = [Asked(request=builders.request("word " * 300)) for _ in range(2)]
    batch = Batch(number=1, requests=requests)
    one.on_message(encode_ask(Ask(hello=Hello(max_endpoints=wanted), state=state, batch=batch)))
    one.on_half_close()
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None and len(picks.picks) == 2 and stream.code == 0
    first, _ = picks.picks
    assert [first.endpoint, *(name for name, _ in first.alternatives)] == ["e1", "e2", "e3", "e0"][:most]


@pytest.mark.parametrize("policy", ["Policy", "Nowhere", "Fails"])
def test_a_policy_that_raises_or_picks_nobody_has_no_opinion(module: str, policy: str) -> None:
    one, stream, stats = session(f"{module}:{policy}")
    one.on_message(encode_ask(Ask(hello=Hello(), state=Dialogue().state(endpoints(2)))))
    one.on_message(encode_ask(Ask(batch=Batch(number=1, requests=[]))))
    batch = Batch(number=2, requests=[Asked(request=builders.request("x"))])
    one.on_message(encode_ask(Ask(batch=batch)))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None and [pick.outcome for pick in picks.picks] == [Outcome.PASSED]
    assert stats.failures == 1 and stream.code is None


@pytest.mark.parametrize(
    ("name", "wants", "failures"), [("Learns", True, 0), ("LearnsNothing", True, 2), ("Least", False, 0)]
)
def test_who_learns_from_outcomes_gets_them(module: str, name: str, wants: bool, failures: int) -> None:
    one, stream, stats = session(f"{module}:{name}")
    one.on_message(encode_ask(Ask(hello=Hello(), state=Dialogue().state(endpoints(2)))))
    welcome = decode_answer(stream.sent[0]).welcome
    assert welcome is not None and welcome.wants_outcomes == wants
    ends = [
        OutcomeRecord(request=builders.request("x", id=number), at=1.0, endpoint="e1", ttft_ms=5.0) for number in (1, 2)
    ]
    batch = Batch(number=1, requests=[Asked(request=builders.request("x"))])
    one.on_message(encode_ask(Ask(ended=ends, batch=batch)))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None and [pick.outcome for pick in picks.picks] == [Outcome.PICKED]
    assert stats.failures == failures and stream.code is None
    if name == "Learns":
        assert import_module(module).Learns.heard[-2:] == [(1, "e1", 5.0), (2, "e1", 5.0)]


@pytest.mark.parametrize("allowed", range(4))
def test_a_class_that_takes_filters_gets_those_of_a_configuration(module: str, allowed: int) -> None:
    one, stream, _ = session(f"{module}:Shortest")
    state = replace(Dialogue().state(endpoints(4)), slots=np.arange(4))
    requests = [Asked(request=builders.request("x"), candidates=np.array([allowed]))]
    one.on_message(encode_ask(Ask(hello=Hello(), state=state, batch=Batch(number=1, requests=requests))))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None and [pick.endpoint for pick in picks.picks] == [f"e{allowed}"]


def pool_of_pairs() -> Ask:
    """The first message of a gateway with two endpoints that only prefill and two that only decode."""
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    there = [
        EndpointState(slot=i, id=name, address=f"10.0.0.{i}:1", labels={ROLE_LABEL: role})
        for i, (name, role) in enumerate(roles.items())
    ]
    return Ask(hello=Hello(), state=Dialogue().state(there))


@pytest.mark.parametrize("allowed", [[2], [2, 3]])
def test_pairs_prefill_where_no_answer_is_written(tmp_path: Path, allowed: list[int]) -> None:
    """The candidates are for the answer; under flow control often only one."""
    (always := tmp_path / "pairs.yaml").write_text("policy: {type: prefill-decode, parameters: {always: true}}")
    one, stream, _ = session(str(always))
    requests = [Asked(request=builders.request("x " * 4000), candidates=np.array(allowed)) for _ in range(40)]
    one.on_message(encode_ask(pool_of_pairs()))
    one.on_message(encode_ask(Ask(batch=Batch(number=1, requests=requests))))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None
    assert {pick.endpoint for pick in picks.picks} == {f"d{slot - 2}" for slot in allowed}
    assert {pick.prefill for pick in picks.picks} == {"p0", "p1"}


def test_prompts_are_computed_only_where_the_gateway_allows_it(tmp_path: Path) -> None:
    (always := tmp_path / "pairs.yaml").write_text("policy: {type: prefill-decode, parameters: {always: true}}")
    one, stream, _ = session(str(always))
    asked = Asked(request=builders.request("x " * 4000), candidates=np.array([2]), prefill_candidates=np.array([0]))
    one.on_message(encode_ask(pool_of_pairs()))
    one.on_message(encode_ask(Ask(batch=Batch(number=1, requests=[asked] * 4))))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None
    assert {(pick.endpoint, pick.prefill) for pick in picks.picks} == {("d0", "p0")}


def test_a_pair_is_charged_where_its_prompt_is_computed(module: str) -> None:
    one, stream, _ = session(f"{module}:Pair")
    one.on_message(encode_ask(pool_of_pairs()))
    requests = [Asked(request=builders.request("x " * 4000), expected_output=100.0) for _ in range(8)]
    one.on_message(encode_ask(Ask(batch=Batch(number=1, requests=requests))))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None
    assert [pick.prefill for pick in picks.picks] == ["p0", "p1"] * 4
    assert [pick.endpoint for pick in picks.picks] == ["d0", "d1"] * 4, "its answers too"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([Ask()], "no hello"),
        ([Ask(hello=Hello(version=0))], "no hello"),
        ([Ask(hello=Hello()), Ask(hello=Hello())], "second hello"),
        ([Ask(hello=Hello()), Ask(batch=Batch(number=2))], "batch 2 after batch 0"),
    ],
)
def test_a_gateway_that_breaks_the_contract_is_told(messages: list[Ask], why: str) -> None:
    one, stream, _ = session()
    for message in messages:
        one.on_message(encode_ask(message))
    assert stream.code == 3 and why in stream.why


def test_states_come_in_order() -> None:
    one, stream, _ = session()
    say = Dialogue()
    first, second, third = say.state(endpoints(2)), say.state(endpoints(1)), say.state(endpoints(1))
    one.on_message(encode_ask(Ask(hello=Hello(), state=first)))
    one.on_message(encode_ask(Ask(state=second)))
    assert stream.code is None and third.version == 3
    one.on_message(encode_ask(Ask(state=say.state(endpoints(1)))))
    assert stream.code == 3 and "state 4 after state 2" in stream.why


def test_everything_may_be_told_anew() -> None:
    one, stream, _ = session()
    say = Dialogue()
    one.on_message(encode_ask(Ask(hello=Hello(), state=say.state(endpoints(3)))))
    again = say.state([EndpointState(slot=0, id="other", address="10.0.0.9:1")])
    again.full = True
    batch = Batch(number=1, requests=[Asked(request=builders.request("x")) for _ in range(4)])
    one.on_message(encode_ask(Ask(state=again, batch=batch)))
    picks = decode_answer(stream.sent[-1]).picks
    assert picks is not None and {pick.endpoint for pick in picks.picks} == {"other"}


def test_noise_ends_the_stream() -> None:
    one, stream, _ = session()
    one.on_message(b"\xff\xff")
    assert stream.code == 3
