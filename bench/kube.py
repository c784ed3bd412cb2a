"""What following a large pool costs: processor time of a resync, memory, and a change's way to the endpoints.

    python bench/kube.py [--json] [--pods 1000]

The API server is `FakeKube` in a process of its own, over plain HTTP, so that only the follower is measured. Pods are
6.2 kB each, like those of a vLLM deployment with managed fields. The limits are what this part is allowed to cost.

JSON: {"pods", "events_up", "first_list_cpu_s", "resync_cpu_s" (best), "resync_worst_cpu_s", "change_ms", "memory_mb",
"code_mb", "steady_cores", "kept"}.
"""

import argparse
import asyncio
import gc
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from _output import tell
from _process import rss

RESYNC_CPU_S = 0.3
MEMORY_MB = 100.0
POOL_V1 = "inference.networking.k8s.io/v1"
_TIMES = 5


def pod(index: int) -> dict[str, Any]:
    """6.2 kB of JSON."""
    labels = {
        "app": "vllm",
        "pod-template-hash": "7d9c5b8f6c",
        "llm-d.ai/role": "decode",
        "llm-d.ai/model": "llama-3-8b",
    }
    container = {
        "name": "vllm",
        "image": "registry.example/vllm/vllm-openai:v0.32.0",
        "args": ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-num-seqs", "256", "--enable-prefix-caching"],
        "env": [{"name": f"VARIABLE_{i}", "value": f"a value of some length {i}"} for i in range(24)],
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}},
    }
    fields = {f"f:{name}": {".": {}, f"k:{i}": {}} for i, name in enumerate(["metadata", "spec", "status"] * 3)}
    managed = [{"manager": f"manager-{i}", "operation": "Update", "fieldsV1": {"f:x": fields}} for i in range(12)]
    return {
        "metadata": {
            "name": f"vllm-7d9c5b8f6c-{index:05d}",
            "namespace": "default",
            "labels": labels,
            "annotations": {"prometheus.io/scrape": "true", "padding": "x" * 1800},
            "managedFields": managed,
        },
        "spec": {"nodeName": f"node-{index // 8}", "containers": [container]},
        "status": {
            "phase": "Running",
            "podIP": f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}",
            "conditions": [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "ContainersReady")],
        },
    }


def serve(pipe: Connection, count: int) -> None:
    """The API server's process: answers commands of the pipe."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from fake_kube import FakeKube

    async def run() -> None:
        kube = FakeKube()
        spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}
        kube.put(POOL_V1, "inferencepools", {"metadata": {"name": "llama", "namespace": "default"}, "spec": spec})
        for index in range(count):
            kube.put("v1", "pods", pod(index))
        await kube.start()
        pipe.send(kube.url)
        while (command := await asyncio.to_thread(pipe.recv)) != "end":
            if command == "relist":
                kube.put("v1", "events", {"metadata": {"name": "x", "namespace": "default"}})
                kube.compact()
                kube.cut()
            else:
                kube.patch("v1", "pods", pod(0)["metadata"]["name"], command)
            pipe.send("done")
        await kube.stop()

    asyncio.run(run())


async def measure(pipe: Connection, url: str, count: int) -> dict[str, Any]:
    base = rss()
    from fairlead.pool.kube.auth import Access, FixedSecret, Secret, Where
    from fairlead.pool.kube.client import KubeClient
    from fairlead.pool.kube.objects import GROUP, Pool
    from fairlead.pool.kube.pods import PoolEndpoints

    imported = rss()
    events: list[object] = []
    client = KubeClient(Access(Where(url), FixedSecret(Secret())), Random(1))
    pods = PoolEndpoints(client, Pool("default", "llama", {}, ()), GROUP, events.append)
    started = time.process_time()
    task = asyncio.create_task(pods.run())
    await until(lambda: len(events) >= count)
    first, up = time.process_time() - started, len(events)
    stats = pods.reflectors["pods"].stats
    resyncs = []
    for turn in range(_TIMES):
        events.clear()
        before, started = stats.lists, time.process_time()
        await asyncio.to_thread(command, pipe, "relist")
        await until(lambda before=before: stats.lists > before)
        resyncs.append(time.process_time() - started)
        assert not events, f"resync {turn} moved endpoints"
    waits = [await change(pipe, events, ready) for ready in (False, True) * _TIMES]
    gc.collect()
    used = rss()
    started, began = time.process_time(), time.monotonic()
    await asyncio.sleep(3)
    share = (time.process_time() - started) / (time.monotonic() - began)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.close()
    scale = max(count / 1000, 1.0)
    return {
        "pods": count,
        "events_up": up,
        "first_list_cpu_s": first,
        "resync_cpu_s": min(resyncs),
        "resync_worst_cpu_s": max(resyncs),
        "change_ms": sorted(waits)[len(waits) // 2] * 1000,
        "memory_mb": (used - base) / 1e6,
        "code_mb": (imported - base) / 1e6,
        "steady_cores": share,
        "kept": min(resyncs) <= RESYNC_CPU_S * scale and (used - base) / 1e6 <= MEMORY_MB * scale,
    }


def show(found: dict[str, Any]) -> None:
    pods, own = found["pods"], found["memory_mb"] - found["code_mb"]
    print(f"first list     {found['first_list_cpu_s']:6.3f} s CPU, {pods} pods, {found['events_up']} endpoints up")
    print(
        f"resync         {found['resync_cpu_s']:6.3f} s CPU at best, {found['resync_worst_cpu_s']:.3f} at worst of "
        f"{_TIMES}; no event"
    )
    print(f"a change       {found['change_ms']:6.1f} ms from the API server's write to the event")
    print(f"memory         {found['memory_mb']:6.1f} MB: {found['code_mb']:.1f} for code, {own:.1f} for {pods} pods")
    print(f"steady state   {found['steady_cores'] * 100:6.2f} % of a core")
    kept = "kept" if found["kept"] else "BROKEN"
    print(f"limits         {RESYNC_CPU_S} s and {MEMORY_MB:.0f} MB per 1,000 pods: {kept}")


async def change(pipe: Connection, events: list[object], ready: bool) -> float:
    events.clear()
    began = time.monotonic()
    conditions = [{"type": "Ready", "status": str(ready)}]
    await asyncio.to_thread(command, pipe, {"status": {"conditions": conditions}})
    await until(lambda: bool(events))
    return time.monotonic() - began


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def command(pipe: Connection, what: object) -> None:
    pipe.send(what)
    pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--pods", type=int, default=1000)
    options = parser.parse_args()
    count = options.pods
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, count))
    process.start()
    try:
        found = asyncio.run(measure(ours, ours.recv(), count))
        ours.send("end")
        process.join(10)
    finally:
        process.kill()
    tell(found, options.json, show)
    sys.exit(0 if found["kept"] else 1)


if __name__ == "__main__":
    main()
