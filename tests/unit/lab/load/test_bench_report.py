import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairlead.core.errors import ConfigError
from fairlead.lab.load.plots import log_axis, plot, plot_run
from fairlead.lab.load.report import Summary, figure, percent, summarise, table
from fairlead.lab.load.spec import CANCELLED, Histogram, Options, Record, RunResult


def record(index: int, ttft: float, tokens: int = 11, **fields: Any) -> Record:
    """Scheduled at `index`, sent 1 ms late; tokens 10 ms apart."""
    first = index + ttft
    last = first + (tokens - 1) * 0.01
    values: dict[str, Any] = {
        "sent": index + 0.001,
        "headers": index + 0.002,
        "first_byte": first,
        "first_data": first,
        "last_data": last,
        "end": last,
        "status": 200,
        "prompt_tokens": 100,
        "completion_tokens": tokens,
        "cached_tokens": 40,
        **fields,
    }
    return Record(index, float(index), **values)


def result(*records: Record, name: str = "policy", duration: float = 10.0, ratio: float = 1.0) -> RunResult:
    gaps = Histogram()
    for _ in range(100):
        gaps.add_all([0.01])
    return RunResult(name=name, records=list(records), gaps=gaps, duration_s=duration, cpu_s=0.001, time_ratio=ratio)


def failures() -> list[Record]:
    words = ("status_429", "status_503", "body_error_503", "timeout", "timeout", "not_sent")
    return [Record(10 + index, 0.0, error=word) for index, word in enumerate(words)]


def test_a_summary_holds_the_promised_keys() -> None:
    summary = summarise(result(record(0, 0.1)))
    promised = {"requests", "failed", "ttft_ms", "output_tokens_per_s", "prefix_hit_rate", "success_rate"}
    assert promised <= summary.keys()
    assert {"p50", "p95", "p99"} <= summary["ttft_ms"].keys()
    json.dumps(summary, allow_nan=False)


def test_figures() -> None:
    summary = summarise(result(*(record(index, 0.1 + index / 100) for index in range(5))))
    assert (summary["requests"], summary["succeeded"], summary["failed"]) == (5, 5, 0)
    assert summary["ttft_ms"]["p50"] == pytest.approx(120)
    assert summary["ttft_ms"]["mean"] == pytest.approx(120)
    assert summary["ttft_ms"]["max"] == pytest.approx(140)
    assert summary["e2e_ms"]["p50"] == pytest.approx(220)
    assert summary["tpot_ms"]["p99"] == pytest.approx(10)
    assert summary["itl_ms"]["p50"] == pytest.approx(10, rel=0.0102)
    assert summary["output_tokens_per_s"] == pytest.approx(5.5)
    assert summary["input_tokens_per_s"] == pytest.approx(50)
    assert summary["prefix_hit_rate"] == pytest.approx(0.4)
    assert summary["send_lag_ms"]["p50"] == pytest.approx(1)
    assert summary["client"]["cpu_us_per_request"] == pytest.approx(200)


def test_failures_are_counted_by_reason_and_leave_latency_alone() -> None:
    summary = summarise(result(record(0, 0.1), record(1, 0.1), *failures()))
    assert (summary["requests"], summary["failed"], summary["success_rate"]) == (8, 6, 0.25)
    assert summary["failed_by_reason"]["timeout"] == 2
    assert summary["shed"] == {"429": 1, "503": 2}
    assert summary["ttft_ms"]["p99"] == pytest.approx(100)


def test_a_request_that_its_client_gave_up_has_not_failed() -> None:
    summary = summarise(result(record(0, 0.1), Record(1, 0.0, sent=0.001, error=CANCELLED), failures()[0]))
    assert [summary[name] for name in ("requests", "cancelled", "failed")] == [3, 1, 1]
    assert (summary["success_rate"], summary["goodput"]) == (0.5, 0.5)
    shown = [[cell.strip() for cell in line.split("│")[1:3]] for line in show(summary).splitlines()]
    assert ["cancelled by the client", "1"] in shown


def test_model_time_scales_durations_and_rates() -> None:
    run = result(record(0, 0.1), record(1, 0.1), ratio=20.0)
    wall, model = summarise(run), summarise(run, time="model")
    assert (wall["time"], model["time"], model["time_ratio"]) == ("wall", "model", 20.0)
    for key in ("ttft_ms", "e2e_ms", "tpot_ms", "itl_ms"):
        assert model[key]["p50"] == pytest.approx(20 * wall[key]["p50"])
    assert model["duration_s"] == 20 * wall["duration_s"]
    assert model["output_tokens_per_s"] == pytest.approx(wall["output_tokens_per_s"] / 20)
    assert model["prefix_hit_rate"] == wall["prefix_hit_rate"]
    assert model["send_lag_ms"] == wall["send_lag_ms"]


def test_a_run_whose_generator_was_late_is_not_valid() -> None:
    prompt = summarise(result(record(0, 0.1)))
    late = summarise(result(*(record(i, 0.1) for i in range(9)), record(9, 0.1, sent=9.1)))
    assert (prompt["valid"], late["valid"]) == (True, False)
    for summaries, said in (([prompt], False), ([prompt, late], True)):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(table(summaries))
        assert ("no: over 20 ms late" in console.export_text()) is said


def test_two_late_runs_fit_a_terminal_of_80_columns() -> None:
    late = summarise(result(*(record(i, 0.1) for i in range(9)), record(9, 0.1, sent=9.1)))
    assert show(late, late, width=80).splitlines()[1].endswith("┓")


def test_unreported_tokens_are_unknown_not_zero() -> None:
    silent = record(0, 0.1, prompt_tokens=-1, completion_tokens=-1, cached_tokens=-1)
    summary = summarise(result(silent))
    assert summary["prefix_hit_rate"] is None
    assert summary["output_tokens_per_s"] is None
    assert summary["usage_missing"] == 1
    # A server that does not report cached tokens must not lower the rate of those that do.
    mixed = summarise(result(record(0, 0.1), record(1, 0.1, cached_tokens=-1)))
    assert mixed["prefix_hit_rate"] == pytest.approx(0.4)


def test_a_run_in_which_everything_failed_is_still_a_summary() -> None:
    summary = summarise(result(*failures(), duration=0.0))
    assert summary["success_rate"] == 0
    assert summary["ttft_ms"]["p50"] is None
    json.dumps(summary, allow_nan=False)


def test_an_empty_run_is_still_a_summary() -> None:
    assert summarise(result())["success_rate"] is None


def test_one_token_has_no_time_per_output_token() -> None:
    assert summarise(result(record(0, 0.1, tokens=1)))["tpot_ms"]["p50"] is None


def test_answers_that_are_computed_at_the_same_time_are_not_faster_tokens() -> None:
    one, four = result(record(0, 0.1, tokens=11)), result(record(0, 0.1, tokens=11, completion_tokens=44, n=4))
    assert summarise(four)["tpot_ms"] == summarise(one)["tpot_ms"]


def test_a_narrow_terminal_cuts_no_figure() -> None:
    runs = [
        summarise(result(record(0, 1234.5), name=f"a run with a long name {i}", ratio=20.0), "model") for i in (1, 2)
    ]
    text = show(*runs, width=60)
    assert "…" not in text and max(map(len, text.splitlines())) <= 60
    assert text.count("24,690,000") == 2 * 5  # TTFT: the mean and four quantiles


def show(*summaries: Summary, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(summaries))
    console.file.close()
    return console.export_text()


def test_the_table_says_which_time_it_is_in_and_names_failures() -> None:
    one = result(record(0, 0.1), *failures(), name="round robin", ratio=20.0)
    other = result(record(0, 1.5), name="fairlead", ratio=20.0)
    text = show(summarise(one, "model"), summarise(other, "model"))
    assert "model time (wall-clock x 20)" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.count("│") == 4}
    assert [cell.strip() for cell in lines["TTFT p50, ms"].split("│")[2:4]] == ["2,000", "30,000"]
    assert [cell.strip() for cell in lines["timeout"].split("│")[2:4]] == ["2", "0"]
    assert [cell.strip() for cell in lines["of these shed with 503"].split("│")[2:4]] == ["2", "0"]
    assert "wall-clock time" in show(summarise(one))
    assert "mixed times" in show(summarise(one), summarise(one, "model"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345.6, "12,346"),
        (123.4, "123"),
        (45.678, "45.7"),
        (1.234, "1.23"),
        (0.01234, "0.012"),
        (0.00001, "0.000010"),
        (7.0, "7"),
    ],
)
def test_figures_are_written_for_people(value: float, text: str) -> None:
    assert figure(value) == text


def test_nearly_all_is_not_all() -> None:
    assert [percent(share) for share in (0.0, 0.00001, 0.126, 0.9987, 0.99999, 1.0)] == [
        "0 %",
        "0.01 %",
        "13 %",
        "99.87 %",
        "99.99 %",
        "100 %",
    ]


@pytest.mark.parametrize("runs", [1, 2, 9])
def test_the_plot_is_a_picture(tmp_path: Path, runs: int) -> None:
    summaries = [summarise(result(record(0, 0.1 * (run + 1)), name=f"policy {run}")) for run in range(runs)]
    summaries[0] = summarise(result(*failures()))
    plot(summaries, tmp_path / "plot.png", "A title")
    picture = (tmp_path / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") >= 1000


@pytest.mark.parametrize("records", [[record(i, 0.1 + i / 50) for i in range(20)] + failures(), failures(), []])
def test_one_run_is_drawn_whatever_came_of_it(tmp_path: Path, records: list[Record]) -> None:
    run = result(*records)
    plot_run(run, summarise(run, slo_ttft_ms=200.0), tmp_path / "run.png", "A title")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_request_that_its_client_gave_up_is_not_drawn_as_failed(tmp_path: Path) -> None:
    pictures = []
    for due in (0.0, 0.5):
        run = result(*(record(i, 0.1) for i in range(9)), Record(9, due, sent=due, error=CANCELLED))
        plot_run(run, summarise(run), tmp_path / "run.png", "A title")
        pictures.append((tmp_path / "run.png").read_bytes())
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize("values", [[100.0, 112.0], [5.0], [3.0, 40_000.0], [0.001, 0.02]])
def test_a_small_difference_looks_small(values: list[float]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    log_axis(axes, "y", values, str)
    low, high = axes.get_ylim()
    assert high / low >= 10 * (1 - 1e-9) and high > max(values)
    share = (math.log(112) - math.log(100)) / math.log(high / low)
    assert share < 0.06, "12 % more is no more than a twentieth of the picture's height"
    assert "log" in axes.get_yscale() and len(axes.patches) == 0


def test_nothing_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot([], tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({}, "$.options"),
        ({"requests": 1, "timeout_s": 0}, "$.options.timeout_s"),
        ({"duration_s": 1, "time_ratio": -1}, "$.options.time_ratio"),
    ],
)
def test_impossible_options_are_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**fields)
    assert caught.value.path == path
