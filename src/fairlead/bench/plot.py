"""Several runs in one picture: who makes users wait, who gets work done, who reuses the cache, who drops requests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairlead.bench.report import Summary, figure, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Grey first: the first run is the one to beat.
_COLOURS = ("#9aa7b4", "#e7a13b", "#2a78c2", "#1d9a83", "#c4553b", "#7c5aa8", "#b59f3b", "#4f5b66")
_INK = "#2b3138"
_FAINT = "#d9dee3"
_QUANTILES = ("p50", "p95", "p99")
#: Below this, bars of a log axis have no length to show.
_SHORTEST_MS = 0.01


def plot(summaries: Sequence[Summary], path: str | Path, title: str = "") -> None:
    """Draw at least one summary (all in the same `time`) into a PNG. Needs matplotlib: the extra `report`."""
    if not summaries:
        raise ValueError("nothing to plot")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context({"font.size": 11, "text.color": _INK, "axes.labelcolor": _INK, "font.family": "sans-serif"}):
        canvas = Figure(figsize=(12, 7.6), dpi=110, facecolor="white")
        FigureCanvasAgg(canvas)
        canvas.set_layout_engine(ConstrainedLayoutEngine(hspace=0.06, wspace=0.04, h_pad=0.08, w_pad=0.1))
        grid = canvas.add_gridspec(2, 3, height_ratios=(1.25, 1))
        canvas.suptitle(title or "Load runs side by side", fontsize=16, fontweight="bold", x=0.012, ha="left")
        waiting = canvas.add_subplot(grid[0, :])
        _draw_ttft(waiting, summaries)
        _draw_bars(canvas.add_subplot(grid[1, 0]), summaries, "Output tokens per second", "output_tokens_per_s")
        _draw_shares(
            canvas.add_subplot(grid[1, 1]), summaries, "Prefix hit rate (cached / prompt tokens)", "prefix_hit_rate"
        )
        _draw_shares(canvas.add_subplot(grid[1, 2]), summaries, "Requests that succeeded", "success_rate")
        handles, labels = waiting.get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)), frameon=False, fontsize=11)
        canvas.text(0.988, 0.975, _clock(summaries), ha="right", va="top", fontsize=10, color="#6a747e")
        canvas.savefig(path, format="png")


def _draw_ttft(axes: "Axes", summaries: Sequence[Summary]) -> None:
    """Groups are quantiles, so what is compared stands side by side."""
    width = 0.82 / len(summaries)
    size = 10 if len(summaries) <= 4 else 8
    shown = [value for summary in summaries for name in _QUANTILES if (value := summary["ttft_ms"][name])] or [10.0]
    # Bars of a log axis grow from its edge: leave the shortest one some length, the longest one its label.
    floor, ceiling = max(min(shown) / 4, _SHORTEST_MS), max(shown) * 2.5
    for index, summary in enumerate(summaries):
        places = [group + (index - (len(summaries) - 1) / 2) * width for group in range(len(_QUANTILES))]
        values = [summary["ttft_ms"][name] for name in _QUANTILES]
        heights = [max(value or 0.0, floor) for value in values]
        bars = axes.bar(places, heights, width * 0.92, color=_colour(index), label=_label(summary), zorder=2)
        axes.bar_label(bars, [_duration(value) for value in values], padding=3, fontsize=size, color=_INK)
    axes.set_yscale("log")
    axes.set_ylim(floor, ceiling)
    axes.set_xticks(
        range(len(_QUANTILES)), ["p50 (half wait longer)", "p95 (1 in 20 waits longer)", "p99 (1 in 100 waits longer)"]
    )
    axes.yaxis.set_major_formatter(lambda value, _place: _duration(value))
    axes.yaxis.set_minor_formatter("")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8, zorder=0)
    _finish(axes, "Time to first token, log scale (lower is better)")


def _draw_bars(axes: "Axes", summaries: Sequence[Summary], title: str, key: str) -> None:
    _draw_panel(axes, summaries, key, lambda value: figure(value))
    _finish(axes, title)


def _draw_shares(axes: "Axes", summaries: Sequence[Summary], title: str, key: str) -> None:
    _draw_panel(axes, summaries, key, percent)
    axes.set_ylim(0, 1.12)
    _finish(axes, title)


def _draw_panel(axes: "Axes", summaries: Sequence[Summary], key: str, write: Callable[[float], str]) -> None:
    values: list[Any] = [summary[key] for summary in summaries]
    colours = [_colour(index) for index in range(len(summaries))]
    bars = axes.bar(range(len(values)), [value or 0.0 for value in values], 0.7, color=colours, zorder=2)
    labels = ["not reported" if value is None else write(value) for value in values]
    axes.bar_label(bars, labels, padding=3, fontsize=10 if len(values) <= 4 else 8, color=_INK)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(y=0.14)
    axes.set_ylim(bottom=0)


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, pad=8)
    axes.tick_params(which="both", length=0, colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#8a949e")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _label(summary: Summary) -> str:
    name = summary["name"] or "run"
    return f"{name} ({summary['failed']:,} of {summary['requests']:,} failed)"


def _duration(ms: float | None) -> str:
    if ms is None:
        return "none"
    return f"{figure(ms / 1000)} s" if ms >= 1000 else f"{figure(ms)} ms"


def _clock(summaries: Sequence[Summary]) -> str:
    ratios = sorted({summary["time_ratio"] for summary in summaries})
    shown = ", ".join(f"{ratio:g}" for ratio in ratios)
    if all(summary["time"] == "model" for summary in summaries):
        return f"model time = wall-clock × {shown}"
    return "wall-clock time" if ratios == [1.0] else f"wall-clock time (servers run {shown} times faster than real)"
