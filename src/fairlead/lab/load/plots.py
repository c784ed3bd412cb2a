"""Load runs as pictures: several side by side, or one in detail. Needs matplotlib, the extra `report`.

Latencies are dots on a log axis of at least a decade, because a log axis has no zero from which bars could start. All
bars start at zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fairlead.lab.load.report import Summary, figure, percent
from fairlead.lab.load.spec import CANCELLED, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Grey is first, because the first run is the baseline.
_COLOURS = ("#9aa7b4", "#e7a13b", "#2a78c2", "#1d9a83", "#c4553b", "#7c5aa8", "#b59f3b", "#4f5b66")
_INK, _FAINT, _QUIET, _BAD = "#2b3138", "#d9dee3", "#6a747e", "#b3261e"
_QUANTILES = ("p50", "p95", "p99")
#: Smallest value shown on a log axis.
_SHORTEST_MS = 0.01


def log_axis(axes: "Axes", name: Literal["x", "y"], values: Sequence[float], write: Callable[[float], str]) -> None:
    """Make an axis logarithmic, for values above 0. It shows at least a decade, so small differences look small.
    `write`: the text of a tick."""
    from matplotlib.ticker import LogLocator

    low, high = max(min(values), _SHORTEST_MS), max(*values, _SHORTEST_MS)
    widen = max(1.6, (10.0 * low / high) ** 0.5)
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low / widen, high * widen)})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    # Few enough ticks to fit side by side.
    decades = high * widen * widen / low
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 1e3 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _place: write(value))
    axis.set_minor_formatter("")
    axes.grid(axis=name, color=_FAINT, linewidth=0.8, zorder=0)


@contextmanager
def _canvas(path: str | Path, title: str, note: str) -> "Iterator[Figure]":
    """An empty picture. At the end of the block, it is written to `path` as PNG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context({"font.size": 11, "text.color": _INK, "axes.labelcolor": _INK, "font.family": "sans-serif"}):
        canvas = Figure(figsize=(12, 7.6), dpi=110, facecolor="white")
        FigureCanvasAgg(canvas)
        canvas.set_layout_engine(ConstrainedLayoutEngine(hspace=0.06, wspace=0.04, h_pad=0.08, w_pad=0.1))
        canvas.suptitle(title, fontsize=16, fontweight="bold", x=0.012, ha="left")
        canvas.text(0.988, 0.975, note, ha="right", va="top", fontsize=10, color=_QUIET)
        yield canvas
        canvas.savefig(path, format="png")


def plot(summaries: Sequence[Summary], path: str | Path, title: str = "") -> None:
    """Draw at least one summary (all in the same `time`) into a PNG: TTFT, output tokens per second, cache hits, and
    failed requests."""
    if not summaries:
        raise ValueError("nothing to plot")
    with _canvas(path, title or "Load runs side by side", _clock(summaries)) as canvas:
        grid = canvas.add_gridspec(2, 3, height_ratios=(1.25, 1))
        waiting = canvas.add_subplot(grid[0, :])
        _draw_ttft(waiting, summaries)
        axes = canvas.add_subplot(grid[1, 0])
        _draw_panel(axes, summaries, "output_tokens_per_s", lambda value: figure(value))
        _finish(axes, "Output tokens per second")
        _draw_shares(
            canvas.add_subplot(grid[1, 1]), summaries, "Prefix hit rate (cached / prompt tokens)", "prefix_hit_rate"
        )
        _draw_shares(canvas.add_subplot(grid[1, 2]), summaries, "Requests that succeeded", "success_rate")
        handles, labels = waiting.get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)), frameon=False, fontsize=11)


def plot_run(result: RunResult, summary: Summary, path: str | Path, title: str) -> None:
    """Draw one run in wall-clock time into a PNG: the latencies of its requests over time, and the distribution of its
    TTFT."""
    note = f"{summary['requests']:,} requests, {summary['failed']:,} failed"
    with _canvas(path, title, note) as canvas:
        over_time, distribution = canvas.subplots(2, 1, height_ratios=(1.25, 1))
        _draw_over_time(over_time, result)
        _draw_distribution(distribution, result, summary)


def _draw_over_time(axes: "Axes", result: RunResult) -> None:
    good = [record for record in result.records if not record.error]
    due = [record.scheduled - result.origin for record in good]
    shown = (("E2E", [r.e2e() * 1e3 for r in good], _COLOURS[0]), ("TTFT", [r.ttft() * 1e3 for r in good], _COLOURS[2]))
    for label, values, colour in shown:
        axes.plot(due, values, ".", color=colour, markersize=5, label=label)
    bad = (record for record in result.records if record.error not in ("", CANCELLED))
    failed = [record.scheduled - result.origin for record in bad]
    if failed:
        top = [0.97] * len(failed)
        label = f"failed ({len(failed):,})"
        axes.plot(failed, top, "x", color=_BAD, transform=axes.get_xaxis_transform(), label=label)
    _latencies(axes, "y", [value for _, values, _ in shown for value in values])
    axes.set_xlabel("seconds since the start at which a request was due")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _finish(axes, "Latency over time, log scale (lower is better)")


def _draw_distribution(axes: "Axes", result: RunResult, summary: Summary) -> None:
    values = sorted(record.ttft() * 1e3 for record in result.records if not record.error)
    shares = [(rank + 1) / len(values) for rank in range(len(values))]
    axes.plot(values, shares, color=_COLOURS[2], drawstyle="steps-post", linewidth=2)
    for name in _QUANTILES:
        value = summary["ttft_ms"][name]
        if value is not None:
            axes.plot([value], [int(name[1:]) / 100], "o", color=_INK, label=f"{name}  {_duration(value)}")
    level = summary["slo"]["ttft_ms"]
    if level is not None:
        label = f"objective  {_duration(level)}" + (
            ", beyond the chart" if level > 1.5 * max(values, default=0.0) else ""
        )
        axes.axvline(level, color=_BAD, linewidth=1, linestyle="--", label=label)
    _latencies(axes, "x", values)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:.0%}")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8, zorder=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _finish(axes, "Time to first token: share of answered requests that waited at most so long (log scale)")


def _latencies(axes: "Axes", name: Literal["x", "y"], values: Sequence[float]) -> None:
    if values:
        log_axis(axes, name, values, _duration)
    else:
        axes.text(0.5, 0.5, "no request succeeded", ha="center", transform=axes.transAxes, color=_BAD)


def _draw_ttft(axes: "Axes", summaries: Sequence[Summary]) -> None:
    """Draw TTFT grouped by quantile, so that the runs to compare are side by side."""
    width = 0.82 / len(summaries)
    size = 10 if len(summaries) <= 4 else 8
    for index, summary in enumerate(summaries):
        places = [group + (index - (len(summaries) - 1) / 2) * width for group in range(len(_QUANTILES))]
        values = [summary["ttft_ms"][name] for name in _QUANTILES]
        drawn = [float("nan") if value is None else max(value, _SHORTEST_MS) for value in values]
        axes.plot(places, drawn, "o", markersize=11, color=_colour(index), label=_label(summary), zorder=2)
        for place, value in zip(places, values, strict=True):
            height = (value, "data") if value else (0.02, "axes fraction")
            axes.annotate(
                _duration(value), (place, height[0]), xycoords=("data", height[1]), xytext=(0, 9),
                textcoords="offset points", ha="center", fontsize=size, color=_INK,
            )  # fmt: skip
    shown = [value for summary in summaries for name in _QUANTILES if (value := summary["ttft_ms"][name])]
    _latencies(axes, "y", shown)
    axes.set_xlim(-0.5, len(_QUANTILES) - 0.5)
    axes.set_xticks(
        range(len(_QUANTILES)),
        ["p50 (half wait longer)", "p95 (1 in 20 waits longer)", "p99 (1 in 100 waits longer)"],
    )
    _finish(axes, "Time to first token, log scale (lower is better)")


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
