"""Statistics of runs against real engines, and their table. Pure."""

from collections import Counter, defaultdict
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
        (*_case(row), row["seed"], row["requests"]): row[figure]["mean"]
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
    """Markdown tables: the runs, their means by policy and rate, the ratios to those of `base` that have run; where
    none has, to the first policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    base = [policy for policy in base if policy in policies] or policies[:1]
    by_case = sorted(rows, key=lambda row: (*_case(row), row["seed"], policies.index(row["policy"])))
    out = [
        "| policy | rate/s | seed | fault | TTFT mean / p95, ms | E2E mean, ms | hits | shares | in band | p50, p90 of"
        " actual/forecast | failed | others' CPU |",
        f"|{'---|' * 12}",
        *map(_line, by_case),
        "",
        "| policy | rate/s | fault | runs | TTFT mean, ms | E2E mean, ms | busiest, at most | in band | failed |",
        f"|{'---|' * 9}",
    ]
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in by_case:
        if row["valid"]:
            groups[_case(row), row["policy"]].append(row)
    out += map(_group_line, groups.values())
    out += ["", "| | pairs | TTFT mean | E2E mean |", "|---|---|---|---|"]
    for policy in policies:
        for other in base:
            pair = [ratio(rows, policy, other, figure) for figure in ("ttft_ms", "e2e_ms")]
            if policy != other and any(pair):
                count = len(_means(rows, policy, "ttft_ms").keys() & _means(rows, other, "ttft_ms").keys())
                out.append(f"| {policy} / {other} | {count} | {' | '.join(map(_interval, pair))} |")
    return out


def _case(row: Row) -> tuple[str, bool, bool, float]:
    return row["fault"], row["adapters"], _pinned(row), row["rate"]


def _pinned(row: Row) -> bool:
    return bool(row.get("pinned"))  # older runs do not say


def _label(row: Row) -> str:
    return row["policy"] + (" (adapters)" if row["adapters"] else "") + (" (pinned)" if _pinned(row) else "")


def _group_line(rows: Sequence[Row]) -> str:
    """One policy at one rate: means over the seeds with their 95 % intervals; forecasts of all requests."""
    row = rows[0]
    judged = [(row["forecast"]["n"], row["forecast"]["inside"]) for row in rows if row["forecast"]]
    inside = sum(n * share for n, share in judged) / sum(n for n, _ in judged) if judged else None
    cells = [
        _label(row),
        f"{row['rate']:g}",
        row["fault"],
        str(len(rows)),
        *(_mean([row[figure]["mean"] for row in rows if row[figure]]) for figure in ("ttft_ms", "e2e_ms")),
        f"{max(max(row['shares'].values(), default=0.0) for row in rows):.0%}",
        "-" if inside is None else f"{inside:.0%}",
        str(sum(row["failed"] for row in rows)),
    ]
    return f"| {' | '.join(cells)} |"


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, _, high = mean_interval(values)
    return f"{mean:,.0f}" if len(values) < 2 else f"{mean:,.0f} ± {high - mean:,.0f}"


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
        _label(row) + ("" if row["valid"] else " (invalid: late load)"),
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
