"""One run: a fresh Fairlead in front of the pool, one conversation workload through it, one row of figures."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from _gateway import environment, free_ports, wait_for
from _real_pool import ADAPTERS, MODEL, Home, Pool, family_cpu_s, set_group_nice
from _real_table import calibration, shares, spread
from fairlead.lab.load.report import summarise
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, RunResult
from fairlead.lab.load.workload import OpenLoop, Recorded, Replay
from fairlead.lab.simulator.journal import JournaledDecision, decisions, one_run
from fairlead.lab.workload.conversation import Conversation, conversation
from fairlead.lab.workload.record import Record

#: Prompts of 670 tokens of which 448 are one of a few system prompts, answers of 30: what a small engine can bear. And
#: four times as much for a large model on a GPU.
SHAPES = {
    "28m": Conversation(
        systems=6,
        system_tokens=448,
        turns=3,
        first_tokens=150,
        turn_tokens=40,
        output_tokens=30,
        gap_s=4,
        max_tokens=1600,
    ),
    "8b": Conversation(
        systems=16,
        system_tokens=2048,
        turns=3,
        first_tokens=500,
        turn_tokens=150,
        output_tokens=40,
        gap_s=4,
        max_tokens=6000,
    ),
}
WARM_REQUESTS, FAULT_S = 60, 10.0
FRONT_NICE = -20
#: Requests after a fault is over; and how often the requests asked for may be exceeded until it is.
AFTER, LONGEST = 60, 5
#: Envoy tells the end of a request up to so long after it.
SETTLED_S = 1.5
#: A history of 10,000 batches takes a second or two.
CAUGHT_UP_S = 60.0


class Case(Struct, frozen=True):
    """What identifies a run. `policy` may end with `+events` (KV events), `+warm` (traffic before), `+at-once` (no flow
    control), `+NAME=NUMBER` (a parameter of the policy), and with `@REVISION`, whose sources are used."""

    policy: str
    rate: float
    seed: int
    requests: int
    fault: str = "none"
    adapters: bool = False
    engine: str = "vllm"
    #: Of the model: a key of `SHAPES`.
    size: str = "28m"
    #: Whether each server has a core of its own.
    pinned: bool = False

    @property
    def key(self) -> str:
        words = [self.policy, f"{self.rate:g}rps", f"seed{self.seed}", f"n{self.requests}", self.fault]
        words += ["adapters"] * self.adapters
        words += ["pinned"] * self.pinned
        words += [self.engine] * (self.engine != "vllm") + [self.size] * (self.size != "28m")
        return "_".join(words)


def scheduling(policy: str, options: Sequence[str]) -> dict[str, Any]:
    """What a configuration says of these."""
    parameters = {name: float(value) for name, equals, value in (o.partition("=") for o in options) if equals}
    document: dict[str, Any] = {"policy": {"type": policy, "parameters": parameters} if parameters else policy}
    return document | ({"flowControl": {"enabled": False}} if "at-once" in options else {})


def traffic(case: Case) -> list[Record]:
    """The same for every policy. Turns come in the order of their conversations, at exactly the rate (Poisson)."""
    rate = 1.0
    made = conversation(
        SHAPES[case.size], seconds=60.0 + case.requests / rate, rate=rate, seed=case.seed, dispatch="timestamp"
    )
    # The first minute has only first turns in it.
    steady = [record for record in made.records if record.arrival_us > 30e6][: case.requests]
    chance = Random(f"arrivals/{case.seed}/{case.rate}")
    at, records = 0.0, []
    for record in steady:
        at += chance.expovariate(case.rate)
        lora = chance.choice(ADAPTERS) if case.adapters else ""
        records.append(replace(record, arrival_us=int(at * 1e6), lora=lora, session="", parent="", think_ms=0.0))
    return records


class Gateway:
    """`fairlead serve` with its embedded gateway, as a user would start it."""

    def __init__(self, case: Case, pool: Pool, home: Home, folder: Path, source: str) -> None:
        self.port, self.admin, ext_proc, als = free_ports(4)
        self.journal = folder / "journal"
        self.journal.mkdir(parents=True, exist_ok=True)
        policy, *options = case.policy.partition("@")[0].split("+")
        document: dict[str, Any] = {
            **scheduling(policy, options),
            "gateway": {"host": "127.0.0.1", "port": self.port, "concurrency": 1},
            "extProc": {"host": "127.0.0.1", "port": ext_proc},
            "als": {"port": als},
            "admin": {"port": self.admin},
            "endpoints": [{"name": s.name, "address": "127.0.0.1", "port": s.port} for s in pool.servers],
            "journal": {"path": str(self.journal)},
            "log": {"level": "warning"},
            "seed": case.seed,
            "state": {"enabled": False},
        }
        self._events, self._servers = "events" in options, len(pool.servers)
        if self._events:
            document["kvEvents"] = {"enabled": True}
            document["tokens"] = {"models": {"*": {"modelPath": str(home.model)}}}
        (folder / "fairlead.json").write_text(json.dumps(document, indent=2))
        self._folder, self._source = folder, source
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Gateway":
        log = self._folder / "fairlead.log"
        with log.open("wb") as file:
            command = [sys.executable, "-m", "fairlead", "serve", str(self._folder / "fairlead.json")]
            self._process = subprocess.Popen(
                command, env=environment(self._source), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        set_group_nice(self._process.pid, FRONT_NICE)
        problem = wait_for(f"http://127.0.0.1:{self.admin}/readyz", self._look)
        problem = problem or wait_for(f"{self.url}/v1/models", self._look)
        deadline = time.monotonic() + CAUGHT_UP_S
        while not problem and self._events and not self._caught_up():
            if time.monotonic() > deadline:
                problem = "the KV events published before are not read"
            time.sleep(0.1)
        if problem:
            self.__exit__()
            raise SystemExit(f"fairlead serve was not ready in time ({problem}):\n{log.read_text()[-2000:]}")
        return self

    def _caught_up(self) -> bool:
        """Whether what engines published before is read: a start has to, and a run is not about that."""
        self._look()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        connected = [line.endswith(" 1") for line in lines if line.startswith("fairlead_kv_feed_connected{")]
        behind = [line.endswith(" 1") for line in lines if line.startswith("fairlead_kv_feed_behind{")]
        return len(connected) == self._servers and all(connected) and not any(behind)

    def cpu_s(self) -> float:
        return family_cpu_s(self._process.pid) if self._process else 0.0

    def _look(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            words = (self._folder / "fairlead.log").read_text(errors="replace")[-2000:]
            raise SystemExit(f"fairlead serve ended with status {self._process.returncode}:\n{words}")

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def measure(case: Case, pool: Pool, home: Home, folder: Path, source: str) -> dict[str, Any]:
    """One run from nothing to its row. `source`: the folder with Fairlead's sources."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / "journal").glob("*.journal"):
        old.unlink()
    pool.forget()
    salt = secrets.randbits(32)
    load = os.getloadavg()[0]
    with Gateway(case, pool, home, folder, source) as gateway:
        if "warm" in case.policy.partition("@")[0].split("+"):
            asyncio.run(_send(gateway, traffic(_warm(case)), salt + 1))
        begin, start = _usage(pool, gateway), time.time()
        result, marks = asyncio.run(_measured(case, pool, gateway, salt))
        used = _usage(pool, gateway).since(begin)
        time.sleep(SETTLED_S)
    # A warm gateway has decided before.
    made = list(decisions(one_run(gateway.journal)))[-len(result.records) :]
    return {
        "key": case.key,
        **{name: getattr(case, name) for name in case.__struct_fields__},
        "at": round(start),
        "loadavg": [round(load, 2), round(os.getloadavg()[0], 2)],
        "salt": salt,
        **used,
        **_figures(result),
        **_decided(made, marks),
    }


def _warm(case: Case) -> Case:
    return replace(case, seed=case.seed + 1000, requests=WARM_REQUESTS)


class UntilHealed:
    """At the records' own times. Where a fault is not over by the end of the first `least`, more of them follow, until
    it is and `AFTER` came behind it."""

    def __init__(self, records: list[Record], least: int, fault: bool, marks: dict[str, float]) -> None:
        self._records, self._least, self._fault, self._marks = records, least, fault, marks

    def offsets(self) -> Iterator[float]:
        last = self._least
        for number, record in enumerate(self._records):
            if self._fault and "healed" not in self._marks:
                last = max(self._least, number + 1 + AFTER)
            if number >= last:
                return
            yield record.arrival_us * 1e-6


async def _measured(case: Case, pool: Pool, gateway: Gateway, salt: int) -> tuple[RunResult, dict[str, float]]:
    """`marks`: Unix times of what was done to server 0."""
    marks: dict[str, float] = {}
    fault = case.fault != "none"
    records = traffic(replace(case, requests=case.requests * LONGEST) if fault else case)
    arrivals = UntilHealed(records, case.requests, fault, marks)
    trouble = asyncio.create_task(_trouble(case, pool, records[case.requests - 1].arrival_us * 1e-6, marks))
    try:
        return await _send(gateway, records, salt, arrivals), marks
    finally:
        trouble.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trouble


async def _send(gateway: Gateway, records: list[Record], salt: int, arrivals: OpenLoop | None = None) -> RunResult:
    seconds = records[-1].arrival_us * 1e-6
    options = Options(requests=len(records), timeout_s=60.0, time_limit_s=seconds + 90.0)
    work = Replay(records, fallback_model=MODEL, extra={"ignore_eos": True, "temperature": 0}, seed=salt)
    return await run(gateway.url, work, arrivals or Recorded(records), options)


async def _trouble(case: Case, pool: Pool, seconds: float, marks: dict[str, float]) -> None:
    """After a quarter of the arrivals: `kill` (and start again), `hang` its engine, or `freeze` the whole server."""
    if case.fault == "none":
        return
    server = pool.servers[0]
    await asyncio.sleep(seconds / 4)
    marks["fault"] = time.time()
    if case.fault == "kill":
        await asyncio.to_thread(server.kill)
        server.start()
        while not await asyncio.to_thread(server.healthy):
            if not server.running():
                raise SystemExit(f"server {server.name} ended when it was started again")
            await asyncio.sleep(0.25)
    else:
        core = case.fault == "hang"
        server.signal(signal.SIGSTOP, core)
        try:
            await asyncio.sleep(FAULT_S)
        finally:
            server.signal(signal.SIGCONT, core)
    marks["healed"] = time.time()


def _figures(result: RunResult) -> dict[str, Any]:
    summary = summarise(result)
    failed = [record for record in result.records if record.error]
    return {
        "failed": summary["failed"],
        "failed_by_reason": summary["failed_by_reason"],
        #: Nothing of the answer had come: these could have been sent elsewhere.
        "failed_without_a_byte": sum(record.status != 200 or record.first_data == 0.0 for record in failed),
        "ttft_ms": spread([record.ttft() * 1e3 for record in result.records if not record.error]),
        "e2e_ms": spread([record.e2e() * 1e3 for record in result.records if not record.error]),
        "hit_rate": summary["prefix_hit_rate"],
        "duration_s": round(summary["duration_s"], 2),
        "lag_p99_ms": round(summary["send_lag_ms"]["p99"] or 0.0, 2),
        "valid": summary["valid"],
    }


def _decided(made: list[JournaledDecision], marks: dict[str, float]) -> dict[str, Any]:
    """Where requests went, and how good the forecasts were."""
    # Decisions have the scheduler's monotonic clock; all processes of a host share it.
    shift = time.time() - time.monotonic()
    places = [(entry.decision.at + shift, entry.decision.endpoint.rpartition("/")[2]) for entry in made]
    judged = [
        (entry.outcome.sent_ttft_ms, f.ttft_ms, f.low_ms, f.high_ms)  # forecasts are made when requests are sent
        for entry in made
        if entry.outcome is not None and entry.outcome.ttft_ms > 0 and (f := entry.decision.forecast) is not None
    ]
    asked = [entry.decision.request.model for entry in made]
    told: dict[str, Any] = {
        "shares": shares(place for _, place in places),
        "shares_by_model": {
            name: shares(place for model, (_, place) in zip(asked, places, strict=True) if model == name)
            for name in sorted(set(asked))
        },
        "forecast": calibration(judged),
    }
    if "fault" in marks:
        stopped, healed = marks["fault"], marks.get("healed", time.time())
        told["met_hung"] = sum(place == "e0" and stopped + 2 < at < healed for at, place in places)
        after = [place for at, place in sorted(places) if at >= healed]
        told["after"] = {"first_20": shares(after[:20]), "all": shares(after)}
    return told


class _Usage(Struct, frozen=True):
    """CPU seconds so far: of the servers, of the gateway with its scheduler, and of the whole machine."""

    servers: float
    gateway: float
    machine: float
    own: float
    at: float

    def since(self, begin: "_Usage") -> dict[str, float]:
        """`others_share`: what of the machine went to processes that are no part of the run."""
        servers, gateway = self.servers - begin.servers, self.gateway - begin.gateway
        others = self.machine - begin.machine - servers - gateway - (self.own - begin.own)
        whole = (self.at - begin.at) * (os.cpu_count() or 1)
        return {
            "servers_cpu_s": round(servers, 2),
            "gateway_cpu_s": round(gateway, 2),
            "others_share": round(max(others, 0.0) / whole, 3),
        }


def _usage(pool: Pool, gateway: Gateway) -> _Usage:
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]))
    busy = sum(fields[:3]) + sum(fields[5:8])
    servers = sum(server.cpu_s() for server in pool.servers)
    return _Usage(servers, gateway.cpu_s(), busy / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic())


@contextlib.contextmanager
def in_front() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does. Where the system allows it, load generator and gateway go before the
    servers: a core of theirs is no part of what is compared."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, FRONT_NICE)
        set_group_nice(os.getpid(), FRONT_NICE)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            set_group_nice(os.getpid(), 0)
