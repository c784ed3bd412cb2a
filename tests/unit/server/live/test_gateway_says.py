"""What the embedded gateway says of itself: how many requests nobody scheduled, and whether it asks us."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from ports import free_port

from fairlead.compat.load import load
from fairlead.gateway.envoy.admin import EnvoyAdmin, Vitals
from fairlead.gateway.health import ServingStatus
from fairlead.server.live.scheduler import Live, watch_gateway
from fairlead.server.observe.component_metrics import CALM_S, DOWN_S, GatewayMetrics, Tempo
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import histograms
from fairlead.server.observe.troubles import Troubles
from fairlead.server.running_gateway import RunningGateway

NAME = b"fairlead_unscheduled_requests_total"


class Gateway:
    """Envoy's admin page on a socket."""

    def __init__(self) -> None:
        self.text = "cluster.all_endpoints.upstream_rq_total: 40\ncluster.all_endpoints_grpc.upstream_rq_total: 2\n"
        self.hangs = False
        self.listens = True
        self._over = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def serve(self, path: Path) -> None:
        app = web.Application()
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/listeners", self._listeners)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()

    async def close(self) -> None:
        self._over.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listeners(self, request: web.Request) -> web.Response:
        where = {"socket_address": {"address": "127.0.0.1", "port_value": 1}}
        listed = [{"name": "gateway", "local_address": where}] if self.listens else []
        return web.json_response({"listener_statuses": listed})

    async def _stats(self, request: web.Request) -> web.Response:
        if self.hangs:
            await self._over.wait()
        return web.Response(text=self.text)


async def test_both_clusters_count_and_the_last_count_stays_while_it_is_away(tmp_path: Path) -> None:
    gateway, registry, path = Gateway(), Registry(), tmp_path / "admin.sock"
    refresh = watch_gateway([str(path)], None, registry, Troubles(registry, time.monotonic))
    assert refresh is not None
    await refresh()
    assert b"\n" + NAME + b" " not in registry.render(), "nobody has told yet"
    await gateway.serve(path)
    try:
        await refresh()
        assert b"\n" + NAME + b" 42" in registry.render()
        gateway.hangs = True
        await refresh()
        assert b"\n" + NAME + b" 42" in registry.render()
    finally:
        await gateway.close()
    await refresh()
    assert b"\n" + NAME + b" 42" in registry.render()


async def test_the_count_does_not_fall_back_when_the_gateway_or_a_scheduler_dies(tmp_path: Path) -> None:
    gateway, path, keep = Gateway(), tmp_path / "admin.sock", tmp_path / "counts.json"
    await gateway.serve(path)

    async def shown(registry: Registry, count: int) -> bytes:
        gateway.text = f"cluster.all_endpoints.upstream_rq_total: {count}\n{PRESSURE}: 40\n"
        refresh = watch_gateway([str(path)], keep, registry, Troubles(registry, time.monotonic))
        assert refresh is not None
        await refresh()
        page = registry.render()
        assert b"\nfairlead_gateway_heap_ratio 0.4\n" in page
        return page.partition(b"\n" + NAME + b" ")[2].partition(b"\n")[0]

    try:
        assert await shown(Registry(), 42) == b"42"
        assert await shown(Registry(), 3) == b"45", "another Envoy, another scheduler"
        assert await shown(Registry(), 5) == b"47"
        assert await shown(Registry(), 1) == b"48"
        keep.write_text("[1")
        assert await shown(Registry(), 7) == b"7"
    finally:
        await gateway.close()


@pytest.mark.parametrize("text", ["", "no such page\n", "cluster.all_endpoints.upstream_rq_total: many\n"])
async def test_other_answers_are_no_counts(tmp_path: Path, text: str) -> None:
    gateway = Gateway()
    gateway.text = text
    await gateway.serve(tmp_path / "admin.sock")
    try:
        assert await EnvoyAdmin(str(tmp_path / "admin.sock")).vitals() == Vitals(0, 0.0)
    finally:
        await gateway.close()


def test_who_has_no_gateway_shows_nothing() -> None:
    registry = Registry()
    assert watch_gateway((), None, registry, Troubles(registry, time.monotonic)) is None
    assert NAME not in registry.render()


async def test_a_removed_socket_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead.server.observe.component_metrics.DOWN_S", -1.0)
    registry, path = Registry(), tmp_path / "admin.sock"
    watch_gateway([str(path)], None, registry, troubles := Troubles(registry, time.monotonic))
    silent = "the embedded gateway does not answer (1 of 1 Envoys)"
    missing = f"{path} is missing; if a cleaner of old files removed it, restart fairlead serve"
    assert troubles.look()["gateway"] == f"{silent}: {missing}"
    path.touch()
    assert troubles.look()["gateway"] == silent


def test_of_two_envoys_one_falls_silent() -> None:
    registry, now = Registry(), [10.0]
    shown = GatewayMetrics(registry, None, 2, lambda: now[0])
    both = [Vitals(1, 0.1), Vitals(2, 0.1)]
    for vitals, text in ((both, ""), (None, ""), (None, "2 of 2 Envoys)"), ([both[0], None], "1 of 2 Envoys)")):
        now[0] += 2.0
        shown.take(vitals or [None, None])
        assert shown.trouble().rpartition("(")[2] == text
        assert b"\nfairlead_gateway_up %d\n" % (not text) in registry.render()


def test_each_envoy_that_was_started_again_is_counted() -> None:
    registry = Registry()
    shown = GatewayMetrics(registry, None, 2, lambda: 10.0)
    for first, second, count in ((60, 5, 0), (65, 10, 0), (0, 15, 1), (5, None, 1), (0, 0, 3)):
        shown.take([None if asked is None else Vitals(0, 0.0, asked=asked) for asked in (first, second)])
        assert b"\nfairlead_gateway_restarts_total %d\n" % count in registry.render()


def test_answers_of_the_gateway_are_counted_since_the_first_look() -> None:
    """What it answered before is counted by no process, and an Envoy that was replaced begins at 0."""
    registry = Registry()
    shown = GatewayMetrics(registry, None, 2, lambda: 10.0)
    for first, second, count in (
        ((60, 500), (5, 7), 0),
        ((65, 510), (10, 9), 12),
        ((0, 4), (15, 9), 16),
        (None, (20, 10), 17),
    ):
        shown.take([seen and Vitals(0, 0.0, asked=seen[0], answers={"4xx": seen[1]}) for seen in (first, second)])
        assert b'\nfairlead_gateway_responses_total{class="4xx"} %d\n' % count in registry.render()


def test_a_slow_scheduler_says_so_and_does_not_blame_the_gateway() -> None:
    registry, now, slow = Registry(), [10.0], [0.0]
    took = histograms("policy", bounds=(0.1,))
    tempo = Tempo(took.children, lambda: now[0])
    shown = GatewayMetrics(registry, None, 1, lambda: now[0], tempo.slow)
    for late_s in (0.0, 0.5, 0.5, 0.6, 0.5, 0.5, 0.5):
        now[0] += 0.5 + late_s
        for _ in range(8 if late_s else 0):
            took.child("mine").observe(0.05)
        tempo.turned(late_s)
        slow.append(float(bool(tempo.trouble())))
        shown.take([None])
        shown.trouble()
    assert slow[:2] == [0.0, 0.0] and all(slow[3:]), "one late turn is nothing"
    assert tempo.trouble().endswith("its event loop is up to 0.6 s late; the policy 'mine' takes 50 ms for a decision")
    assert not shown.trouble()
    calm = now[0] + CALM_S
    while tempo.slow():
        assert not shown.trouble(), "it has its time from then on"
        now[0] += 0.5
        tempo.turned(0.0)
    now[0] += DOWN_S - 0.5
    assert not shown.trouble()
    now[0] += 1.0
    assert shown.trouble() and tempo.trouble(), "an Envoy is judged while the delays are still reported"
    while tempo.trouble():
        now[0] += 0.5
    assert calm <= now[0] < calm + 3.0


def test_pauses_now_and_then_do_not_hide_a_dead_envoy() -> None:
    now = [10.0]
    tempo = Tempo({}, lambda: now[0])
    shown = GatewayMetrics(Registry(), None, 1, lambda: now[0], tempo.slow)
    reported = []
    for number in range(100):
        late_s = 0.0 if number % 10 else 1.2
        now[0] += 0.5 + late_s
        tempo.turned(late_s)
        shown.take([None])
        assert tempo.trouble()
        if shown.trouble():
            reported.append(now[0])
    assert reported[0] < 20.0 and len(reported) > 10


def test_long_pauses_again_and_again_are_one_trouble() -> None:
    now = [10.0]
    tempo = Tempo({}, lambda: now[0])
    for number in range(60):
        late_s = 0.0 if number % 10 else 1.2
        now[0] += 0.5 + late_s
        tempo.turned(late_s)
        assert tempo.trouble().endswith("up to 1.2 s late"), "it does not end in between"
    now[0] += CALM_S
    tempo.turned(5.0)
    assert tempo.trouble().endswith("up to 5.0 s late"), "what was before is over"


def test_keys_that_cannot_be_fetched_are_reported_for_a_minute() -> None:
    now = [10.0]
    shown = GatewayMetrics(Registry(), None, 1, lambda: now[0])
    for failures, untrusted, text in ((3, 2, ""), (3, 2, ""), (4, 2, "are refused"), (5, 3, "(gateway.jwt.caFile)")):
        now[0] += 5.0
        shown.take([Vitals(0, 0.0, failures, untrusted)])
        assert shown.keyless().endswith(text) if text else not shown.keyless()
    now[0] += 61.0
    assert not shown.keyless()


def test_failures_of_long_ago_are_not_reported_when_one_of_two_envoys_answers_again() -> None:
    now = [10.0]
    shown = GatewayMetrics(Registry(), None, 2, lambda: now[0])
    old = Vitals(0, 0.0, 3, 3)
    for vitals in ([old, old], [old, None], [old, old], [None, old], [Vitals(0, 0.0), old]):
        now[0] += 5.0
        shown.take(vitals)
        assert not shown.keyless()
    shown.take([Vitals(0, 0.0, 1), old])
    assert shown.keyless(), "another Envoy has replaced the first one"


PRESSURE = "overload.envoy.resource_monitors.fixed_heap.pressure"
HEALTHY = "cluster.ext_proc.membership_healthy: 1\n"
PORT = free_port()
FILE = f"""
gateway: {{mode: embedded, port: 1}}
extProc: {{port: {PORT}}}
als: {{enabled: false}}
admin: {{port: 0}}
endpoints: ['127.0.0.1:1']
"""


@pytest.mark.parametrize(
    ("text", "asks"), [(HEALTHY, True), (HEALTHY.replace("1", "0"), False), ("", False), (HEALTHY[:-2] + "many", False)]
)
async def test_whether_it_asks(tmp_path: Path, text: str, asks: bool) -> None:
    gateway, admin = Gateway(), EnvoyAdmin(str(tmp_path / "admin.sock"))
    assert not await admin.asks_scheduler(), "it is not there yet"
    gateway.text = text
    await gateway.serve(tmp_path / "admin.sock")
    try:
        assert await admin.asks_scheduler() is asks
    finally:
        await gateway.close()


@asynccontextmanager
async def running(file: Path, gateway: Gateway, directory: str = "") -> AsyncIterator[Live]:
    """A scheduler beside this gateway, from when its admin page answers."""
    collector, socket = gc.get_threshold(), file.with_name("admin.sock")
    await gateway.serve(socket)
    live = Live(load(file), RunningGateway([str(socket)], directory))
    run = asyncio.create_task(live.run())
    try:
        async with asyncio.timeout(30):
            while not run.done() and not hasattr(live, "admin"):
                await asyncio.sleep(0.01)
        yield live
    finally:
        live.stop()
        await run
        await gateway.close()
        # `Live` tunes the collector for a process of its own.
        gc.unfreeze()
        gc.set_threshold(*collector)


async def until_ready_page(live: Live, begins: str) -> None:
    """Wait until `/readyz` begins like that; then come notes, as there is no model server."""
    async with asyncio.timeout(30), ClientSession() as session:
        while True:
            with suppress(OSError):
                async with session.get(f"http://127.0.0.1:{live.admin.port}/readyz") as answer:
                    if (await answer.text()).startswith(begins):
                        return
            await asyncio.sleep(0.01)


async def test_a_scheduler_is_ready_once_its_gateway_asks_it(tmp_path: Path) -> None:
    file, gateway = tmp_path / "f.yaml", Gateway()
    file.write_text(FILE)
    gateway.text, gateway.listens = HEALTHY.replace("1", "0"), False
    async with running(file, gateway) as live:
        await until_ready_page(live, "not ready\n- the embedded gateway has not asked yet\n")
        assert live.health.status("") is ServingStatus.SERVING
        gateway.text = HEALTHY
        await asyncio.sleep(0.2)
        await until_ready_page(live, "not ready\n- the embedded gateway has not asked yet\n")
        gateway.listens = True
        await until_ready_page(live, "ready\n")


async def test_a_gateway_that_falls_silent_takes_readiness_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead.server.observe.component_metrics.DOWN_S", 1.5)
    file, gateway = tmp_path / "f.yaml", Gateway()
    file.write_text(FILE)
    gateway.text = HEALTHY
    async with running(file, gateway, str(tmp_path)) as live:
        await until_ready_page(live, "ready\n")
        gateway.hangs = True
        await until_ready_page(live, "not ready\n- the embedded gateway does not answer (1 of 1 Envoys)\n")
        assert live.health.status("") is ServingStatus.SERVING, "once it is back, it asks this scheduler"
        gateway.hangs = False
        await until_ready_page(live, "ready\n")


async def test_a_gateway_keeps_its_endpoints_until_its_new_scheduler_knows_some(tmp_path: Path) -> None:
    file, listed, gateway = tmp_path / "f.yaml", tmp_path / "listed.yaml", Gateway()
    file.write_text(FILE.replace("['127.0.0.1:1']", f"{{file: '{listed}'}}"))
    listed.write_text("endpoints: []\n")
    gateway.text = HEALTHY + "cluster.all_endpoints.membership_total: 3\n"
    async with running(file, gateway) as live:
        await until_ready_page(live, "not ready\n- starting\n- no endpoints are known here; the gateway goes on")
        assert live.health.status("") is ServingStatus.NOT_SERVING, "requests would be refused"
        with pytest.raises(ConnectionRefusedError):  # Envoy would ask until its next health check
            await asyncio.open_connection("127.0.0.1", PORT)
        listed.write_text("endpoints: ['127.0.0.1:1']\n")
        await until_ready_page(live, "ready\n")
        assert live.health.status("") is ServingStatus.SERVING
        _, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.close()


async def test_a_scheduler_that_waits_for_endpoints_can_be_stopped(tmp_path: Path) -> None:
    file, listed, gateway = tmp_path / "f.yaml", tmp_path / "listed.yaml", Gateway()
    file.write_text(FILE.replace("['127.0.0.1:1']", f"{{file: '{listed}'}}"))
    listed.write_text("endpoints: []\n")
    gateway.text = HEALTHY + "cluster.all_endpoints.membership_total: 3\n"
    async with running(file, gateway) as live:
        await until_ready_page(live, "not ready\n- starting\n- no endpoints are known here; the gateway goes on")
        live.stop()


HOLDS = "flowControl: {noEndpointTtl: 60s}\n"


@pytest.mark.parametrize(
    ("allowed", "size", "more", "said"),
    [
        (True, 3, "", "not ready\n- no endpoints\n"),
        (False, 0, "", "not ready\n- no endpoints\n"),
        (True, 3, HOLDS, "ready\n- no endpoints: requests wait for the first one\n"),
        (True, 3, HOLDS.replace("60", "0"), "not ready\n- no endpoints\n"),
    ],
    ids=["allowEmpty", "nobody knows any", "requests wait", "they do not"],
)
async def test_a_pool_that_is_empty_is_served_as_empty(
    tmp_path: Path, allowed: bool, size: int, more: str, said: str
) -> None:
    file, listed, gateway = tmp_path / "f.yaml", tmp_path / "listed.yaml", Gateway()
    source = f"{{file: '{listed}', allowEmpty: {str(allowed).lower()}}}"
    file.write_text(FILE.replace("['127.0.0.1:1']", source) + more)
    listed.write_text("endpoints: []\n")
    gateway.text = (HEALTHY if size else "") + f"cluster.all_endpoints.membership_total: {size}\n"
    async with running(file, gateway) as live:
        await until_ready_page(live, said)
        assert live.health.status("") is ServingStatus.SERVING
