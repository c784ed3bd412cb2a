"""Several schedulers in front of one pool: what is lost in comparison with one, and what it costs to tell each other.

    python bench/replicas.py            tables
    python bench/replicas.py --json     {"us_per_request", "bytes_per_request", "scenarios", …}
    python bench/replicas.py --live kills --times 20    `fairlead serve --workers` with its Envoy instead (one of LIVE)

* `scenarios`: simulated; mean TTFT and E2E of one scheduler, of several that tell each other through a server
  (`shared`) or through files (`on one machine`), and of several that do not (`independent`), with their ratios to one.
  Means over seeds: the requests are the same, who decides and what else is left to chance is not.
* `lags`, `losses`: the agents before 4 and 8 schedulers, by milliseconds until the others hear, and by the share of
  messages that are lost.
* `bands`: three bands with two tenants each before an overloaded pool; by flow the share of the work that was done
  while requests came, in percent, and the mean TTFT of those requests.
* `us_per_request`: CPU time of a request of the pool with 66 blocks of prefix, for the scheduler that tells of it and
  one that hears of it together.
* `bytes_per_request`: what the scheduler that decides it sends, as fetched every 5 ms at 250 requests per second.
* `snapshot_ms`, `join_ms`: CPU time to make a snapshot with 512 prompts and the leases in flight, and to take it in.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ProcessPoolExecutor
from random import Random
from statistics import fmean
from typing import Any

from msgspec import structs

import _replicas_live as live
from _output import tell
from _replicated import Exchange, ReplicatedSimulation
from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.core.clock import VirtualClock
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import (
    EndpointUp,
    FirstTokenSeen,
    MetricsSampled,
    PeerHeard,
    PeerSnapshot,
    RequestArrived,
    ResponseEnded,
)
from fairlead.core.fleet import Fleet
from fairlead.core.prefix import ChainHasher
from fairlead.core.reports import Reports, SharedFleet
from fairlead.core.request import Request, Usage
from fairlead.core.scheduler import Pipeline
from fairlead.lab.simulator.result import summarise
from fairlead.lab.simulator.run import config_from, policy_text
from fairlead.lab.simulator.scenarios import QUALITY, cut, scenario
from fairlead.lab.simulator.world import Scenario, replicas
from fairlead.lab.workload.record import Record, Workload

#: Requests of a scenario, at most.
HEAD = 1500
#: Several schedulers, and the lag that they are measured with.
COUNTS = ((2, 10.0), (4, 10.0), (8, 50.0))
LAGS = (0.0, 10.0, 25.0, 50.0, 100.0)
LOSSES = (0.0, 0.01, 0.1)
Run = tuple[str, Exchange, int, int]
ONE = Exchange(schedulers=1)


def _run(run: Run) -> dict[str, float]:
    """One simulation, in a process of its own."""
    name, exchange, seed, head = run
    made = scenario(name)
    made = structs.replace(made, name=name, workload=cut(made.workload, head))
    config, registry = config_from(policy_text("default"))
    simulation = ReplicatedSimulation(made, config, exchange, seed, registry=registry)
    simulation.run()
    summary = summarise(simulation)
    return {
        "ttft_ms": summary.ttft_mean_ms,
        "e2e_ms": summary.e2e_mean_ms,
        "hit_rate": summary.prefix_hit_rate,
        "bytes_per_request": simulation.bytes / summary.requests,
    }


#: Priority, tenant, and requests per second: more than four servers can do. The last tenant of the middle band wants
#: more than its share, and the lowest band gets what is left.
FLOWS = ((2, "a", 2.0), (2, "b", 4.0), (1, "a", 2.0), (1, "b", 2.5), (0, "a", 3.0), (0, "b", 3.0))


def overloaded(seconds: float, seed: int) -> Scenario:
    """Prompts of 4,000 to 8,000 tokens with nothing in common, and 20 to 60 tokens out."""
    chance, records = Random(f"bands/{seed}"), list[Record]()
    for priority, tenant, rate in FLOWS:
        at = chance.expovariate(rate)
        while at < seconds:
            sizes = {"in_tokens": chance.randrange(4000, 8000), "out_tokens": chance.randrange(20, 60)}
            name = f"{priority}{tenant}{len(records)}"
            records.append(Record(id=name, arrival_us=int(at * 1e6), tenant=tenant, priority=priority, **sizes))
            at += chance.expovariate(rate)
    records.sort(key=lambda record: record.arrival_us)
    return Scenario(name="bands", workload=Workload(name="bands", records=records), replicas=replicas(4))


def _bands(run: tuple[Exchange, int, float]) -> dict[str, float]:
    exchange, seed, seconds = run
    config, registry = config_from(policy_text("default"))
    simulation = ReplicatedSimulation(overloaded(seconds, seed), config, exchange, seed, registry=registry)
    simulation.run()
    last = max(job.arrived for job in simulation.jobs)
    done = [job for job in simulation.jobs if job.status == "done" and job.ended_at <= last]
    tokens = sum(job.record.in_tokens + job.record.out_tokens for job in done)
    row = {"requests": float(len(done))}
    for priority, tenant, _ in FLOWS:
        own = [job for job in done if (job.record.priority, job.record.tenant) == (priority, tenant)]
        share = sum(job.record.in_tokens + job.record.out_tokens for job in own) / tokens
        row[f"{priority}{tenant} share"] = 100.0 * share
        row[f"{priority}{tenant} ttft_ms"] = fmean(job.ttft_ms for job in own) if own else 0.0
    return row


def bands(seeds: int, processes: int, seconds: float) -> dict[str, dict[str, float]]:
    """By how many schedulers there are."""
    kinds = {"1": ONE, "4 shared": Exchange(schedulers=4), "4 independent": Exchange(schedulers=4, shared=False)}
    runs = [(exchange, seed, seconds) for exchange in kinds.values() for seed in range(seeds)]
    with ProcessPoolExecutor(processes) as pool:
        found = dict(zip(runs, pool.map(_bands, runs), strict=True))
    rows = {kind: [found[exchange, seed, seconds] for seed in range(seeds)] for kind, exchange in kinds.items()}
    return {kind: {key: round(fmean(row[key] for row in own), 2) for key in own[0]} for kind, own in rows.items()}


class Runs:
    """Each simulation once, several at a time."""

    def __init__(self, seeds: int, head: int, processes: int) -> None:
        self._seeds, self._head, self._processes = seeds, head, processes

    def means(self, wanted: Iterable[tuple[str, Exchange]]) -> Callable[[str, Exchange], dict[str, float]]:
        """Scenario and exchange → means over the seeds."""
        runs = [(name, exchange, seed, self._head) for name, exchange in wanted for seed in range(self._seeds)]
        with ProcessPoolExecutor(self._processes) as pool:
            found = dict(zip(runs, pool.map(_run, runs), strict=True))

        def mean(name: str, exchange: Exchange) -> dict[str, float]:
            rows = [found[name, exchange, seed, self._head] for seed in range(self._seeds)]
            return {key: fmean(row[key] for row in rows) for key in rows[0]}

        return mean


def compare(names: list[str], runs: Runs) -> dict[str, Any]:
    """By scenario, "1", "2 shared", …"""
    many = {"1": ONE}
    for count, lag_ms in COUNTS:
        many[f"{count} shared"] = Exchange(schedulers=count, lag_ms=lag_ms)
        many[f"{count} independent"] = Exchange(schedulers=count, shared=False)
    many["4 on one machine"] = Exchange(schedulers=4, at_once=True)
    mean = runs.means([(name, exchange) for name in names for exchange in many.values()])
    return {name: _beside({key: mean(name, exchange) for key, exchange in many.items()}) for name in names}


def curves(runs: Runs, counts: tuple[int, ...], quick: bool) -> dict[str, Any]:
    """What lag and loss cost the agents, by number of schedulers. `quick`: one lag, one loss."""
    most = 1 if quick else None
    lags = {f"{n} at {lag:g} ms": Exchange(schedulers=n, lag_ms=lag) for n in counts for lag in LAGS[:most]}
    losses = {f"{n} losing {loss:.0%}": Exchange(schedulers=n, loss=loss) for n in counts for loss in LOSSES[:most]}
    mean = runs.means([("agents", exchange) for exchange in {ONE, *lags.values(), *losses.values()}])
    return {
        part: _beside({"1": mean("agents", ONE)} | {key: mean("agents", of) for key, of in exchanges.items()})
        for part, exchanges in (("lags", lags), ("losses", losses))
    }


def _beside(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    one = rows["1"]
    for row in rows.values():
        row["ttft_ratio"], row["e2e_ratio"] = row["ttft_ms"] / one["ttft_ms"], row["e2e_ms"] / one["e2e_ms"]
    return {key: {name: round(value, 4) for name, value in row.items()} for key, row in rows.items()}


# What it costs.


def _pipeline(clock: VirtualClock, fleet: type[Fleet]) -> Pipeline:
    made = build_pipeline(
        load("flowControl: {enabled: false}\n", need_endpoints=False), clock, Random(1), fleet=fleet()
    )
    page = Sample(waiting=0.0, running=0.0, block_size=16, num_blocks=40_000)
    for number in range(8):
        made.handle(EndpointUp(Endpoint(f"default/vllm-{number}-5d8f7c9b4-x2x7q", f"10.0.0.{number}:8000")))
        made.handle(MetricsSampled(f"default/vllm-{number}-5d8f7c9b4-x2x7q", 0.0, page))
    return made


def _requests(count: int) -> list[Request]:
    """Conversations of 20 turns behind ten system prompts."""
    cut_up, chance = ChainHasher(), Random(2)
    systems = [chance.randbytes(12_000) for _ in range(10)]
    texts = [systems[number % 10] + Random(number).randbytes(24_000) for number in range(200)]
    turns = [(number % 200, number // 200 % 20) for number in range(count)]
    chains = [cut_up.chain(b"m", texts[who][: 12_000 + 1200 * (turn + 1)]) for who, turn in turns]
    sizes = [chain.ends[-1] for chain in chains]
    return [
        Request(number, 0.0, prompt_tokens=size // 4, prompt_bytes=size, prefix=chain, stream=True)
        for number, (size, chain) in enumerate(zip(sizes, chains, strict=True), 1)
    ]


def costs(count: int, passes: int) -> dict[str, float]:
    """One of two schedulers decides all, and the other one hears of it. The quietest pass counts."""
    rows = [_told_and_heard(_requests(count)) for _ in range(passes)]
    return {key: round(min(row[key] for row in rows), 2) for key in rows[0]}


def _timed(work: Callable[[], object]) -> float:
    """Seconds of CPU time. The clock itself takes long, so whole passes are measured."""
    gc.collect()
    gc.disable()
    begin = time.thread_time()
    work()
    taken = time.thread_time() - begin
    gc.enable()
    return taken


def _told_and_heard(requests: list[Request]) -> dict[str, float]:
    clock = VirtualClock(1000.0)
    alone, decides, hears = (_pipeline(clock, kind) for kind in (Fleet, SharedFleet, Fleet))
    reports: Reports = decides.fleet.reports  # type: ignore[attr-defined]
    payloads: list[bytes] = []

    def serve(pipeline: Pipeline, tell: Callable[[float], object]) -> None:
        for request in requests:
            pipeline.handle(RequestArrived(request))
            pipeline.handle(FirstTokenSeen(request.id - 20))
            end = ResponseEnded(request_id=request.id - 100, status=200, usage=Usage(completion_tokens=100))
            pipeline.handle(end)
            clock.now += 0.004
            tell(clock.now)

    def hear() -> None:
        for payload in payloads:
            clock.now += 0.004
            hears.handle(PeerHeard("peer", payload))

    plain_s = _timed(lambda: serve(alone, lambda now: None))
    told_s = _timed(lambda: serve(decides, lambda now: payloads.append(reports.batch(now)))) - plain_s
    heard_s = _timed(hear)
    snapshot_s = _timed(lambda: payloads.append(b"".join(reports.snapshot())))
    joiner = _pipeline(clock, Fleet)
    join_s = _timed(lambda: joiner.handle(PeerSnapshot("peer", payloads[-1])))
    size = len(payloads.pop())
    told_us, heard_us = told_s / len(requests) * 1e6, heard_s / len(requests) * 1e6
    return {
        "us_per_request": told_us + heard_us,
        "told_us": told_us,
        "heard_us": heard_us,
        "bytes_per_request": sum(map(len, payloads)) / len(requests),
        "snapshot_ms": snapshot_s * 1e3,
        "join_ms": join_s * 1e3,
        "snapshot_bytes": size,
    }


def show(result: dict[str, Any]) -> None:
    for name, rows in {**result["scenarios"], **{part: result[part] for part in ("lags", "losses")}}.items():
        print(f"{name:22} {'TTFT ms':>9} {'E2E ms':>9} {'hits':>6} {'TTFT':>7} {'E2E':>7}   of one")
        for key, row in rows.items():
            print(
                f"  {key:20} {row['ttft_ms']:9,.0f} {row['e2e_ms']:9,.0f} {row['hit_rate']:6.1%}"
                f" {row['ttft_ratio']:7.3f} {row['e2e_ratio']:7.3f}"
            )
    for kind, row in result["bands"].items():
        print(f"bands, {kind:14} " + ", ".join(f"{key} {value:,.1f}" for key, value in row.items()))
    print(f"telling {result['told_us']:.1f} µs and hearing {result['heard_us']:.1f} µs per request (target 30 in all)")
    print(f"{result['bytes_per_request']:.0f} bytes per request (target 400)")
    print(
        f"a snapshot of {result['snapshot_bytes']:,.0f} bytes: made in {result['snapshot_ms']:.1f} ms,"
        f" taken in within {result['join_ms']:.1f} ms"
    )


#: What is measured live, and at how many requests a second.
LIVE: dict[str, tuple[Callable[[int, float], Coroutine[Any, Any, dict[str, Any]]], float]] = {
    "kills": (live.kills, 200.0),
    "restarts": (live.restarts, 100.0),
    "valkey": (live.valkey, 200.0),
    "bands": (live.bands, 60.0),
    "compare": (live.compare, 100.0),
    "throughput": (live.throughput, 0.0),
}


def show_live(result: dict[str, Any]) -> None:
    for name, row in result.items():
        print(f"{name:24} {row if not isinstance(row, dict) else ''}")
        for key, value in row.items() if isinstance(row, dict) else ():
            print(f"    {key:20} {f'{value:,.2f}' if isinstance(value, float) else value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="one scenario, few requests, one seed")
    parser.add_argument("--scenario", action="append", choices=QUALITY, help="instead of all nine")
    parser.add_argument("--seeds", type=int, default=3, help="of each simulation (default 3)")
    parser.add_argument("--head", type=int, default=HEAD, help=f"requests of each (default {HEAD})")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--live", choices=LIVE, help="real processes instead of simulations")
    parser.add_argument("--times", type=int, default=1, help="how often what is live is repeated")
    parser.add_argument("--rate", type=float, help="requests a second of what is live")
    arguments = parser.parse_args()
    if arguments.live:
        measure, rate = LIVE[arguments.live]
        tell(asyncio.run(measure(arguments.times, arguments.rate or rate)), arguments.json, show_live)
        return
    quick = arguments.quick
    runs = Runs(1 if quick else arguments.seeds, 10 if quick else arguments.head, arguments.processes)
    names = arguments.scenario or (["agents"] if quick else list(QUALITY))
    found = costs(120 if quick else 4000, 1 if quick else 5)
    found |= {"scenarios": compare(names, runs), **curves(runs, (4,) if quick else (4, 8), quick)}
    found["bands"] = bands(1 if quick else arguments.seeds, arguments.processes, 6.0 if quick else 60.0)
    tell(found, arguments.json, show)


if __name__ == "__main__":
    main()
