"""What serving many pools in one process costs while nothing happens, and how soon a new pool is served.

    python bench/pools.py [--json] [--pools 50] [--pods 20]

`fairlead serve` runs as a process of its own, over all namespaces of `FakeKube`. The pods are addresses of one model
server that answers with a metrics page. A pool counts as served once the scheduler lists all its endpoints, by its
admin port; RSS and CPU are the kernel's figures.

JSON: {"pools", "pods", "start_s", "idle_cores", "rss_mb", "one_pool_rss_mb", "served_ms" (median), "served_worst_ms",
"freed_mb", "kept"}.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from _gateway import free_ports
from _output import tell
from _process import cpu_s, rss

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

IDLE_CORES, RSS_MB, SERVED_S = 0.15, 300.0, 1.0
_SETTLE_S, _IDLE_S, _NEW = 15.0, 20.0, 5
POOL_V1 = "inference.networking.k8s.io/v1"


def pool(name: str, port: int) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": f"team-{name}"},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}},
        },
    }


def pod(of: str, number: int, index: int) -> dict[str, Any]:
    return {
        "metadata": {"name": f"{of}-{index}", "namespace": f"team-{of}", "labels": {"app": of}},
        "status": {
            "phase": "Running",
            "podIP": f"127.1.{number}.{index + 1}",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def answer(text: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)


class Pages(asyncio.Protocol):
    """A model server's metrics and list of models."""

    METRICS = answer(
        b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        + b"".join(b"# HELP other_%d A metric that nobody reads.\nother_%d 1\n" % (i, i) for i in range(300))
    )
    MODELS = answer(b'{"data": [{"id": "llama"}]}')

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.MODELS if b"/v1/models" in data[:64] else self.METRICS)


class Scheduler:
    def __init__(self, directory: Path, url: str, pools: bool) -> None:
        self.admin = free_ports(1)[0]
        kubeconfig = directory / "kubeconfig"
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        cluster = {"name": "c", "cluster": {"server": url}}
        user = {"name": "u", "user": {"token": "t"}}
        document = {"current-context": "x", "contexts": [context], "clusters": [cluster], "users": [user]}
        kubeconfig.write_text(json.dumps(document))
        kubernetes: dict[str, Any] = {"kubeconfig": str(kubeconfig), "status": False}
        kubernetes |= {"namespaces": ["*"]} if pools else {"pool": "p0", "namespace": "team-p0"}
        config = {
            "gateway": "none",
            "kubernetes": kubernetes,
            "admin": {"port": self.admin},
            "extProc": {"host": "127.0.0.1", "port": free_ports(1)[0]},
            "log": {"level": "error"},
        }
        file = directory / "fairlead.json"
        file.write_text(json.dumps(config))
        self.process = subprocess.Popen([sys.executable, "-m", "fairlead", "serve", str(file)])

    async def page(self, path: str) -> str:
        def read() -> str:
            with urlopen(f"http://127.0.0.1:{self.admin}{path}", timeout=30) as answer:
                return str(answer.read().decode())

        try:
            return await asyncio.to_thread(read)
        except OSError:
            return ""

    async def lists(self, key: str, count: int) -> bool:
        page = await self.page(f"/debug/endpoints{f'?pool={key}' if key else ''}")
        return len(json.loads(page)["endpoints"]) == count if page else False

    def rss_mb(self) -> float:
        return rss(self.process.pid) / 1e6

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


async def until(condition: Any) -> float:
    began = time.monotonic()
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.005)
    return time.monotonic() - began


async def measure(pools: int, pods: int, directory: Path) -> dict[str, Any]:
    from fake_kube import FakeKube

    server = await asyncio.get_running_loop().create_server(Pages, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    kube = FakeKube()

    def put(number: int) -> None:
        name = f"p{number}"
        for index in range(pods):
            kube.put("v1", "pods", pod(name, number, index))
        kube.put(POOL_V1, "inferencepools", pool(name, port))

    for number in range(pools):
        put(number)
    await kube.start()
    alone = Scheduler(directory, kube.url, pools=False)
    try:
        await until(lambda: alone.lists("", pods))
        await asyncio.sleep(_SETTLE_S / 3)
        one_rss = alone.rss_mb()
    finally:
        alone.end()
    scheduler = Scheduler(directory, kube.url, pools=True)
    try:
        last = f"team-p{pools - 1}/p{pools - 1}"
        start_s = await until(lambda: scheduler.lists(last, pods))
        await asyncio.sleep(_SETTLE_S)
        cpu, began = cpu_s(scheduler.process.pid), time.monotonic()
        await asyncio.sleep(_IDLE_S)
        idle = (cpu_s(scheduler.process.pid) - cpu) / (time.monotonic() - began)
        used = scheduler.rss_mb()
        served = []
        for number in range(pools, pools + _NEW):
            put(number)
            key = f"team-p{number}/p{number}"
            served.append(await until(lambda key=key: scheduler.lists(key, pods)))
        grown = scheduler.rss_mb()
        for number in range(1, pools + _NEW):
            kube.drop(POOL_V1, "inferencepools", f"p{number}", f"team-p{number}")

        async def alone_again() -> bool:
            return "fairlead_pools 1\n" in await scheduler.page("/metrics")

        await until(alone_again)
        await asyncio.sleep(_SETTLE_S)
        freed = grown - scheduler.rss_mb()
    finally:
        scheduler.end()
    await kube.stop()
    server.close()
    worst = max(served)
    return {
        "pools": pools,
        "pods": pods,
        "start_s": start_s,
        "idle_cores": idle,
        "rss_mb": used,
        "one_pool_rss_mb": one_rss,
        "served_ms": sorted(served)[len(served) // 2] * 1e3,
        "served_worst_ms": worst * 1e3,
        "freed_mb": freed,
        "kept": idle <= IDLE_CORES and used <= RSS_MB and worst <= SERVED_S,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['pools']} pools of {found['pods']} pods in one process")
    print(f"start          {found['start_s']:7.1f} s until all are served")
    print(f"idle           {found['idle_cores']:7.3f} core")
    print(f"memory         {found['rss_mb']:7.0f} MB; one pool alone {found['one_pool_rss_mb']:.0f} MB")
    print(
        f"a new pool     {found['served_ms']:7.0f} ms until served, {found['served_worst_ms']:.0f} at worst of {_NEW}"
    )
    print(f"pools deleted  {found['freed_mb']:7.0f} MB given back")
    kept = "kept" if found["kept"] else "BROKEN"
    print(f"limits         {IDLE_CORES} core, {RSS_MB:.0f} MB, {SERVED_S:g} s: {kept}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--pools", type=int, default=50)
    parser.add_argument("--pods", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(options.pools, options.pods, Path(directory)))
    tell(found, options.json, show)
    sys.exit(0 if found["kept"] else 1)


if __name__ == "__main__":
    main()
