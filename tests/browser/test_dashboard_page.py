"""The dashboard in a real browser, on a run of the whole product: Envoy, scheduler and simulated model servers."""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import aiohttp
import pytest
from br_checks import accessible, figure, fits, picture, rows, text_of
from br_chromium import Browser, Page
from ports import free_ports

from fairlead.gateway.envoy.admin import GatewayError
from fairlead.gateway.envoy.binary import find_envoy
from fairlead.lab.demo import Child

pytestmark = pytest.mark.envoy

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
REPLICAS = 6
#: Requests at once; each begins when one ends.
CLIENTS = 8


class Run:
    """The product with clients that ask until they are told to stop."""

    def __init__(self, ports: list[int], stub: Child) -> None:
        self._stub = stub
        self.gateway, self.admin = (f"http://127.0.0.1:{port}" for port in (ports[0], ports[2]))
        self._clients: list[asyncio.Task[None]] = []

    def begin(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]

    async def stop(self) -> None:
        for client in self._clients:
            client.cancel()
        for found in await asyncio.gather(*self._clients, return_exceptions=True):
            assert isinstance(found, asyncio.CancelledError), found

    async def outage(self) -> None:
        """Every model server dies, and clients go on asking."""
        os.kill(self._stub.pid, signal.SIGTERM)
        while True:
            async with self._session.post(
                f"{self.gateway}/v1/completions", json={"model": MODEL, "prompt": "x"}
            ) as answer:
                await answer.read()
            await asyncio.sleep(0.2)

    async def _client(self, client: int) -> None:
        rng = Random(client)
        while True:
            group = min(int(rng.expovariate(0.2)), 20)
            body = {
                "model": MODEL,
                "max_tokens": rng.randrange(10, 400),
                "stream": rng.random() < 0.8,
                "messages": [{"role": "user", "content": f"group {group} " * 900 + str(rng.random())}],
            }
            ended = asyncio.ensure_future(self._ask(body))
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                await ended  # so that no answer is cut, and all counts come to rest
                raise
            await asyncio.sleep(rng.expovariate(5.0))

    async def _ask(self, body: dict[str, object]) -> None:
        async with self._session.post(f"{self.gateway}/v1/chat/completions", json=body) as answer:
            await answer.read()
            assert answer.status == 200

    async def metrics(self) -> dict[str, float]:
        """Sums by name, and each sample by its name and labels."""
        async with self._session.get(f"{self.admin}/metrics") as answer:
            page = await answer.text()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", page, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
            if labels:
                found[name + labels] = float(value)
        return found


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    try:
        find_envoy()
    except GatewayError as error:
        if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    ports = free_ports(3 + REPLICAS)
    config = tmp_path / "fairlead.yaml"
    config.write_text(
        json.dumps(
            {
                "gateway": {"mode": "embedded", "port": ports[0], "concurrency": 1},
                "extProc": {"port": ports[1]},
                "admin": {"port": ports[2]},
                "endpoints": [f"127.0.0.1:{port}" for port in ports[3:]],
                "journal": {"explain": True},
                "flowControl": {"enabled": True},
                "shadows": {"policies": [{"policy": "least-requests"}]},
                "metrics": {"staleness": "15s"},
            }
        )
    )
    async with contextlib.AsyncExitStack() as stack:
        engine = ("--engine=llama-8b-h100", "--time-ratio=4", "--stream-interval=4")
        stub = Child("stub", f"--port={ports[3]}", f"--replicas={REPLICAS}", *engine)
        await stack.enter_async_context(stub)
        await stub.ready(f"http://127.0.0.1:{ports[-1]}/health")
        serve = await stack.enter_async_context(Child("serve", str(config)))
        made = Run(ports, stub)
        await serve.ready(f"{made.admin}/readyz")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made.begin(session)
        try:
            yield made
        finally:
            await made.stop()


async def test_a_run_seen_in_a_browser(run: Run, browser: Browser, axe: str) -> None:
    page = await browser.page(run.admin + "/", 1400, 1000)
    await page.until('document.body.dataset.state === "live"')
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length > 20")
    await asyncio.gather(_counts_while_running(run, page), _comes_every_second(page), _stands_still(page))
    await accessible(page, axe)
    await fits(page)
    await picture(page, "light")
    await _explains(page, axe)
    await _finds_and_opens_an_endpoint(page, axe)
    await page.dress(dark=True)
    await accessible(page, axe)
    await page.resize(390, 844, 1.0)
    await asyncio.sleep(1.0)
    await fits(page)
    await accessible(page, axe)
    await picture(page, "phone")
    await page.dress(dark=False)
    await page.resize(1400, 1000)
    await run.stop()
    await _equals_the_metrics(run, page)
    await _shows_an_outage(run, page, axe)
    assert page.messages == []
    assert {address.split("/")[2] for address in page.requested} == {run.admin.removeprefix("http://")}
    await page.close()


async def _shows_an_outage(run: Run, page: Page, axe: str) -> None:
    answered = await run.metrics()
    asking = asyncio.create_task(run.outage())
    await page.until("document.querySelector('#notices li').textContent.startsWith('Every request has failed since')")
    await page.until(f"document.querySelector('#notices li').textContent.includes('{REPLICAS} of {REPLICAS} endpoints "
                     "refuse connections.')")  # fmt: skip
    await page.until("document.querySelector('[data-figure=error_rate]').textContent === '100.0 %'")
    await page.until("document.querySelector('[data-figure=ttft_p50]').textContent === '–'")
    await page.dress(dark=True)
    await accessible(page, axe)
    await picture(page, "outage")
    asking.cancel()
    metrics = await run.metrics()
    assert metrics["llm_d_epp_request_error_total"] > 5
    assert metrics["fairlead_failed_request_duration_seconds_count"] > 5
    for name in ("llm_d_epp_request_ttft_seconds_count", "inference_objective_request_ttft_seconds_count"):
        assert metrics[name] == answered[name], "a failure has no first token"


NOTICES = "document.querySelectorAll('#notices li').length"
#: Over three seconds: how far things moved, and which.
MOVED = """new Promise((resolve) => {
  const moved = {sum: 0, what: []};
  const rect = (r) => `${r.x},${r.y} ${r.width}x${r.height}`;
  const told = (s) => `${s.node?.id || s.node?.nodeName} ${s.node?.textContent?.slice(0, 40)}: `
    + `${rect(s.previousRect)} -> ${rect(s.currentRect)}`;
  const watch = new PerformanceObserver((list) => list.getEntries().forEach((one) => {
    moved.sum += one.value;
    moved.what.push([one.value, ...one.sources.map(told)]);
  }));
  watch.observe({type: "layout-shift"});
  setTimeout(() => { watch.disconnect(); resolve(moved); }, 3000);
})"""


async def _counts_while_running(run: Run, page: Page) -> None:
    """What the page says lies between the metrics of just before and just after."""
    before = await run.metrics()
    await asyncio.sleep(1.5)
    shown = await figure(page, "requests")
    after = await run.metrics()
    assert before["llm_d_epp_request_total"] <= shown <= after["llm_d_epp_request_total"]
    assert shown > 20
    assert await figure(page, "per_s") > 0


async def _comes_every_second(page: Page) -> None:
    """At least one update in each second, over five."""
    await asyncio.sleep(5.5)
    times = [at for at, name in page.events if name == "now"]
    last = times[-1]
    seconds = {int(last - at) for at in times if last - at < 5.0}
    assert seconds == {0, 1, 2, 3, 4}
    drawn = await figure(page, "requests")
    await page.until(f"Number(document.querySelector('[data-figure=requests]').textContent.replace(',', '')) > {drawn}")


async def _stands_still(page: Page) -> None:
    """Numbers change in their places: the layout does not move (0.1 is what browsers call good for a whole visit). A
    notice that comes or goes may move it: a machine that has too much to do has something to say."""
    for _ in range(5):
        before = await page.run(NOTICES)
        moved = await page.run(MOVED)
        if before == await page.run(NOTICES):
            break
    assert moved["sum"] < 0.02, moved["what"]


async def _explains(page: Page, axe: str) -> None:
    """With the keyboard: pause, go to a decision, open it, read why, close it, be back."""
    await page.run("document.getElementById('pause').focus()")
    await page.press("Enter")
    assert await text_of(page, "#pause") == "Resume the list"
    await page.run("document.querySelector('#decision-rows tbody tr:nth-child(20) button').focus()")
    wanted = await page.run("document.activeElement.dataset.id")
    await page.press("Enter")
    await page.until("document.querySelector('#why').open && document.querySelector('#why table')")
    assert await text_of(page, "#why-title") == f"Decision {wanted}"
    words = await text_of(page, "#why-body")
    assert "Why 127.0.0.1:" in words and "cost-model" in words and "Cost, ms" in words
    assert await page.run("document.querySelectorAll('#why tbody tr').length") == REPLICAS
    await accessible(page, axe)
    await picture(page, "explain", scrolled=True)
    await page.press("Escape")
    await page.until("!document.querySelector('#why').open")
    assert await page.run("document.activeElement.dataset.id") == wanted
    await page.run("document.getElementById('pause').focus()")
    await page.press(" ")
    assert await text_of(page, "#pause") == "Pause the list"


async def _finds_and_opens_an_endpoint(page: Page, axe: str) -> None:
    """A search by outcome beyond the 30 that are listed; and the page of an endpoint, with its first point."""
    await page.until("Number(document.querySelector('[data-figure=requests]').textContent.replace(',', '')) > 60")
    await page.run("""(() => { const field = document.getElementById("search").elements.outcome;
        field.value = "answered"; field.dispatchEvent(new Event("input", {bubbles: true})); })()""")
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length > 30")
    assert re.match(r"\d+ of the last [\d,]+ match", await text_of(page, "#decisions-sub"))
    await page.run("document.querySelector('#search button[type=reset]').click()")
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length === 30")
    await page.run("document.querySelector('#endpoint-rows a').click()")
    await page.until("document.querySelectorAll('#endpoint-decisions tbody tr').length > 5")
    await page.until("document.getElementById('endpoint-load').ariaLabel.includes('running')")
    await accessible(page, axe)
    await page.press("Escape")
    await page.until("!document.getElementById('endpoint').open")


async def _equals_the_metrics(run: Run, page: Page) -> None:
    """After the last answer everything is the same on both sides."""
    metrics: dict[str, float] = {}
    for _ in range(50):
        before, metrics = metrics, await run.metrics()
        still = all(metrics[name] == before.get(name) for name in ("fairlead_request_end_total", "kv_cache_hit_total"))
        if still and metrics["fairlead_leases"] == 0 and metrics["llm_d_epp_request_running"] == 0:
            break
        await asyncio.sleep(0.7)
    await page.until("document.querySelector('[data-figure=leases]').textContent === '0'")
    assert await figure(page, "requests") == metrics["llm_d_epp_request_total"]
    assert await figure(page, "errors") == metrics.get("llm_d_epp_request_error_total", 0)
    assert await figure(page, "refused") == metrics.get("fairlead_rejected_total", 0)
    assert await figure(page, "ready") == metrics["llm_d_epp_ready_endpoints"] == REPLICAS
    assert await figure(page, "waiting") == metrics["fairlead_flow_waiting_requests"]
    hit_rate = 100 * metrics["kv_cache_hit_total"] / metrics["kv_cache_lookup_total"]
    assert await figure(page, "hit_rate") == pytest.approx(hit_rate, abs=0.051)
    within = metrics['fairlead_ttft_forecasts_total{result="inside"}']
    share = 100 * within / metrics["fairlead_ttft_forecasts_total"]
    assert await figure(page, "inside") == pytest.approx(share, abs=0.051)
    traffic = await rows(page, "traffic-rows")
    asked = sum(int(row["requests"].replace(",", "")) for row in traffic.values())
    assert asked == metrics["llm_d_epp_request_total"]
    endpoints = await rows(page, "endpoint-rows")
    for name, row in endpoints.items():
        assert float(row["leases"]) == metrics[f'fairlead_endpoint_leases{{endpoint="{name}"}}']
    (shadow,) = (await rows(page, "shadow-rows")).values()
    assert float(shadow["decisions"].replace(",", "")) == metrics["fairlead_shadow_decisions_total"]
    agreed = metrics.get('fairlead_shadow_decisions_total{shadow="least-requests",verdict="agree"}', 0.0)
    share = 100 * agreed / metrics["fairlead_shadow_decisions_total"]
    assert float(shadow["agrees"].split(" ")[0]) == pytest.approx(share, abs=0.51)
