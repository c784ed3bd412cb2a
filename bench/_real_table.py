"""Statistics of runs against real engines, and their table. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

Row = Mapping[str, Any]

#: Student's t for a two-sided 95 % interval, by degrees of freedom; beyond the last one 1.96 is near enough.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and quantiles; None of nothing."""
    if not values:
        return None
    quantiles = {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 95, 99)}
    return {name: round(value, 1) for name, value in ({"mean": fmean(values)} | quantiles).items()}


def shares(places: Iterable[str]) -> dict[str, float]:
    """Place → its share of all; refused requests have the place ``. The busiest comes first."""
    counts = Counter(places)
    return {place: round(count / counts.total(), 3) for place, count in counts.most_common()}


def calibration(judged: Sequence[tuple[float, float, float, float]]) -> dict[str, float] | None:
    """Of (actual, forecast, low, high) in ms: the share in, below and above the band; quantiles of actual/forecast."""
    if not judged:
        return None
    actual, forecast, low, high = np.array(judged).T
    ratios = actual / np.maximum(forecast, 1e-3)
    return {
        "n": len(judged),
        "inside": round(float(np.mean((actual >= low) & (actual <= high))), 3),
        "below": round(float(np.mean(actual < low)), 3),
        "above": round(float(np.mean(actual > high)), 3),
        **{f"ratio_p{share}": round(float(np.percentile(ratios, share)), 2) for share in (10, 50, 90)},
    }


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval (Student's t); of one value the interval is infinite."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, -float("inf"), float("inf")
    degrees = len(values) - 1
    half = (_T[degrees - 1] if degrees <= len(_T) else 1.96) * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def ratio(rows: Sequence[Row], policy: str, other: str, figure: str) -> tuple[float, float, float] | None:
    """Geometric mean of policy / other over what both have run (same rate, seed and fault), with its 95 % interval.

    None when they have nothing in common.
    """
    means = [_means(rows, name, figure) for name in (policy, other)]
    both = sorted(means[0].keys() & means[1].keys())
    if not both:
        return None
    mean, low, high = mean_interval([log(means[0][at] / means[1][at]) for at in both])
    return exp(mean), exp(low), exp(min(high, 700.0))


def _means(rows: Sequence[Row], policy: str, figure: str) -> dict[tuple[Any, ...], float]:
    return {
        (row["rate"], row["seed"], row["requests"], row["fault"], row["adapters"]): row[figure]["mean"]
        for row in rows
        if row["policy"] == policy and row["valid"] and row[figure]
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The first policy against every other one, and each policy's forecasts and shares."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    found: dict[str, Any] = {"runs": len(rows), "invalid": sum(not row["valid"] for row in rows), "ratios": {}}
    for policy in policies:
        for other in policies:
            pair = {name: ratio(rows, policy, other, name) for name in ("ttft_ms", "e2e_ms")}
            if policy != other and any(pair.values()):
                found["ratios"][f"{policy} / {other}"] = pair
    return found


def lines(rows: Sequence[Row], base: Sequence[str] = ("round-robin", "least-requests")) -> list[str]:
    """A Markdown table of the runs, one row each, and one of the ratios to `base`."""
    out = [
        "| policy | rate/s | seed | fault | TTFT mean / p95, ms | E2E mean, ms | hits | shares | in band | p50, p90 of"
        " actual/forecast | failed | others' CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(dict.fromkeys(row["policy"] for row in rows))
    by_case = sorted(rows, key=lambda row: (row["fault"], row["rate"], row["seed"], order.index(row["policy"])))
    out += map(_line, by_case)
    out += ["", "| | TTFT mean | E2E mean |", "|---|---|---|"]
    for policy in order:
        for other in base:
            pair = [ratio(rows, policy, other, figure) for figure in ("ttft_ms", "e2e_ms")]
            if policy != other and any(pair):
                out.append(f"| {policy} / {other} | {' | '.join(map(_interval, pair))} |")
    return out


def simulation_lines(found: Sequence[Row]) -> list[str]:
    """A Markdown table: real and simulated means. Nothing where nothing was simulated."""
    if not found:
        return []
    out = ["", "| run | TTFT real / simulated, ms | E2E real / simulated, ms |", "|---|---|---|"]
    for row in found:
        pairs = [f"{row[name][0]:,.0f} / {row[name][1]:,.0f}" for name in ("ttft_ms", "e2e_ms") if not row["problem"]]
        out.append(f"| {row['key']} | {' | '.join(pairs or [row['problem'], ''])} |")
    return out


def _line(row: Row) -> str:
    ttft, e2e, forecast = row["ttft_ms"], row["e2e_ms"], row["forecast"]
    cells = [
        row["policy"] + (" (adapters)" if row["adapters"] else "") + ("" if row["valid"] else " (invalid: late load)"),
        f"{row['rate']:g}",
        str(row["seed"]),
        row["fault"],
        f"{ttft['mean']:,.0f} / {ttft['p95']:,.0f}" if ttft else "-",
        f"{e2e['mean']:,.0f}" if e2e else "-",
        "-" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
        ", ".join(f"{place or 'refused'} {share:.0%}" for place, share in row["shares"].items()),
        f"{forecast['inside']:.0%}" if forecast else "-",
        f"{forecast['ratio_p50']:.2f}, {forecast['ratio_p90']:.2f}" if forecast else "-",
        str(row["failed"]),
        f"{row['others_share']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def _interval(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "-"
    mean, low, high = found
    return f"{mean:.2f}" if low <= 0 or high > 1e6 else f"{mean:.2f} ({low:.2f} to {high:.2f})"
