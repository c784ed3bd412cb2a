"""The load that `fairlead bench` sends according to its command line, its progress line, and its hints at the end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fairlead.config.problems import suggestion
from fairlead.core.errors import ConfigError
from fairlead.core.text import plain
from fairlead.lab.load.workload import (
    Chat,
    ClosedLoop,
    OpenLoop,
    Paced,
    Recorded,
    Replay,
    SharedPrefix,
    Turns,
    Workload,
)
from fairlead.lab.simulator.build import ScenarioSpec, at_own_pace, is_name, listed, read_workload
from fairlead.lab.simulator.build import build as build_scenario
from fairlead.lab.simulator.scenarios import cut
from fairlead.lab.workload.conversation import Conversation
from fairlead.lab.workload.generate import ADVERSARIAL, CATALOGUE, Pace, arrivals_of, changed, generate
from fairlead.lab.workload.record import Record
from fairlead.lab.workload.record import Workload as Listed

#: Smaller than in published figures, so that any endpoint answers them within a minute.
SHARED_PREFIX = SharedPrefix(groups=20, prompts=10, system_tokens=2000, question_tokens=200, output_tokens=200)
CHAT = Chat()
#: Workloads that are generated as one long list before the run.
SESSIONS = ("conversation", *CATALOGUE)
KINDS = ("shared-prefix", "chat", *SESSIONS, *ADVERSARIAL)
DEFAULT_RATE, DEFAULT_REQUESTS = 5.0, 200
#: Conversations start at this rate before they are paced: with 45 s between turns, about 30 run at the same time.
_SESSION_RATE = 0.2


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line. 0 and empty = not given."""

    workload: str = "shared-prefix"
    #: Directory with the published traces, for a scenario.
    traces: str = ""
    parameters: Mapping[str, str] = {}
    rate: float = 0.0
    arrivals: str = ""
    cv: float = 3.0
    to_rate: float = 0.0
    closed: int = 0
    requests: int = 0
    seconds: float = 0.0
    speedup: float = 0.0
    output_tokens: int = 0
    extra: Mapping[str, Any] = {}
    seed: int = 0


class Load(msgspec.Struct, kw_only=True):
    """What to send and when. `workload` makes the requests once the model's name is known."""

    arrivals: OpenLoop | ClosedLoop | Turns
    #: The run ends after `requests` or after `seconds`, whichever is not 0.
    requests: int
    seconds: float
    #: The load in words, for the title and the summary.
    described: str
    #: The requests to send; `None` = generated without end from `options`.
    records: Sequence[Record] | None
    options: LoadOptions

    @property
    def names_models(self) -> bool:
        """Whether every record names its model."""
        return self.records is not None and all(record.model or record.lora for record in self.records)

    def workload(self, model: str, fallback: str) -> Workload:
        """Make the requests. `fallback`: the model of records that name none. Raises ConfigError for an invalid
        parameter."""
        options = self.options
        if self.records is not None:
            return Replay(
                self.arrivals.begun if isinstance(self.arrivals, Turns) else self.records,
                model=model,
                fallback_model=fallback,
                output_tokens=options.output_tokens,
                extra=dict(options.extra),
                seed=options.seed,
            )
        return _endless(options, model or fallback)


def build(options: LoadOptions) -> Load:
    """The load for these options. Raises ConfigError for invalid ones, TraceError or OSError for an unreadable file."""
    _check(options)
    source, requests = _listed(options), options.requests or (0 if options.seconds else DEFAULT_REQUESTS)
    if source is None:
        _endless(options, "")
    else:
        source = cut(source, options.requests or len(source))
        requests = len(source)
        if not requests:
            raise ConfigError("the workload holds no request", "--workload")
    arrivals: OpenLoop | ClosedLoop | Turns
    if options.closed:
        arrivals = ClosedLoop(workers=options.closed)
        when = f"closed loop of {options.closed}"
    elif source is not None and _has_own_times(options):
        speedup, thinks = options.speedup or 1.0, source.dispatch == "think"
        arrivals = Turns(source.records, speedup) if thinks else Recorded(source.records, speedup)
        when = "turns after answers" if thinks else "at its own times"
        when += f", {speedup:g} times as fast" if speedup != 1 else ""
    else:
        arrivals, when = _paced(options)
    return Load(
        arrivals=arrivals,
        requests=requests,
        seconds=options.seconds,
        described=f"{Path(options.workload).name}, {when}",
        records=None if source is None else source.records,
        options=options,
    )


def workloads() -> list[str]:
    """All kinds and scenarios that `--workload` takes."""
    return [*dict.fromkeys((*KINDS, *listed()))]


def _check(options: LoadOptions) -> None:
    known = options.workload in KINDS or is_name(options.workload)
    if not known and not Path(options.workload).is_file():
        there = suggestion(options.workload, workloads())
        raise ConfigError(f"{options.workload!r} is neither a file nor a workload; {there}", "--workload")
    if options.closed and (options.rate or options.arrivals):
        raise ConfigError("a closed loop has no rate and no arrivals: leave out --rate and --arrivals", "--closed")
    if options.speedup and not _has_own_times(options):
        raise ConfigError("is only for a file that is replayed at its own times; here use --rate", "--speedup")
    if options.parameters and options.workload not in KINDS:
        raise ConfigError("files and scenarios have no parameters", "--set")
    if options.workload in SESSIONS and options.closed and not options.requests:
        raise ConfigError("name the number of requests: conversations are generated before they are sent", "--requests")


def _has_own_times(options: LoadOptions) -> bool:
    made_to_measure = options.workload in ("shared-prefix", "chat", *SESSIONS)
    return not (made_to_measure or options.rate or options.arrivals or options.closed)


def _paced(options: LoadOptions) -> tuple[OpenLoop, str]:
    kind, rate = options.arrivals or "poisson", options.rate or DEFAULT_RATE
    if kind == "ramp" and not (options.to_rate and options.seconds):
        raise ConfigError("a ramp goes from --rate to --to-rate within --seconds: give all three", "--arrivals")
    pace = Pace(rate=rate, arrivals=kind, cv=options.cv, to_rate=options.to_rate, seconds=options.seconds)
    try:
        made = arrivals_of(pace)
    except ValueError as error:
        raise ConfigError(str(error), "--arrivals") from None
    until = f" to {options.to_rate:g}" if kind == "ramp" else ""
    return Paced(made, options.seed), f"{kind} arrivals at {rate:g}{until}/s"


def _listed(options: LoadOptions) -> Listed | None:
    """The requests to send; `None` = the workload has no end."""
    name = options.workload
    if name in ("shared-prefix", "chat"):
        return None
    if name not in KINDS:
        if not is_name(name):
            return read_workload(Path(name))
        return at_own_pace(
            build_scenario(ScenarioSpec(name=name, source=name, traces=options.traces, seed=options.seed))
        )
    try:
        if name in ADVERSARIAL:
            return generate(name, Pace(seed=options.seed), options.parameters)
        return _conversations(options)
    except ValueError as error:
        raise ConfigError(str(error), "--set") from None


def _conversations(options: LoadOptions) -> Listed:
    """Generate as many sessions as are needed for the wanted number of requests; their turns alternate."""
    count = options.requests or DEFAULT_REQUESTS
    if options.seconds and not options.requests:
        # 1.5 times as many as expected, because arrivals are random.
        count = int(max(options.rate or DEFAULT_RATE, options.to_rate) * options.seconds * 1.5) + 100
    spec = CATALOGUE[options.workload].spec if options.workload in CATALOGUE else Conversation()
    # Long sessions have many turns, so fewer sessions are enough. The list of all turns has to fit into memory.
    sessions = max(int(2 * count / spec.turns) + 1, 20 if spec.turns <= 30 else 4)
    while True:
        pace = Pace(rate=_SESSION_RATE, count=sessions, seed=options.seed)
        made = generate(options.workload, pace, options.parameters)
        if len(made) >= count:
            return cut(made, count)
        sessions *= 2


def _endless(options: LoadOptions, model: str) -> SharedPrefix | Chat:
    base: SharedPrefix | Chat = CHAT if options.workload == "chat" else SHARED_PREFIX
    settable = [name for name in msgspec.structs.asdict(base) if name not in ("seed", "model", "extra")]
    try:
        made = changed(base, options.parameters, settable)
    except ValueError as error:
        raise ConfigError(str(error), "--set") from None
    tokens = options.output_tokens or made.output_tokens
    return replace(made, seed=options.seed, model=model, extra=dict(options.extra), output_tokens=tokens)


if TYPE_CHECKING:
    from fairlead.lab.load.report import Summary
    from fairlead.lab.load.spec import Progress as Look

#: Seconds between two lines of progress if stderr is not a terminal.
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


@contextmanager
def bench_progress(title: str) -> "Iterator[Callable[[Look], None]]":
    """Print the title, then show the progress as a line on stderr: redrawn on a terminal, otherwise printed every few
    seconds. Yields the progress callback for `fairlead.lab.load.runner.run`."""
    console = Console(stderr=True)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    next_line_s = _LINE_EVERY_S

    def step(look: "Look") -> None:
        nonlocal next_line_s
        text = line(look)
        shown.update(task, completed=look.done, total=look.total or None, description=text)
        if not console.is_terminal and look.elapsed_s >= next_line_s:
            next_line_s = look.elapsed_s + _LINE_EVERY_S
            say(f"{look.elapsed_s:.0f} s: {text}")

    say(plain(title))
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        task = shown.add_task("waiting for the first answer", total=None)
        yield step


def line(look: "Look") -> str:
    """The progress in a few words."""
    done = f"{look.done:,} of {look.total:,}" if look.total else f"{look.done:,} done"
    # The rate is the average since the start: too few requests end between two updates (a quarter of a second).
    parts = [done, f"{look.in_flight:,} in flight", f"{look.done / max(look.elapsed_s, 1e-9):.1f}/s"]
    if look.waiting:
        parts.append(f"{look.waiting:,} held back")
    if look.ttft_p50_ms is not None:
        parts.append(f"TTFT p50 {look.ttft_p50_ms:,.0f} ms")
    if look.failed:
        parts.append(f"{look.failed:,} failed")
    return ", ".join(parts)


def hints(summary: "Summary") -> Iterator[str]:
    """Yield hints at what to do about failures, and at results that the server is not responsible for."""
    for reason, count in summary["failed_by_reason"].items():
        if reason in _HINTS:
            yield f"hint: {count:,} × {reason}: {_HINTS[reason]}"
    if not summary["valid"]:
        yield (
            f"hint: not valid: requests left up to {summary['send_lag_ms']['p99']:,.0f} ms late (p99), so this machine "
            "or --max-in-flight was the bottleneck, not only the server"
        )
    if summary["succeeded"] and summary["usage_missing"] == summary["succeeded"]:
        yield "hint: the server reports no usage, so tokens/s, TPOT and prefix hits are unknown"
