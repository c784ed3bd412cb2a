"""What `fairlead bench` understands of its command line. What it sends is in the integration tests."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import fairlead
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.cli.bench_load import DEFAULT_REQUESTS, KINDS, Load, LoadOptions, bench_progress, build, hints, line
from fairlead.core.errors import ConfigError
from fairlead.lab.load.spec import Progress
from fairlead.lab.load.workload import ClosedLoop, Paced, Recorded, Turns

TRACE = """{"fairlead_workload":1,"name":"t"}
{"id":"a","in_tokens":20,"out_tokens":2,"arrival_us":0,"block_size":10,"hash_ids":[1,2]}
{"id":"b","in_tokens":20,"out_tokens":3,"arrival_us":4000000,"block_size":10,"hash_ids":[1,3],"model":"m"}
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACE)
    return str(path)


def offsets(load: Load, count: int) -> list[float]:
    assert not isinstance(load.arrivals, ClosedLoop | Turns)
    return list(islice(load.arrivals.offsets(), count))


def sent(load: Load, count: int, model: str = "", fallback: str = "served") -> list[dict[str, Any]]:
    if isinstance(load.arrivals, Turns):
        load.arrivals.begin()
    return [json.loads(call.body) for call in islice(load.workload(model, fallback).calls(), count)]


def test_the_default_is_a_bounded_open_loop() -> None:
    load = build(LoadOptions())
    assert (load.requests, load.seconds) == (DEFAULT_REQUESTS, 0.0)
    assert isinstance(load.arrivals, Paced)
    assert offsets(load, 500)[-1] == pytest.approx(100, rel=0.2)
    systems = Counter(body["messages"][0]["content"] for body in sent(load, 200))
    assert sorted(systems.values()) == [10] * 20
    assert sent(load, 1)[0]["model"] == "served"


def test_a_file_keeps_its_times_unless_told_otherwise(trace: str) -> None:
    load = build(LoadOptions(workload=trace, speedup=4))
    assert isinstance(load.arrivals, Recorded)
    assert offsets(load, 5) == [0.0, 1.0]
    assert load.requests == 2
    assert [body["model"] for body in sent(load, 5)] == ["served", "m"]
    assert not load.names_models
    assert isinstance(build(LoadOptions(workload=trace, rate=3)).arrivals, Paced)
    assert isinstance(build(LoadOptions(workload=trace, closed=3)).arrivals, ClosedLoop)
    assert build(LoadOptions(workload=trace, requests=1)).requests == 1
    assert build(LoadOptions(workload=trace, requests=9)).requests == 2


def test_options_reach_the_requests(trace: str) -> None:
    for name in ("shared-prefix", "chat", "conversation", trace):
        load = build(LoadOptions(workload=name, requests=1, output_tokens=5, extra={"top_k": 3}))
        (body,) = sent(load, 1, model="x")
        assert (body["max_tokens"], body["top_k"], body["model"]) == (5, 3, "x")
    (small,) = sent(build(LoadOptions(parameters={"system_tokens": "3", "stream": "false"})), 1)
    assert len(small["messages"][0]["content"]) == 12
    assert "stream" not in small


def test_conversations_hold_as_many_requests_as_wanted_and_later_turns_among_them() -> None:
    load = build(LoadOptions(workload="conversation", requests=120, seed=2))
    assert load.records is not None and len(load.records) == load.requests == 120
    assert sum(bool(record.parent) for record in load.records) > 40
    assert isinstance(load.arrivals, Paced)
    timed = build(LoadOptions(workload="interactive-chat", rate=10, seconds=20))
    assert timed.records is not None and len(timed.records) >= 300


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "code-generation"])
def test_every_kind_can_be_sent(kind: str) -> None:
    load = build(LoadOptions(workload=kind, requests=3))
    assert load.requests <= 3
    assert len(sent(load, 2)) >= 1


def test_a_scenario_is_sent_as_it_is_simulated() -> None:
    thinks = build(LoadOptions(workload="agents", requests=50))
    assert isinstance(thinks.arrivals, Turns) and thinks.requests == 50
    assert "turns after answers" in thinks.described
    fast, slow = (build(LoadOptions(workload=f"conversation-{pace}x", requests=50)) for pace in ("2", "1"))
    assert offsets(fast, 50) == pytest.approx([at / 2 for at in offsets(slow, 50)], abs=1e-5)
    assert isinstance(build(LoadOptions(workload="agents", requests=5, rate=3)).arrivals, Paced)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LoadOptions(workload="no-such"), "neither a file nor a workload; known: adapters, "),
        (LoadOptions(workload="agnets"), "neither a file nor a workload; did you mean 'agents'"),
        (LoadOptions(closed=3, rate=2), "closed"),
        (LoadOptions(workload="conversation", closed=3), "--requests"),
        (LoadOptions(arrivals="ramp"), "--to-rate"),
        (LoadOptions(arrivals="odd"), "known: poisson"),
        (LoadOptions(speedup=2), "--speedup"),
        (LoadOptions(workload="agents", parameters={"x": "1"}), "have no parameters"),
        (LoadOptions(parameters={"groupz": "1"}), "known: groups"),
        (LoadOptions(parameters={"groups": "x"}), "--set"),
        (LoadOptions(parameters={"groups": "0"}), "at least 1"),
        (LoadOptions(workload="conversation", parameters={"turnz": "1"}), "known: systems"),
        (LoadOptions(workload="overload", parameters={"x": "1"}), "no parameters"),
    ],
)
def test_options_that_make_no_sense_say_what_to_do(options: LoadOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(options)


@pytest.mark.parametrize("arguments", [["--extra", "[1]"], ["--extra", "{"], ["-H", "a"], ["--set", "=3"]])
def test_bad_options_are_wrong_usage(arguments: list[str]) -> None:
    done = CliRunner().invoke(build_app(), ["bench", "127.0.0.1:1", *arguments])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "option", ["-n", "--rate", "--to-rate", "--closed", "--seconds", "--output-tokens", "--speedup"]
)
def test_a_zero_is_refused_and_not_taken_as_absent(option: str, value: str) -> None:
    done = fairlead("bench", "127.0.0.1:1", option, value)
    assert done.exit_code == 2
    assert f"Invalid value for '{'--requests' if option == '-n' else option}'" in done.output


def test_a_bad_file_is_wrong_usage(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"id":"a","in_tokens":0,"out_tokens":1}\n\xff')
    done = fairlead("bench", "127.0.0.1:1", "-w", bad)
    assert done.exit_code == 2, done.output
    assert "bad.jsonl:1" in done.output


def test_help_tells_how_latency_counts_and_gives_examples() -> None:
    text = CliRunner().invoke(build_app(), ["bench", "--help"]).output
    assert "Examples:" in text
    assert "a request was due, not from when it was sent" in " ".join(text.split())


def test_the_line_of_a_running_run() -> None:
    look = Progress(30, 100, 2, 5, 7, 99.0, 3.0, 41.6)
    assert line(look) == "30 of 100, 5 in flight, 10.0/s, 7 held back, TTFT p50 42 ms, 2 failed"
    assert line(Progress(0, 0, 0, 0, 0, 0.0, 0.0, None)) == "0 done, 0 in flight, 0.0/s"


def test_a_title_names_a_model_as_a_server_does(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_progress("model \x1b[31mred"):
        pass
    assert "model \N{REPLACEMENT CHARACTER}[31mred" in capsys.readouterr().err


def test_hints_name_the_cure() -> None:
    summary = {
        "failed_by_reason": {"status_404": 3, "odd": 1},
        "send_lag_ms": {"p99": 900.0},
        "valid": False,
        "succeeded": 5,
        "usage_missing": 5,
    }
    found = list(hints(summary))
    assert len(found) == 3
    assert "--model" in found[0] and "bottleneck" in found[1] and "usage" in found[2]
    quiet = {"failed_by_reason": {}, "send_lag_ms": {"p99": None}, "valid": True, "succeeded": 0}
    assert list(hints({**quiet, "usage_missing": 0})) == []
