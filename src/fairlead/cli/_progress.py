"""Bars on stderr for what takes longer than a second. Nothing is drawn where stderr is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Steps between two looks at the bar: drawing must not cost what is measured.
_EVERY = 64


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None] | None]:
    """Gives a function to be called once per step; `None` where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task, done = bar.add_task(title, total=total), 0

        def step() -> None:
            nonlocal done
            done += 1
            if done % _EVERY == 0:
                bar.update(task, completed=done)

        yield step


@contextmanager
def busy(title: str) -> Iterator[None]:
    """Something moves, and the seconds are counted, while it is not known how much there is to do."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(title, total=None)
        yield
