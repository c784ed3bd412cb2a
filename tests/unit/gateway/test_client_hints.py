"""Whose headers are listened to."""

import pytest

from fairlead.core import headers as names
from fairlead.gateway.understand import NO_HINTS, ClientHints, HintReader, within

ALL = {
    "x-session-id": "s",
    "x-llm-d-inference-objective": "o",
    "x-llm-d-inference-fairness-id": "f",
    "x-llm-d-model-name-rewrite": "r",
    "x-llm-d-slo-ttft-ms": "100",
    "x-llm-d-slo-tpot-ms": "9.5",
    "test-epp-endpoint-selection": "10.0.0.1, 10.0.0.2:80,",
}
EVERYTHING = ClientHints(
    session="s",
    objective="o",
    fairness_id="f",
    rewrite="r",
    slo_ttft_ms=100.0,
    slo_tpot_ms=9.5,
    selection=frozenset({"10.0.0.1", "10.0.0.2:80"}),
)


def test_all_and_nothing() -> None:
    assert HintReader(names.TRUST).read(ALL) == EVERYTHING
    assert HintReader(()).read(ALL) is NO_HINTS
    assert HintReader().read({"x-other": "1"}) is NO_HINTS


def test_clients_do_not_choose_replicas_unless_told_so() -> None:
    assert HintReader().read(ALL).selection is None


@pytest.mark.parametrize("key", [key for key, headers in names.TRUST.items() if headers])
def test_each_can_be_distrusted(key: str) -> None:
    found = HintReader(set(names.TRUST) - {key}).read(ALL)
    with_key, left = (
        {name for name in ClientHints.__struct_fields__ if getattr(one, name) != getattr(NO_HINTS, name)}
        for one in (EVERYTHING, found)
    )
    assert len(with_key - left) == (2 if key == "slo" else 1)
    assert left < with_key


def test_the_current_name_wins_over_the_older() -> None:
    both = {"x-gateway-inference-objective": "old", "x-llm-d-inference-objective": "new"}
    assert HintReader().read(both).objective == "new"
    assert HintReader().read({"x-gateway-inference-objective": "old"}).objective == "old"
    assert HintReader().read({"x-slo-ttft-ms": "5"}).slo_ttft_ms == 5.0


def test_names_may_be_utf8() -> None:
    value = "日本".encode().decode("latin-1")
    assert HintReader().read({"x-llm-d-model-name-rewrite": value}).rewrite == "日本"
    assert HintReader().read({"x-llm-d-inference-fairness-id": value}).fairness_id == "日本"
    assert HintReader().read({"x-llm-d-model-name-rewrite": "\xff"}).rewrite == "\xff"


@pytest.mark.parametrize("space", [" ", "\t", "\r\n", "\u00a0", "\u2028"])
def test_space_in_a_tokens_claim_is_part_of_the_tenants_name(space: str) -> None:
    """Whoever chooses a claim would choose another's name, if it were not."""
    for claim in (f"team-a{space}", f"{space}team-a"):
        header = {"x-llm-d-inference-fairness-id": claim.encode().decode("latin-1")}
        assert HintReader().read(header).fairness_id == claim


def test_values_are_cut() -> None:
    found = HintReader().read({"x-session-id": "s" * 1000, "x-slo-ttft-ms": "nan", "x-slo-tpot-ms": "-1"})
    assert len(found.session) == 256
    assert (found.slo_ttft_ms, found.slo_tpot_ms) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("subset", "selection", "both"),
    [
        (None, None, None),
        ({"a:1"}, None, {"a:1"}),
        (None, {"a"}, {"a"}),
        ({"10.0.0.1:80", "10.0.0.2:80"}, {"10.0.0.1"}, {"10.0.0.1:80"}),
        ({"10.0.0.1"}, {"10.0.0.1:80", "10.0.0.2:80"}, {"10.0.0.1:80"}),
        ({"10.0.0.1:80"}, {"10.0.0.1:81"}, set()),
        ({"[fd00::1]:80"}, {"fd00::1"}, {"[fd00::1]:80"}),
        ({"[fd00::1]:80"}, {"[fd00::1]:80"}, {"[fd00::1]:80"}),
    ],
)
def test_hint_and_selection(subset: set[str] | None, selection: set[str] | None, both: set[str] | None) -> None:
    found = within(*(None if one is None else frozenset(one) for one in (subset, selection)))
    assert found == both


def test_what_is_removed() -> None:
    passed_on = {*names.SESSION_HEADERS, names.TEST_SELECTION}
    assert frozenset().union(*names.TRUST.values()) - passed_on < names.STEERING_HEADERS
    assert not names.REMOVED_HEADERS & {*passed_on, names.REQUEST_ID, "traceparent", "content-type"}
    assert names.CONTROL_HEADERS.isdisjoint(names.READ_HEADERS)
    assert all(name in names.READ_HEADERS for group in names.TRUST.values() for name in group)


def test_time_in_the_queue() -> None:
    assert HintReader().read({"x-fairlead-ttl-ms": "1500"}).ttl_s == 1.5
    for odd in ("", "-3", "nan", "inf", "1e12", "soon"):
        assert HintReader().read({"x-fairlead-ttl-ms": odd}).ttl_s == 0.0
    assert HintReader(["objective"]).read({"x-fairlead-ttl-ms": "1500"}).ttl_s == 0.0
