"""Whether an engine makes the same ids of a prompt: without that no block ever matches, and nothing else would tell.

A few probes are encoded here and by an engine. Which engine, and when, is the caller's: once for each model and engine
version is enough.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from fairlead.io.render import RenderClient
from fairlead.parse.request import parse_request
from fairlead.tokens import PromptTokeniser

_TEXT = "Naïve  café: 12345 = 3.14?\n\n\tdef f(x):\n        return x  # 你好 👍🏽\n"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_ASKED = {"role": "user", "content": _TEXT}
_TOLD = {"role": "assistant", "content": "Well."}

#: What is compared, by name: (path, body).
PROBES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": _TEXT}),
    "chat": ("/v1/chat/completions", {"messages": [_ASKED]}),
    "system and turns": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Be brief."}, _ASKED, _TOLD, _ASKED]},
    ),
    "tools": ("/v1/chat/completions", {"messages": [_ASKED], "tools": [_TOOL]}),
}


class Parity(Struct, frozen=True):
    """`agreed` and `differing` are names of probes; a probe that either side could not encode is in neither."""

    agreed: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    #: For people: `agrees`, `differs: …` or `unknown: …`.
    state: str = ""


async def compare(tokeniser: PromptTokeniser, client: RenderClient, url: str, model: str) -> Parity:
    """Ask the engine at `url` (`http://host:port`) for the ids of all probes. Never raises but for cancellation."""
    agreed: list[str] = []
    differing: list[str] = []
    first, why = "", ""
    for name, (path, fields) in PROBES.items():
        body = json.dumps({"model": model, "max_tokens": 1, **fields}).encode()
        parsed = parse_request(path, body)
        here = tokeniser.tokens_of(parsed, body, model)
        there = here if here.reason else await client.tokens_of(parsed, body, url)
        if there.reason:
            why = why or f"{name}: {there.reason}: {there.detail}"
        elif here.ids == there.ids:
            agreed.append(name)
        else:
            differing.append(name)
            first = first or f"{name}: {_difference(here.ids, there.ids)}"
    if differing:
        state = f"differs: {first}"
    else:
        state = "agrees" if agreed else f"unknown: {why}"
    return Parity(tuple(agreed), tuple(differing), state)


def _difference(here: bytes, there: bytes) -> str:
    ours, theirs = np.frombuffer(here, "<u4"), np.frombuffer(there, "<u4")
    shared = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:shared] != theirs[:shared])
    at = int(unequal[0]) if len(unequal) else shared
    return f"{len(ours)} tokens here, {len(theirs)} there; from token {at}: {_shown(ours, at)} and {_shown(theirs, at)}"


def _shown(ids: "np.ndarray[Any, Any]", at: int) -> str:
    return ", ".join(map(str, ids[at : at + 4].tolist())) or "none"
