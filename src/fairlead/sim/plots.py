"""Plots of a comparison. Needs matplotlib (the extra `report`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairlead.sim.regret import Figures

_PLOTS = (
    ("ttft", "ttft_mean_ms", "mean TTFT, ms (log)", True),
    ("ttft_p99", "ttft_p99_ms", "p99 TTFT, ms (log)", True),
    ("e2e", "e2e_mean_ms", "mean E2E, ms (log)", True),
    ("hit", "prefix_hit_rate", "share of prompt tokens hit", False),
)


def draw(means: Mapping[str, Mapping[str, Figures]], out: Path) -> list[tuple[Path, str]]:
    """One SVG per figure: bars per policy, grouped by scenario. Returns (path, title). Raises `ImportError`."""
    import matplotlib

    matplotlib.use("svg")
    # Paths and ids that do not change from run to run.
    matplotlib.rcParams.update({"svg.hashsalt": "fairlead", "svg.fonttype": "none", "font.size": 9})
    scenarios = list(means)
    policies = list(dict.fromkeys(name for row in means.values() for name in row))
    drawn = []
    for stem, key, title, log in _PLOTS:
        path = out / f"{stem}.svg"
        _bars(means, scenarios, policies, key, title, log, path)
        drawn.append((path, title))
    return drawn


def _bars(
    means: Mapping[str, Mapping[str, Figures]],
    scenarios: Sequence[str],
    policies: Sequence[str],
    key: str,
    title: str,
    log: bool,
    path: Path,
) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.3 * len(scenarios)), 3.8), layout="constrained")
    width = 0.84 / max(len(policies), 1)
    for index, policy in enumerate(policies):
        places = [i + (index - (len(policies) - 1) / 2) * width for i in range(len(scenarios))]
        values = [means[scenario].get(policy, {}).get(key, 0.0) for scenario in scenarios]
        axes.bar(places, values, width, label=policy, color=pyplot.get_cmap("tab20")(index % 20))
    if log:
        axes.set_yscale("log")
    axes.set_xticks(range(len(scenarios)), scenarios, rotation=20, ha="right")
    axes.set_ylabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
