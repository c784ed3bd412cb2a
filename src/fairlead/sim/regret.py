"""How much worse than the best policy of the run each one is."""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from fairlead.sim.grid import CellResult

Figures = dict[str, float]
#: Below this many milliseconds a difference is nobody's: a ratio of tiny numbers must not decide.
FLOOR_MS = 10.0
_COMPARED = ("ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms")


def mean_figures(results: Sequence[CellResult]) -> dict[str, dict[str, Figures]]:
    """{scenario: {policy: {figure: mean over the seeds}}}, in the order of the results. Failed cells are left out."""
    grouped: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        if not result.error:
            grouped.setdefault(result.scenario, {}).setdefault(result.policy, []).append(result.figures)
    return {
        scenario: {policy: _means(rows) for policy, rows in policies.items()} for scenario, policies in grouped.items()
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> Figures:
    names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    return {name: round(fmean(row[name] for row in rows), 4) for name in names}


def regrets(summary: Mapping[str, Mapping[str, Figures]]) -> dict[str, Figures]:
    """{policy: {figure: geometric mean of value / best, figure + "_worst": the highest of these ratios, shed, failed}}.

    Only of policies that took part in every scenario.
    """
    shared = [name for name in _first(summary) if all(name in policies for policies in summary.values())]
    return {policy: _of(policy, summary, shared) for policy in shared}


def _first(summary: Mapping[str, Mapping[str, Figures]]) -> Sequence[str]:
    return list(next(iter(summary.values()), {}))


def _of(policy: str, summary: Mapping[str, Mapping[str, Figures]], among: Sequence[str]) -> Figures:
    found: Figures = {}
    for figure in _COMPARED:
        ratios = [_ratio(policies, policy, figure, among) for policies in summary.values()]
        found[figure] = round(exp(fmean(map(log, ratios))), 3)
        found[f"{figure}_worst"] = round(max(ratios), 2)
    rows = [policies[policy] for policies in summary.values()]
    found["shed"] = sum(row["shed"] for row in rows)
    found["failed"] = sum(row["failed"] for row in rows)
    return found


def _ratio(policies: Mapping[str, Figures], policy: str, figure: str, among: Sequence[str]) -> float:
    best = min(max(policies[name][figure], FLOOR_MS) for name in among)
    return max(policies[policy][figure], FLOOR_MS) / best
