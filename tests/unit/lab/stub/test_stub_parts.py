"""Small parts: the clock, response heads, ORCA lines, faults, events."""

import json
import math

import pytest

from fairlead.lab.stub.config import NO_FAULTS, StubConfig, changed
from fairlead.lab.stub.connection import Heads
from fairlead.lab.stub.generation import orca_line
from fairlead.lab.stub.replica import EngineClock
from fairlead.lab.stub.shapes import ChatShape, CompletionShape, Counts, Parts


class Wall:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_engine_time_runs_by_the_ratio_and_back():
    wall = Wall()
    clock = EngineClock(wall, 20.0)
    assert clock.now() == 0.0
    wall.at += 3.0
    assert clock.now() == pytest.approx(60.0)
    assert clock.wall(100.0) == pytest.approx(105.0)


def test_a_frozen_clock_goes_on_where_it_stood():
    wall = Wall()
    clock = EngineClock(wall, 2.0)
    wall.at += 1.0
    clock.freeze()
    clock.freeze()
    wall.at += 50.0
    assert clock.frozen and clock.now() == pytest.approx(2.0)
    clock.thaw()
    clock.thaw()
    wall.at += 1.0
    assert clock.now() == pytest.approx(4.0)
    assert clock.wall(6.0) == pytest.approx(wall.at + 1.0)


@pytest.mark.parametrize("ratio", [0, -1.0, float("nan"), float("inf")])
def test_time_must_run_forwards(ratio):
    with pytest.raises(ValueError, match="time_ratio"):
        EngineClock(Wall(), ratio)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"time_ratio": 0}, "time_ratio must be above 0 and at most 1,000,000, got 0"),
        ({"time_ratio": math.inf}, "got inf"),
        ({"time_ratio": math.nan}, "got nan"),
        ({"time_ratio": 1e7}, "got 1e\\+07"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"preset": "x"}, "unknown preset"),
        ({"kv_tokens": 100}, "KV cache of 100 tokens: it has 6 whole blocks of 16 tokens"),
        ({"kv_tokens": 5}, "KV cache of 5 tokens: it has 0 whole blocks of 16 tokens"),
        (
            {"kv_tokens": 40_959, "block_size": 20_000},
            "KV cache of 40959 tokens: it has 2 whole blocks of 20000 tokens",
        ),
        ({"block_size": 400_000}, "0 whole blocks of 400000"),
        ({"block_size": -1}, "block_size"),
    ],
)
def test_a_configuration_that_could_not_start_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        StubConfig(**wrong)


def test_adapters_need_slots():
    assert StubConfig(loras=("a",)).spec().max_loras == 1
    spec = StubConfig().spec()
    with pytest.raises(ValueError, match="max_loras"):
        StubConfig(loras=("a",), engine=spec)


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ("TEXT", b"endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=2.0, "
         b"named_metrics.kv_cache_usage_perc=0.0063\r\n"),
        ("json", b'endpoint-load-metrics: JSON {"named_metrics": {"num_requests_waiting": 2.0, '
         b'"kv_cache_usage_perc": 0.0063}}\r\n'),
        ("BIN", b""),
        ("", b""),
    ],
)  # fmt: skip
def test_the_load_report_has_the_formats_of_the_real_server(wanted, line):
    assert orca_line(wanted, 2, 0.0063) == line


def test_the_date_is_made_once_per_second():
    heads = Heads()
    assert heads.date(0.5) == b"Thu, 01 Jan 1970 00:00:00 GMT"
    assert heads.date(0.9) is heads.date(0.1)
    assert heads.date(1.0) == b"Thu, 01 Jan 1970 00:00:01 GMT"


def test_faults_change_all_together_or_not_at_all():
    faults = changed(NO_FAULTS, {"error_rate": 0.5, "error_status": 429})
    assert (faults.error_rate, faults.error_status, faults.slow_factor) == (0.5, 429, 1.0)
    for wrong in ({"error_rate": 1.5}, {"slow_factor": 0}, {"stall": 1}, {"x": 1}, {"metrics_delay_s": -1}):
        with pytest.raises(ValueError):
            changed(faults, wrong | {"health_status": 500})


@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_every_event_and_body_is_json_whatever_a_client_called_it(shape):
    made = shape('id"\\\n\ud800', 7, 'model"\x00é', "fp")
    for usage in (b"", Counts(1, 2, 3, None).bare()):
        for reason in ("", "stop"):
            event = (
                made.event_head(3)
                + b"abc "
                + made.event_tail(Parts(reason=reason, ids=b"[1]", prompt_ids=b"[2]"), usage, last=True)
            )
            assert event.startswith(b"data: ") and event.endswith(b"\n\n")
            parsed = json.loads(event[6:])
            assert parsed["model"] == 'model"\x00é'
            assert parsed["choices"][0]["index"] == 3
            assert ("usage" in parsed) == bool(usage)
    for details in (True, False):
        counts = Counts(5, 6, 4, 1)
        whole = made.body([made.choice(0, b"a", Parts(reason="stop"))], counts, details, b"null")
        usage = json.loads(whole)["usage"]
        assert usage["total_tokens"] == 11
        assert (usage["prompt_tokens_details"] is not None) == details
        streamed = json.loads(made.usage_event(counts, details, bytes)[6:])["usage"]
        assert ("prompt_tokens_details" in streamed) == details
