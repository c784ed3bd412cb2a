"""What it costs to have a scheduler in another process decide: latency and CPU, beside the same policy in-process.

    python bench/remote.py [--json] [--rate 500] [--seconds 10] [--endpoints 8] [--address HOST:PORT]

Open-loop arrivals at a constant rate go through the real pipeline and driver, without gateway and sockets. `in-process`
has the policy decide, `remote` asks a `fairlead scheduler serve` in a process of its own (or the scheduler at
--address). Printed is the time from `RequestArrived` to `Route`; the last line is one exchange after the other over the
same server.

JSON: {"routing": [{"rate_per_s", "in_process": ROW, "remote": ROW}], "exchange": {"us", "cpu_us"}}, where a
ROW has `routed`, `p50_ms` … `p999_ms`, CPU microseconds per request `here_us` and `there_us`, `answered`, `fell_back`,
`refused`.
"""

import argparse
import asyncio
import gc
import re
import subprocess
import sys
from random import Random
from time import perf_counter, process_time
from typing import Any

import numpy as np

from _output import tell
from _process import cpu_s
from fairlead.config.schema import SchedulerSettings
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import EndpointUp, FirstTokenSeen, MetricsSampled, RequestArrived, ResponseEnded
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import AskRemote, Route
from fairlead.core.remote import RemotePolicy
from fairlead.core.request import Request
from fairlead.core.scheduler import Pipeline
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.driver import Driver
from fairlead.plugins.policies.cost_model import CostModel
from fairlead.server.remote.client import RemoteClient
from fairlead.server.remote.messages import Ask, Asked, Batch, EndpointState, encode_ask
from fairlead.server.sdk.check import talk
from fairlead.testing.builders import request as built

_HOLD = 0.2
PERCENTILES = {"p50_ms": 50.0, "p90_ms": 90.0, "p99_ms": 99.0, "p999_ms": 99.9}


class Waiting:
    """A request that is routed, gets its first token and ends."""

    def __init__(self, rig: "Rig", number: int, sent: float) -> None:
        self._rig, self._number, self._sent = rig, number, sent

    def route(self, route: Route) -> None:
        self._rig.took.append(perf_counter() - self._sent)
        self._rig.driver.later(_HOLD / 2, self._rig.driver.feed, FirstTokenSeen(self._number))
        self._rig.driver.later(_HOLD, self._rig.driver.feed, ResponseEnded(request_id=self._number, status=200))

    def reject(self, reject: object) -> None:
        self._rig.rejected += 1

    def hold(self, seconds: float) -> None:
        """No flow control here."""

    def fail(self) -> None:
        self._rig.rejected += 1


class Rig:
    """Pipeline and driver on this loop."""

    def __init__(self, endpoints: int, remote: str, budget: float) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.took: list[float] = []
        self.rejected = 0
        self.fleet = Fleet()
        builtin = CostModel()
        self.policy = RemotePolicy("scheduler", builtin, lambda request, fleet, now: None, budget)
        chosen = self.policy if remote else builtin
        remotes = {"scheduler": self.policy} if remote else None
        self.pipeline = Pipeline(loop, Random(1), self.fleet, chosen, TokenEstimator(), remotes=remotes)
        self.driver = Driver(self.pipeline, loop, self, {AskRemote: self._ask})
        for i in range(endpoints):
            self.driver.feed(EndpointUp(Endpoint(f"e{i}", f"10.0.{i // 250}.{i % 250}:8000")))
        self.client: RemoteClient | None = None
        if remote:
            settings = SchedulerSettings(address=remote, budget=budget)
            self.client = RemoteClient("scheduler", settings, self.fleet, self.driver.feed)
            self.client.start()
        self.driver.start()

    def _ask(self, question: AskRemote) -> None:
        assert self.client is not None
        self.client.ask(question)

    def on_decision(self, record: object, duration_s: float) -> None:
        """Nobody counts here."""

    def on_outcome(self, record: object) -> None:
        """Nobody counts here."""

    def on_failure(self, instruction: str) -> None:
        """Nobody counts here."""

    async def run(self, rate: float, seconds: float) -> None:
        """Open loop: an arrival that comes late is sent at once, and its lateness counts."""
        while self.client is not None and self.client.welcome is None:
            await asyncio.sleep(0.01)
        requests = [built("turn " * 400 + str(i % 37) * 200, stream=True) for i in range(round(rate * seconds))]
        scrapes = asyncio.create_task(self._scrape())
        begin = perf_counter()
        for i, one in enumerate(requests):
            due = begin + i / rate
            while (left := due - perf_counter()) > 0:
                await asyncio.sleep(left)
            self._send(one, due)
        await asyncio.sleep(_HOLD + 0.3)
        scrapes.cancel()

    def _send(self, one: Request, due: float) -> None:
        self.driver.feed(RequestArrived(one, Waiting(self, one.id, perf_counter())))

    async def _scrape(self) -> None:
        table = self.fleet.table
        while True:
            for slot, endpoint in table.slots():
                sample = Sample(waiting=float(table.pending[slot]), running=float(table.inflight[slot]), kv_usage=0.2)
                self.driver.feed(MetricsSampled(endpoint.id, self.loop.time(), sample))
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        self.driver.close()


def start_scheduler() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "fairlead", "scheduler", "serve", "cost-model", "--listen", "127.0.0.1:0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    found = re.search(r" on (\S+)", child.stdout.readline())
    assert found is not None
    return child, found[1]


async def measure(options: argparse.Namespace, rate: float, remote: str, pid: int) -> dict[str, float]:
    rig = Rig(options.endpoints, remote, options.budget)
    gc.collect()
    before, theirs = process_time(), cpu_s(pid) if pid else 0.0
    await rig.run(rate, options.seconds)
    cpu = process_time() - before
    other = cpu_s(pid) - theirs if pid else 0.0
    took = np.array(rig.took) * 1e3
    await rig.close()
    return {
        "routed": len(took),
        **{name: float(np.percentile(took, share)) for name, share in PERCENTILES.items()},
        "here_us": cpu / len(took) * 1e6,
        "there_us": other / len(took) * 1e6,
        "answered": rig.policy.stats.answered if remote else 0,
        "fell_back": sum(rig.policy.stats.fallbacks.values()),
        "refused": rig.rejected,
    }


def question(number: int) -> bytes:
    """A batch of one request; the first is behind the hello."""
    return encode_ask(Ask(batch=Batch(number=number, now=1.0, requests=[Asked(request=built("x" * 2000))])))


async def exchanges(address: str, rounds: int) -> dict[str, float]:
    """One question after the other, as the gateway's client asks them."""
    async with talk(address) as say:
        await say.greet([EndpointState(slot=i, id=f"e{i}", address=f"10.0.0.{i}:1") for i in range(8)])
        begin, cpu = perf_counter(), process_time()
        for number in range(1, rounds + 1):
            say.send_bytes(question(number))
            await say.answer()
        return {"us": (perf_counter() - begin) / rounds * 1e6, "cpu_us": (process_time() - cpu) / rounds * 1e6}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    child = None
    address = options.address
    if not address:
        child, address = start_scheduler()
    pid = child.pid if child is not None else 0
    routing = []
    try:
        for rate in (options.rate, 1000.0):
            row: dict[str, Any] = {"rate_per_s": rate}
            for name, where in (("in_process", ""), ("remote", address)):
                print(f"{name} at {rate:g}/s …", file=sys.stderr)
                row[name] = await measure(options, rate, where, pid if where else 0)
            routing.append(row)
        exchange = await exchanges(address, options.exchanges)
    finally:
        if child is not None:
            child.terminate()
            child.wait()
    return {"endpoints": options.endpoints, "seconds": options.seconds, "routing": routing, "exchange": exchange}


def show(found: dict[str, Any]) -> None:
    print(f"{found['endpoints']} endpoints, {found['seconds']:g} s each; milliseconds from arrival to route\n")
    print(
        f"{'':<12}{'rate':>9}{'routed':>8}{'p50':>9}{'p90':>9}{'p99':>9}{'p99.9':>9}{'us here':>10}{'us there':>10}"
        f"{'answered':>9}{'fell':>7}{'refused':>8}"
    )
    for rates in found["routing"]:
        for name in ("in_process", "remote"):
            row = rates[name]
            print(
                f"{name:<12}{rates['rate_per_s']:>7.0f}/s{row['routed']:>8}"
                + "".join(f"{row[key]:>9.3f}" for key in PERCENTILES)
                + f"{row['here_us']:>10.0f}{row['there_us']:>10.0f}"
                f"{row['answered']:>9}{row['fell_back']:>7}{row['refused']:>8}"
            )
        added = (rates["remote"][key] - rates["in_process"][key] for key in PERCENTILES)
        print(f"{'added':<12}{'':>17}" + "".join(f"{value:>9.3f}" for value in added))
    exchange = found["exchange"]
    print(f"\none exchange after the other: {exchange['us']:.0f} us, {exchange['cpu_us']:.0f} us of CPU here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--endpoints", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.05, help="seconds")
    parser.add_argument("--exchanges", type=int, default=3000)
    parser.add_argument("--address", default="", help="of a scheduler that runs already")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    tell(found, options.json, show)


if __name__ == "__main__":
    main()
