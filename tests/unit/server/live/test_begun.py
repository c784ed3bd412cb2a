"""What a scheduler that starts later has of the start, although its configuration does not say it."""

import asyncio

from fairlead.compat.load import load
from fairlead.config.schema import Config
from fairlead.server.live.wiring import Core

BODY = b'{"model": "m", "prompt": "%s"}' % (b"x" * 4000)


def scorer(text: str) -> Config:
    return load(f"endpoints: ['10.0.0.1:1']\ngateway: none\nscorers: [{{type: {text}}}]\n")


async def test_prompts_are_cut_as_those_who_began_before_cut_them() -> None:
    first, now = scorer("prefix-aware, hashBlockSize: 9"), scorer("queue")
    chains = []
    for config, begun in ((first, None), (now, first), (now, None)):
        understanding = Core(config, asyncio.get_running_loop(), None, print, print, begun=begun).host.understanding
        request, _ = understanding.request(understanding.head({":path": "/v1/completions"}), BODY)
        chains.append([*request.prefix.hashes])
    assert chains[0] == chains[1] != chains[2]
