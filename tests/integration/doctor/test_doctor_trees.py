"""The troubleshooting trees: what a running scheduler's own pages say, here told by a server in its place."""

from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from ports import free_ports

from fairlead.doctor.run import Examination

Json = dict[str, Any]
Told = Callable[..., Awaitable[str]]


def codes(examination: Examination) -> set[str]:
    return {one.code for one in examination.findings}


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    """`await told(metrics, endpoints)` starts the pages; gives their URL. `later`: the metrics from the third time."""
    servers: list[TestServer] = []

    async def start(
        metrics: str = "",
        endpoints: list[Json] | None = None,
        unready: str = "",
        decisions: list[Json] | None = None,
        ready: str = "ready\n",
        several: bool = False,
        index: str = "fairlead\n\n/debug/endpoints  all endpoints\n",
        replicas: Json | None = None,
        decided: bool = False,
        port: int | None = None,
        token: str = "",
        later: str = "",
        means: dict[str, float | None] = {},  # noqa: B006
    ) -> str:
        pages = [later or metrics, metrics, metrics]

        async def page(request: web.Request) -> web.Response:
            given = request.headers.get("Authorization", "")
            if token and given != "Basic " + b64encode(f":{token}".encode()).decode():
                return web.Response(status=401, text="a token is needed\n")
            if request.path == "/metrics":
                text = pages.pop() if len(pages) > 1 else pages[0]
                return web.Response(text=text, status=500 if "metrics failed" in text else 200)
            if request.path == "/debug/endpoints" and endpoints is None:
                return web.Response(status=503, text="too many readers\n")
            if request.path == "/debug/endpoints":
                pool = request.query.get("pool", "")
                if several and not pool:
                    return web.Response(status=404, text="no pool ''")
                rows = [row for row in endpoints or [] if row["id"].startswith(pool)]
                return web.json_response({"endpoints": rows})
            if request.path == "/debug/decisions":
                return web.json_response({"decisions": (decisions or [])[: int(request.query["last"])]})
            if request.path == "/dashboard/snapshot":
                if several and not request.query.get("pool"):
                    return web.Response(status=404, text="no pool ''")
                rows = [{"id": name, "actual_ms": ms} for name, ms in means.items()]
                return web.json_response({"now": {"endpoints": rows}})
            if request.path == "/debug/replicas" and replicas is not None:
                return web.json_response(replicas)
            if request.path.startswith("/debug/decisions/"):
                return web.json_response({}, status=200 if decided else 404)
            if request.path == "/readyz":
                return web.Response(status=503 if unready else 200, text=unready or ready)
            return web.Response(text=index)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", page)
        server = TestServer(app, port=port)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


async def examined(world: Any, admin: str, check: str) -> Examination:
    """The configuration lists an endpoint that no check here asks."""
    found: Examination = await world.examined({"endpoints": ["127.0.0.1:9"]}, admin=admin, only=(check,))
    return found


async def test_a_scheduler_that_is_not_ready_says_why(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    found = await examined(world, await told(endpoints=here, unready="not ready\n- no endpoints\n"), "scheduler")
    assert codes(found) == {"scheduler.not-ready"}
    assert found.findings[0].evidence == "not ready - no endpoints"


@pytest.mark.parametrize(("listed", "found"), [(None, set()), ([], {"scheduler.other-endpoints"})])
async def test_a_list_of_endpoints_that_cannot_be_read_differs_from_nothing(
    world: Any, told: Told, listed: list[Json] | None, found: set[str]
) -> None:
    assert codes(await examined(world, await told(endpoints=listed), "scheduler")) == found


@pytest.mark.parametrize("kubernetes", [{"pool": "llama"}, {"namespaces": ["a", "b"]}], ids=["one", "several"])
async def test_endpoints_that_the_scheduler_does_not_show_are_not_examined_and_that_is_said(
    world: Any, told: Told, kubernetes: Json
) -> None:
    config = {"gateway": "none", "kubernetes": kubernetes}
    hidden = await world.examined(config, admin=await told(index="fairlead\n"), only=("scheduler", "endpoints"))
    assert codes(hidden) == {"scheduler.no-debug"}
    empty = await world.examined(config, admin=await told(), only=("scheduler", "endpoints"))
    assert codes(empty) == set()


async def test_the_endpoints_of_several_pools_are_examined(world: Any, told: Told) -> None:
    rows = [{"id": f"{pool}-0-rank-0", "address": "127.0.0.1:9"} for pool in ("a/llama", "b/qwen")]
    lines = [f'llm_d_epp_ready_endpoints{{inference_pool="{pool}"}} 1\n' for pool in ("a/llama", "b/qwen")]
    config = {"gateway": "none", "kubernetes": {"namespaces": ["a", "b"]}}
    found = await world.examined(config, admin=await told("".join(lines), rows, several=True), only=("endpoints",))
    assert {where for one in found.findings for where in one.where} == {row["id"] for row in rows}


async def test_late_servers_of_several_pools_are_named(world: Any, told: Told) -> None:
    lines = 'llm_d_epp_ready_endpoints{inference_pool="a/llama"} 1\nllm_d_epp_ready_endpoints{inference_pool="b/x"} 1\n'
    config = {"gateway": "none", "kubernetes": {"namespaces": ["a", "b"]}}
    admin = await told(lines, several=True, means={"slow": 2100.0, "fast": 100.0})
    (late,) = (await world.examined(config, admin=admin, only=("scheduler",))).findings
    assert (late.code, late.where) == ("scheduler.late", ("slow",))


async def test_a_pods_label_that_is_no_port_is_named(world: Any, told: Told) -> None:
    (address,) = await world.stubs(1)
    rows = [{"id": "a/llama-0-rank-0", "address": address, "labels": {"metricsPort": "abc"}}]
    config = {"gateway": "none", "kubernetes": {"pool": "llama"}}
    (finding,) = (await world.examined(config, admin=await told(endpoints=rows), only=("metrics",))).findings
    assert finding.code == "metrics.port-label"
    assert finding.evidence == f"'abc'; the page is read at http://{address}/metrics"


async def test_a_metrics_page_that_fails_is_named(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    found = await examined(world, await told("/metrics failed: KeyError", here), "scheduler")
    assert codes(found) == {"scheduler.no-metrics"}


async def test_plugins_that_fail_and_requests_that_went_past_are_named(world: Any, told: Told) -> None:
    metrics = (
        'fairlead_plugin_errors_total{plugin_name="mine"} 3\n'
        'fairlead_fallback_requests_total{endpoint="e"} 20\n'
        'llm_d_epp_request_total{model_name="m"} 100\n'
    )
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    found = await examined(world, await told(metrics, here), "scheduler")
    assert codes(found) == {"scheduler.plugin-errors", "scheduler.bypassed"}
    assert found.findings[0].where == ("mine",)
    assert found.findings[1].evidence == "20 of 120 requests since the start"


async def test_a_state_file_that_cannot_be_written_is_named(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    why = "/var/learned.state cannot be written, and a restart forgets: No space left on device"
    metrics = 'fairlead_trouble{what="scrapes"} 1\nfairlead_trouble{what="state"} '
    well = await examined(world, await told(metrics + "0\n", here), "scheduler")
    assert codes(well) == set()
    found = await examined(world, await told(metrics + "1\n", here, ready=f"ready\n- {why}\n"), "scheduler")
    assert codes(found) == {"scheduler.forgets"}
    assert found.findings[0].evidence == why


@pytest.mark.parametrize(("failed", "found"), [(3, set()), (6, {"scheduler.errors"})])
async def test_many_requests_that_fail_are_named(world: Any, told: Told, failed: int, found: set[str]) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    counts = {"ModelServerError": failed, "Internal": 1, "ResourceExhausted": 50}
    metrics = 'llm_d_epp_request_total{model_name="m"} 100\n' + "".join(
        f'llm_d_epp_request_error_total{{model_name="m",error_code="{code}"}} {count}\n'
        for code, count in counts.items()
    )
    report = await examined(world, await told(metrics, here), "scheduler")
    assert codes(report) == found
    for finding in report.findings:
        assert finding.evidence == "7 of 100 requests since the start: ModelServerError 6, Internal 1"


ENDPOINTS = "".join(f'fairlead_endpoint_stale{{endpoint="{name}"}} 0\n' for name in "abc")
WAITING = 'fairlead_flow_waiting_requests 38\nfairlead_flow_head_age_seconds{priority="0"} '


@pytest.mark.parametrize(
    ("metrics", "evidence"),
    [
        (WAITING + "1.5\n", ""),  # a burst
        (WAITING.replace('"0"', '"-10"') + "300\n", ""),  # sheddable requests are meant to wait
        (WAITING + "30\n" + "".join(f'fairlead_endpoint_out{{endpoint="{each}"}} 1\n' for each in "abc"), ""),
        (WAITING + "30.4\n", "38 requests wait, the oldest for 30 s; 3 endpoints serve"),
        (
            WAITING + '30\nfairlead_endpoint_out{endpoint="a",why="fails"} 1\nfairlead_desired_replicas 8\n',
            "38 requests wait, the oldest for 30 s; 2 endpoints serve, fairlead_desired_replicas is 8",
        ),
        (
            'fairlead_scale_up_wanted 1\nfairlead_desired_replicas{role="prefill"} 2\n'
            'fairlead_desired_replicas{role="decode"} 3\n',
            "requests found all full; 3 endpoints serve, fairlead_desired_replicas is 5",
        ),
    ],
)
async def test_an_overload_is_named_with_the_servers_that_are_missing(
    world: Any, told: Told, metrics: str, evidence: str
) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    found = await examined(world, await told(ENDPOINTS + metrics, here), "scheduler")
    overloads = [each for each in found.findings if each.code == "scheduler.overloaded"]
    assert [each.evidence for each in overloads] == [evidence] * bool(evidence)


@pytest.mark.parametrize(
    ("good", "bad", "decided", "evidence"),
    [
        (0, 40, 0, "40 of 40 answers just now are errors without a decision"),
        (10, 40, 20, ""),  # the scheduler refused some
        (40, 30, 0, ""),
        (0, 2, 0, ""),
    ],
)
async def test_a_gateway_that_refuses_most_requests_is_named(
    world: Any, told: Told, good: int, bad: int, decided: int, evidence: str
) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    page = (
        'fairlead_gateway_responses_total{{class="2xx"}} {}\nfairlead_gateway_responses_total{{class="4xx"}} {}\n'
        'llm_d_epp_request_error_total{{error_code="BadRequest"}} {}\n'
    )
    pages = page.format(1_000, 5, 3), page.format(1_000 + good, 5 + bad, 3 + decided)
    report = await examined(world, await told(pages[0], here, later=pages[1]), "scheduler")
    assert [each.evidence for each in report.findings] == [evidence] * bool(evidence)


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_reading_that_failed_is_not_compared(world: Any, told: Told, missing: int) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    page = (
        'fairlead_gateway_responses_total{class="2xx"} 100\nfairlead_gateway_responses_total{class="4xx"} 900\n'
        'llm_d_epp_request_total{model_name="m"} 1000\n'
        f'llm_d_epp_request_error_total{{model_name="m",error_code="BadRequest"}} {2000 * missing}\n'
    )
    pages = [page, page]
    pages[missing] = "metrics failed"
    found = await examined(world, await told(pages[0], here, later=pages[1]), "scheduler")
    assert codes(found) <= {"scheduler.no-metrics"}


async def test_servers_with_late_first_tokens_are_named_the_slowest_first(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    means = {"a": 2100.0, "b": 1900.0, "c": 12_345.0, "d": None}
    (late,) = (await examined(world, await told("", here, means=means), "scheduler")).findings
    assert (late.code, late.where) == ("scheduler.late", ("c", "a"))
    assert late.evidence == "12.3 s at c, the mean of the last minute"


async def test_requests_that_fail_now_are_named_after_weeks_without_failures(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    counts = ((1_000_000, 0), (1_000_040, 8), (1_000_080, 10), (1_000_120, 10))
    pages = [
        f'llm_d_epp_request_total{{model_name="m"}} {asked}\n'
        f'llm_d_epp_request_error_total{{model_name="m",error_code="ModelServerError"}} {failed}\n'
        for asked, failed in counts
    ]
    for first, now, evidence in ((0, 1, "8 of 40 requests just now: ModelServerError 8"), (1, 2, ""), (2, 3, "")):
        report = await examined(world, await told(pages[first], here, later=pages[now]), "scheduler")
        assert [each.evidence for each in report.findings] == [evidence] * bool(evidence)


async def test_an_endpoint_whose_answers_fail_is_named(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    metrics = "".join(f'fairlead_endpoint_out{{endpoint="{why}-1",why="{why}"}} 1\n' for why in ("fails", "hangs"))
    found = await examined(world, await told(metrics, here), "scheduler")
    named = {(each.code, each.where) for each in found.findings}
    assert named == {("scheduler.failing", ("fails-1",)), ("scheduler.hanging", ("hangs-1",))}


@pytest.mark.parametrize(
    ("gauge", "well", "wrong", "code"),
    [
        ('scheduler_connected{scheduler="one"}', 1, 0, "remote-down"),
        ('scheduler_breaker{scheduler="one",state="open"}', 0, 1, "remote-fails"),
        ('shadow_cut_off{shadow="one"}', 0, 1, "shadow-cut-off"),
        ("indexer_up", 1, 0, "indexer-down"),
    ],
)
async def test_deciders_and_an_indexer_that_fail_are_named(
    world: Any, told: Told, gauge: str, well: int, wrong: int, code: str
) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    closed = 'fairlead_scheduler_breaker{scheduler="one",state="closed"} 1\n'
    for value, named in ((well, set()), (wrong, {f"scheduler.{code}"})):
        found = await examined(world, await told(f"fairlead_{gauge} {value}\n{closed}", here), "scheduler")
        assert codes(found) == named


async def test_what_the_scheduler_says_of_itself_is_a_finding(world: Any, told: Told) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    why = "records of the journal are lost: its disk fails or is full; the log says which"
    metrics = 'fairlead_trouble{what="journal"} 1\nfairlead_trouble{what="keys"} 0\n'
    found = await examined(world, await told(metrics, here, ready=f"ready\n- {why}\n"), "scheduler")
    assert codes(found) == {"scheduler.restricted"}
    assert (found.findings[0].where, found.findings[0].evidence) == (("journal",), why)


@pytest.mark.parametrize(
    ("metrics", "expected", "evidence"),
    [
        ("fairlead_replicas_connected 1\nfairlead_replicas_unheard_seconds 0\n", set(), ""),
        ("fairlead_replicas_connected 1\nfairlead_replicas_unheard_seconds 2\n", set(), ""),
        ("fairlead_replicas_connected 1\nfairlead_replicas_unheard_seconds 40\n", {"scheduler.no-peers"}, "for 40 s"),
        ("fairlead_replicas_connected 0\nfairlead_replicas_unheard_seconds 40\n", {"scheduler.alone"}, "refused"),
    ],
)
async def test_a_replica_that_nobody_hears_is_named(
    world: Any, told: Told, metrics: str, expected: set[str], evidence: str
) -> None:
    here = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}]
    ready = "ready\n- this replica decides alone: valkey://h: connection refused\n"
    found = await examined(world, await told(metrics, here, ready=ready), "scheduler")
    assert codes(found) == expected
    assert all(evidence in each.evidence for each in found.findings)


@pytest.mark.parametrize(("decided", "peers", "expected"), [(1, 1, False), (2, 1, True), (2, 2, False)])
async def test_any_worker_may_have_decided(world: Any, told: Told, decided: int, peers: int, expected: bool) -> None:
    """Where there are yet more schedulers, those may have, too."""
    first, workers = (
        free_ports(2)[0],
        [{"worker": i, "workers": 2, "replicas": dict.fromkeys("ab"[:peers])} for i in (0, 1)],
    )
    admins = [await told(replicas=page, decided=i == decided, port=first + i) for i, page in enumerate(workers)]
    config = {"endpoints": ["127.0.0.1:9"]}
    found = await world.examined(config, admin=admins[1], gateway=await told(), only=("asking",))
    assert codes(found) == ({"asking.bypassed"} if expected else set())


async def test_workers_are_asked_with_the_token_of_the_first(world: Any, told: Told) -> None:
    first, token = free_ports(2)[0], "t0/ken"
    workers = [{"worker": i, "workers": 2, "replicas": {"a": None}} for i in (0, 1)]
    admins = [await told(replicas=page, decided=i == 1, port=first + i, token=token) for i, page in enumerate(workers)]
    admin = admins[0].replace("http://", "http://:t0%2Fken@")
    found = await world.examined({"endpoints": ["127.0.0.1:9"]}, admin=admin, gateway=await told(), only=("asking",))
    assert codes(found) == set()


@pytest.mark.parametrize("readable", [True, False])
async def test_the_configured_token_is_used(world: Any, told: Told, tmp_path: Path, readable: bool) -> None:
    """Without it, the doctor says that the port asks for one: a scheduler runs."""
    admin = await told(unready="not ready\n- it is broken\n", token="t0/ken")
    if readable:
        (tmp_path / "tokens").write_text("t0/ken\n")
    configured = {"port": int(admin.rpartition(":")[2]), "tokenFile": str(tmp_path / "tokens")}
    found = await world.examined({"endpoints": ["127.0.0.1:9"], "admin": configured}, only=("scheduler",))
    if readable:
        assert "scheduler.not-ready" in codes(found)
    else:
        assert "asks for a token" in found.outcomes[0].detail


async def test_each_worker_is_looked_at(world: Any, told: Told) -> None:
    here, first = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}], free_ports(3)[0]
    trouble = "only 2 of 3 workers are heard: one does not run, hangs or keeps restarting, see the log"
    page = {"worker": 0, "workers": 3, "replicas": {"b": {}}, "trouble": trouble}
    metrics = 'fairlead_replicas_connected 1\nfairlead_trouble{what="replicas"} 1\n'
    admin = await told(metrics, here, replicas=page, port=first)
    await told(unready="not ready\n- no endpoints\n", port=first + 1)
    found = await examined(world, admin, "scheduler")
    assert codes(found) == {"scheduler.not-ready", "scheduler.apart"}
    by_code = {one.code: one for one in found.findings}
    assert by_code["scheduler.not-ready"].where == ("worker 1", "worker 2")
    assert by_code["scheduler.apart"].evidence == trouble


async def test_what_waits_at_any_worker_is_counted(world: Any, told: Told) -> None:
    here, first = [{"id": "127.0.0.1:9", "address": "127.0.0.1:9"}], free_ports(2)[0]
    waits = 'fairlead_flow_waiting_requests {}\nfairlead_flow_head_age_seconds{{priority="0"}} {}\n'
    page = {"worker": 0, "workers": 2, "replicas": {"b": {}}}
    desired = "fairlead_desired_replicas 4\n"
    admin = await told(ENDPOINTS + desired + waits.format(5, 0.5), here, replicas=page, port=first)
    await told(ENDPOINTS + desired + waits.format(20, 30), here, port=first + 1)
    (overload,) = (await examined(world, admin, "scheduler")).findings
    assert overload.code == "scheduler.overloaded"
    assert overload.evidence.startswith("25 requests wait, the oldest for 30 s; 3 endpoints serve, ")
    assert overload.evidence.endswith("fairlead_desired_replicas is 4")


async def test_events_that_are_not_relied_on_are_named_with_their_cause(world: Any, told: Told) -> None:
    metrics = (
        'fairlead_kv_feed_connected{endpoint="e0",rank="0"} 1\nfairlead_kv_feed_connected{endpoint="e1",rank="0"} 1\n'
        'fairlead_kv_source{endpoint="e0",source="learned"} 1\nfairlead_kv_source{endpoint="e1",source="exact"} 1\n'
        'fairlead_kv_disagreements_total{endpoint="e0",cause="unknown"} 2\n'
        'fairlead_kv_disagreements_total{endpoint="e0",cause="chat-template"} 9\n'
        'fairlead_kv_disagreements_total{endpoint="e1",cause="evicted"} 1\n'
    )
    found = await examined(world, await told(metrics), "hits")
    assert codes(found) == {"hits.distrusted"}
    assert found.findings[0].where == ("e0",)
    assert found.findings[0].evidence == "likely cause: chat-template (9 answers)"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ("kv_cache_lookup_total 1000000\nkv_cache_hit_total 100000\n", {"hits.low"}),
        ("kv_cache_lookup_total 1000000\nkv_cache_hit_total 400000\n", set()),
        ("kv_cache_lookup_total 1000\nkv_cache_hit_total 0\n", set()),
        ('kv_cache_lookup_total{model_name="other"} 1000000\nkv_cache_hit_total{model_name="other"} 0\n', set()),
        (
            "fairlead_predicted_hit_tokens_total 200000\nfairlead_reported_cached_tokens_total 9000\n",
            {"hits.not-real"},
        ),
        (
            'llm_d_epp_request_total 1000\nfairlead_kv_prompts_without_tokens_total{reason="media"} 800\n',
            {"hits.no-tokens"},
        ),
        ("", set()),
    ],
)
async def test_hit_rates(world: Any, told: Told, metrics: str, expected: set[str]) -> None:
    assert codes(await examined(world, await told(metrics), "hits")) == expected


def histogram(name: str, quick: int, slow: int, labels: str = "") -> str:
    return (
        f'{name}_bucket{{{labels}le="0.001"}} {quick}\n{name}_bucket{{{labels}le="0.1"}} {quick + slow}\n'
        f'{name}_bucket{{{labels}le="+Inf"}} {quick + slow}\n'
    )


LAG, DECIDING = "fairlead_loop_lag_seconds", "llm_d_epp_scheduler_e2e_duration_seconds"
PLUGINS = 'llm_d_epp_plugin_duration_seconds_sum{plugin_name="mine"} 40\n' + (
    'llm_d_epp_plugin_duration_seconds_sum{plugin_name="queue"} 3\n'
)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (histogram(LAG, 1000, 10) + histogram(DECIDING, 1000, 10), set()),
        (histogram(LAG, 1000, 100), {"scheduling.cpu"}),
        (histogram(LAG, 5, 5) + histogram(DECIDING, 5, 5), set()),
        (histogram(DECIDING, 1000, 100), {"scheduling.slow"}),
        (histogram(DECIDING, 1000, 100) + PLUGINS, {"scheduling.plugin"}),
    ],
)
async def test_slow_scheduling(world: Any, told: Told, metrics: str, expected: set[str]) -> None:
    assert codes(await examined(world, await told(metrics), "scheduling")) == expected


def row(name: str, waiting: float, leases: int, running: float = 0.0, model: str = "m") -> Json:
    page: Json = {"id": name, "address": "127.0.0.1:9", "fresh": True, "labels": {"model-id": model}}
    return {**page, "models": [model], "waiting": waiting, "running": running, "leases": leases}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("a", 3, 10), row("b", 0, 9)], set()),
        ([row("a", 90, 90), row("b", 1, 9), row("c", 0, 8)], {"balance.skew"}),
        ([row("a", 90, 90), row("b", 1, 9, model="other")], set()),
        ([row("a", 0, 2, running=30.0), row("b", 0, 2, running=2.0)], {"balance.foreign"}),
        ([row("a", 0, 15, running=30.0), row("b", 0, 16, running=31.0)], {"balance.foreign"}),
        ([row("a", 90, 90)], set()),
        ([], set()),
    ],
)
async def test_uneven_load(world: Any, told: Told, rows: list[Json], expected: set[str]) -> None:
    assert codes(await examined(world, await told(endpoints=rows), "balance")) == expected


def decided(cached: float = 0.0, **counts: int) -> list[Json]:
    """As `/debug/decisions` tells them; `cached` is the share of a prompt that was found where it went."""
    made: Json = {"prompt_tokens": 1000, "predicted_hit_tokens": 1000 * cached, "model": "m", "target_model": "m"}
    return [{**made, "endpoint": name} for name, count in counts.items() for _ in range(count)]


@pytest.mark.parametrize(
    ("rows", "decisions", "expected"),
    [
        ([row("a", 0, 0), row("b", 0, 0)], decided(a=40, b=20), set()),
        ([row("a", 0, 0), row("b", 0, 0)], decided(a=40, b=1), {"balance.starved"}),
        # Too few decisions say nothing, and those that a cache made neither.
        ([row("a", 0, 0), row("b", 0, 0)], decided(a=15), set()),
        ([row("a", 0, 0), row("b", 0, 0)], decided(0.8, a=40), set()),
        # What keeps requests away and is in its numbers: load, a full cache, slowness, suspicion, another model.
        ([row("a", 0, 0), row("b", 3, 4)], decided(a=40), set()),
        ([row("a", 0, 0), {**row("b", 0, 0), "kv_usage": 0.9}], decided(a=40), set()),
        ([row("a", 0, 0), {**row("b", 0, 0), "suspicion": "suspect"}], decided(a=40), set()),
        ([row("a", 0, 0), {**row("b", 0, 0), "fresh": False}], decided(a=40), set()),
        ([row("a", 0, 0), row("b", 0, 0, model="other")], decided(a=40), set()),
        ([row("a", 0, 0), {**row("b", 0, 0), "step_factor": 3.0}], decided(a=40), {"balance.unlike-speeds"}),
        # A server of one model, of which few requests ask for it; and a server of both that gets none.
        ([{**row("a", 0, 0), "models": ["m", "n"]}, {**row("b", 0, 0), "models": ["n"]}], decided(a=40), set()),
        ([row("a", 0, 0), {**row("b", 0, 0), "models": ["m", "n"]}], decided(a=40), {"balance.starved"}),
        ([row("a", 0, 0), {**row("b", 0, 0), "models": []}], decided(a=40), {"balance.starved"}),
    ],
)
async def test_an_endpoint_that_gets_nothing(
    world: Any, told: Told, rows: list[Json], decisions: list[Json], expected: set[str]
) -> None:
    found = await examined(world, await told(endpoints=rows, decisions=decisions), "balance")
    assert codes(found) == expected
    assert all(one.where == ("b",) for one in found.findings)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prefill_factor": 1.4}, set()),
        ({"prefill_factor": 4.0}, {"balance.unlike-speeds"}),
        ({"prefill_factor": 4.0, "num_blocks": 99}, set()),
        ({"prefill_factor": 4.0, "labels": {"model-id": "m", "gpu": "l40s"}}, set()),
        (
            {"prefill_factor": 4.0, "labels": {"model-id": "m", "statefulset.kubernetes.io/pod-name": "b"}},
            {"balance.unlike-speeds"},
        ),
    ],
)
async def test_servers_that_look_alike_and_were_learned_to_be_unlike(
    world: Any, told: Told, change: Json, expected: set[str]
) -> None:
    found = await examined(world, await told(endpoints=[row("a", 0, 0), {**row("b", 0, 0), **change}]), "balance")
    assert codes(found) == expected


async def test_decisions_of_any_bytes_break_no_check(world: Any, told: Told) -> None:
    rows = [row("a", 0, 0), row("b", 0, 0)]
    assert codes(await examined(world, await told(endpoints=rows, decisions=[{"endpoint": 5}]), "balance")) == set()


async def test_what_cannot_be_used_of_the_file_of_endpoints_is_named(world: Any, told: Told) -> None:
    file = world.directory / "endpoints.yaml"
    file.write_text("endpoints: [127.0.0.1:9, 127.0.0.1:99999]\n")
    config = {"endpoints": {"file": str(file)}}
    found = await world.examined(config, admin=await told(), only=("endpoints",))
    assert codes(found) == {"endpoints.file", "endpoints.unreachable"}
    (problem,) = (one for one in found.findings if one.code == "endpoints.file")
    assert "99999" in problem.evidence
