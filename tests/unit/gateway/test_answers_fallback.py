"""The fallback endpoint travels in metadata of its own, behind the answer."""

import pytest

from fairlead.core.endpoint import Endpoint
from fairlead.gateway.answers import Answers
from fairlead.gateway.ext_proc import DESTINATION, LEASE_KEY, BodyMode, Kind
from fairlead.gateway.protobuf import fields, read_struct

FIRST = Endpoint(id="e", address="10.0.0.1:8000")
MODES = (BodyMode.STREAMED, BodyMode.STREAMED, True)


def metadata(answer: bytes) -> dict[str, object]:
    """All `dynamic_metadata` of a ProcessingResponse, merged as protobuf merges a message that comes twice."""
    found: dict[str, object] = {}
    for key, start, end in fields(answer):
        if key == 8:
            found.update(read_struct(answer, start, end))
    return found


@pytest.mark.parametrize("fallback", ["10.0.0.2:8000", "[fd00::2]:8000"])
def test_both_stand_in_the_answer(fallback: str) -> None:
    answers = Answers("fl")
    for _ in range(2):
        found = metadata(answers.pick(Kind.REQUEST_BODY, FIRST.address, 7, frozenset(), fallback=fallback))
        lease = answers.lease(7)
        assert found == {"envoy.lb": {DESTINATION: FIRST.address, LEASE_KEY: lease}, "fairlead": {"second": fallback}}


def test_without_one_nothing_changes() -> None:
    answers = Answers("fl")
    plain = answers.pick(Kind.REQUEST_BODY, FIRST.address, 7, frozenset())
    more = answers.pick(Kind.REQUEST_BODY, FIRST.address, 7, frozenset(), fallback="10.0.0.2:1")
    assert more.startswith(plain) and b"fairlead\x12" not in plain


def test_a_changed_body_has_it_too() -> None:
    messages = Answers("fl").pick_with_body(
        MODES, FIRST.address, 7, frozenset(), b"{}", False, False, fallback="10.0.0.2:1"
    )
    assert metadata(messages[0])["fairlead"] == {"second": "10.0.0.2:1"}


def test_a_traced_answer_has_it_too() -> None:
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    answer = Answers("fl").pick(Kind.REQUEST_BODY, FIRST.address, 7, frozenset(), fallback="a:1", trace=trace)
    assert metadata(answer)["fairlead"] == {"second": "a:1"}


def test_addresses_that_come_and_go_are_forgotten() -> None:
    answers = Answers("fl")
    for number in range(20_000):
        answers.pick(Kind.REQUEST_BODY, FIRST.address, 7, frozenset(), fallback=f"10.0.0.1:{number}")
    assert len(answers._fallbacks) < 17_000


def retry(mode: str, repeatable: bool, hedge_after_ms: float) -> dict[str, str]:
    """The headers of a pick with a fallback endpoint that only the gateway reads."""
    answers = Answers("fl", mode)
    answer = answers.pick(
        Kind.REQUEST_BODY,
        FIRST.address,
        7,
        frozenset(),
        fallback="a:1",
        retry=answers.retry_headers(repeatable, hedge_after_ms),
    )
    assert metadata(answer)["fairlead"] == {"second": "a:1"}
    found = {}
    for name in (b"x-envoy-retry-on", b"x-envoy-upstream-rq-per-try-timeout-ms"):
        at = answer.find(name)
        if at >= 0:
            size = answer[at + len(name) + 1]
            found[name.decode()] = answer[at + len(name) + 2 : at + len(name) + 2 + size].decode()
    return found


def test_the_gateway_is_told_what_it_may_repeat_and_when() -> None:
    on, after = "x-envoy-retry-on", "x-envoy-upstream-rq-per-try-timeout-ms"
    assert retry("hedge", True, 4000.0) == {on: "reset,5xx", after: "4096"}
    assert retry("hedge", True, 0.0) == {on: "reset,5xx"}, "never overdue"
    assert retry("unanswered", True, 4000.0) == {on: "reset,5xx"}
    assert retry("connect", True, 4000.0) == retry("hedge", False, 4000.0) == {}


@pytest.mark.parametrize("milliseconds", [1.5, 777.0, 4000.0, 123_456.0])
def test_times_are_rounded_up_a_little(milliseconds: float) -> None:
    told = float(retry("hedge", True, milliseconds)["x-envoy-upstream-rq-per-try-timeout-ms"])
    assert milliseconds <= told <= 1.2 * milliseconds + 1.0


def test_a_changed_body_is_repeated_by_the_same_rules() -> None:
    answers = Answers("fl")
    headers = answers.retry_headers(True, 4000.0)
    messages = answers.pick_with_body(
        MODES, FIRST.address, 7, frozenset(), b"{}", False, False, fallback="10.0.0.2:1", retry=headers
    )
    assert headers in messages[0]
