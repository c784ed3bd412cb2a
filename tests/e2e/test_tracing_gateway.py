"""Traces through the real gateway: a caller's context comes in, the model server's goes out, spans arrive by OTLP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gw_processes import Serve, sees_the_scheduler
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
}
PAGE = (Path(__file__).parents[1] / "data" / "metrics" / "vllm-idle.txt").read_bytes()


class World:
    """A model server that remembers the headers it got, and a collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.spans: list[dict[str, Any]] = []
        self.services: set[str] = set()
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response(ANSWER)

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=PAGE, headers={"content-type": "text/plain; version=0.0.4"})

    async def collect(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans += [
                    {
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "took": span.end_time_unix_nano - span.start_time_unix_nano,
                        **{one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
                    }
                    for span in scope.spans
                ]
        return web.Response(body=b"", content_type="application/x-protobuf")

    async def until(self, spans: int) -> None:
        async with asyncio.timeout(20.0):
            while len(self.spans) < spans:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    app.router.add_get("/metrics", made.page)
    app.router.add_post("/v1/traces", made.collect)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.port = int(runner.addresses[0][1])
    try:
        yield made
    finally:
        await runner.cleanup()


async def start(serve: Callable[..., Serve], port: int, **tracing: Any) -> Serve:
    config: dict[str, Any] = {"endpoints": [{"name": "a", "address": f"127.0.0.1:{port}"}]}
    if tracing:
        config["tracing"] = {"endpoint": f"http://127.0.0.1:{port}/v1/traces", **tracing}
    served = await asyncio.to_thread(serve, config)
    await sees_the_scheduler(served.gateway)
    return served


async def ask(served: Serve, **headers: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


@pytest.mark.slow
async def test_a_trace_goes_through(serve: Callable[..., Serve]) -> None:
    async with world() as around:
        served = await start(serve, around.port, sample=0.0)
        await ask(served)
        await ask(served, traceparent=CALLER[:-2] + "00")
        await ask(served, traceparent=CALLER)  # the last one in its buckets
        await around.until(2)
        whole, decision = sorted(around.spans, key=lambda span: span["name"], reverse=True)
        assert (whole["name"], decision["name"]) == ("gateway.request", "fairlead.decision")
        assert around.services == {"fairlead"}
        assert (whole["trace"], whole["parent"]) == (TRACE, "00f067aa0ba902b7")
        assert (decision["trace"], decision["parent"]) == (TRACE, whole["id"])
        assert decision["fairlead.endpoint"] == "default/a"
        assert whole["gen_ai.request.model"] == "m"
        assert whole["gen_ai.request.max_tokens"] == 5
        assert whole["http.response.status_code"] == 200
        assert 0 < decision["took"] < whole["took"]
        # The model server continues our span; contexts that are not traced pass as they came.
        told = [headers.get("traceparent") for headers in around.headers]
        assert told == [None, CALLER[:-2] + "00", f"00-{TRACE}-{whole['id']}-01"]
        page = await openmetrics(served)
        examples = re.findall(r'_bucket\{[^}]*\} \d+ # \{decision_id="([0-9a-f.]+)",trace_id="(\w+)"\}', page)
        assert {trace for _, trace in examples} == {TRACE}
        assert json.loads(await served.page(f"/debug/decisions/{examples[0][0]}"))["endpoint"] == "default/a"
    await asyncio.to_thread(served.end)
    assert served.code == 0


async def openmetrics(served: Serve) -> str:
    wanted = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    async with aiohttp.ClientSession() as session, session.get(served.admin + "/metrics", headers=wanted) as answer:
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return await answer.text()


async def test_a_refused_body_is_traced(serve: Callable[..., Serve]) -> None:
    async with world() as around:
        served = await start(serve, around.port, sample=0.0)
        url, headers = f"http://127.0.0.1:{served.port}/v1/chat/completions", {"traceparent": CALLER}
        async with aiohttp.ClientSession() as session, session.post(url, data=b"{", headers=headers) as answer:
            assert answer.status == 400
            await answer.read()
        await around.until(1)
        (span,) = around.spans
        assert (span["name"], span["trace"], span["parent"]) == ("gateway.request", TRACE, "00f067aa0ba902b7")
        assert (span["http.response.status_code"], span["error.type"]) == (400, "bad-request")


async def test_off_changes_nothing(serve: Callable[..., Serve]) -> None:
    async with world() as around:
        served = await start(serve, around.port)
        await ask(served, traceparent=CALLER)
        assert [headers.get("traceparent") for headers in around.headers] == [CALLER]
        assert "trace_id" not in await openmetrics(served)


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "an error"])
async def test_a_collector_that_is_away_costs_no_request(serve: Callable[..., Serve], answers: bool) -> None:
    async with world() as around:
        path = "/nothing-here" if answers else ""
        where = f"http://127.0.0.1:{around.port if answers else 9}{path}"
        served = await start(serve, around.port, endpoint=where, sample=1.0, timeout=1)
        for _ in range(20):
            await ask(served)
        assert len(around.headers) == 20
        assert all("traceparent" in headers for headers in around.headers)
        await asyncio.to_thread(served.end)
        assert served.code == 0
