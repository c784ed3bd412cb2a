"""The section of docs/benchmarks-policies.md that `quality.py` writes, between its markers.

Tables and plots come from the summary alone. Why a rule beats the default, and what was tried, no summary knows:
that is kept by hand in `quality_reasons.toml`, by scenario.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from msgspec import Struct

from _quality_plots import draw
from fairlead.lab.simulator.grid import COMPARED, served
from fairlead.lab.simulator.quality import Comparison, Regrets, Summary, regrets_of
from fairlead.lab.simulator.scenarios import ADVERSARIAL, APART, HELD_OUT, PUBLISHED, QUALITY, SITUATIONS

PAGE = "benchmarks-policies.md"
BEGIN, END = "<!-- quality:begin (written by bench/quality.py) -->", "<!-- quality:end -->"
REASONS = Path(__file__).with_name("quality_reasons.toml")
#: Columns of the wide tables, as far as they took part; all policies are in the regrets.
SHOWN = (
    "default", "default-at-once", "weights-322", "sticky, 5 s", "dynamo, agentic", "lmetric", "aibrix-prefix-cache",
    "least-requests", "round-robin",
)  # fmt: skip
#: Flow control holds requests back and binds them late; it is no rule that one could have taken instead of the default.
LATE = "+flow"
#: A rule beats the default by less than this, or by fewer milliseconds: nobody's difference.
WORTH, WORTH_MS = 1.02, 5.0
_COMPARED = (("ttft_mean_ms", "mean TTFT"), ("e2e_mean_ms", "mean E2E"))


class Run(Struct, frozen=True, kw_only=True):
    """How the figures came about."""

    cells: int
    seeds: int
    cpu_minutes: float
    traces: bool


def write_section(docs: Path, compared: Comparison, run: Run) -> list[Path]:
    """Replace what stands between the markers of `PAGE` in `docs`, draw the plots. Returns what was written.

    Raises `SystemExit` where the markers are missing: nothing written by hand may be lost.
    """
    page = docs / PAGE
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"error: {page} must contain once: {BEGIN} … {END}")
    plots = draw(_part(compared.scenarios, QUALITY), SHOWN, docs / "img")
    section = "\n".join(_section(compared, run, [path.relative_to(docs).as_posix() for path in plots]))
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}{BEGIN}\n\n{section}\n{after}", encoding="utf-8")
    return [page, *plots]


def _part(summary: Summary, names: Mapping[str, object]) -> Summary:
    return {name: rows for name, rows in summary.items() if name in names}


def _section(compared: Comparison, run: Run, plots: Sequence[str]) -> list[str]:
    summary = compared.scenarios
    policies = dict.fromkeys(policy for name in summary if name not in APART for policy in summary[name])
    traces = "the published ones" if run.traces else "made-up stand-ins for the published ones"
    lines = [
        f"`make quality TRACES=directory` — {len(policies)} policies, {len(summary)} scenarios, {run.seeds} "
        f"seed{'s' * (run.seeds > 1)}: {run.cells} simulations in {run.cpu_minutes:.0f} CPU minutes. 8 servers of",
        "Qwen3-32B on two H100 each (`headline-70b-20`: Llama 3.1 70B on four);",
        f"the Mooncake conversation and Azure code traces are {traces}.",
        "What the scenarios are: [workloads.md](workloads.md); what the policies do: [policies.md](policies.md).",
        "Bold: best of all policies (or within 0.5 %); a star: some requests were shed or failed.",
        "",
    ]
    nine = _part(summary, QUALITY)
    if nine:
        lines += [f"![{Path(plot).stem}]({plot})" for plot in plots] + [""]
        lines += ["Mean TTFT in ms:", "", *_wide(nine, "ttft_mean_ms"), "", "Mean E2E in ms:", ""]
        lines += [*_wide(nine, "e2e_mean_ms"), "", *_default(nine), ""]
    lines += _more("The adversarial set", _part(summary, ADVERSARIAL))
    lines += _more("Situations of pools", _part(summary, SITUATIONS))
    lines += _more("The held-out set", _part(summary, HELD_OUT))
    for name, regret in compared.regrets.items():
        lines += [*_regrets(name.replace("_", "-"), regret), "", *_at_once(name, summary)]
    lines += _truth(summary, compared.known)
    lines += _calm(summary, compared.calm)
    lines += _beaten({name: rows for name, rows in summary.items() if name not in APART})
    lines += _published(_part(summary, PUBLISHED))
    lines += _apart(_part(summary, APART))
    return lines


def _wide(part: Summary, figure: str) -> list[str]:
    shown = [name for name in SHOWN if any(name in rows for rows in part.values())]
    lines = [_row(["scenario", *shown]), _rule(len(shown) + 1)]
    for scenario, rows in part.items():
        best = min((row[figure] for row in rows.values() if served(row)), default=0.0)
        lines.append(_row([scenario, *(_number(rows.get(name), figure, best) for name in shown)]))
    return lines


def _number(row: Mapping[str, float] | None, figure: str, best: float) -> str:
    if row is None:
        return ""
    text = (f"{row[figure]:,.0f}" if served(row) else "–") + "\\*" * bool(row["shed"] or row["failed"])
    return f"**{text}**" if served(row) and row[figure] <= 1.005 * best else text


def _regrets(name: str, regret: Regrets) -> list[str]:
    lines = [
        f"Regret over the {name} set (value / best value of any policy, for goodput the inverse: geometric mean, in"
    ]
    lines += ["parentheses the worst):", ""]
    lines += [_row(["policy", "mean TTFT", "p99 TTFT", "mean E2E", "goodput", "shed", "failed"]), _rule(7)]
    for policy, row in sorted(regret.items(), key=lambda item: item[1]["ttft_mean_ms"] * item[1]["e2e_mean_ms"]):
        parts = [f"{row[f]:.2f} ({row[f'{f}_worst']:.3g})" for f in COMPARED]
        lines.append(_row([policy, *parts, f"{row['shed']:g}", f"{row['failed']:g}"]))
    return lines


def _at_once(name: str, summary: Summary) -> list[str]:
    """The default among those that send every request at once: holding some back is a choice of another kind."""
    rows = {
        scenario: {name: row for name, row in rows.items() if not name.endswith(LATE)}
        for scenario, rows in summary.items()
    }
    own = regrets_of(name, rows).get("default")
    if rows == summary or own is None:
        return []
    ttft, e2e = (f"{own[f]:.2f} (worst {own[f'{f}_worst']:.3g})" for f in ("ttft_mean_ms", "e2e_mean_ms"))
    return [
        f"Among the rules that send every request at once (without `…{LATE}`) the default's regret is {ttft} in",
        f"mean TTFT and {e2e} in mean E2E.",
        "",
    ]


def _default(part: Summary) -> list[str]:
    """All figures of the default policy."""
    head = ["default", "TTFT p50", "p90", "p99", "TPOT p50", "E2E mean", "output tokens/s", "hit", "shed", "failed"]
    lines = [_row(head), _rule(len(head))]
    for scenario, rows in part.items():
        row = rows.get("default")
        if row is not None:
            times = [f"{row[f]:,.0f}" for f in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")]
            times += [f"{row['tpot_p50_ms']:.1f}", f"{row['e2e_mean_ms']:,.0f}", f"{row['output_tokens_per_s']:,.0f}"]
            counts = [f"{row['prefix_hit_rate']:.0%}", f"{row['shed']:g}", f"{row['failed']:g}"]
            lines.append(_row([scenario, *times, *counts]))
    return lines


def _more(title: str, part: Summary) -> list[str]:
    return [f"{title}, mean TTFT in ms:", "", *_wide(part, "ttft_mean_ms"), ""] if part else []


def _truth(summary: Summary, known: Summary) -> list[str]:
    """What ignorance costs."""
    both = {name: (summary[name]["default"], rows["default"]) for name, rows in known.items() if "default" in rows}
    both = {name: pair for name, pair in both.items() if min(row["ttft_mean_ms"] for row in pair) > 0}
    if not both:
        return []
    figures = ("ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms")
    lines = [
        "The default as above, and where prior, tokens and lengths of answers were known from the first request:",
        "",
    ]
    lines += [_row(["scenario", *("mean TTFT", "known", "p99 TTFT", "known", "mean E2E", "known")]), _rule(7)]
    for name, pair in both.items():
        lines.append(_row([name, *(f"{row[figure]:,.0f}" for figure in figures for row in pair)]))
    ratios = [geometric_mean(own[figure] / truth[figure] for own, truth in both.values()) for figure in figures]
    return [*lines, _row(["geometric mean of the ratios", *(cell for r in ratios for cell in (f"{r:.3f}", "1"))]), ""]


def _calm(summary: Summary, calm: Summary) -> list[str]:
    """What late binding costs where the servers can do more, and how often first tokens come when they are expected."""
    rows = {
        name: (calm[name]["default"], calm[name]["default-at-once"], summary[name]["default"])
        for name in calm
        if {"default", "default-at-once"} <= calm[name].keys()
    }
    rows = {name: row for name, row in rows.items() if min(one["ttft_mean_ms"] for one in row) > 0}
    if not rows:
        return []
    lines = [
        "At half the pace, where nearly all are below saturation, beside the same without flow control; and the share",
        "of first tokens in the 90 % band of their forecast, at that pace and at the scenario's own:",
        "",
        _row(["scenario", "mean TTFT", "at once", "ratio", "mean E2E", "at once", "ratio", "in band", "own pace"]),
        _rule(9),
    ]
    figures = ("ttft_mean_ms", "e2e_mean_ms")
    for name, (own, other, full) in rows.items():
        cells = []
        for figure in figures:
            cells += [f"{own[figure]:,.0f}", f"{other[figure]:,.0f}", f"{own[figure] / other[figure]:.3f}"]
        lines.append(_row([name, *cells, *(_share(row["in_band"]) for row in (own, full))]))
    means = [f"{geometric_mean(own[f] / other[f] for own, other, _ in rows.values()):.4f}" for f in figures]
    return [*lines, _row(["geometric mean", *(c for mean in means for c in ("", "", mean)), "", ""]), ""]


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.0 else "none is streamed"


def _beaten(part: Summary) -> list[str]:
    """Where a rule that sheds and fails no more than the default beats it, by how much, and why."""
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    lines = []
    for scenario, rows in part.items():
        own = rows.get("default")
        found = [] if own is None else [_best(rows, own, figure, title) for figure, title in _COMPARED]
        words = "; ".join(text for text in found if text)
        if words:
            why = reasons.get(scenario, {}).get("why", "no reason is known")
            tried = reasons.get(scenario, {}).get("tried", "")
            lines.append(f"- **{scenario}**: {words}. {why}{tried and f' Tried: {tried}'}")
    if not lines:
        return []
    return ["Where a rule beats the default by more than 2 % (and 5 ms):", "", *lines, ""]


def _best(rows: Regrets, own: Mapping[str, float], figure: str, title: str) -> str:
    lost = own["shed"] + own["failed"]
    rivals = {
        name: row
        for name, row in rows.items()
        if not name.startswith("default") and row["shed"] + row["failed"] <= lost
    }
    if not rivals:
        return ""
    name = min(rivals, key=lambda one: rivals[one][figure])
    value = rivals[name][figure]
    if own[figure] <= WORTH * value or own[figure] <= value + WORTH_MS:
        return ""
    return f"{title} {value:,.0f} ms with `{name}`, {own[figure]:,.0f} with the default ({own[figure] / value:.2f}x)"


def _published(part: Summary) -> list[str]:
    """The default beside round robin in the published benchmark."""
    both = {name: rows for name, rows in part.items() if "default" in rows and "round-robin" in rows}
    if not both:
        return []
    head = ["scenario", "TTFT p50: round robin", "default", "lower by", "output tokens/s: round robin", "default"]
    lines = ["The published shared-prefix benchmark (round robin → default):", ""]
    lines += [_row([*head, "ratio", "hit: round robin", "default", "served"]), _rule(10)]
    for scenario, rows in both.items():
        plain, own = rows["round-robin"], rows["default"]
        times = [plain["ttft_p50_ms"], own["ttft_p50_ms"]]
        tokens = [plain["output_tokens_per_s"], own["output_tokens_per_s"]]
        lost = own["shed"] + own["failed"]
        cells = [scenario, *(f"{value:,.0f} ms" for value in times), f"{times[0] / max(times[1], 1e-9):,.0f}x"]
        cells += [*(f"{value:,.0f}" for value in tokens), f"{tokens[1] / max(tokens[0], 1e-9):.2f}"]
        cells += [f"{row['prefix_hit_rate']:.1%}" for row in (plain, own)]
        lines.append(_row([*cells, f"{1 - lost / max(own['requests'], 1):.0%}"]))
    return [*lines, ""]


def _apart(part: Summary) -> list[str]:
    """Pools of prefill and decode servers."""
    if not part:
        return []
    head = ["scenario", "pool and policy", "TTFT mean", "p99", "TPOT p50", "p99", "E2E mean", "goodput", "failed"]
    lines = ["Prefill and decode apart, 8 servers; goodput is TTFT up to 2 s and TPOT up to 25 ms:", ""]
    lines += [_row(head), _rule(len(head))]
    for scenario, rows in part.items():
        for policy, row in rows.items():
            what = "all do both, default" if policy == "default" else policy
            times = [f"{row[f]:,.0f}" for f in ("ttft_mean_ms", "ttft_p99_ms")]
            times += [f"{row[f]:.1f}" for f in ("tpot_p50_ms", "tpot_p99_ms")]
            cells = [*times, f"{row['e2e_mean_ms']:,.0f}", f"{row['goodput']:.2f}", f"{row['failed']:g}"]
            lines.append(_row([scenario.removeprefix("apart-"), what, *cells]))
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return "|" + "---|" * count
