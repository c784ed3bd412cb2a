"""What a person sees while `fairlead bench` runs, and what it advises afterwards."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from fairlead.bench.report import Summary
    from fairlead.bench.spec import Progress as Look

#: Seconds between two lines where nothing can be drawn over.
_LINE_EVERY_S = 5.0
_HINTS = {
    "status_400": "refused as invalid: too long for the model, or a field in --extra that it does not know",
    "status_401": "the server wants a key: --header 'Authorization=Bearer KEY'",
    "status_403": "the server wants another key: --header 'Authorization=Bearer KEY'",
    "status_404": "the server knows neither this model nor this path: see /v1/models, and give --model",
    "status_429": "the server sheds: the rate is above what it admits",
    "status_503": "the server sheds, or no replica is ready",
    "timeout": "answers took longer than --timeout",
    "connect_econnrefused": "the server stopped listening during the run",
    "connect_emfile": "this shell allows too few open files: raise `ulimit -n`, or lower --max-in-flight",
}


class BenchProgress:
    """One line on stderr: drawn over where that is a terminal, else repeated now and then."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        self._title = title
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("waiting for the first answer", total=None)
        self._next_line_s = _LINE_EVERY_S

    def __enter__(self) -> "BenchProgress":
        self._console.print(self._title, highlight=False, markup=False, soft_wrap=True)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, look: "Look") -> None:
        """For `fairlead.bench.runner.run`."""
        text = line(look)
        self._bar.update(self._task, completed=look.done, total=look.total or None, description=text)
        if not self._console.is_terminal and look.elapsed_s >= self._next_line_s:
            self._next_line_s = look.elapsed_s + _LINE_EVERY_S
            self._console.print(f"{look.elapsed_s:.0f} s: {text}", highlight=False, markup=False, soft_wrap=True)


def line(look: "Look") -> str:
    """How it goes, in a few words."""
    done = f"{look.done:,} of {look.total:,}" if look.total else f"{look.done:,} done"
    # Of the whole run so far: a quarter of a second holds too few to tell a rate.
    parts = [done, f"{look.in_flight:,} in flight", f"{look.done / max(look.elapsed_s, 1e-9):.1f}/s"]
    if look.waiting:
        parts.append(f"{look.waiting:,} held back")
    if look.ttft_p50_ms is not None:
        parts.append(f"TTFT p50 {look.ttft_p50_ms:,.0f} ms")
    if look.failed:
        parts.append(f"{look.failed:,} failed")
    return ", ".join(parts)


def hints(summary: "Summary") -> Iterator[str]:
    """What to do about failures, and about figures that are not the server's."""
    for reason, count in summary["failed_by_reason"].items():
        if reason in _HINTS:
            yield f"hint: {count:,} × {reason}: {_HINTS[reason]}"
    lag, ttft = summary["send_lag_ms"]["p99"], summary["ttft_ms"]["p50"]
    if lag and ttft and lag > max(10.0, ttft / 5):
        yield (
            f"hint: requests left up to {lag:,.0f} ms late (p99): this machine or --max-in-flight was the bottleneck, "
            "not only the server"
        )
    if summary["succeeded"] and summary["usage_missing"] == summary["succeeded"]:
        yield "hint: the server reports no usage, so tokens/s, TPOT and prefix hits are unknown"
