"""Roles are looked at by model, without waiting for servers one after another."""

import asyncio

import pytest

from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint
from fairlead.doctor.checks.pool import roles
from fairlead.doctor.site import Site

CONFIG = """
policy: prefill-decode
gateway: none
admin: {port: 0}
endpoints:
- {name: a, address: '127.0.0.1:1', labels: {model-id: m, llm-d.ai/role: prefill}}
- {name: b, address: '127.0.0.1:2', labels: {llm-d.ai/role: prefill}}
- {name: c, address: '127.0.0.1:3', labels: {llm-d.ai/role: cook}}
"""


async def test_only_servers_without_a_label_are_asked_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    both = asyncio.Barrier(2)

    async def served(site: Site, endpoint: Endpoint) -> dict[str, bool]:
        asked.append(endpoint.id)
        await both.wait()
        return {"m": False}

    monkeypatch.setattr(Site, "served", served)
    async with Site(load(CONFIG)) as site, asyncio.timeout(5.0):
        found = await roles.run(site)
    assert asked == ["default/b", "default/c"]
    assert [(one.code, one.where) for one in found] == [
        ("roles.unknown", ("default/c",)),
        ("roles.nobody", ("decode",)),
    ]


OTHERS = """
gateway: none
admin: {port: 0}
endpoints:
- {name: a, address: '127.0.0.1:1', labels: {model-id: m, llm-d.ai/role: prefill}}
- {name: b, address: '127.0.0.1:2', labels: {model-id: m, llm-d.ai/role: decode}}
"""


@pytest.mark.parametrize(
    ("decides", "codes"),
    [
        ("policy: cost-model", ["roles.idle"]),
        ("canary: {percent: 50, policy: prefill-decode}", []),
        ("canary: {percent: 50, policy: round-robin}", ["roles.idle"]),
        ("scheduler: {address: '127.0.0.1:9'}", []),
        ("canary: {percent: 50, scheduler: {address: '127.0.0.1:9'}}", []),
        ("shadows: {policies: [{policy: prefill-decode}]}", ["roles.idle"]),
    ],
)
async def test_an_endpoint_that_only_prefills_may_be_for_another_decider(decides: str, codes: list[str]) -> None:
    async with Site(load(OTHERS + decides)) as site:
        assert [one.code for one in await roles.run(site)] == codes
