"""The page that tells what is known of prompts."""

import json

import aiohttp

from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import Fleet
from fairlead.server.admin import Admin, AdminSources
from fairlead.server.live.knowledge import exact_knowledge
from fairlead.server.live.kv import KvListening
from fairlead.server.observe.exposition import Registry


async def page(sources: AdminSources) -> object:
    admin = Admin(sources, port=0)
    await admin.start()
    url = f"http://127.0.0.1:{admin.port}/debug/knowledge"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        found = json.loads(await answer.read())
    await admin.close()
    return found


async def test_what_is_known_is_shown() -> None:
    config = load("endpoints: ['10.0.0.1:80']\nkvEvents: {enabled: true}")
    fleet = Fleet(exact=exact_knowledge(config))
    kv = KvListening(config, fleet, Registry())
    fleet.up(Endpoint("a", "10.0.0.1:80"))
    sources = AdminSources(metrics=list, unready=list, endpoints=list, decisions=lambda count: [], knowledge=kv.page)
    found = await page(sources)
    assert isinstance(found, dict)
    assert found["endpoints"]["a"]["source"] == "learned"
    assert found["index"]["keys"] == "own-1"
    assert found["token_check"] == {}
    nothing = AdminSources(metrics=list, unready=list, endpoints=list, decisions=lambda count: [])
    assert await page(nothing) is None
