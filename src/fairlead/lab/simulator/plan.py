"""How many replicas hold an objective: the least number, found with few simulations.

Theory. More replicas nearly always serve better. So the search brackets the border and then cuts the bracket, trying as
many sizes in parallel as there are processes. A run is stopped as soon as it is certain to miss (`objective.hopeless`),
so sizes that are far too small cost little. Chance moves the border by about one replica. So the result is simulated to
the end with several seeds, and so is the next smaller size. The least number is the one at which most seeds hold the
objective while with one replica less most do not. Each seed gives the scheduler a different wrong belief about the
engines to begin with (`world.unknowing`), as a live scheduler has.

With `split`, some of the replicas only prefill. For each size, the split is moved towards what is missed: prefill for
the time to the first token, decode for the time per token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from math import ceil, inf
from statistics import fmean, median
from time import process_time
from typing import Any

from msgspec import Struct, structs

from fairlead.compat.recorded import restore
from fairlead.config.registry import Registry
from fairlead.config.schema import Config
from fairlead.core.endpoint import PREFILL_ONLY, ROLE_LABEL
from fairlead.lab.simulator.grid import deaf_children, workers
from fairlead.lab.simulator.objective import (
    E2E,
    FAILED,
    TPOT,
    TTFT,
    Objective,
    decided_after_s,
    goodput,
    hopeless,
    loosest,
)
from fairlead.lab.simulator.run import config_from
from fairlead.lab.simulator.scenarios import parted
from fairlead.lab.simulator.simulation import START, Simulation
from fairlead.lab.simulator.world import WARM_UP, Fault, Job, Replica, Scenario, unknowing
from fairlead.lab.workload.describe import ideal_hits
from fairlead.lab.workload.record import Record

#: How many sizes below and above the least sufficient size the table shows.
_BELOW, _ABOVE = 2, 2
#: How many times during a run it is checked whether the objective is certain to be missed.
_LOOKS = 50
#: The confidence is `clear` if no figure exceeds this share of its limit.
_CLEAR = 0.9


class Case(Struct, frozen=True):
    """The planning problem. The scenario's replicas are repeated in turn to make the needed number."""

    scenario: Scenario
    wanted: tuple[Objective, ...]
    #: The text of a configuration, or what `compat.recorded.record` made from one.
    policy: Any
    #: The number of replicas that break down after a third of the time and stay down.
    dead: int = 0


class Trial(Struct, frozen=True):
    """One simulation. `complete`: it continues even if the objective is missed. `prefill`: the number of replicas that
    only prefill; 0 = all do both. `dead`: see `Case`."""

    replicas: int
    prefill: int = 0
    seed: int = 0
    complete: bool = False
    dead: int = 0


class Tried(Struct, frozen=True):
    """The result of a trial. `measured` has the value of each objective by name; it is empty if the trial was stopped.
    `missed` has the number of requests that missed each objective, divided by the least number that breaks it."""

    trial: Trial
    holds: bool
    missed: dict[str, float]
    measured: dict[str, float] = {}
    goodput: float = 0.0
    #: Prompt and answer tokens of the served requests; and the seconds from the first arrival to the last.
    tokens: tuple[int, int] = (0, 0)
    arriving_s: float = 0.0
    cpu_s: float = 0.0


class Row(Struct, frozen=True):
    """The figures of one size over its seeds: means, but medians in `measured`. `held` of `seeds` seeds hold the
    objective. `tokens_per_hour`: of prompts, and of answers."""

    replicas: int
    prefill: int
    goodput: float
    measured: dict[str, float]
    held: int
    seeds: int
    tokens_per_hour: tuple[float, float]
    dead: int = 0


class Plan(Struct, frozen=True):
    """`best`: the row of the least size that holds; `None` if no size does."""

    best: Row | None
    rows: list[Row]
    #: `clear`, `fair` or `narrow`, and why; both empty if `best` is `None`.
    confidence: str
    why: str
    #: The number of simulations, and their CPU time.
    trials: int
    cpu_s: float


#: Runs trials, in any number of processes, and returns their results in the same order.
Run = Callable[[Sequence[Trial]], list[Tried]]


class _Hopeless(Exception):
    """Stops a run that is certain to miss the objective."""


def sized(case: Case, trial: Trial, role: str = "") -> Scenario:
    """The scenario with the trial's number of replicas. The last of those with this role die first."""
    scenario, kinds = case.scenario, case.scenario.replicas
    made = structs.replace(scenario, replicas=tuple(kinds[i % len(kinds)] for i in range(trial.replicas)))
    made = parted(made, trial.prefill) if trial.prefill else made
    dying = sorted(range(trial.replicas), key=lambda i: (_role(made.replicas[i]) == role, i), reverse=True)
    third = scenario.workload.duration_s / scenario.speedup / 3.0
    faults = [fault for fault in scenario.faults if fault.replica < trial.replicas]
    faults += [Fault(kind="down", replica=i, at_s=third) for i in dying[: trial.dead]]
    return unknowing(structs.replace(made, faults=faults), trial.seed)


def _role(replica: Replica) -> str:
    return replica.labels.get(ROLE_LABEL, "")


def scheduling_of(policy: Any) -> tuple[Config, Registry | None]:
    """The configuration of a `Case.policy`, and the plugins that it may name in addition to the installed ones. Raises
    `ConfigError` or `PluginError`."""
    return config_from(policy) if isinstance(policy, str) else (restore(policy), None)


def attempt(case: Case, trial: Trial) -> Tried:
    """Simulate a trial. If replicas die, replicas of each role do so in turn, and the worst result counts. Raises
    `ConfigError` or `PluginError` if the policy cannot be built, or fails."""
    roles = dict.fromkeys(map(_role, sized(case, trial).replicas)) if trial.dead else ("",)
    made: list[Tried] = []
    for role in roles:
        made.append(_simulated(case, trial, sized(case, trial, role)))
        if not made[-1].measured:
            break  # it was stopped
    worst = min(made, key=lambda tried: (tried.holds, -max(tried.missed.values())))
    return structs.replace(worst, cpu_s=sum(tried.cpu_s for tried in made))


def _simulated(case: Case, trial: Trial, scenario: Scenario) -> Tried:
    begun = process_time()
    world, speedup = scenario.world, scenario.speedup
    if scenario.workload.dispatch == "timestamp":
        arrivals = ((record.arrival_us * 1e-6 / speedup, record.out_tokens) for record in scenario.workload.records)
        last_s = scenario.workload.duration_s / speedup
        drain_s = min(max(decided_after_s(case.wanted, arrivals) - last_s, 1.0), world.drain_s)
        scenario.world = structs.replace(world, drain_s=drain_s)
    config, registry = scheduling_of(case.policy)
    simulation = Simulation(scenario, config, trial.seed, registry=registry)
    counted = [job for job in simulation.jobs if job.record.arrival_us >= scenario.counted_from_s * 1e6]
    pause_s = max(scenario.workload.duration_s / speedup / _LOOKS, 0.5)

    def look() -> None:
        if hopeless(case.wanted, counted, simulation.kernel.now):
            raise _Hopeless
        simulation.kernel.call_at(simulation.kernel.now + pause_s, look)

    if not trial.complete:
        simulation.kernel.call_at(START + WARM_UP + pause_s, look)
    stopped = False
    try:
        simulation.run()
    except _Hopeless:
        stopped = True
    if simulation.plugin_errors:
        raise simulation.plugin_errors[0]
    if stopped:
        return Tried(trial, False, _missed(case.wanted, counted, simulation.kernel.now), cpu_s=process_time() - begun)
    measured = {objective.name: objective.measured(counted) for objective in case.wanted}
    done = [job for job in counted if job.status == "done"]
    arrived = [job.arrived for job in counted] or [0.0]
    return Tried(
        trial,
        all(objective.held(measured[objective.name]) for objective in case.wanted),
        _missed(case.wanted, counted, simulation.kernel.now),
        measured,
        goodput(case.wanted, counted),
        (sum(job.record.in_tokens for job in done), sum(job.output_tokens for job in done)),
        max(arrived) - min(arrived),
        process_time() - begun,
    )


def _missed(wanted: Sequence[Objective], jobs: Sequence[Job], now: float) -> dict[str, float]:
    came = [job for job in jobs if job.request is not None]
    return {o.name: sum(o.missed(job, now) for job in came) / (o.may_miss(len(jobs)) + 1) for o in wanted}


#: The case that this worker process of `in_processes` simulates, set when the process starts.
_case: list[Case] = []


@contextmanager
def in_processes(case: Case, count: int, progress: Callable[[Tried], object] = lambda tried: None) -> Iterator[Run]:
    """Yields a function that runs trials in `count` processes in parallel."""
    with workers(count, _begin, case) as pool:

        def run(trials: Sequence[Trial]) -> list[Tried]:
            with deaf_children():
                futures = [pool.submit(_attempt, trial) for trial in trials]
            for future in as_completed(futures):
                progress(future.result())
            return [future.result() for future in futures]

        yield run


def _begin(case: Case) -> None:
    _case[:] = [case]


def _attempt(trial: Trial) -> Tried:
    return attempt(_case[0], trial)


# ---- the search, which is independent of simulations ----


def least(holds: Callable[[Sequence[int]], Sequence[bool]], guess: int, most: int, width: int = 1) -> int | None:
    """The least size from 1 to `most` that holds, provided that every larger size does too; `None` if not even `most`
    does. `holds` is called with `width` sizes at a time."""
    fails, good = 0, most + 1
    asked = {min(max(guess, 1) << i, most) for i in range(width)}
    while True:
        sizes = sorted(asked)
        answers = list(zip(sizes, holds(sizes), strict=True))
        good = min([size for size, held in answers if held], default=good)
        fails = max([fails, *(size for size, held in answers if not held and size < good)])
        between = good - fails - 1
        if good > most and fails < most:
            asked = {min(fails << i, most) for i in range(1, width + 1)}
        elif between:
            parts = min(width, between)
            asked = {fails + (i + 1) * (between + 1) // (parts + 1) for i in range(parts)}
        else:
            return good if good <= most else None


def settle(share: Callable[[Sequence[int]], Sequence[float]], size: int, most: int) -> int | None:
    """The border near `size`: the least size at which at least half of the seeds hold, while one size below fewer than
    half do. `None` if not even `most` is such a size."""
    while True:
        here, below = share([size, size - 1]) if size > 1 else (share([size])[0], 0.0)
        if here < 0.5:
            if size == most:
                return None
            size += 1
        elif below >= 0.5:
            size -= 1
        else:
            return size


class _Trials:
    """The trials and their results. Each trial is run once."""

    def __init__(self, case: Case, run: Run, seeds: int, share: float) -> None:
        self._case, self._run, self._seeds = case, run, seeds
        #: The initial share of the replicas that prefill; 0 = all do both.
        self._share = share
        self.done: dict[Trial, Tried] = {}

    def __call__(self, trials: Iterable[Trial]) -> list[Tried]:
        wanted = list(dict.fromkeys(trials))
        left = [trial for trial in wanted if trial not in self.done]
        for tried in self._run(left) if left else ():
            self.done[tried.trial] = tried
            if tried.measured:  # it ran to its end
                self.done[structs.replace(tried.trial, complete=True)] = tried
        return [self.done[trial] for trial in wanted]

    def trial(self, replicas: int, seed: int = 0, complete: bool = False) -> Trial:
        """A trial of this size, with the best split that was tried so far."""
        return Trial(replicas, self.parts(replicas), seed, complete, self._case.dead)

    def parts(self, replicas: int) -> int:
        """How many of the replicas prefill in the best split so far; 0 = no split."""
        if not self._share or replicas < 2:
            return 0
        alike = [tried for tried in self.done.values() if tried.trial.replicas == replicas and tried.trial.prefill]
        if alike:
            return max(alike, key=lambda tried: (tried.holds, -max(tried.missed.values()))).trial.prefill
        return min(max(round(self._share * replicas), 1), replicas - 1)

    def holds(self, sizes: Sequence[int]) -> list[bool]:
        """Whether each size holds with the first seed, in any of the splits that are tried."""
        best: dict[int, bool] = dict.fromkeys(sizes, False)
        open_ = {size: self.trial(size) for size in sizes if size > self._case.dead + bool(self._share)}
        while open_:
            for tried in self(open_.values()):
                size = tried.trial.replicas
                best[size] = best[size] or tried.holds
                further = None if tried.holds else self._moved(tried)
                if further is None or further in self.done:
                    del open_[size]
                else:
                    open_[size] = further
                if tried.trial.prefill and tried.holds:
                    self._share = tried.trial.prefill / size
        return [best[size] for size in sizes]

    def _moved(self, missed: Tried) -> Trial | None:
        """The trial with one replica moved to prefill or to decode, whichever is missed more. `None` if there is no
        split, or no replica to move."""
        trial = missed.trial
        if not trial.prefill:
            return None
        first, token = (max(self._misses(missed, what), default=0.0) for what in (TTFT, TPOT))
        prefill = trial.prefill + (1 if first >= token else -1)
        return structs.replace(trial, prefill=prefill) if 0 < prefill < trial.replicas else None

    def _misses(self, tried: Tried, what: str) -> Iterator[float]:
        return (tried.missed[objective.name] for objective in self._case.wanted if objective.what == what)

    def shares(self, sizes: Sequence[int]) -> list[float]:
        """The share of the seeds that hold, per size. The first seed runs to its end, for the table."""
        able = [size for size in sizes if size > self._case.dead + bool(self._share)]
        trials = {size: [self.trial(size, seed, seed == 0) for seed in range(self._seeds)] for size in able}
        self(trial for of_size in trials.values() for trial in of_size)
        return [fmean(self.done[trial].holds for trial in trials[size]) if size in trials else 0.0 for size in sizes]

    def row(self, trials: Sequence[Trial], held: dict[int, bool]) -> Row:
        tried = self(trials)
        per_hour = [
            fmean(run.tokens[i] / run.arriving_s * 3600.0 if run.arriving_s else 0.0 for run in tried) for i in range(2)
        ]
        return Row(
            trials[0].replicas,
            sum(_role(replica) in PREFILL_ONLY for replica in sized(self._case, trials[0]).replicas),
            fmean(run.goodput for run in tried),
            {o.name: median(run.measured[o.name] for run in tried) for o in self._case.wanted},
            sum(held.values()),
            len(held),
            (per_hour[0], per_hour[1]),
            trials[0].dead,
        )

    def rows(self) -> list[Row]:
        """One row per size: the figures of the runs that were simulated to the end, and the verdicts of all runs."""
        complete: dict[tuple[int, int, int], list[Trial]] = {}
        held: dict[tuple[int, int, int], dict[int, bool]] = {}
        for trial, tried in self.done.items():
            size = trial.replicas, trial.prefill, trial.dead
            held.setdefault(size, {})[trial.seed] = tried.holds
            if trial.complete:
                complete.setdefault(size, []).append(trial)
        return [self.row(trials, held[size]) for size, trials in sorted(complete.items())]

    @property
    def cpu_s(self) -> float:
        return sum({id(tried): tried.cpu_s for tried in self.done.values()}.values())


def plan(
    case: Case,
    run: Run,
    *,
    most: int = 256,
    seeds: int = 3,
    width: int = 1,
    split: bool = False,
    now: int = 0,
) -> Plan:
    """Find the least size. `width`: sizes tried at the same time. `now`: the current number of replicas (0 = unknown).
    The rows then also show this size, as it is and with one more replica dead."""
    trials = _Trials(case, run, seeds, prefill_share(case.scenario, case.wanted) if split else 0.0)
    most = max(min(most, len(case.scenario.workload.records)), 1 + split + case.dead)
    border = least(trials.holds, first_guess(case.scenario, case.wanted), most, width)
    best = settle(trials.shares, border, most) if border is not None else None
    beside = range((best or most) - _BELOW, (best + _ABOVE if best else most) + 1)
    shown = [trials.trial(size, 0, True) for size in beside if case.dead + split < size <= most]
    if now:
        alone = [structs.replace(trials.trial(now, 0, True), dead=dead) for dead in (case.dead, case.dead + 1)]
        shown += [trial for trial in alone if trial.dead < now]
    trials(shown)
    rows = trials.rows()
    row = next((row for row in rows if row.replicas == best and row.dead == case.dead and row.seeds == seeds), None)
    return Plan(
        row,
        rows,
        *_confidence(case.wanted, row, rows),
        len({id(tried) for tried in trials.done.values()}),
        trials.cpu_s,
    )


def _confidence(wanted: Sequence[Objective], best: Row | None, rows: Sequence[Row]) -> tuple[str, str]:
    if best is None:
        return "", ""
    held = f"{best.held} of {best.seeds} seeds hold it"
    below = next((r for r in rows if (r.replicas, r.dead) == (best.replicas - 1, best.dead) and r.seeds > 1), None)
    less = f"with {best.replicas - 1}, {below.held} of {below.seeds}" if below else "fewer were not simulated"
    tightest = max(
        best.measured[o.name] / (1.0 - o.share if o.what == FAILED else o.limit) for o in wanted if o.what != FAILED
    )
    why = f"{held}; {less}; the tightest figure is at {tightest:.0%} of its limit"
    if best.held < best.seeds or (below is not None and below.held):
        return "narrow", f"{why}. Plan one more"
    return ("clear" if tightest <= _CLEAR else "fair"), why


# Bounds from the speed of one engine: a first guess of the size, and objectives that no number of replicas holds.

#: Sequences decoded in a step if no objective bounds them.
_BATCH = 64


def _prompt_s(replica: Replica, prompt: int, cached: int) -> float:
    """The least seconds that an idle server needs to compute a prompt, as far as it takes it."""
    engine, took_s = replica.engine, 0.0
    prompt = min(prompt, engine.max_model_len)
    done = min(cached, prompt - 1)
    while done < prompt:
        new = min(engine.max_batched_tokens, prompt - done)
        took_s += engine.latency.step_s(new, new * (done + new / 2), 0, 0)
        done += new
    return took_s / replica.speed + replica.overhead_ms * 1e-3


def _token_s(replica: Replica, context: int) -> float:
    """The least seconds for a further token of an answer that decodes alone."""
    return replica.engine.latency.step_s(0, 0.0, 1, context) / replica.speed / (1 + replica.engine.draft_tokens)


def _alone_ms(what: str, replica: Replica, record: Record, cached: int) -> float | None:
    """The least TTFT, TPOT or E2E (`what`) of a request in milliseconds: alone on a server that has `cached` of its
    prompt tokens. `None` = the request has no such latency."""
    first_s, token_s = _prompt_s(replica, record.in_tokens, cached), _token_s(replica, record.in_tokens)
    if what == TPOT:
        return token_s * 1e3 if record.out_tokens > 1 else None
    return (first_s + (token_s * (record.out_tokens - 1) if what == E2E else 0.0)) * 1e3


def impossible(scenario: Scenario, wanted: Sequence[Objective]) -> str:
    """Why one engine is too slow or too small for an objective, whatever the number of replicas; empty if none is."""
    replica = max(scenario.replicas, key=lambda replica: replica.speed)
    records, most = scenario.workload.records, replica.engine.max_model_len
    long = sum(record.in_tokens + record.out_tokens > most for record in records)
    for objective in wanted:
        may_miss = objective.may_miss(len(records))
        if objective.what == FAILED:
            if long > may_miss:
                share = f"{long / len(records):.0%} of the requests are longer than the {most:,} tokens that it takes"
                return f"{objective} cannot be held by this engine: {share}"
            continue
        hits = ideal_hits(scenario.workload)
        times = [_alone_ms(objective.what, replica, record, hit) for record, hit in zip(records, hits, strict=True)]
        known = sorted(time for time in times if time is not None)
        if not known:
            continue
        least_ms = known[len(known) - objective.may_miss(len(known)) - 1]
        if least_ms > objective.limit:
            reason = {
                TTFT: "computing the prompt alone, with every shared beginning cached,",
                TPOT: "one step of an answer that is alone",
                E2E: "a request that is alone",
            }[objective.what]
            said = f"{reason} takes {objective.shown(least_ms)} at that percentile"
            return f"{objective} cannot be held by any number of replicas: on this engine {said}"
    return ""


def _work(scenario: Scenario, wanted: Sequence[Objective]) -> tuple[float, float]:
    """Seconds that one replica needs for all prompts; and for all answers, in batches as large as allowed."""
    replica, records = scenario.replicas[0], scenario.workload.records
    context = fmean(record.in_tokens + record.out_tokens / 2 for record in records) if records else 0.0
    token_ms = dict(loosest(wanted)).get(TPOT, inf)
    latency, fitting = replica.engine.latency, max(int(replica.engine.kv_tokens / max(context, 1.0)), 1)
    batch = min(fitting, replica.engine.max_num_seqs, _BATCH if token_ms == inf else 1024)
    while batch > 1 and latency.step_s(0, 0.0, batch, int(batch * context)) * 1e3 > token_ms * replica.speed:
        batch = batch * 3 // 4
    step_s = latency.step_s(0, 0.0, batch, int(batch * context))
    hits = ideal_hits(scenario.workload)
    prompts_s = sum(_prompt_s(replica, record.in_tokens, hit) for record, hit in zip(records, hits, strict=True))
    return prompts_s, sum(record.n * record.out_tokens for record in records) * step_s / batch / replica.speed


def first_guess(scenario: Scenario, wanted: Sequence[Objective]) -> int:
    """The number of replicas that the work keeps busy all the time."""
    lasts_s = max(scenario.workload.duration_s / scenario.speedup, 1.0)
    return max(ceil(sum(_work(scenario, wanted)) / lasts_s), 1)


def prefill_share(scenario: Scenario, wanted: Sequence[Objective]) -> float:
    """The share of prefill in the work of all replicas, from 0.1 to 0.9."""
    prompts_s, answers_s = _work(scenario, wanted)
    return min(max(prompts_s / (prompts_s + answers_s), 0.1), 0.9) if prompts_s + answers_s else 0.5
