"""Whatever becomes of a request, nothing of its prompt, answer or credentials is told to anybody else."""

import json
from collections.abc import Callable
from pathlib import Path

from gw_http1 import Http1
from gw_messages import JSON, Ask
from gw_processes import Serve, Upstream, sees_the_scheduler

from fairlead.server.journal.blocks import Damage, blocks

SECRET = "cormorant-7f3a"
KEY = "sk-albatross-91c2"
PAGES = ("/metrics", "/debug/endpoints", "/debug/decisions?last=100", "/dashboard/snapshot")


def bodies() -> list[bytes]:
    text = f"{SECRET} " * 50
    chat = {"model": "m", "messages": [{"role": "user", "content": text}], "prompt": text, "input": text}
    return [
        json.dumps(chat | {"x-bench": "mode=json"}).encode(),
        json.dumps(chat | {"stream": True, "x-bench": "mode=sse;chunks=3"}).encode(),
        json.dumps(chat | {"x-bench": "mode=early;status=500"}).encode(),
        json.dumps(chat | {"messages": [{"role": SECRET}], "max_tokens": SECRET}).encode(),
        json.dumps(chat).encode()[:-3],
        SECRET.encode(),
    ]


def written(file: Path) -> str:
    found = [one for one in blocks(file.read_bytes()) if not isinstance(one, Damage)]
    assert found
    return b"".join(content for _, content in found).decode("latin-1")


async def test_nothing_of_a_prompt_is_told(upstream: Upstream, serve: Callable[..., Serve], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    at = serve(
        {
            "endpoints": upstream.addresses,
            "log": {"level": "debug"},
            "journal": {"path": str(journal), "explain": True},
            "inspect": {"usageSampling": 1.0},
            "flowControl": {},
        }
    )
    await sees_the_scheduler(at.gateway)
    for _ in range(5):  # a busy machine's first ones may go past the scheduler
        async with Http1(at.port) as client:
            for body in bodies():
                for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
                    await client.ask(Ask(path=path, fields=[JSON, ("authorization", f"Bearer {KEY}")], pieces=[body]))
        assert await at.settled() == {}
        if await at.decisions() >= 9:
            break
    assert await at.decisions() >= 9, "the first three bodies, each on three paths"
    assert await at.settled() == {}
    told = {page: await at.page(page) for page in PAGES}
    at.end()
    told["the log"] = at.said()
    told |= {file.name: written(file) for file in journal.iterdir() if file.stat().st_size}
    assert sum(map(len, told.values())) > 10_000, "they told something"
    assert [where for where, text in told.items() if SECRET in text or KEY in text] == []
