"""Policies × scenarios × seeds: running the cells, and how much worse each policy is than the best one of the run.

Each cell is a simulation in its own process, and finished cells are not run again. Results are kept as lines of JSON,
one per cell, written when the cell is done. A cell is identified by everything it depends on: scenario, policy text,
seed, the code (through `version`), and size and time of the files that it reads.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from math import exp, log
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from pathlib import Path
from statistics import fmean, stdev
from threading import Thread, current_thread, main_thread
from time import process_time
from typing import Any

import msgspec
from msgspec import Struct

import fairlead
from fairlead.config.registry import GROUP
from fairlead.core.errors import PLUGIN_FAILURES, FairleadError
from fairlead.lab.simulator.build import ScenarioSpec, build, is_generated
from fairlead.lab.simulator.run import modules_beside, python_files, simulate
from fairlead.lab.simulator.world import unknowing


class Cell(Struct, frozen=True, kw_only=True):
    scenario: ScenarioSpec
    policy: str
    #: The policy's configuration.
    text: str
    seed: int = 0

    def key(self, code: str) -> str:
        """The identity of the cell. `code`: the version of the code that runs it."""
        spec = self.scenario
        files = [Path(spec.source), *(Path(spec.traces).glob("*") if spec.traces else ()), *modules_beside(self.text)]
        stamps = sorted((path.name, *_stamp(path)) for path in files if path.is_file())
        return sha256(msgspec.json.encode([code, spec, self.text, self.seed, stamps])).hexdigest()[:24]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class CellResult(Struct, frozen=True, kw_only=True):
    """The result of a cell: figures as in `Summary.as_dict`, or an error."""

    key: str
    scenario: str
    policy: str
    seed: int
    figures: dict[str, Any] = {}
    error: str = ""
    cpu_s: float = 0.0


#: Takes (cell, key) pairs and yields their results in any order.
Runner = Callable[[Sequence[tuple[Cell, str]]], Iterable[CellResult]]
_DIED = "a process that simulated this policy ended: it was killed, ran out of memory, or the policy ended it"
#: Paths in the package with code that no simulation runs.
_ELSEWHERE = ("cli/", "gateway/", "pool/", "lab/demo", "lab/load/", "lab/stub/", "server/observe/")


def version() -> str:
    """A hash of all code that simulations run, installed plugins included. Results of other versions are not reused."""
    root = Path(fairlead.__file__).parent
    digest = sha256()
    for path in sorted(root.rglob("*.py")):
        if not path.relative_to(root).as_posix().startswith(_ELSEWHERE):
            digest.update(path.read_bytes())
    for path in _plugin_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plugin_files() -> list[Path]:
    """The modules of the distributions that have plugins. Nothing is imported."""
    return sorted({path.resolve() for point in entry_points(group=GROUP) for path in _files_of(point)})


def _files_of(point: EntryPoint) -> Iterator[Path]:
    """The modules of a plugin's distribution. If that does not list the plugin's own, as where its sources are
    installed in place, those beside it."""
    listed = (point.dist.files or ()) if point.dist else ()
    files = {Path(path.locate()).resolve() for path in listed if path.suffix == ".py"}
    yield from (path for path in files if path.is_file())
    spec = find_spec(point.module.partition(".")[0])
    own = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    for folder in own:
        yield from folder.rglob("*.py")
    if spec is not None and spec.origin and spec.has_location and Path(spec.origin).resolve() not in files:
        yield from python_files(Path(spec.origin).parent.parent if own else Path(spec.origin).parent)


def run_cell(cell: Cell, key: str = "") -> CellResult:
    """Run a cell in this process. An error becomes part of the result, so that the comparison continues."""
    begun = process_time()
    figures: dict[str, Any] = {}
    error = ""
    try:
        scenario = _scenario(cell.scenario)
        if cell.scenario.unknowing:
            scenario = unknowing(scenario, cell.seed)
        figures = simulate(scenario, cell.text, cell.seed).as_dict()
    except PLUGIN_FAILURES as problem:
        error = f"{type(problem).__name__}: {problem}"
    return CellResult(
        key=key,
        scenario=cell.scenario.name,
        policy=cell.policy,
        seed=cell.seed,
        figures=figures,
        error=error,
        cpu_s=round(process_time() - begun, 3),
    )


_scenario = lru_cache(maxsize=2)(build)


def run_grid(
    cells: Sequence[Cell],
    *,
    processes: int = 0,
    kept: Path | None = None,
    progress: Callable[[CellResult, int, int], None] | None = None,
    runner: Runner | None = None,
) -> list[CellResult]:
    """All results in the order of `cells`. `processes`: 0 = one per CPU. `kept`: a file of finished results, which are
    reused and added to; `None` = keep none. `runner`: runs the cells elsewhere; `None` = in processes on this machine.

    Cells of one scenario should be adjacent, so that a process builds the scenario once.
    """
    code = version()
    keys = [cell.key(code) for cell in cells]
    done = {result.key: result for result in read_kept(kept)} if kept else {}
    left = [(cell, key) for cell, key in zip(cells, keys, strict=True) if key not in done]
    total, count = len(cells), len(cells) - len(left)
    if runner is None:
        runner = partial(_run_all, processes=processes or os.cpu_count() or 1)
    for result in runner(left):
        done[result.key] = result
        count += 1
        if kept is not None and not result.error:
            _append(kept, msgspec.json.encode(result))
        if progress is not None:
            progress(result, count, total)
    return [done[key] for key in keys]


def read_kept(path: Path) -> Iterator[CellResult]:
    """The results that an earlier run wrote. A line that was cut off when that run ended is skipped."""
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(CellResult)
    for line in path.read_bytes().splitlines():
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            continue


def _append(path: Path, line: bytes) -> None:
    """Add a line to a file, also if its last line was cut off."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else b"\n" + line
        file.write(line + b"\n")


def _run_all(cells: Sequence[tuple[Cell, str]], processes: int) -> Iterable[CellResult]:
    if processes == 1 or len(cells) < 2:
        for cell, key in cells:
            yield run_cell(cell, key)
        return
    lost: list[tuple[Cell, str]] = []
    yield from _run_beside(cells, processes, lost)
    for policy in dict.fromkeys(cell.policy for cell, _ in lost):
        dead: list[tuple[Cell, str]] = []
        yield from _run_beside([entry for entry in lost if entry[0].policy == policy], processes, dead)
        for cell, key in dead:
            yield CellResult(key=key, scenario=cell.scenario.name, policy=policy, seed=cell.seed, error=_DIED)


def _run_beside(
    cells: Sequence[tuple[Cell, str]], processes: int, lost: list[tuple[Cell, str]]
) -> Iterator[CellResult]:
    """Run the cells in processes. If a process dies, the pool ends: cells without a result are added to `lost`."""
    with workers(min(processes, len(cells))) as pool:
        futures: dict[Future[CellResult], tuple[Cell, str]] = {}
        with deaf_children():
            for cell, key in cells:
                try:
                    futures[pool.submit(run_cell, cell, key)] = cell, key
                except BrokenProcessPool:
                    lost.append((cell, key))
        for future in as_completed(futures):
            if isinstance(future.exception(), BrokenProcessPool):
                lost.append(futures[future])
            else:
                yield future.result()


@contextmanager
def workers(processes: int, begin: Callable[..., object] | None = None, *given: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that are killed immediately if the body ends with an error or is interrupted, and that end if
    this process is killed. Each process first calls `begin(*given)`. Submit work within `deaf_children`. A process that
    dies and is not handled in the body raises `FairleadError`."""
    strangers = active_children()
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin, initargs=(begin, *given)) as pool:
        try:
            yield pool
        except BaseException as error:
            # A simulation takes up to minutes. Ending the run must not wait for the simulations that have begun.
            for child in active_children():
                if child not in strangers:
                    child.kill()
            # The pool's thread must end before Python does, or it may find its pipes closed and print a traceback.
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                least = "a shorter workload (-n)" if processes == 1 else f"fewer than {processes} --processes"
                raise FairleadError(f"{_DIED}; if memory is short, use {least}") from None
            raise


def _begin(begin: Callable[..., object] | None, *given: Any) -> None:
    """The start of a worker process."""
    Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*given)


def _end_with_parent() -> None:
    """A process that is killed cannot end its workers: each would simulate on, and then wait for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Hide Ctrl-C from the processes that are started in the body; a terminal sends it to all of its processes. Only
    this process handles it, and SIGTERM, and only after the body, because a half-started process would not be cleaned
    up. Blocking the signals is not enough here: other threads (numpy has some) receive them, and Python interrupts the
    main thread anyway."""
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    came: list[int] = []
    main = current_thread() is main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


Figures = dict[str, float]
#: Smaller values (milliseconds; share of the requests) are raised to these before ratios are formed, so that a ratio of
#: tiny numbers does not decide.
FLOOR_MS, FLOOR_SHARE = 10.0, 0.01
#: Figures whose standard deviation over the seeds is shown.
_SPREAD = ("ttft_mean_ms", "e2e_mean_ms")
COMPARED = ("ttft_mean_ms", "ttft_p99_ms", "e2e_mean_ms", "goodput")


def mean_figures(results: Sequence[CellResult]) -> dict[str, dict[str, Figures]]:
    """{scenario: {policy: {figure: mean over the seeds}}}, in the order of the results, without failed cells.

    With several seeds, the figures also have their number (`seeds`) and standard deviations (`ttft_mean_ms_sd`).
    Latencies are those of the seeds in which a request was served.
    """
    grouped: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        if not result.error:
            grouped.setdefault(result.scenario, {}).setdefault(result.policy, []).append(result.figures)
    return {
        scenario: {policy: _means(rows) for policy, rows in policies.items()} for scenario, policies in grouped.items()
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> Figures:
    names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    able = [row for row in rows if served(row)] or rows
    means = {name: round(fmean(row[name] for row in (able if "_ms" in name else rows)), 4) for name in names}
    if len(rows) > 1:
        spread = {f"{name}_sd": round(stdev(row[name] for row in able), 4) if able[1:] else 0.0 for name in _SPREAD}
        means |= {"seeds": len(rows), **spread}
    return means


def judged(results: Sequence[CellResult]) -> dict[str, Figures]:
    """The regrets of the means over the seeds, and with several seeds the standard deviations of each seed's
    (`ttft_mean_ms_sd`)."""
    regret = regrets(mean_figures(results))
    seeds = dict.fromkeys(result.seed for result in results)
    if len(seeds) > 1:
        of_seeds = [regrets(mean_figures([result for result in results if result.seed == seed])) for seed in seeds]
        for policy, figures in regret.items():
            rows = [of_seed[policy] for of_seed in of_seeds if policy in of_seed]
            figures |= {f"{name}_sd": round(stdev(row[name] for row in rows), 3) for name in _SPREAD if rows[1:]}
    return regret


def ratios_in_words(regret: Mapping[str, Mapping[str, float]]) -> str:
    """What `regret_text` shows, for the title of a table."""
    several = any("ttft_mean_ms_sd" in row for row in regret.values())
    return f"geometric mean{' ± standard deviation over seeds' if several else ''} (worst ratio)"


def regret_text(row: Mapping[str, float], figure: str) -> str:
    """A regret for people: mean, its standard deviation if there are several seeds, and the worst ratio."""
    spread = f" ±{row[f'{figure}_sd']:.2f}" if f"{figure}_sd" in row else ""
    return f"{row[figure]:.2f}{spread} ({row[f'{figure}_worst']:.1f})"


def note_of_seeds(cells: Sequence[Cell]) -> str:
    """A note about scenarios whose traffic is the same for all of several seeds; empty = there are none."""
    repeated = {cell.scenario.name: cell.scenario for cell in cells if cell.seed}
    fixed = [name for name, spec in repeated.items() if not is_generated(spec.source, spec.traces)]
    if not fixed:
        return ""
    return f"note: the traffic of {', '.join(fixed)} is recorded: seeds vary only ties and jitter"


def regrets(summary: Mapping[str, Mapping[str, Figures]]) -> dict[str, Figures]:
    """{policy: {figure: geometric mean of value / best, figure + "_worst": the highest of these ratios, shed, failed}}.
    For goodput, the ratio is best / value.

    Contains only policies that served something in every scenario: one that refuses everything has no latency.
    """
    rows = summary.values()
    shared = [name for name in next(iter(rows), {}) if all(served(policies.get(name)) for policies in rows)]
    return {policy: _of(policy, summary, shared) for policy in shared}


def served(figures: Mapping[str, Any] | None) -> bool:
    """Whether any request was served, so that there are latencies."""
    return figures is not None and figures.get("done", 0.0) > 0


def for_json(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures for a document: latencies are `None` if no request was served."""
    able = served(figures)
    return {name: value if able or "_ms" not in name else None for name, value in figures.items()}


def failures(results: Sequence[CellResult]) -> dict[str, list[str]]:
    """By scenario: how many requests failed for each reason, over all policies and seeds, in words."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.scenario, Counter()).update(result.figures.get("reasons", {}).get("failed", {}))
    return {
        scenario: [f"{number:,} requests failed: {reason}" for reason, number in reasons.most_common()]
        for scenario, reasons in counts.items()
    }


def _of(policy: str, summary: Mapping[str, Mapping[str, Figures]], among: Sequence[str]) -> Figures:
    figures: Figures = {}
    for figure in COMPARED:
        ratios = [_ratio(policies, policy, figure, among) for policies in summary.values()]
        figures[figure] = round(exp(fmean(map(log, ratios))), 3)
        figures[f"{figure}_worst"] = round(max(ratios), 3)
    rows = [policies[policy] for policies in summary.values()]
    figures["shed"] = sum(row["shed"] for row in rows)
    figures["failed"] = sum(row["failed"] for row in rows)
    return figures


def _ratio(policies: Mapping[str, Figures], policy: str, figure: str, among: Sequence[str]) -> float:
    if figure == "goodput":
        most = max(max(policies[name][figure], FLOOR_SHARE) for name in among)
        return most / max(policies[policy][figure], FLOOR_SHARE)
    best = min(max(policies[name][figure], FLOOR_MS) for name in among)
    return max(policies[policy][figure], FLOOR_MS) / best
