"""`tokens`: whether prompts are read here as the engines read them. Asks `/tokenize`, which computes nothing.

Text that differs is another tokeniser; text that agrees in a chat that does not, another chat template.
"""

import asyncio
import json

from fairlead.config.tokens import ModelTokens
from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.io.render import RenderClient
from fairlead.io.token_parity import PROBES, compare
from fairlead.model.endpoint import Endpoint
from fairlead.parse.request import parse_request

_DOCS = "docs/tokens.md"
_TEXT = "completion"
#: Endpoints of one model that are asked.
_MOST = 3

TOKENISER = Kind(
    "tokens.tokeniser", Severity.ERROR, "text becomes other tokens here than in the engine: no block ever matches",
    "set tokens.models.….modelPath to the directory that the engine loads, or render: engine", _DOCS,
)  # fmt: skip
TEMPLATE = Kind(
    "tokens.chat-template", Severity.ERROR, "chats become other prompts here than in the engine: no block ever matches",
    "set chatTemplate to the engine's --chat-template and templateKwargs to its --default-chat-template-kwargs,"
    " or render: engine", _DOCS,
)  # fmt: skip
UNUSABLE = Kind(
    "tokens.unusable", Severity.ERROR, "a tokeniser cannot be used", "correct the paths under tokens.models", _DOCS,
)  # fmt: skip
NO_ANSWER = Kind(
    "tokens.engine-silent", Severity.ERROR, "the engine is to make the tokens, and does not",
    "start it with --enable-scale-out, or leave /tokenize open; or set modelPath and let them be made here", _DOCS,
)  # fmt: skip
UNCHECKED = Kind(
    "tokens.unchecked", Severity.NOTE, "whether the engine makes the same tokens could not be compared",
    "engines with /tokenize can be asked; with --probe the KV events show it too", _DOCS,
)  # fmt: skip


def settings_of(site: Site, model: str) -> ModelTokens | None:
    """What is configured for a model's prompts."""
    models = site.config.tokens.models
    return models.get(model, models.get("*"))


async def _compared(site: Site, client: RenderClient, endpoint: Endpoint, model: str) -> list[Finding]:
    tokeniser = await site.tokeniser()
    parity = await compare(tokeniser, client, f"http://{endpoint.address}", model)  # type: ignore[arg-type]
    if _TEXT in parity.differing:
        return [TOKENISER.at(endpoint.id, f"{model}: {parity.state}")]
    if parity.differing:
        return [TEMPLATE.at(endpoint.id, f"{model}: {parity.state}")]
    if parity.agreed:
        return []
    if not tokeniser.knows(model):
        return [UNUSABLE.at(model, f"{getattr(tokeniser, 'state', '')}")]
    return [UNCHECKED.at(endpoint.id, f"{model}: {parity.state}")]


async def _rendered(client: RenderClient, endpoint: Endpoint, model: str) -> list[Finding]:
    path, fields = PROBES["chat"]
    body = json.dumps({"model": model, "max_tokens": 1, **fields}).encode()
    found = await client.tokens_of(parse_request(path, body), body, f"http://{endpoint.address}")
    return [NO_ANSWER.at(endpoint.id, f"{model}: {found.detail}")] if found.reason else []


async def _run(site: Site) -> list[Finding]:
    client = RenderClient(5.0, asyncio.get_running_loop().time)
    asked: dict[str, int] = {}
    found: list[Finding] = []
    try:
        for endpoint in site.endpoints:
            model = await site.model(endpoint)
            settings = settings_of(site, model)
            if not model or asked.get(model, 0) >= _MOST:
                continue
            asked[model] = asked.get(model, 0) + 1
            if settings is not None and settings.render == "engine":
                found += await _rendered(client, endpoint, model)
            else:
                found += await _compared(site, client, endpoint, model)
    finally:
        await client.close()
    return found


CHECK = Check(
    name="tokens",
    about="prompts become the same tokens here as in the engines",
    kinds=(TOKENISER, TEMPLATE, UNUSABLE, NO_ANSWER, UNCHECKED),
    run=_run,
    needs=("endpoints", "tokens"),
    budget=60.0,
)
