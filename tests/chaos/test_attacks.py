"""Hostile clients beside polite ones."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ch_site import MEMORY_MIB
from ch_trial import FULL, LASTS_S, LATER_S, WARM_S, Bounds, Row, quantile_ms, trial
from gw_http1 import Http1
from gw_messages import JSON, Ask, Broken
from gw_processes import Child, Serve, Stub

from fairlead.core.headers import FAIRNESS_HEADERS
from fairlead.lab.load.runner import run
from fairlead.lab.load.spec import Options
from fairlead.lab.load.workload import Chat, ClosedLoop

ATTACKERS = Path(__file__).parent / "support" / "ch_attackers.py"
Judge = Callable[[Row], None]
Starting = Callable[..., Awaitable[Serve]]
#: Series that a page of metrics may have after any number of made-up names.
MOST_SERIES = 5_000
#: Until the first answers nobody knows which tenant wants how much.
UNKNOWN_S = 1.0
#: How much later the slowest answers of a light tenant may come because of a heavy one.
TENANT_TIMES = 1.5
MODELS = """
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModel
metadata: {name: m}
spec: {modelName: renamed, criticality: Default, poolRef: {name: pool}, targetModels: [{name: Qwen/Qwen3-32B}]}
"""


def attack(envoy_mib: float | None = None) -> Bounds:
    """A minute later memory is what it was after a minute without it."""
    return Bounds(envoy_mib=envoy_mib, after_times=1.2, calm_s=WARM_S, after_s=LATER_S)


@pytest.fixture
def stub(tmp_path: Path, ending: Callable[[Child], None]) -> Stub:
    """A model server with the times of a real one, which knows only its own model."""
    made = Stub(tmp_path / "stub.log")
    ending(made)
    return made.start(1, "--time-ratio", "1")


@asynccontextmanager
async def attacked(directory: Path, kind: str, port: int, count: int) -> AsyncIterator[None]:
    """The attack is in force."""
    child = Child(f"{kind} from {count} clients", directory / f"{kind}.log")
    child.spawn(sys.executable, str(ATTACKERS), kind, str(port), str(count))
    try:
        await asyncio.to_thread(child.poll_until, lambda: "up" in child.said())
        yield
    finally:
        child.end(gently=False)


@pytest.mark.long_form
async def test_uploads_that_stop_short(
    memory_limit: tuple[list[str], str], own: Starting, tmp_path: Path, judged: Judge
) -> None:
    """Four times as much as there is memory for."""
    prefix, said = memory_limit
    serve = await own({}, *prefix)
    first = serve.envoy_pid()

    async def happens() -> None:
        async with attacked(tmp_path, "uploads", serve.port, 70 if FULL else 20):
            await asyncio.sleep(LASTS_S)

    row = await trial("70 idle uploads of 62 MB", serve, happens, attack(envoy_mib=MEMORY_MIB))
    row.note = said
    judged(row)
    assert serve.envoy_pid() == first, "it was not killed for memory"


@pytest.mark.long_form
async def test_messages_to_the_scheduler_that_never_end(own: Starting, tmp_path: Path, judged: Judge) -> None:
    serve = await own({})

    async def happens() -> None:
        port = int(serve.ext_proc.rpartition(":")[2])
        async with attacked(tmp_path, "streams", port, 20 if FULL else 6):
            await asyncio.sleep(LASTS_S)

    judged(await trial("unfinished ext_proc messages of 60 MiB", serve, happens, attack()))


@pytest.mark.long_form
async def test_readers_of_the_dearest_page(own: Starting, tmp_path: Path, judged: Judge) -> None:
    serve = await own({})

    async def happens() -> None:
        async with attacked(tmp_path, "decisions", int(serve.config["admin"]["port"]), 32):
            await asyncio.sleep(LASTS_S)

    judged(await trial("32 readers of /debug/decisions", serve, happens, attack()))


@pytest.mark.long_form
async def test_names_that_nobody_has(own: Starting, tmp_path: Path, judged: Judge) -> None:
    """And readers of the page that they would all be on."""
    serve = await own({})

    async def happens() -> None:
        async with attacked(tmp_path, "models", serve.port, 8):
            await asyncio.sleep(LASTS_S)
        async with attacked(tmp_path, "metrics", int(serve.config["admin"]["port"]), 32):
            await asyncio.sleep(LASTS_S)

    row = await trial("made-up model names, 32 scrapers", serve, happens, attack())
    page = (await serve.page("/metrics")).splitlines()
    series = sum(not line.startswith("#") for line in page)
    row.note = f"{series} series"
    if series > MOST_SERIES:
        row.problems.append(f"{series} series, at most {MOST_SERIES}")
    judged(row)


#: Spellings of a path that a model server may take for /v1/chat/completions.
SPELLINGS = [
    "/v1/chat%2Fcompletions", "/v1%2fchat/completions", "/v1/%63hat/completions", "/v1//chat/completions",
    "/v1/./chat/completions", "/v1/x/../chat/completions", "/v1/chat/completions/", "/v1\\chat\\completions",
    "/v1/chat/completions;a=b", "/v1/chat/completions%3Fa", "/V1/chat/completions", "/v1/chat%252Fcompletions",
]  # fmt: skip
#: Of vLLM, for its administrator.
ADMINISTRATION = [
    ("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/reset_prefix_cache"), ("POST", "/collective_rpc"), ("GET", "/metrics"), ("GET", "/server_info"),
]  # fmt: skip


async def reached(serve: Serve, method: str, path: str, model: str) -> bool:
    """Did a model server answer?"""
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "x-bench": "mode=json"}
    pieces = [json.dumps(chat).encode()] if method == "POST" else []
    async with Http1(serve.port) as client:
        got = await client.ask(Ask(method, path, fields=[JSON], pieces=pieces))
    return got.status == 200


async def test_no_spelling_goes_past_the_rules(own: Starting, tmp_path: Path, judged: Judge) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    serve = await own({"models": {"file": str(tmp_path / "models.yaml")}})
    assert await reached(serve, "POST", "/v1/chat/completions", "renamed")
    assert not await reached(serve, "POST", "/v1/chat/completions", "forbidden")
    row = Row(name="paths: spellings, administration")
    asked = [*(("POST", path, "forbidden") for path in SPELLINGS), *((*one, "renamed") for one in ADMINISTRATION)]
    row.problems = [f"{' '.join(one)} reached a model server" for one in asked if await reached(serve, *one)]
    row.requests = len(asked)
    judged(row)


@pytest.mark.long_form
async def test_clients_from_the_first_moment_on(own: Starting, stub: Stub, tmp_path: Path, judged: Judge) -> None:
    """A renamed model, asked for while everything starts: refused connections are right, wrong answers are not."""
    (tmp_path / "models.yaml").write_text(MODELS)
    serve = await own({"endpoints": stub.addresses, "models": {"file": str(tmp_path / "models.yaml")}})
    serve.end()
    row = Row(name="asked while it starts")
    starting = asyncio.create_task(asyncio.to_thread(serve.again))
    ask = Ask(path="/v1/completions", fields=[JSON], pieces=[b'{"model": "renamed", "prompt": "hi", "max_tokens": 1}'])
    while not starting.done() or row.polite < 50:
        async with Http1(serve.port) as client:
            with contextlib.suppress(Broken):
                got = await client.ask(ask)
                row.polite += 1
                if got.status != 200:
                    row.polite_failed += 1
                    row.errors[f"status_{got.status}"] = row.errors.get(f"status_{got.status}", 0) + 1
        await asyncio.sleep(0.01)
    await starting
    row.problems = ["wrong answers while it starts"] if row.polite_failed else []
    judged(row)


def tenant(name: str) -> Options:
    return Options(duration_s=LASTS_S, timeout_s=60.0, time_limit_s=LASTS_S + 60.0, headers={FAIRNESS_HEADERS[0]: name})


def asking(seed: int) -> Chat:
    return Chat(body_bytes=200, output_tokens=16, seed=seed, model="Qwen/Qwen3-32B")


@pytest.mark.long_form
async def test_a_tenant_with_sixty_workers(own: Starting, stub: Stub, judged: Judge) -> None:
    """Beside one with two, both with short prompts, under the default flow control."""
    serve = await own({"endpoints": stub.addresses, "flowControl": {}})
    target = f"http://127.0.0.1:{serve.port}"
    alone = (await run(target, asking(1), ClosedLoop(workers=2), tenant("light"))).records
    beside, heavy = await asyncio.gather(
        run(target, asking(2), ClosedLoop(workers=2), tenant("light")),
        run(target, asking(3), ClosedLoop(workers=60), tenant("heavy")),
    )
    known = min(record.scheduled for record in beside.records) + UNKNOWN_S
    light = [record for record in beside.records if record.scheduled > known]
    row = Row(name="tenant of 60 workers beside one of 2", requests=len(heavy.records), polite=len(light))
    row.failed = sum(bool(record.error) for record in heavy.records)
    row.polite_failed = sum(bool(record.error) for record in light)
    row.calm_p99_ms, row.p99_ms = quantile_ms(alone), quantile_ms(light)
    p50_alone, p50 = quantile_ms(alone, 0.5), quantile_ms(light, 0.5)
    row.note = f"p50 of the light one: {p50:.0f} ms beside ({len(light)} answers), {p50_alone:.0f} alone ({len(alone)})"
    for name, before, beside_ms in (("p50", p50_alone, p50), ("p99", row.calm_p99_ms, row.p99_ms)):
        if FULL and beside_ms > TENANT_TIMES * before:
            row.problems.append(
                f"the light tenant's {name} was {beside_ms:.0f} ms, at most {TENANT_TIMES:g} times that alone"
            )
    if row.polite_failed:
        row.problems.append(f"requests of the light tenant failed: {row.polite_failed}")
    judged(row)
