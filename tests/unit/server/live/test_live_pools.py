"""Schedulers of several pools in one process: each its own, opened and closed while the others go on."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fairlead.compat.load import load
from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import EndpointUp, RequestArrived, ResponseEnded
from fairlead.core.models import InferenceModel, ModelSet, Origin, Target
from fairlead.core.request import Request
from fairlead.pool.kube.objects import PickerRef, Pool
from fairlead.server.live import pools as live_pools
from fairlead.server.live.pools import LivePools, of_pool

FILE = """
gateway: none
kubernetes: {namespaces: ["*"]}
metrics: {modelsInterval: 0s}
journal: {path: JOURNAL}
state: {file: STATE}
scorers: [{type: prefix-aware, weight: 1}]
pools:
  b/llama: {scorers: [{type: load-aware, weight: 1}]}
"""


def pool(name: str, namespace: str) -> Pool:
    return Pool(namespace, name, {"app": name}, (8000,), picker=PickerRef(f"{name}-epp"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    return FILE.replace("JOURNAL", str(tmp_path / "journal")).replace("STATE", str(tmp_path / "learned.state"))


@pytest.fixture
async def pools(text: str) -> AsyncIterator[LivePools]:
    made = LivePools(load(text), None, list)
    yield made
    await made.close()


def up(name: str) -> EndpointUp:
    return EndpointUp(Endpoint(name, "127.0.0.1:1"))


def scorers(opened: Any) -> list[str]:
    return [spec.type for spec in opened.scheduler.config.policy.scorers]


async def test_pods_pages_are_read_where_the_settings_say(text: str) -> None:
    pools = LivePools(load(text.replace("modelsInterval", "port: 9400, path: /m, modelsInterval")), None, list)
    opened = await pools.open("a/llama", pool("llama", "a"))
    opened.endpoint(up("a/one-rank-0"))
    ((_, endpoint),) = opened.scheduler.fleet.table.slots()
    assert endpoint.scrape_url == "http://127.0.0.1:9400/m"
    await pools.close()


async def test_each_has_its_own_policy_endpoints_names_and_files(pools: LivePools, tmp_path: Path) -> None:
    a, b = await pools.open("a/llama", pool("llama", "a")), await pools.open("b/llama", pool("llama", "b"))
    assert (scorers(a), scorers(b)) == (["prefix-aware"], ["load-aware"])
    a.endpoint(up("a/one-rank-0"))
    b.endpoint(up("b/one-rank-0"))
    b.endpoint(up("b/two-rank-0"))
    chat = InferenceModel(origin=Origin(namespace="a", name="chat"), model="chat", targets=(Target("m"),))
    a.defined("kubernetes", ModelSet((chat,)))
    assert a.scheduler.pipeline.models.known == {"chat", "m"}
    assert b.scheduler.pipeline.models.empty
    pages = pools.pages()
    assert {key: [one.id for one in page.endpoints()] for key, page in pages.items()} == {
        "a/llama": ["a/one-rank-0"],
        "b/llama": ["b/one-rank-0", "b/two-rank-0"],
    }
    assert {path.name for path in (tmp_path / "journal").iterdir()} == {"a.llama", "b.llama"}
    await pools.close()
    assert {path.name for path in tmp_path.glob("*.state")} == {"a.llama.learned.state", "b.llama.learned.state"}


def test_each_has_its_own_snapshot_of_the_kv_index(text: str) -> None:
    config = load(text + "kvEvents: {enabled: true, port: 5557, snapshot: /kept/index.kv}\n")
    shared = config.model_copy(update={"pools": {}})
    assert of_pool(shared, "a/llama").kv_events.snapshot == "/kept/a.llama.index.kv"
    named = config.kv_events.model_copy(update={"snapshot": "/kept/of-a.kv"})
    own = config.model_copy(update={"pools": {"a/llama": shared.model_copy(update={"kv_events": named})}})
    assert of_pool(own, "a/llama").kv_events.snapshot == "/kept/of-a.kv", "it names one itself"


async def test_each_measures_its_load_only_while_the_process_leads(pools: LivePools) -> None:
    a = await pools.open("a/llama", pool("llama", "a"))
    assert not a.scheduler.watch.standby(), "there is no leader election"
    for leads in (False, True):
        pools.kube.leader.child("team/epp").set(leads)
        assert a.scheduler.watch.standby() is not leads


async def test_a_pool_with_the_service_of_an_older_one_is_named(pools: LivePools) -> None:
    older = replace(pool("llama", "a"), created="2026-01-01T00:00:00Z")
    await pools.open("a/llama-v2", replace(older, name="llama-v2", created="2026-01-02T00:00:00Z"))
    opened = await pools.open("a/llama", older)
    reason = "gateways do not reach pools with the Service and port of an older pool; give each pool its own: "
    assert reason + "a/llama-v2 (as a/llama)" in pools.sources().notes()
    opened.changed(pool("other", "a"))
    assert not any("older" in note for note in pools.sources().notes())


async def test_a_pool_without_endpoints_is_named(pools: LivePools) -> None:
    a = await pools.open("a/llama", pool("llama", "a"))
    assert "a/llama: no endpoints" in pools.sources().notes()
    a.endpoint(up("a/one-rank-0"))
    assert "a/llama: no endpoints" not in pools.sources().notes()


async def test_one_page_of_metrics_tells_them_apart(pools: LivePools) -> None:
    for namespace in "ab":
        opened = await pools.open(f"{namespace}/llama", pool("llama", namespace))
        opened.endpoint(up(f"{namespace}/one-rank-0"))
    lines = b"".join(pools.exposition()).decode().splitlines()
    ready = [line for line in lines if line.startswith("llm_d_epp_ready_endpoints{")]
    assert [line.count('inference_pool="a/llama"') for line in ready] == [1, 0]
    heads = [line for line in lines if line.startswith("# TYPE ")]
    assert len(heads) == len({head.split()[2] for head in heads})
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len({*samples})
    assert "fairlead_pools 2" in lines
    assert b"".join(pools.exposition(openmetrics=True)).endswith(b"# EOF\n")


async def test_a_changed_configuration_reaches_the_pools_that_it_is_for(pools: LivePools, text: str) -> None:
    a, b = await pools.open("a/llama", pool("llama", "a")), await pools.open("b/llama", pool("llama", "b"))
    weighty = text.replace("{type: load-aware, weight: 1}", "{type: load-aware, weight: 7}")
    assert pools.reconfigure(plan_reload(pools.config, load(weighty))[0])
    assert b.scheduler.config.policy.scorers[0].weight == 7
    assert a.scheduler.pipeline.policy is not b.scheduler.pipeline.policy
    before = b.scheduler.pipeline.policy
    other = weighty.replace("{type: prefix-aware, weight: 1}", "{type: prefix-aware, weight: 3}")
    assert pools.reconfigure(plan_reload(pools.config, load(other))[0])
    assert a.scheduler.config.policy.scorers[0].weight == 3
    assert b.scheduler.pipeline.policy is before
    later = await pools.open("c/llama", pool("llama", "c"))
    assert later.scheduler.config.policy.scorers[0].weight == 3
    pools.refuse(["line 3: unknown key", "line 4: another one"])
    shown = pools.troubles.look()["configuration"]
    assert shown.endswith("cannot be used; the old one stays: line 3: unknown key (and 1 more)")
    assert not pools.reconfigure(plan_reload(pools.config, load(other))[0])
    assert "configuration" not in pools.troubles.look()
    queues = other.replace("b/llama: {", "b/llama: {flowControl: {ttl: 9s}, ")
    pools.reconfigure(plan_reload(pools.config, load(queues))[0])
    pools.reconfigure(plan_reload(pools.config, load(queues.replace("9s", "8s")))[0])
    assert pools.refused == ["b/llama $.flowControl"]
    pools.reconfigure(plan_reload(pools.config, load(queues))[0])
    assert not pools.refused


async def test_a_pool_that_comes_later_has_what_the_others_have(text: str) -> None:
    """The port began before it, with a limit of its own."""

    def limited(body: int) -> Config:
        return load(f"{text}parsing: {{maxBodyBytes: {body}MiB}}\n")

    def limits() -> list[int]:
        return [opened.scheduler.config.parsing.max_body_bytes >> 20 for opened in pools.pools.values()]

    start = limited(2)
    pools = LivePools(start, None, list)
    await pools.open("a/llama", pool("llama", "a"))
    pools.reconfigure(plan_reload(pools.config, limited(1), start)[0])
    await pools.open("c/llama", pool("llama", "c"))
    assert limits() == [1, 1]
    pools.reconfigure(plan_reload(pools.config, limited(4), start)[0])
    await pools.open("b/llama", pool("llama", "b"))
    assert (limits(), pools.refused) == ([2, 2, 2], ["b/llama $.parsing.maxBodyBytes"])
    pools.reconfigure(plan_reload(pools.config, limited(2), start)[0])
    assert not pools.refused
    await pools.close()


async def test_a_pool_that_is_gone_drains_and_leaves_nothing(pools: LivePools) -> None:
    kept = await pools.open("a/llama", pool("llama", "a"))
    gone = await pools.open("b/llama", pool("llama", "b"))
    for opened in (kept, gone):
        opened.endpoint(up("x/one-rank-0"))
    scheduler = gone.scheduler
    asked = Request(1, 0.0)
    scheduler.driver.feed(RequestArrived(asked))
    assert (pools.leases, pools.endpoints) == (1, 2)
    scheduler.driver.later(0.1, scheduler.driver.feed, ResponseEnded(request_id=1, status=200))
    await gone.close()
    assert (pools.leases, pools.endpoints, list(pools.pools)) == (0, 1, ["a/llama"])
    parts = [weakref.ref(part) for part in (scheduler, scheduler.fleet, scheduler.pipeline, scheduler.watch)]
    del gone, scheduler, opened
    async with asyncio.timeout(10):  # tasks that were cancelled may hold them for a moment
        while any(part() for part in parts):
            gc.collect()
            await asyncio.sleep(0.01)
    assert 'inference_pool="b/llama"' not in b"".join(pools.exposition()).decode()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_pool_that_is_gone_refuses_all_that_wait(
    text: str, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StopAsked` refuses the first few only; timers refuse the others."""
    monkeypatch.setattr(live_pools, "REFUSE_S", 60.0)  # a busy machine takes longer than a second
    pools = LivePools(load(f"{text}flowControl: {{noEndpointTtl: 60s}}\n"), None, list)
    opened = await pools.open("a/llama", pool("llama", "a"))
    now = asyncio.get_running_loop().time()
    for number in range(1, 2001):
        opened.scheduler.driver.feed(RequestArrived(Request(number, now)))
    assert (pools.leases, pools.waiting) == (0, 2000)
    closing = asyncio.create_task(opened.close())
    await asyncio.sleep(0)
    assert 0 < pools.waiting < 2000
    if comes_back:
        await pools.open("a/llama", pool("llama", "a"))
    await closing
    assert opened.scheduler.waiting == pools.waiting == 0
    await pools.close()


async def test_a_pool_that_comes_back_does_not_wait_for_its_old_requests(pools: LivePools) -> None:
    first = await pools.open("a/llama", pool("llama", "a"))
    first.endpoint(up("a/one-rank-0"))
    first.scheduler.driver.feed(RequestArrived(Request(1, 0.0)))
    closing = asyncio.create_task(first.close())
    await asyncio.sleep(0)
    assert not pools.pools
    again = await pools.open("a/llama", pool("llama", "a"))
    await closing
    assert pools.pools == {"a/llama": again}
    assert pools.leases == 0


async def test_a_request_with_a_pair_of_leases_counts_as_one(pools: LivePools) -> None:
    opened = await pools.open("a/llama", pool("llama", "a"))
    for name in ("a/one-rank-0", "a/two-rank-0"):
        opened.endpoint(up(name))
    fleet = opened.scheduler.fleet
    lease = fleet.charge_pair(Request(0, 0.0), 0, 1, 0.0, 0, 8.0)
    assert (len(fleet.ledger), pools.leases) == (2, 1)
    fleet.ledger.release(lease)
    assert pools.leases == 0
