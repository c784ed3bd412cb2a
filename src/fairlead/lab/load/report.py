"""The figures of a run from its records, and several runs side by side in a table.

Rules
* `failed` counts all requests without success, including shed requests (429, 503), which `shed` also shows separately:
  a router that sheds one request in seven looks fast. Latencies are of successful requests only, so read them together
  with `failed`. Requests that the client gave up are only `cancelled`: the workload says so, not the server.
* Latencies count from the scheduled arrival. `send_lag_ms` shows how late the generator itself was. A run whose p99 is
  above `LAG_MS` is not `valid`: it has measured the generator, or `max_in_flight`, and not only the server.
* Token counts are those reported by the servers, `None` if there is no report at all; `usage_missing` counts successes
  without a report.
* The results of a server that runs `time_ratio` times faster than the server it models can be shown in model time:
  durations times the ratio, rates divided by it. `time` shows which of the two a summary uses. `send_lag_ms` and
  `client` are always in wall-clock time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from rich.table import Table

from fairlead.lab.load.spec import CANCELLED, Record, RunResult

Summary = dict[str, Any]
Time = Literal["wall", "model"]

LAG_MS = 20.0
NO_PLOT = "no plot: it needs matplotlib (pip install 'fairlead[report]')"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_SHED = {"status_429": "429", "body_error_429": "429", "status_503": "503", "body_error_503": "503"}


def summarise(
    result: RunResult, time: Time = "wall", slo_ttft_ms: float = math.inf, slo_tpot_ms: float = math.inf
) -> Summary:
    """The figures of one run as plain data for JSON, with stable keys. Durations are in ms, unless a key ends in `_s`.

    The service levels are in ms of the summary's time (`wall` or `model`); infinite = none.
    """
    ratio = result.time_ratio if time == "model" else 1.0
    records = result.records
    stayed = [record for record in records if record.error != CANCELLED]
    good = [record for record in stayed if not record.error]
    duration = result.duration_s * ratio
    lag = _spread([record.sent - record.scheduled for record in records if record.sent])
    return {
        "name": result.name,
        "target": result.target,
        "time": time,
        "time_ratio": result.time_ratio,
        "requests": len(records),
        "cancelled": len(records) - len(stayed),
        "succeeded": len(good),
        **_failures(stayed),
        "success_rate": len(good) / len(stayed) if stayed else None,
        "cut_by_time_limit": result.cut,
        "duration_s": duration,
        "requests_per_s": _rate(len(good), duration),
        "ttft_ms": _spread([record.ttft() * ratio for record in good]),
        "e2e_ms": _spread([record.e2e() * ratio for record in good]),
        "tpot_ms": _spread([gap * ratio for record in good if (gap := tpot(record)) is not None]),
        "itl_ms": _gaps(result, ratio),
        **_tokens(good, duration),
        **_goodput(stayed, ratio, duration, slo_ttft_ms, slo_tpot_ms),
        "send_lag_ms": lag,
        "valid": (lag["p99"] or 0.0) <= LAG_MS,
        "client": {"cpu_s": result.cpu_s, "cpu_us_per_request": result.cpu_s / len(records) * 1e6 if records else None},
        "config": result.config,
    }


def _failures(records: Sequence[Record]) -> Summary:
    reasons = Counter(record.error for record in records if record.error)
    shed = {"429": 0, "503": 0}
    for reason, count in reasons.items():
        if reason in _SHED:
            shed[_SHED[reason]] += count
    return {"failed": reasons.total(), "failed_by_reason": dict(reasons.most_common()), "shed": shed}


def _tokens(good: Sequence[Record], duration: float) -> Summary:
    output = _total(record.completion_tokens for record in good)
    prompt = _total(record.prompt_tokens for record in good)
    cached = _total(record.cached_tokens for record in good)
    # Only requests whose server also reported cached tokens count for the hit rate.
    base = _total(record.prompt_tokens for record in good if record.cached_tokens >= 0)
    return {
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens_per_s": _rate(output, duration),
        "input_tokens_per_s": _rate(prompt, duration),
        "prefix_hit_rate": cached / base if cached is not None and base else None,
        "usage_missing": sum(record.completion_tokens < 0 for record in good),
    }


def _goodput(records: Sequence[Record], ratio: float, duration: float, ttft_ms: float, tpot_ms: float) -> Summary:
    """The share of all requests that succeeded within both service levels. A response without a second token has no
    TPOT, so only its TTFT counts."""
    levels = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
    within = sum(
        record.ttft() * ratio * 1000 <= ttft_ms and (tpot(record) or 0.0) * ratio * 1000 <= tpot_ms
        for record in records
        if not record.error
    )
    return {
        "slo": {name: None if math.isinf(level) else level for name, level in levels.items()},
        "goodput": within / len(records) if records else None,
        "good_requests_per_s": _rate(within, duration),
    }


def _total(counts: Iterable[int]) -> int | None:
    reported = [count for count in counts if count >= 0]
    return sum(reported) if reported else None


def _rate(amount: int | None, duration: float) -> float | None:
    return amount / duration if amount is not None and duration > 0 else None


def tpot(record: Record) -> float | None:
    """Seconds per output token after the first; None for a response with less than two tokens, or not streamed. Several
    answers are computed at the same time, so the longest counts: at least the mean, rounded up."""
    longest = -(-record.completion_tokens // record.n)
    if longest < 2 or not 0 < record.first_data < record.last_data:
        return None
    return (record.last_data - record.first_data) / (longest - 1)


def _spread(seconds: Sequence[float]) -> Summary:
    if not seconds:
        return {"mean": None, **dict.fromkeys(_QUANTILES), "max": None}
    values = np.asarray(seconds) * 1000
    values_at = np.quantile(values, list(_QUANTILES.values()))
    quantiles = {name: float(value) for name, value in zip(_QUANTILES, values_at, strict=True)}
    return {"mean": float(values.mean()), **quantiles, "max": float(values.max())}


def _gaps(result: RunResult, ratio: float) -> Summary:
    """Time between arrivals of body bytes. Tokens that arrive together count as one. Quantiles are within 1 %."""
    gaps = result.gaps
    spread = {"mean": gaps.mean(), **{name: gaps.quantile(share) for name, share in _QUANTILES.items()}}
    return {name: None if value is None else value * ratio * 1000 for name, value in spread.items()}


def figure(value: float) -> str:
    """A number for people: three significant digits, thousands separators, no exponents."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 0.1:
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:.2g}" if abs(value) >= 0.001 else f"{value:.6f}"


def percent(share: float) -> str:
    """A share as text for people. 100 % and 0 % are shown only if the share is exactly 1 or 0."""
    hundredths = share * 100
    if hundredths in (0, 100) or 1 <= hundredths < 99:
        return f"{hundredths:.0f} %"
    return f"{max(int(hundredths * 100), 1) / 100:.2f} %"


def table(summaries: Sequence[Summary]) -> Table:
    """Several runs side by side, one column each."""
    kinds = {summary["time"] for summary in summaries}
    ratios = {summary["time_ratio"] for summary in summaries}
    clock = "model time" if kinds == {"model"} else "wall-clock time" if kinds == {"wall"} else "mixed times"
    if kinds == {"model"} and len(ratios) == 1:
        clock += f" (wall-clock x {ratios.pop():g})"
    out = Table(title=f"Load runs, {clock}", title_justify="left")
    rows = list(_rows(summaries))
    out.add_column("", overflow="fold")
    for index, summary in enumerate(summaries):
        widest = max(len(values[index]) for _, values in rows)
        out.add_column(summary["name"] or "run", justify="right", overflow="fold", min_width=widest)
    for label, values in rows:
        out.add_row(label, *values)
    return out


def _goodput_row(summaries: Sequence[Summary]) -> tuple[str, list[str]]:
    """The goodput row. It shows `-` unless all runs have the same service level: without one, each success is good."""
    levels = {(summary["slo"]["ttft_ms"], summary["slo"]["tpot_ms"]) for summary in summaries}
    words = [f"{name} {level:g} ms" for name, level in zip(("TTFT", "TPOT"), levels.pop(), strict=True) if level]
    shown = bool(words) and not levels
    values = [summary["goodput"] if shown else None for summary in summaries]
    label = f"goodput ({', '.join(words)})" if shown else "goodput"
    return label, ["-" if value is None else percent(value) for value in values]


def _rows(summaries: Sequence[Summary]) -> Iterable[tuple[str, list[str]]]:
    def row(label: str, *path: str, write: Callable[[float], str] = figure) -> tuple[str, list[str]]:
        values = []
        for summary in summaries:
            value: Any = summary
            for key in path:
                value = value[key]
            values.append("-" if value is None else write(value))
        return label, values

    yield row("requests", "requests")
    if any(summary["cancelled"] for summary in summaries):
        yield row("cancelled by the client", "cancelled")
    yield row("failed", "failed")
    yield row("  of these shed with 429", "shed", "429")
    yield row("  of these shed with 503", "shed", "503")
    for reason in sorted({reason for summary in summaries for reason in summary["failed_by_reason"]} - set(_SHED)):
        yield f"  {reason}", [figure(summary["failed_by_reason"].get(reason, 0)) for summary in summaries]
    yield row("success rate", "success_rate", write=percent)
    for key, label in (("ttft_ms", "TTFT"), ("e2e_ms", "E2E"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL")):
        for name in ("mean", *_QUANTILES):
            yield row(f"{label} {name}, ms", key, name)
    yield row("output tokens/s", "output_tokens_per_s")
    yield row("input tokens/s", "input_tokens_per_s")
    yield _goodput_row(summaries)
    yield row("prefix hit rate", "prefix_hit_rate", write=percent)
    yield row("requests/s", "requests_per_s")
    yield row("duration, s", "duration_s")
    yield row("send lag p99, ms (wall)", "send_lag_ms", "p99")
    if not all(summary["valid"] for summary in summaries):
        late = f"no: over {LAG_MS:g} ms late"
        yield "valid", ["yes" if summary["valid"] else late for summary in summaries]
