"""Our codec of `fairlead.scheduler.v1` against Google's, generated from the contract; and bytes that are no message."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import fairlead
from fairlead.core.errors import ProtocolError
from fairlead.core.events import RemotePick
from fairlead.core.request import Request
from fairlead.server.remote.messages import (
    COLUMNS,
    MAX_ALTERNATIVES,
    MAX_REASON,
    Answer,
    Ask,
    Asked,
    Batch,
    EndpointState,
    Forecast,
    Hello,
    Picks,
    Speeds,
    State,
    Welcome,
    decode_answer,
    decode_ask,
    encode_answer,
    encode_ask,
)

PROTO = Path(fairlead.__file__).parent / "server" / "remote" / "proto"
FILE = "fairlead/scheduler/v1/scheduler.proto"


@pytest.fixture(scope="session")
def pb(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module that protoc makes of the contract."""
    out = tmp_path_factory.mktemp("pb")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={out}", FILE]
    subprocess.run(command, check=True, capture_output=True)
    spec = importlib.util.spec_from_file_location("scheduler_pb2_test", out / FILE.replace(".proto", "_pb2.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole_ask() -> Ask:
    state = State(version=7, full=True, gone=[3, 300], settled=5, slots=np.array([0, 200]))
    state.endpoints = [
        EndpointState(slot=0, id="a", address="10.0.0.1:8000", labels={"zone": "ü", "": ""}, adapters=("x", "")),
        EndpointState(slot=200, id="b"),
        EndpointState(slot=1, id="c", adapters=()),
    ]
    state.columns = {number: np.array([number + 0.5, -np.inf]) for number in COLUMNS}
    state.speeds = Speeds(c0=1.0, c_pf=2.0, c_attn=3.0, c_seq=4.0, c_kv=5.0, hold_ms=6.0, answer_steps=7.0)
    request = Request(
        id=2**63, arrived=1.5, api="chat", model="m", target="t", stream=True, prompt_tokens=1000, prompt_bytes=4000,
        max_tokens=9, priority=-3, session="s", fairness_id="f", slo_ttft_ms=1.5, slo_tpot_ms=2.5, media=2,
    )  # fmt: skip
    column = np.array([1.0, 2.0])
    asked = Asked(
        request=request,
        expected_output=12.5,
        hit_slots=np.array([0, 200]),
        hit_shares=np.array([0.25, 1.0]),
        candidates=np.array([0, 1, 200]),
        forecast=Forecast(ttft_ms=column, prefill_ms=column * 2, step_ms=column * 3, used=column * 0),
    )
    bare = Asked(request=Request(id=1, arrived=0.0, api=""), candidates=np.zeros(0, dtype=np.intp))
    batch = Batch(number=9, now=1.5, requests=[asked, bare])
    return Ask(hello=Hello(gateway="g", pool="p", budget_us=5000), state=state, batch=batch)


def test_the_other_side_reads_what_we_ask(pb: Any) -> None:
    ask = pb.Ask.FromString(encode_ask(whole_ask()))
    assert (ask.hello.version, ask.hello.gateway, ask.hello.pool, ask.hello.budget_us) == (1, "g", "p", 5000)
    state = ask.state
    assert (state.version, state.full, list(state.gone), state.settled) == (7, True, [3, 300], 5)
    assert [(one.slot, one.id, one.HasField("adapters")) for one in state.endpoints] == [
        (0, "a", True), (200, "b", False), (1, "c", True),
    ]  # fmt: skip
    assert dict(state.endpoints[0].labels) == {"zone": "ü", "": ""}
    assert list(state.endpoints[0].adapters.names) == ["x", ""]
    assert list(state.load.slots) == [0, 200]
    for number, name in COLUMNS.items():
        assert list(getattr(state.load, name)) == [number + 0.5, -np.inf], name
    assert (state.speeds.c_kv, state.speeds.answer_steps) == (5.0, 7.0)
    one, bare = ask.batch.requests
    assert (ask.batch.number, ask.batch.now, one.id, one.model, one.stream) == (9, 1.5, 2**63, "t", True)
    assert (one.priority, one.media, one.expected_output, one.slo_tpot_ms) == (-3, 2, 12.5, 2.5)
    assert (list(one.hit_slots), list(one.hit_shares)) == ([0, 200], [0.25, 1.0])
    assert list(one.candidates.slots) == [0, 1, 200] and list(one.forecast.prefill_ms) == [2.0, 4.0]
    assert bare.HasField("candidates") and not bare.candidates.slots


def test_field_names_are_those_of_the_contract(pb: Any) -> None:
    fields = pb.Load.DESCRIPTOR.fields_by_number
    assert {number: field.name for number, field in fields.items()} == {1: "slots", **COLUMNS}


def test_we_read_what_the_other_side_writes(pb: Any) -> None:
    ours = whole_ask()
    theirs = pb.Ask.FromString(encode_ask(ours)).SerializeToString()
    back = decode_ask(theirs)
    assert back.hello == ours.hello and back.state is not None and back.batch is not None
    assert back.state.endpoints == ours.state.endpoints  # type: ignore[union-attr]
    assert back.state.speeds == ours.state.speeds  # type: ignore[union-attr]
    assert {n: list(c) for n, c in back.state.columns.items()} == {n: [n + 0.5, -np.inf] for n in COLUMNS}
    one = back.batch.requests[0]
    assert one.request.priority == -3 and one.request.model == "t" and one.request.arrived == 1.5
    assert one.candidates is not None and one.candidates.tolist() == [0, 1, 200]
    assert back.batch.requests[1].candidates is not None and back.batch.requests[1].forecast is None


def test_answers_go_both_ways(pb: Any) -> None:
    pick = RemotePick(2**64 - 1, 1, "é", -2.5, "why", (("x", 1.0), ("y", 0.0)), "p")
    ours = Answer(
        welcome=Welcome(scheduler="s", policy="p", wants_forecasts=True),
        picks=Picks(batch=3, picks=(pick, RemotePick(5, 2))),
    )
    theirs = pb.Answer.FromString(encode_answer(ours))
    assert theirs.picks.picks[0].endpoint == "é" and theirs.picks.picks[0].alternatives[0].score == 1.0
    assert decode_answer(theirs.SerializeToString()) == ours


def test_what_is_long_is_cut() -> None:
    many = tuple((str(i), 0.0) for i in range(500))
    pick = RemotePick(1, 2, reason="r" * 5000, alternatives=many)
    back = decode_answer(encode_answer(Answer(picks=Picks(batch=1, picks=(pick,)))))
    assert back.picks is not None
    (found,) = back.picks.picks
    assert (len(found.reason), len(found.alternatives)) == (MAX_REASON, MAX_ALTERNATIVES)


@pytest.mark.parametrize(
    "ask",
    [
        Ask(state=State(slots=np.array([0, 1]), columns={5: np.array([1.0])})),
        Ask(state=State(slots=np.array([0]), columns={5: np.array([np.nan])})),
        Ask(state=State(endpoints=[EndpointState(slot=1, id="")])),
        Ask(state=State(endpoints=[EndpointState(slot=1 << 20, id="a")])),
        Ask(batch=Batch(requests=[Asked(request=Request(id=1, arrived=0.0), hit_slots=np.array([1]))])),
    ],
    ids=["columns", "nan", "no id", "slot", "hits"],
)
def test_what_cannot_be_meant_is_refused(ask: Ask) -> None:
    with pytest.raises(ProtocolError):
        decode_ask(encode_ask(ask))


SEEDS = [encode_ask(whole_ask()), encode_answer(Answer(picks=Picks(batch=1, picks=(RemotePick(1, 1, "e"),))))]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_of_any_kind_are_read_or_refused(data: st.DataObject) -> None:
    """Mutated messages and noise: a value or a `ProtocolError`, nothing else."""
    raw = bytearray(data.draw(st.sampled_from(SEEDS) | st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for decode in (decode_ask, decode_answer):
        try:
            decode(cut)
        except ProtocolError:
            continue
