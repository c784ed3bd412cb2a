"""Requests that come together with one long beginning, simulated: how far is the default from the best split of them?

An agent fans out: k requests with the same beginning within 20 ms. Whoever goes where nobody computes that yet computes
it once more; whoever follows another waits. The default decides about one after the other. The best split is found by
trying them all: how many of the k go to each endpoint.

    python bench/groups.py                    all cells, in two processes: two CPU minutes
    python bench/groups.py --quick            three of them, and fewer sessions
    python bench/groups.py --json             {"cells": [...], "summary": {load: {figure: mean}}, "sessions": {...}}

Endpoints are those of the benchmarks. `idle`: nobody else is there. `warm`: one endpoint has the beginning. `loaded`:
others' requests, placed by the default, take about 60 % of two endpoints. Regret is the default's figure / that of the
best split, which is another one for each figure: the mean TTFT and E2E of the k, and the end of the last of them, which
is what the agent waits for. `all`: the mean E2E of everybody. Means over three draws; the best split is the best over
all of them, since nobody knows what others will send.

`sessions`: conversations on four endpoints with too little memory for all, whose users think for 1 s to 10 min. By the
mean time of thinking: mean TTFT, the share of prompts that was cached, and the shares that were believed to be cached
and were gone, or were cached and not believed to be. `exact` is the same with KV events that come at once.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import exp, log
from random import Random
from statistics import fmean
from typing import Any

from msgspec import Struct

from _output import tell
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Answer, Context, Picked, Policy
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.core.request import Request
from fairlead.lab.simulator.run import config_from, policy_from
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Scenario, World, replicas
from fairlead.lab.workload.arrivals import poisson, times
from fairlead.lab.workload.record import Record, arranged

BLOCK = 64
#: Tokens of each request's own, seconds until the group comes, seconds within which it does.
OWN, BEGIN_S, WITHIN_S = 192, 8.0, 0.02
SIZES, PREFIXES, ANSWERS = (2, 4, 8, 16, 32), (512, 4096, 16384), (1, 500)
#: (load, endpoints): `loaded` knows no symmetry, so there are many more splits.
POOLS = (("idle", 2), ("idle", 4), ("warm", 2), ("loaded", 2))
#: On four endpoints 32 requests have 300 splits.
MOST_OF_FOUR = 16
#: Of what others send, and of the default's chance.
DRAWS = 3
FIGURES = ("ttft", "e2e", "last", "all")
#: Mean seconds of thinking, and what is told of each: milliseconds, and shares of the prompts.
THINKS_S, SHARES = (1, 5, 20, 60, 180, 600), ("ttft", "cached", "gone", "unknown")
#: Sessions of each: memory for most of them, and for half.
PRESSURES = (20, 40)


class Cell(Struct, frozen=True):
    """One group."""

    load: str
    endpoints: int
    size: int
    prefix: int
    answer: int


class AsTold:
    """The group goes where it is told, all others where the policy says."""

    name = "as-told"

    def __init__(self, base: Policy, slots: dict[int, int]) -> None:
        self._base = base
        self._slots = slots

    def choose(self, request: Request, fleet: Fleet, context: Context) -> Answer:
        slot = self._slots.get(request.id)
        if slot is None:
            return self._base.choose(request, fleet, context)
        share = fleet.match(request)
        return Picked(slot) if share is None else Picked(slot, hit_share=share.item(slot), best_share=share.max())


def scenario(cell: Cell, draw: int) -> tuple[Scenario, list[int]]:
    """And the places of the group's requests among the records."""
    chance = Random(f"groups/{cell}/{draw}")
    shared = tuple(range(cell.prefix // BLOCK))
    fresh = iter(range(10_000, 10_000_000, 1_000))

    def record(name: str, at_s: float, begins: tuple[int, ...], own: int, answer: int) -> Record:
        ids, tokens = range(first := next(fresh), first + own // BLOCK), len(begins) * BLOCK + own
        return Record(
            id=name, arrival_us=int(at_s * 1e6), in_tokens=tokens, out_tokens=answer, max_tokens=answer,
            block_size=BLOCK, hash_ids=(*begins, *ids),
        )  # fmt: skip

    records = [
        record(f"group {i}", BEGIN_S + WITHIN_S * i / cell.size, shared, OWN, cell.answer) for i in range(cell.size)
    ]
    if cell.load == "warm":
        records.append(record("before", 0.0, shared, OWN, 50))
    if cell.load == "loaded":
        arrivals = times(poisson(2.2 * cell.endpoints), chance, seconds=BEGIN_S + 12.0)
        records += [
            record(f"other {i}", at_s, (), chance.randrange(640, 6400), chance.randrange(50, 450))
            for i, at_s in enumerate(arrivals)
        ]
    workload = arranged("group", records)
    places = [i for i, each in enumerate(workload.records) if each.id.startswith("group")]
    return Scenario(name="group", workload=workload, replicas=replicas(cell.endpoints, block_size=BLOCK)), places


def splits(cell: Cell) -> Iterator[tuple[int, ...]]:
    """How many go to each endpoint. Where endpoints are alike, the first is given the most."""
    alike = {"idle": 0, "warm": 1, "loaded": cell.endpoints}[cell.load]

    def parts(left: int, places: int, most: int) -> Iterator[tuple[int, ...]]:
        if places == 1:
            if left <= most:
                yield (left,)
            return
        place = cell.endpoints - places
        for count in range(min(left, most), -1, -1):
            for rest in parts(left - count, places - 1, count if place >= alike else left):
                yield (count, *rest)

    return parts(cell.size, cell.endpoints, cell.size)


def figures(simulation: Simulation, places: Sequence[int]) -> list[float]:
    simulation.run()
    group = [simulation.jobs[place] for place in places]
    assert all(job.status == "done" for job in simulation.jobs)
    last = max(job.ended_at for job in group) - min(job.arrived for job in group)
    return [
        fmean(job.ttft_ms for job in group),
        fmean(job.e2e_ms for job in group),
        last * 1e3,
        fmean(job.e2e_ms for job in simulation.jobs if job.record.id != "before"),
    ]


def in_turns(split: Sequence[int]) -> Iterator[int]:
    """Endpoints of the group's requests, in the order of their arrival."""
    left = list(split)
    while any(left):
        for slot, count in enumerate(left):
            if count:
                left[slot] -= 1
                yield slot


def judge(cell: Cell) -> dict[str, Any]:
    """Means over the draws, of the default and of each split: the best one must be known before it begins."""
    config, _ = config_from("policy: default\n")
    default: list[list[float]] = []
    split_default: list[list[int]] = []
    tried: dict[tuple[int, ...], list[list[float]]] = {}
    for draw in range(DRAWS):
        made, places = scenario(cell, draw)
        simulation = Simulation(made, config, draw)
        default.append(figures(simulation, places))
        # The first endpoint of a split is the one that has the beginning, or is given it first by the default.
        chosen = simulation.jobs[0 if cell.load == "warm" else places[0]].server
        order = [chosen, *(slot for slot in range(cell.endpoints) if slot != chosen)]
        servers = [simulation.jobs[place].server for place in places]
        split_default.append([servers.count(slot) for slot in order])
        if draw and cell.load != "loaded":
            continue  # nothing else is drawn
        for split in splits(cell):
            slots = {place + 1: order[slot] for place, slot in zip(places, in_turns(split), strict=True)}
            if cell.load == "warm":
                slots[1] = chosen
            run = Simulation(made, AsTold(policy_from("policy: default\n"), slots), draw)
            tried.setdefault(split, []).append(figures(run, places))
    means = {split: _means(runs) for split, runs in tried.items()}
    best = {name: min(means, key=lambda split, i=i: means[split][i]) for i, name in enumerate(FIGURES)}
    least = {name: means[best[name]][i] for i, name in enumerate(FIGURES)}
    found = dict(zip(FIGURES, _means(default), strict=True))
    return {
        "cell": {name: getattr(cell, name) for name in cell.__struct_fields__},
        "default": found,
        "best": least,
        "default_splits": split_default,
        "best_split": best,
        "regret": {name: found[name] / least[name] for name in FIGURES},
    }


def _means(runs: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*runs, strict=True)]


def thinking(count: int, seconds: float) -> list[Record]:
    """`count` sessions for each time of thinking, which go on until a prompt has 12,000 tokens, and begin anew."""
    chance, records, fresh = Random("thinking"), list[Record](), iter(range(0, 10**9, 100))

    def blocks(least: int, most: int) -> tuple[int, ...]:
        return tuple(range(first := next(fresh), first + chance.randrange(least, most)))

    systems = [blocks(16, 17) for _ in range(8)]
    for mean_s, session in product(THINKS_S, range(count)):
        at_s, ids, parent = chance.random() * (mean_s + 60.0), (), ""
        while at_s < seconds:
            ids = ids + blocks(2, 6) if ids else chance.choice(systems) + blocks(20, 90)
            thinks_s = chance.expovariate(1.0 / mean_s)
            records.append(
                Record(
                    id=str(len(records)), session=f"{mean_s} {session}", parent=parent, think_ms=thinks_s * 1e3,
                    arrival_us=int(at_s * 1e6), in_tokens=len(ids) * BLOCK, out_tokens=200, max_tokens=200,
                    block_size=BLOCK, hash_ids=ids,
                )
            )  # fmt: skip
            parent = records[-1].id
            at_s += thinks_s + 5.0
            if len(ids) * BLOCK > 12_000:
                ids, parent = (), ""
    return records


def sessions(case: tuple[int, float, float]) -> dict[str, list[float]]:
    """By time of thinking: `SHARES`. `case`: sessions of each, seconds, and how late KV events are (-1 = none)."""
    count, seconds, lag_ms = case
    hits: dict[int, float] = {}

    def watch(record: DecisionRecord | OutcomeRecord | StallRecord) -> None:
        if isinstance(record, DecisionRecord):
            hits[record.request.id] = record.hit_tokens / record.request.prompt_tokens

    made = Scenario(
        name="sessions",
        workload=arranged("sessions", thinking(count, seconds), "think"),
        replicas=replicas(4, block_size=BLOCK, kv_tokens=150_000),
        world=World(kv_lag_ms=lag_ms),
    )
    config, _ = config_from("policy: default\n")
    simulation = Simulation(made, config, watch=watch)
    simulation.run()
    found = {}
    for mean_s in THINKS_S:
        jobs = [job for job in simulation.jobs if job.record.parent and job.record.session.startswith(f"{mean_s} ")]
        rows = [(job.ttft_ms, job.cached_tokens / job.record.in_tokens, hits[job.index + 1]) for job in jobs]
        each = [(ttft, real, max(told - real, 0.0), max(real - told, 0.0)) for ttft, real, told in rows]
        if each:
            found[str(mean_s)] = _means(each)
    return found


def geomean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))


def show(found: dict[str, Any]) -> None:
    rows = found["cells"]
    print(f"regret over {len(rows)} cells: geometric mean (worst)\n")
    print(f"{'':<16}" + "".join(f"{name:>16}" for name in FIGURES))
    for what in ("load", "size", "prefix", "answer"):
        for value in dict.fromkeys(row["cell"][what] for row in rows):
            some = [row["regret"] for row in rows if row["cell"][what] == value]
            cells = [f"{geomean([r[f] for r in some]):.3f} ({max(r[f] for r in some):.2f})" for f in FIGURES]
            print(f"{what + ' ' + str(value):<16}" + "".join(f"{cell:>16}" for cell in cells))
    print("\nthe worst by the last one's end, and by mean TTFT")
    for figure in ("last", "ttft"):
        for row in sorted(rows, key=lambda row: -row["regret"][figure])[:6]:
            times = f"{row['regret'][figure]:.2f} {row['default'][figure]:.0f} ms, best {row['best'][figure]:.0f}"
            print(f"{figure} {times}: {row['cell']} {row['default_splits']} instead of {row['best_split'][figure]}")
    for name, by_think in found["sessions"].items():
        print(f"\n{name + ' sessions of each':<28}" + "".join(f"{share:>10}" for share in SHARES))
        for think, (ttft, *shares) in by_think.items():
            print(f"{think + ' s between turns':<28}{ttft:>10.0f}" + "".join(f"{share:>10.1%}" for share in shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="three cells, and fewer sessions")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    cells = [Cell(*pool, *rest) for pool in POOLS for rest in product(SIZES, PREFIXES, ANSWERS)]
    cells = [cell for cell in cells if cell.endpoints == 2 or cell.size <= MOST_OF_FOUR]
    if options.quick:
        cells = [cell for cell in cells if (cell.endpoints, cell.size, cell.prefix, cell.answer) == (2, 4, 512, 1)]
    counts, seconds = ((3,), 60.0) if options.quick else (PRESSURES, 400.0)
    cases = {f"{count}{name}": (count, seconds, lag) for count in counts for name, lag in (("", -1.0), (" exact", 0.0))}
    with ProcessPoolExecutor(options.processes) as pool:
        by_case = pool.map(sessions, cases.values())
        rows = list(pool.map(judge, cells))
        told = dict(zip(cases, by_case, strict=True))
    summary = {
        load: {name: geomean([row["regret"][name] for row in rows if row["cell"]["load"] == load]) for name in FIGURES}
        for load in dict.fromkeys(cell.load for cell in cells)
    }
    tell({"cells": rows, "summary": summary, "sessions": told}, options.json, show)


if __name__ == "__main__":
    main()
