"""The OpenAPI document of the admin port, against what a running scheduler answers at each path."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
from jsonschema import Draft202012Validator

from fairlead.compat.load import load
from fairlead.core.events import FirstTokenSeen, RequestArrived, ResponseEnded
from fairlead.server.admin import Admin, AdminSources
from fairlead.server.live import Live
from fairlead.testing import request

CONFIG = """
gateway: none
extProc: {{host: 127.0.0.1, port: 0}}
als: {{enabled: false}}
admin: {{port: 0}}
metrics: {{interval: 10s, idleInterval: 10s, staleness: 20s}}
journal: {{path: {journal}}}
tokens: {{models: {{"*": {{render: engine}}}}}}
kvEvents: {{enabled: true}}
replicas: {{via: "valkey://127.0.0.1:1"}}
endpoints: ['127.0.0.1:1', '127.0.0.1:2']
"""


def strict(schema: Any) -> Any:
    """Fields that it does not name are wrong."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {key: strict(value) for key, value in schema.items()} | closed


async def started(live: Live) -> None:
    async with asyncio.timeout(30):
        while not hasattr(live, "admin") or not live.admin.port:
            await asyncio.sleep(0.02)


async def test_every_answer_is_as_described(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(CONFIG.format(journal=tmp_path / "journal"))
    live = Live(load(file))
    running = asyncio.create_task(live.run())
    try:
        await started(live)
        asked = request("hello", model="m")
        live.driver.feed(RequestArrived(asked))
        live.driver.feed(FirstTokenSeen(asked.id))
        live.driver.feed(ResponseEnded(request_id=asked.id, status=200))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{live.admin.port}") as session:

            async def get(path: str) -> tuple[int, str, bytes]:
                async with session.get(path) as answer:
                    stream = answer.content_type == "text/event-stream"
                    body = await (answer.content.readany() if stream else answer.read())
                    return answer.status, answer.content_type, body

            document = json.loads((await get("/openapi.json"))[2])
            endpoint = json.loads((await get("/debug/endpoints"))[2])["endpoints"][0]["id"]
            names = {
                "/debug/decisions/{name}": str(asked.id),
                "/debug/journal/{name}": json.loads((await get("/debug/journal"))[2])["segments"][0][0],
            }
            components = strict(document["components"])
            for path, item in document["paths"].items():
                query = f"?id={endpoint}" if path == "/dashboard/endpoint" else ""
                status, kind, body = await get(path.replace("{name}", names.get(path, "")) + query)
                assert (path, status) == (path, 200) or (path == "/readyz" and status == 503)
                answers = item["get"]["responses"][str(status)]["content"]
                assert (path, [kind]) == (path, [*answers])
                if kind == "application/json":
                    schema = {**strict(answers[kind]["schema"]), "components": components}
                    faults = Draft202012Validator(schema).iter_errors(json.loads(body))
                    assert [(path, fault.json_path, fault.message) for fault in faults] == []
            for path, wrong in (("/debug/decisions/{name}", 404), ("/debug/journal/{name}", 404)):
                assert (await get(path.replace("{name}", "none")))[0] == wrong
                assert str(wrong) in document["paths"][path]["get"]["responses"]
            assert (await get("/debug/decisions?last=x"))[0] == 400
            assert "400" in document["paths"]["/debug/decisions"]["get"]["responses"]
            routes = {resource.canonical for resource in live.admin.make_app().router.resources()}
            assert routes - {"/", "/dashboard/{name}"} <= {*document["paths"]}
    finally:
        live.stop()
        await asyncio.wait_for(running, 40)


async def test_without_debug_pages_only_what_is_served_is_described() -> None:
    sources = AdminSources(metrics=list, unready=list, endpoints=list, decisions=lambda count: [])
    admin = Admin(sources, port=0, debug=False)
    await admin.start()
    try:
        async with aiohttp.ClientSession() as session:
            document = await (await session.get(f"http://127.0.0.1:{admin.port}/openapi.json")).json()
        assert {*document["paths"]} == {"/healthz", "/readyz", "/metrics", "/openapi.json"}
    finally:
        await admin.close()
