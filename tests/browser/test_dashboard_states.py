"""The dashboard's page in states that a good run does not show: nothing there, a hundred endpoints, nobody answers."""

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from math import inf, sin
from pathlib import Path
from types import SimpleNamespace

import pytest
from br_checks import accessible, figure, fits, picture, rows, text_of
from br_chromium import Browser, Page
from br_relay import Relay
from waiting_rules import AbleRules

import fairlead.server.pages
from fairlead.core.binding import PairBinder
from fairlead.core.endpoint import MODEL_LABEL, ROLE_LABEL, BaseModels, Endpoint, Sample
from fairlead.core.fairness import StartTimeFair
from fairlead.core.fleet import Fleet
from fairlead.core.flow_control import FlowControl, FlowController
from fairlead.core.gates import LedgerGate
from fairlead.core.queues import Queues
from fairlead.core.records import DecisionRecord, Forecast, OutcomeRecord
from fairlead.core.request import Request
from fairlead.plugins.flow_control import Fcfs
from fairlead.server.admin import Admin, AdminSources
from fairlead.server.http_port import Access, Tokens
from fairlead.server.observe.snapshot import SnapshotMaker
from fairlead.server.observe.watch import Watch

#: Seconds from the scheduler's clock to the time of day.
WALL = 1.8e9
EVIL = "<img src=x onerror=document.title='gotcha'>"


class Scheduler:
    """What the admin port shows, over a fleet in this process; `restart` keeps the port."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.fleet = Fleet(staleness=inf)
        self.watch = Watch(self.fleet, self.now, served=lambda: ["m", "llama"])
        self.maker = SnapshotMaker(
            self.watch, self.now, lambda: WALL, pool="default", policy=lambda: "cost-model",
            reasons=lambda: self.reasons, schedulers=lambda: self.schedulers,
        )  # fmt: skip
        self.reasons: list[str] = []
        self.schedulers = 1
        self.port = 0
        self.tokens: Tokens | None = None

    async def start(self) -> None:
        maker = self.maker
        source = SimpleNamespace(
            begin=maker.begin, end=maker.end, beginning=maker.beginning, take=maker.take, tick=0.25,
            answers={"decisions": maker.search, "endpoint": maker.endpoint, "model": maker.model},
        )  # fmt: skip
        sources = AdminSources(
            metrics=self.watch.exposition,
            unready=lambda: self.reasons,
            endpoints=self.watch.endpoints,
            decisions=self.watch.decisions,
            decision=self.watch.decision,
            dashboard=source,
        )
        self.admin = Admin(sources, port=self.port, access=Access(tokens=self.tokens))
        await self.admin.start()
        self.port = self.admin.port

    def refuse(self, count: int, first: int = 0, reason: str = "cannot connect: Connection refused") -> None:
        """So many endpoints cannot be scraped any more: nobody listens there."""
        for i in range(first, first + count):
            name = f"default/model-server-{i:03}"
            self.watch.on_silence(name, reason)
            for _ in range(3):
                self.fleet.scrape_failed(name, self.now())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def add(self, count: int) -> None:
        for i in range(count):
            name = f"default/model-server-{i:03}"
            self.fleet.up(Endpoint(name, f"10.0.{i // 250}.{i % 250}:8000", {MODEL_LABEL: "m"}))
            at = self.now()
            self.fleet.sampled(name, at, at, Sample(waiting=i % 4, running=i % 13, kv_usage=(i % 20) / 20))

    def hold(self, waiting: dict[str, int]) -> None:
        """Flow control with so many requests that wait, by tenant."""
        queues = Queues(lambda priority: (StartTimeFair(), Fcfs()))
        flow = FlowControl(queues, LedgerGate(requests=1), PairBinder(AbleRules()))
        self.watch.watch_queue(FlowController(flow, "p", 1.0))
        for slot, _ in self.fleet.table.slots():
            self.fleet.charge(Request(id=9000 + slot, arrived=0.0, prompt_tokens=10), slot, self.now(), 0, 10)
        tenants = [tenant for tenant, count in waiting.items() for _ in range(count)]
        for number, tenant in enumerate(tenants, 10_000):
            request = Request(id=number, arrived=self.now(), model="m", prompt_tokens=10, fairness_id=tenant,
                              body_bytes=2000)  # fmt: skip
            flow.arrived(request, self.fleet, self.now())

    def serve(
        self, number: int, endpoint: str, model: str = "m", status: int = 200, tenant: str = "", client_id: str = "",
        target: str = "", at: float | None = None, ttft_ms: float = 110.0, answered_by: str = "",
        prefill: str = "",
    ) -> None:  # fmt: skip
        request = Request(id=number, arrived=self.now(), model=model, target=target, prompt_tokens=900,
                          stream=True, fairness_id=tenant, external_id=client_id)  # fmt: skip
        at = self.now() if at is None else at
        forecast = Forecast(ttft_ms=120.0, low_ms=60.0, high_ms=300.0)
        self.watch.on_decision(
            DecisionRecord(
                request=request, at=at, policy="p", endpoint=endpoint, address="x:1", prefill=prefill, forecast=forecast
            ),
            1e-4,
        )
        self.watch.on_outcome(
            OutcomeRecord(
                request=request, at=at, endpoint=answered_by or endpoint, status=status, duration_ms=900.0,
                ttft_ms=ttft_ms if status < 300 else -1.0,
                forecast=forecast, unreached=endpoint if answered_by else "",
            )
        )  # fmt: skip


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    made = Scheduler()
    await made.start()
    yield made
    await made.admin.close()


async def live(page: Page) -> None:
    await page.until('document.body.dataset.state === "live"')


_FIRST_NOTICE = """
fetch(location.href, { headers: { Accept: "text/html" } }).then((answer) => answer.text()).then((text) => {
  const notice = new DOMParser().parseFromString(text, "text/html").querySelector("#notices li");
  document.getElementById("notices").append(notice);
  const styles = [getComputedStyle(notice), getComputedStyle(notice, "::before")];
  window.first = [notice.textContent.trim(), styles[0].color, styles[1].content];
  notice.remove();
});
"""


async def test_before_the_first_numbers_nothing_is_called_well(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelector('#notices .calm')")
    await page.run(_FIRST_NOTICE)
    await page.until("window.first")
    said, color, sign = await page.run("window.first")
    assert (said, sign) == ("Waiting for the first numbers.", '"…"')
    assert color != await page.run("getComputedStyle(document.querySelector('#notices .calm')).color")
    await page.close()


async def test_nothing_is_there_yet(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.reasons = ["no endpoints"]
    page = await browser.page(scheduler.url)
    await live(page)
    assert "Not ready: no endpoints." in await text_of(page, "#notices")
    assert "No endpoint is known yet" in await text_of(page, "#endpoints-empty")
    assert "No decision has been made yet" in await text_of(page, "#decisions-empty")
    assert await page.run("document.getElementById('share').hidden")
    scheduler.schedulers = 2
    await page.until("document.getElementById('share').textContent.startsWith('Numbers of this scheduler, one of 2;')")
    assert not await page.run("document.getElementById('share').hidden")
    assert "NaN" not in await text_of(page, "body") and "undefined" not in await text_of(page, "main")
    await accessible(page, axe)
    scheduler.reasons = []
    scheduler.add(1)
    await page.until("document.querySelectorAll('#endpoint-rows tbody tr').length === 1")
    await page.until("document.querySelector('#notices').textContent.includes('no request has arrived yet')")
    await _listen(page)
    scheduler.reasons = ["no endpoints"]
    await page.until("window.said.join() === 'Not ready: no endpoints.'")
    assert page.messages == []
    await page.close()


async def test_a_hundred_endpoints_and_a_hostile_name(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.add(100)
    for i in range(60):
        scheduler.serve(i, f"default/model-server-{i:03}", EVIL if i % 7 == 0 else "m")
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelectorAll('#endpoint-rows tbody tr').length === 16")
    assert await figure(page, "endpoints") == 100
    assert await page.run("document.querySelectorAll('#strip > span').length") == 100
    await page.run("document.getElementById('endpoints-more').click()")
    assert await page.run("document.querySelectorAll('#endpoint-rows tbody tr').length") == 100
    await _sorts_and_finds(page)
    assert EVIL in await text_of(page, "#traffic-rows")
    assert await page.run("document.querySelectorAll('main img').length") == 0
    assert await page.run("document.title") == "Fairlead · default"
    await fits(page)
    for width in (1400, 1024, 390):
        await page.resize(width, 900)
        await asyncio.sleep(0.5)
        await fits(page)
    await accessible(page, axe)
    assert page.messages == []
    await page.close()


async def test_long_names_can_be_told_apart(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    names = [
        f"default/ms-inference-scheduling-llm-d-modelservice-decode-7d9f8c6b5d-{end}" for end in ("x2x7k", "9q4mz")
    ]
    for name in names:
        scheduler.fleet.up(Endpoint(name, "10.0.0.1:8000"))
    model = "meta-llama/Llama-3.3-70B-Instruct-FP8-dynamic"
    scheduler.watch.on_models([model], [])
    for i in range(4):
        scheduler.serve(i, names[i % 2], model, answered_by=names[0] if i == 3 else "",
                        target=f"our-own-adapters/{model}" if i == 3 else "")  # fmt: skip
    scheduler.hold({"the-tenant-with-the-longest-of-names-of-all": 12})
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length === 4")
    cells = ", ".join(f"#{table}-rows [data-column={column}]" for table, column in (
        ("endpoint", "id"), ("decision", "endpoint"), ("decision", "model"), ("traffic", "model"), ("queue", "band"),
    ))  # fmt: skip
    shown = await page.run(
        f"""[...document.querySelectorAll("td:is({cells})")].map((cell) => {{
          const range = document.createRange();
          const cuts = [...cell.querySelectorAll(".cut")];
          const right = cuts.map((cut) => {{
            range.selectNode(cut.nextSibling);
            return range.getBoundingClientRect().right;
          }});
          const narrow = cuts.every((cut) => cut.getBoundingClientRect().width < 30);
          const within = narrow && Math.max(...right) <= cell.getBoundingClientRect().right;
          const seen = cuts.reduce((text, cut) => text.replace(cut.textContent, "…"), cell.textContent);
          return [cell.textContent, cell.title, seen, within];
        }})"""
    )
    for text, title, _, fits_in in shown:
        assert title.startswith(text) and fits_in, text
    ends = ["8c6b5d-x2x7k", "8c6b5d-9q4mz"]
    assert {seen for _, _, seen, _ in shown} == {
        *(f"default/ms-inference…{end}" for end in ends), *(f"default/ms…{end}" for end in ends),
        f"defa…{ends[1]} → defa…{ends[0]}", "meta-llama/Llama-3.3…-FP8-dynamic", "meta-llama…-FP8-dynamic",
        "meta…-FP8-dynamic → our-…-FP8-dynamic", "the-…names-of-all · m", "band 0",
    }  # fmt: skip
    tree = await page.call("Accessibility.getFullAXTree")
    read = {node["name"]["value"] for node in tree["nodes"] if node.get("role", {}).get("value") in ("link", "cell")}
    assert read >= {names[0], names[1], "meta-llama/Llama-3.3-70B-Instruct-FP8-dynamic"}
    assert await page.run("window.find('Instruct-FP8-dynamic') && window.find('decode-7d9f8c6b5d-x2x7k')")
    await page.until(
        "document.querySelector('#decision-rows').scrollWidth <= document.querySelector('#decision-rows').clientWidth"
    )
    for width in (1400, 390):
        await page.resize(width, 900)
        await fits(page)
    await accessible(page, axe)
    await page.close()


async def _sorts_and_finds(page: Page) -> None:
    first = "#endpoint-rows tbody tr:first-child [data-column=id]"
    running = "[...document.querySelectorAll('#endpoint-rows th button')].find((one) => one.textContent === 'Running')"
    await page.run(f"({running}).focus()")
    await page.press("Enter")
    assert await text_of(page, "#endpoint-rows tbody tr:first-child [data-column=active]") == "12"
    assert await page.run(f"({running}).parentElement.ariaSort") == "descending"
    await page.press("Enter")
    assert await text_of(page, "#endpoint-rows tbody tr:first-child [data-column=active]") == "0"
    await page.run("(() => { const f = document.getElementById('filter'); f.value = 'server-042'; "
                   "f.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert await text_of(page, first) == "default/model-server-042"
    assert await page.run("document.querySelectorAll('#endpoint-rows tbody tr').length") == 1
    assert "1 found" in await text_of(page, "#endpoints-count")


async def test_a_lost_connection_is_told_and_comes_back(
    scheduler: Scheduler, browser: Browser, axe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add(2)
    scheduler.serve(0, "default/model-server-000")
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelector('#decision-rows button')")
    await scheduler.admin.close()
    await page.until('document.body.dataset.state === "lost"')
    assert "The connection to the scheduler is lost." in await text_of(page, "#lost")
    await page.until("document.querySelector('#lost').textContent.includes('old. Trying again')")
    await accessible(page, axe)
    await fits(page)
    await page.run("document.querySelector('#decision-rows button').click()")
    await page.until(
        "document.getElementById('why-body').textContent.endsWith('shown: The scheduler does not answer.')"
    )
    await page.press("Escape")
    await page.run("document.querySelector('#endpoint-rows a').click()")
    await page.until("document.getElementById('endpoint-problem').textContent === 'The scheduler does not answer.'")
    for part in ("sent", "decisions", "empty"):
        assert await page.run(f"document.getElementById('endpoint-{part}').hidden"), (
            "whether there are some is not known"
        )
    await page.press("Escape")
    scheduler.add(3)
    scheduler.reasons = ["it drains"]
    await _listen(page)
    await scheduler.start()
    await live(page)
    assert await page.run("window.said") == ["The scheduler answers again. Not ready: it drains."]
    await page.until("document.querySelectorAll('#endpoint-rows tbody tr').length === 3")
    assert await page.run("document.getElementById('lost').hidden && document.getElementById('changed').hidden")
    await scheduler.admin.close()
    changed = tmp_path / "pages"
    shutil.copytree(Path(fairlead.server.pages.__path__[0]), changed)
    (changed / "icon.svg").write_text("<svg/>")
    monkeypatch.setattr("fairlead.server.dashboard.files", lambda package: changed)
    await scheduler.start()
    await page.until("!document.getElementById('changed').hidden")
    await accessible(page, axe)
    await page.run("window.old = true; document.getElementById('reload').click()")
    await page.until("!window.old && document.body?.dataset.state === 'live'")
    assert await page.run("document.getElementById('changed').hidden")
    await page.close()


async def _pass(page: Page, seconds: int) -> None:
    """The page's clock jumps."""
    await page.run(f"(() => {{ const now = performance.now.bind(performance); "
                   f"performance.now = () => now() + {1000 * seconds}; }})()")  # fmt: skip


async def _hide(page: Page, hidden: bool) -> None:
    await page.run(f"""Object.defineProperty(document, "hidden", {{configurable: true, value: {json.dumps(hidden)}}});
        document.dispatchEvent(new Event("visibilitychange"))""")


async def test_connections_are_made_anew_and_hidden_pages_have_none(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    async with Relay(scheduler.port) as relay:
        page = await browser.page(relay.url)
        await live(page)
        await _hide(page, True)
        await _pass(page, 6)
        await page.until('document.body.dataset.state === "connecting"')
        async with asyncio.timeout(20.0):
            while scheduler.watch.recent is not None:  # somebody looks
                await asyncio.sleep(0.05)
        await _hide(page, False)
        await live(page)
        relay.silence()
        await _pass(page, 20)
        await page.until('document.body.dataset.state === "lost"')
        await live(page)
        await page.run("AbortSignal.timeout = () => AbortSignal.abort(new DOMException('', 'TimeoutError'))")
        await page.run("location.hash = '#endpoint=x'")
        await page.until(
            "document.getElementById('endpoint-problem').textContent.includes('has not answered within 10 s')"
        )
        await page.close()


async def test_a_link_that_falls_behind_is_left(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    page = await browser.page(scheduler.url)
    await live(page)
    await page.run("(() => { const now = Date.now; Date.now = () => now() + 15000; })()")  # all that comes is old
    await page.until("document.getElementById('lost').checkVisibility()")
    assert re.search(r"The numbers below are 1\d s old", await text_of(page, "#lost"))
    await live(page)
    assert [name for _, name in page.events].count("beginning") == 2
    await asyncio.sleep(1.0)
    assert await page.run("document.getElementById('lost').hidden"), "the new connection is measured by itself"
    await page.close()


async def test_it_works_below_a_prefix_and_with_a_token_in_the_address(
    scheduler: Scheduler, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\n")
    await scheduler.admin.close()
    scheduler.tokens = Tokens(str(file))
    await scheduler.start()
    scheduler.add(1)
    scheduler.serve(7, "default/model-server-000")
    async with Relay(scheduler.port, "/ops/fairlead/") as relay:
        page = await browser.page(relay.url.replace("//", "//:one@"))
        await live(page)
        await page.run("location.hash = '#endpoint=default%2Fmodel-server-000'")
        await page.until("document.getElementById('endpoint-decisions').checkVisibility()")
        await page.run("document.querySelector('#endpoint-decisions button').click()")
        await page.until("document.querySelector('#why-body dl')")
        assert page.messages == []
        assert [address for address in page.requested if "/ops/fairlead/" not in address] == []
        assert await page.run("[...document.links].filter((link) => !link.href.includes('/ops/fairlead/')).length") == 0
        file.write_text("another\n")
        await page.until("document.getElementById('lost').textContent.startsWith('The scheduler refuses: a token')")
        await page.close()


async def test_a_decision_that_is_no_longer_known(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    scheduler.serve(7, "default/model-server-000")
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelector('#decision-rows button')")
    await page.run("document.querySelector('#decision-rows button').click()")
    await page.until("document.querySelector('#why-body dl')")
    assert "No reasons in numbers" in await text_of(page, "#why-body")
    await page.press("Escape")
    await page.run("(() => { const b = document.querySelector('#decision-rows button'); "
                   "b.dataset.id = '12345'; b.click(); })()")  # fmt: skip
    await page.until("document.querySelector('#why-body').textContent.includes('This decision cannot be shown')")
    assert "no decision '12345' among the last ones" in await text_of(page, "#why-body")
    await page.press("Escape")
    at = time.time() - 200_000.0
    scheduler.serve(6, "default/model-server-000", at=at - WALL)
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length === 2")
    shown = (await rows(page, "decision-rows"))["6"]["at"]
    assert re.fullmatch(r"\d+ \w{3,4}, \d\d:\d\d", shown), "it is older than a day"
    title = await page.run("document.querySelector('tr[data-key=\"6\"] [data-column=at]').title")
    assert title.endswith(
        await page.run(f"new Intl.DateTimeFormat('en-GB', {{timeStyle: 'long'}}).format({at} * 1000)")
    )
    await _names_the_endpoint_that_answered(scheduler, page)
    await page.close()


async def _names_the_endpoint_that_answered(scheduler: Scheduler, page: Page) -> None:
    scheduler.add(2)
    scheduler.serve(8, "default/model-server-000", answered_by="default/model-server-001")
    both = "default/model-server-000 → default/model-server-001"
    cell = 'tr[data-key="8"] [data-column=endpoint]'
    await page.until(f"document.querySelector('#decision-rows {cell}')?.textContent === '{both}'")
    failed = {name: row["failed"] for name, row in (await rows(page, "endpoint-rows")).items()}
    assert failed == {"default/model-server-000": "1", "default/model-server-001": "0"}
    await page.run("document.querySelector('#decision-rows [data-id=\"8\"]').click()")
    await page.until("document.querySelector('#why-body dl')")
    facts = await text_of(page, "#why-body dl")
    assert "Went todefault/model-server-000Answered bydefault/model-server-001, because " in facts
    await page.press("Escape")
    await page.run("location.hash = '#endpoint=default%2Fmodel-server-001'")
    await page.until(f"document.querySelector('#endpoint-decisions {cell}')?.textContent === '{both}'")


async def test_roles_and_both_ends_of_a_pair_are_shown(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    page = await browser.page(scheduler.url)
    await live(page)
    role = "[...document.querySelectorAll('#endpoint-rows [data-column=role]')].filter((cell) => cell.offsetParent)"
    assert await page.run(f"{role}.length") == 0, "there are none"
    for name in ("prefill", "decode"):
        scheduler.fleet.up(Endpoint(f"pd/{name}", f"{name}:80", {ROLE_LABEL: name}))
    scheduler.serve(1, "pd/decode", prefill="pd/prefill")
    await page.until(f"{role}.map((cell) => cell.textContent).join() === 'Role,–,decode,prefill'")
    cell = 'tr[data-key="1"] [data-column=endpoint]'
    await page.until(f"document.querySelector('#decision-rows {cell}')?.textContent === 'pd/decode ← pd/prefill'")
    await page.run("location.hash = '#endpoint=pd%2Fprefill'")
    await page.until(f"document.querySelector('#endpoint-decisions {cell}')")
    await page.close()


async def test_an_outage_is_red_and_says_since_when_and_what_to_do(
    scheduler: Scheduler, browser: Browser, axe: str
) -> None:
    scheduler.add(8)
    page = await browser.page(scheduler.url)
    await live(page)
    scheduler.refuse(3)
    await page.until("document.querySelector('#notices .bad')")
    partial = await text_of(page, "#notices li")
    assert re.search(
        r"^3 of 8 endpoints \(.*\) have been out of use since \d\d:\d\d: they refuse connections\.", partial
    )
    assert "Requests go to the other 5." in partial
    scheduler.refuse(8)
    for number in range(20):
        scheduler.serve(number, "default/model-server-000", status=503)
        await asyncio.sleep(0.1)
    await page.until("document.querySelector('#notices li').textContent.startsWith('Every request has failed since')")
    assert "8 of 8 endpoints refuse connections." in await text_of(page, "#notices li")
    assert (
        await text_of(page, "#announce") != "" and await page.run("document.querySelector('#announce').role") == "alert"
    )
    await page.until("document.querySelector('[data-figure=error_rate]').textContent === '100.0 %'")
    assert await text_of(page, '[data-figure="ttft_p50"]') == "–", "a failure is no first token"
    assert await figure(page, "ready") == 0
    state = "#endpoint-rows tbody tr [data-column=state]"
    assert re.fullmatch(r"out since \d\d:\d\d: connection refused", await text_of(page, state))
    red = await page.run("getComputedStyle(document.querySelector('#notices li')).color")
    for shown in ("[data-figure=error_rate]", state):
        assert await page.run(f"getComputedStyle(document.querySelector('{shown}')).color") == red
    assert await page.run("[...document.querySelectorAll('#strip em')].map((one) => one.textContent).join()") == (
        ",".join(f"{i:03}" for i in range(8))
    )
    for width, dark in ((1400, False), (1400, True), (390, True), (390, False)):
        await page.resize(width, 900)
        await page.dress(dark)
        await asyncio.sleep(0.5)
        await fits(page)
        await accessible(page, axe)
    await _leads_to_the_runbook(scheduler, page, browser)
    assert page.messages == []
    await page.close()


async def _listen(page: Page) -> None:
    """Keep what screen readers read out in `said`."""
    await page.run(
        """(() => { window.said = []; const place = document.getElementById("announce");
        new MutationObserver(() => window.said.push(place.textContent)).observe(place, { childList: true }); })()"""
    )


NOTICES = "[...document.querySelectorAll('#notices li span')].map((one) => one.textContent)"


async def test_two_dead_endpoints_are_two_notices_though_their_names_differ_in_a_digit(
    scheduler: Scheduler, browser: Browser
) -> None:
    scheduler.add(5)
    page = await browser.page(scheduler.url)
    await live(page)
    await _listen(page)
    scheduler.refuse(1)
    await page.until(f"{NOTICES}[0].includes('model-server-000')")
    scheduler.refuse(1, first=1, reason="status 500")
    await page.until(f"{NOTICES}.length === 2")
    scheduler.refuse(1, first=2)
    await page.until(
        f"{NOTICES}[0].startsWith('2 of 5 endpoints (default/model-server-000, default/model-server-002)')"
    )
    notices = await page.run(NOTICES)
    assert len(notices) == 2 and notices[1].startswith("Endpoint default/model-server-001 has been out of use since")
    said = await page.run("window.said")
    assert [len(re.findall(r"since \d\d:\d\d", words)) for words in said] == [1, 1, 1], "each change is read out once"
    await _are_at_most_six(scheduler, page)
    assert page.messages == []
    await page.close()


async def test_the_end_of_a_problem_is_read_out(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(2)
    page = await browser.page(scheduler.url)
    await live(page)
    scheduler.refuse(1)
    await page.until("document.getElementById('announce').textContent.includes('has been out of use since')")
    scheduler.add(2)
    await page.until("document.getElementById('announce').textContent.startsWith('Ready and waiting')")
    await page.close()


async def _are_at_most_six(scheduler: Scheduler, page: Page) -> None:
    """Also while notices of problems that have ended stay, as they do while the page's clock stands."""
    await page.run("(() => { const time = performance.now(); performance.now = () => time; })()")
    scheduler.add(9)
    for i in range(9):
        scheduler.refuse(1, first=i, reason=f"status {500 + i}")
    last = f"{NOTICES}.at(-1)"
    await page.until(f"{NOTICES}.length === 6 && {last} === 'And 4 more problems.'")
    scheduler.add(4)
    await page.until(f"{last}.includes('model-server-008')")
    notices = await page.run(NOTICES)
    assert len(notices) == 6 and "And 4 more problems." not in notices
    assert sum(f"model-server-00{i} " in " ".join(notices) for i in range(4, 9)) == 5


async def test_while_requests_get_4xx_not_all_is_well(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.add(2)
    page = await browser.page(scheduler.url)
    await live(page)
    for number in range(20):
        scheduler.serve(number, "default/model-server-000", model="misspelt", status=404)
        await asyncio.sleep(0.1)
    await page.until(
        "document.querySelector('#notices .watch').textContent.startsWith('Every endpoint answers, but 100.0 %')"
    )
    name = "(names without metrics of their own)"
    await page.until(f"document.querySelector('#traffic-rows td').textContent === '{name}'")
    models = await rows(page, "model-rows")
    assert models["other"]["model"] == name and models["other"]["error_rate"] == "100.0 %"
    assert await page.run("!document.querySelector('#model-rows tr[data-key=other] a')"), "no search finds them"
    await accessible(page, axe)
    assert page.messages == []
    await page.close()


async def _leads_to_the_runbook(scheduler: Scheduler, page: Page, browser: Browser) -> None:
    """With the keyboard: the link is the first thing to reach after the choice of a theme."""
    await page.run("document.getElementById('theme').focus()")
    await page.press("Tab")
    assert await page.run("document.activeElement.textContent") == "What to do: FairleadNoEndpoints"
    target = await page.run("document.activeElement.href")
    runbook = await browser.page(target)
    assert "## FairleadNoEndpoints" in await text_of(runbook, "body")
    await runbook.close()


async def test_the_server_keeps_the_history_not_the_page(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    history = scheduler.maker.history
    for i in range(700):
        history.look(scheduler.now() + 5.0 * i)
    page = await browser.page(scheduler.url)
    await live(page)
    shown = "document.getElementById('traffic-chart').ariaLabel"
    await page.until(f"{shown}.startsWith('Requests per second over the last 15 min.')")
    await page.run("(() => { const w = document.getElementById('window'); w.value = '3600'; "
                   "w.dispatchEvent(new Event('change')); })()")  # fmt: skip
    await page.until(f"{shown}.startsWith('Requests per second over the last 60 min.')")
    assert page.messages == []
    await page.close()


async def _choose(page: Page, name: str, value: str) -> None:
    """Fill in a field of the search."""
    await page.run(f"""(() => {{ const field = document.getElementById("search").elements[{name!r}];
        field.value = {value!r}; field.dispatchEvent(new Event("input", {{bubbles: true}})); }})()""")


async def _looks_good_everywhere(page: Page, axe: str) -> None:
    for width, dark in ((390, True), (390, False), (1400, True), (1400, False)):
        await page.resize(width, 1000)
        await page.dress(dark)
        await asyncio.sleep(0.3)
        await fits(page)
        await accessible(page, axe)


LISTED = "[...document.querySelectorAll('#decision-rows tbody tr')].map((row) => row.dataset.key).join()"


async def test_decisions_are_found_beyond_those_that_are_shown(
    scheduler: Scheduler, browser: Browser, axe: str
) -> None:
    scheduler.add(2)
    for i in range(200):
        scheduler.serve(
            i, f"default/model-server-00{i % 2}", model="llama" if i % 50 == 7 else "m", client_id=f"client-{i:04x}-x",
            status=503 if i in (3, 103) else 200, tenant="Team-A" if i < 5 else "team-b",
        )  # fmt: skip
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length === 30")
    await page.run("document.querySelector('#decision-rows [data-id=\"170\"]').focus()")
    scheduler.serve(200, "default/model-server-000")
    await page.until(f"{LISTED}.startsWith('200,199,') && {LISTED}.endsWith(',171,170')")
    assert await page.run("document.activeElement.dataset.id") == "170", "who reads a row by keyboard keeps it"
    await page.run("document.activeElement.blur()")
    await _choose(page, "tenant", "team-a")
    await page.until(f"{LISTED} === '4,3,2,1,0'")
    assert await text_of(page, "#decisions-sub") == "5 of the last 201 match; newest first"
    await page.until("document.getElementById('search-said').textContent === '5 of the last 201 match'")
    await _choose(page, "outcome", "failed")
    await page.until(f"{LISTED} === '3'")
    await _looks_good_everywhere(page, axe)
    await _choose(page, "tenant", "")
    await page.until(f"{LISTED} === '103,3'")
    scheduler.serve(201, "default/model-server-000", status=500)
    await page.until(f"{LISTED} === '201,103,3'")
    await _choose(page, "outcome", "")
    await _choose(page, "model", "LLAMA")
    await page.until(f"{LISTED} === '157,107,57,7'")
    await _choose(page, "id", "client-006b")
    await page.until(f"{LISTED} === '107'")
    await _choose(page, "id", "9999")
    await page.until("document.getElementById('decisions-empty').textContent.startsWith('No decision that is still')")
    await page.run("document.querySelector('#search button[type=reset]').focus()")
    await page.press("Enter")
    await page.until("document.querySelectorAll('#decision-rows tbody tr').length === 30")
    assert page.messages == []
    await page.close()


async def test_models_say_where_they_go_and_queues_who_waits(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.add(3)
    for slot in range(2):
        scheduler.fleet.table.set_listed(slot, frozenset({"sql"}))
    scheduler.watch.on_models(["chat", "m", "sql"], [])
    for i in range(40):
        scheduler.serve(i, "default/model-server-000", "chat", target="sql" if i % 4 == 0 else "m")
    scheduler.serve(40, "default/model-server-000", "chat", target="m", status=503)
    scheduler.hold({"team-a": 12, "team-b": 3})
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelectorAll('#queue-rows tbody tr').length === 3")
    models = await rows(page, "model-rows")
    assert list(models) == ["chat"], "targets are told with the model that is sent to them"
    chat = models["chat"]
    assert chat["targets"] in ("sql 24 %, m 76 %", "m 76 %, sql 24 %")
    assert "sql: adapter on 2 endpoints" in chat["served"] and "m: 3 endpoints" in chat["served"]
    assert (chat["requests"], chat["errors"], chat["error_rate"]) == ("41", "1", "2.4 %")
    assert (chat["p50"], chat["p95"]) == ("110 ms", "110 ms")
    queues = await rows(page, "queue-rows")
    assert [(row["band"], row["waiting"]) for row in queues.values()] == [
        ("band 0", "15"), ("team-a · m", "12"), ("team-b · m", "3"),
    ]  # fmt: skip
    await _looks_good_everywhere(page, axe)
    assert page.messages == []
    await page.close()


async def test_a_split_and_a_notice_with_a_link_fit(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(8)
    adapter, base = "our-own-adapters/customer-support-de", "meta-llama/Llama-3.1-8B-Instruct"
    for slot in range(8):
        scheduler.fleet.table.set_listed(slot, frozenset({adapter}))
    scheduler.watch.on_models(["assistant", base, adapter], [])
    for i in range(40):
        scheduler.serve(i, "default/model-server-000", "assistant", target=adapter if i % 4 == 0 else base)
    scheduler.refuse(1)
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelector('#notices a') && document.querySelector('#model-rows tbody tr')")
    for width in (1600, 1400, 1280):
        await page.resize(width, 900)
        await page.until("document.querySelector('#model-rows').scrollWidth <= "
                         "document.querySelector('#model-rows').clientWidth")  # fmt: skip
    await page.resize(320, 900)
    right = "getBoundingClientRect().right"
    within = f"(link) => link.{right} <= link.closest('li').{right}"
    await page.until(f"[...document.querySelectorAll('#notices a')].every({within})")
    await fits(page)
    await page.close()


async def test_an_endpoint_has_a_page_with_its_last_hour(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.add(3)
    history, now = scheduler.maker.history, scheduler.now()
    for i in range(240):
        busy = 1 + sin(i / 30)
        load = Sample(waiting=max(10 * busy - 14, 0), running=16 * busy, kv_usage=0.4 * busy)
        scheduler.fleet.sampled("default/model-server-001", now, now, load)
        scheduler.serve(i, f"default/model-server-00{i % 3}", at=now + 15.0 * i, ttft_ms=90 * busy + i % 11)
        history.look(now + 15.0 * i)
    page = await browser.page(scheduler.url)
    await live(page)
    link = "#endpoint-rows tbody tr:nth-child(2) a"
    await page.until(f"document.querySelector('{link}')")
    await page.run(f"document.querySelector('{link}').focus()")
    await page.press("Enter")
    await page.until("document.getElementById('endpoint').open")
    assert await text_of(page, "#endpoint-title") == "default/model-server-001"
    kv = "document.getElementById('endpoint-kv').ariaLabel"
    await page.until(f"{kv}.startsWith('KV cache in use over the last 60 min. Now: in use 80 %')")
    await page.until("document.querySelectorAll('#endpoint-decisions tbody tr').length === 20")
    facts = await text_of(page, "#endpoint-facts")
    assert "10.0.0.1:8000" in facts and "serving" in facts
    await _looks_good_everywhere(page, axe)
    await picture(page, "endpoint")
    await page.run("document.querySelector('#endpoint-decisions button').click()")
    await page.until("document.getElementById('why').open")
    await page.press("Escape")
    await page.until("!document.getElementById('why').open && document.getElementById('endpoint').open")
    await page.press("Escape")
    await page.until("!document.getElementById('endpoint').open && !location.hash")
    assert await page.run("document.activeElement.textContent") == "default/model-server-001"
    await page.run("document.activeElement.click()")
    await page.until("document.getElementById('endpoint-decisions').checkVisibility()")
    await page.run("document.querySelector('#endpoint-decisions button').click(); history.back()")
    await page.until("!document.getElementById('endpoint').open && !location.hash")
    assert not await page.run("document.getElementById('why').open")
    await page.close()
    named = await browser.page(scheduler.url + "#endpoint=default%2Fmodel-server-009")
    await named.until(
        "document.getElementById('endpoint-problem').textContent.startsWith('There is nothing of that name')"
    )
    await accessible(named, axe)
    await named.close()


async def test_a_model_has_a_page_with_its_last_hour(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.add(2)
    scheduler.watch.on_models(["chat", "code", "m"], [])
    history, now = scheduler.maker.history, scheduler.now()
    for i in range(240):
        for number in (2 * i, 2 * i + 1):
            failed = number % 10 == 9
            scheduler.serve(
                number, f"default/model-server-00{number % 2}", "chat" if i % 3 else "code", at=now + 15.0 * i,
                status=503 if failed else 200, ttft_ms=90 + 60 * sin(i / 20) + number % 7,
            )  # fmt: skip
        history.look(now + 15.0 * i)
    page = await browser.page(scheduler.url)
    await live(page)
    await page.until("document.querySelectorAll('#model-rows tbody a').length === 3")
    await page.run("document.querySelector('#model-rows tr[data-key=chat] a').focus()")
    await page.press("Enter")
    await page.until("document.getElementById('model').open")
    assert await text_of(page, "#model-title") == "chat"
    traffic = "document.getElementById('model-traffic').ariaLabel"
    await page.until(
        f"{traffic}.startsWith('Requests per second over the last 60 min. Now: decided 0.13, failed 0.07')"
    )
    await page.until("document.querySelectorAll('#model-decisions tbody tr').length === 20")
    assert "Served by" in await text_of(page, "#model-facts")
    await _looks_good_everywhere(page, axe)
    await picture(page, "model")
    await page.press("Escape")
    await page.until("!document.getElementById('model').open && !location.hash")
    assert await page.run("document.activeElement.textContent") == "chat"
    assert page.messages == []
    await page.close()


async def test_the_page_of_a_model_lists_only_its_own_decisions(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    for number, model in enumerate(("sql", "sql-long", "", "SQL")):
        scheduler.serve(number, "default/model-server-000", model)
    page = await browser.page(scheduler.url + "#model=sql")
    listed = "[...document.querySelectorAll('#model-decisions tbody tr')].map((row) => row.dataset.key).join()"
    await page.until(f"{listed} === '0'")
    await page.run("location.hash = '#model='")
    await page.until(f"{listed} === '2'")
    assert await text_of(page, "#model-title") == "(none named)"
    await page.close()


async def test_endpoints_are_found_by_the_model_that_they_list(scheduler: Scheduler, browser: Browser) -> None:
    for name in ("a", "b"):
        scheduler.fleet.up(Endpoint(name, "10.0.0.1:8000"))
    page = await browser.page(scheduler.url)
    await page.until("document.querySelectorAll('#endpoint-rows tbody tr').length === 2")
    scheduler.fleet.table.set_based(1, BaseModels(frozenset({"Qwen/Qwen3-32B"})))
    await page.run("(() => { const f = document.getElementById('filter'); f.value = 'qwen'; "
                   "f.dispatchEvent(new Event('input')); })()")  # fmt: skip
    await page.until("document.getElementById('endpoints-count').textContent.includes('1 found')")
    cell = "document.querySelector('#endpoint-rows td.name')"
    await page.until(f"{cell}.title === 'b · 10.0.0.1:8000 · Qwen/Qwen3-32B'")
    await page.run(f"{cell}.querySelector('a').click()")
    await page.until("document.getElementById('endpoint-facts').textContent.includes('Qwen/Qwen3-32B')")
    scheduler.fleet.table.set_based(1, BaseModels(frozenset(f"model-{i:03}" for i in range(200))))
    await page.until("document.getElementById('endpoint-facts').textContent.includes('model-005 and 194 more')")
    await page.close()


async def test_models_that_are_not_listed_are_counted(scheduler: Scheduler, browser: Browser, axe: str) -> None:
    scheduler.add(1)
    names = [f"model-{i:02}" for i in range(45)]
    scheduler.watch.on_models([*names, "m"], [])
    for number, model in enumerate(names):
        scheduler.serve(number, "default/model-server-000", model)
    page = await browser.page(scheduler.url + "#model=m")
    await page.until("document.getElementById('model-problem').textContent.startsWith('Nothing has been recorded yet')")
    scheduler.maker.history.look(scheduler.now())
    await page.run("location.hash = '#model=model-01'")
    await page.until("document.getElementById('model-charts').checkVisibility()")
    assert await page.run("document.getElementById('model-problem').hidden")
    await page.run("location.hash = '#model=m'")
    await page.until(
        "document.getElementById('model-problem').textContent.startsWith('It is not in the list of models')"
    )
    assert await page.run("document.getElementById('model-facts').hidden")
    await page.press("Escape")
    assert await text_of(page, "#served-more") == "And 6 more."
    assert await text_of(page, "#models-more") == "And 5 more."
    row = "#model-rows tr[data-key=model-20]"
    await page.run(f"document.querySelector('{row} a').focus()")
    for number in range(50, 70):
        scheduler.serve(number, "default/model-server-000", "model-20")
    await page.until(f"document.querySelector('{row}').rowIndex === 1")
    assert await page.run("document.activeElement.textContent") == "model-20"
    await accessible(page, axe)
    await page.close()


async def _hold(page: Page, part: str) -> None:
    """Hold the next answers to requests whose address has `part`, until the page's `release()` is called."""
    await page.run(f"""(() => {{ const ask = fetch;
        const released = new Promise((done) => {{ window.release = done; }});
        window.fetch = async (url) => {{
          const answer = await ask(url);
          if (!url.includes({part!r})) return answer;
          const content = await answer.json();
          await released;
          return {{ ok: true, json: async () => {{ window.read = true; return content; }} }};
        }}; }})()""")


async def test_an_answer_that_comes_late_is_not_shown_as_another(scheduler: Scheduler, browser: Browser) -> None:
    scheduler.add(1)
    for number, model in ((1, "alpha"), (2, "beta")):
        scheduler.serve(number, "default/model-server-000", model)
    page = await browser.page(scheduler.url)
    await page.until("document.querySelectorAll('#decision-rows button').length === 2")
    await _hold(page, "/debug/decisions/2")
    await page.run("document.querySelector('#decision-rows [data-id=\"2\"]').click()")
    await page.press("Escape")
    await page.run("document.querySelector('#decision-rows [data-id=\"1\"]').click()")
    await page.until("document.querySelector('#why-body dl')")
    await page.run("release()")
    await page.until("window.read")
    await page.run("new Promise((done) => setTimeout(done))")  # what was read would be shown by now
    assert "alpha" in await text_of(page, "#why-body") and "beta" not in await text_of(page, "#why-body")
    await page.press("Escape")
    shown = "document.getElementById('model-decisions').checkVisibility()"
    await page.run("location.hash = '#model=alpha'")
    await page.until(shown)
    await _hold(page, "requested=beta")
    await page.run("location.hash = '#model=beta'")
    await page.until("document.getElementById('model-title').textContent === 'beta'")
    assert not await page.run(shown), "these are the decisions for the other model"
    await page.run("release()")
    await page.until(shown)
    await page.close()
