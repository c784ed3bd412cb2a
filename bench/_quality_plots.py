"""The plots of docs/benchmarks-policies.md: each policy over the best one, per scenario. Small SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_PLOTS = (("quality-ttft", "ttft_mean_ms", "mean TTFT / best"), ("quality-e2e", "e2e_mean_ms", "mean E2E / best"))
_COLOURS = ("#0b62d6", "#d62728", "#7f7f7f", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
_MARKS = "osDv^<>PX"


def draw(summary: Mapping[str, Mapping[str, Mapping[str, float]]], shown: Sequence[str], out: Path) -> list[Path]:
    """One SVG per figure, on a light ground that also reads on dark pages. None where there is nothing to show."""
    if not summary:
        return []
    import matplotlib

    matplotlib.use("svg")
    # Paths and ids that do not change from run to run; text as text keeps the files small.
    matplotlib.rcParams.update({"svg.hashsalt": "fairlead", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, key, title in _PLOTS:
        figure, axes = pyplot.subplots(figsize=(8.2, 3.0), layout="constrained", facecolor="white")
        for index, policy in enumerate(name for name in shown if any(name in rows for rows in summary.values())):
            _dots(axes, summary, policy, key, index)
        axes.set_yscale("log")
        axes.set_xticks(range(len(summary)), list(summary), rotation=18, ha="right")
        axes.set_ylabel(f"{title} (log)")
        axes.grid(axis="y", which="both", color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        paths.append(out / f"{stem}.svg")
        figure.savefig(paths[-1], metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
    return paths


def _dots(
    axes: object, summary: Mapping[str, Mapping[str, Mapping[str, float]]], policy: str, key: str, index: int
) -> None:
    places, ratios = [], []
    for place, rows in enumerate(summary.values()):
        if policy in rows:
            best = min(max(row[key], 1e-3) for row in rows.values())
            places.append(place + 0.05 * (index - 4))
            ratios.append(max(rows[policy][key], 1e-3) / best)
    own = policy.startswith("default")
    axes.plot(  # type: ignore[attr-defined]
        places, ratios, _MARKS[index % 9], label=policy, color=_COLOURS[index % 9], markersize=6 if own else 4,
        zorder=3 if own else 2,
    )  # fmt: skip
