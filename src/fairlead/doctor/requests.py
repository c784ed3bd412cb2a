"""The requests that checks send: with one output token, and marked so that they can be recognised in logs."""

import json
import secrets

from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.doctor.http import Answer
from fairlead.doctor.site import Site, tried
from fairlead.pool.served_models import read_model_list

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: Token ids of the made-up prompt: within every vocabulary in use, above the control tokens.
_FIRST_ID, _IDS = 1_000, 20_000
#: One token each, with the space before.
_WORDS = ("the", "and", "for", "are", "but", "not", "you", "all", "any", "can", "had", "her", "was")


async def gateway_request(site: Site) -> tuple[str, bytes]:
    """Path and body of a request that clients of this gateway could send. Those of a pool with defined names may only
    use these, so the gateway's list of models counts first."""
    offered = await site.once("offered", lambda: _offered(site))
    model = ""
    for endpoint in site.endpoints:
        model = model or await site.model(endpoint)
    if offered and model not in offered:
        model = offered[0]
    return CHAT, chat(model, 4)


async def _offered(site: Site) -> list[str]:
    """The models that the gateway lists; empty = it has no list."""
    answer = await tried(site.client.get(f"{site.gateway}/v1/models", site.gateway_headers))
    try:
        return list(read_model_list(answer.body).entries) if isinstance(answer, Answer) else []
    except ValueError:
        return []


def chat(model: str, words: int) -> bytes:
    """A chat with a new prompt of at least this many tokens, and few more: every vocabulary has these words."""
    start = f"fairlead doctor {secrets.token_hex(8)}"
    text = " ".join([start, *(_WORDS[index % len(_WORDS)] for index in range(words))])
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": model, "max_tokens": 1, "messages": messages}).encode()


def completion(model: str, tokens: int) -> bytes:
    """A completion with a new prompt of this many tokens, as token ids, so that no tokeniser is needed."""
    ids = [_FIRST_ID + secrets.randbelow(_IDS) for _ in range(tokens)]
    return json.dumps({"model": model, "max_tokens": 1, "prompt": ids}).encode()


class ReportedUsage(Struct, frozen=True):
    """The usage in an answer, in tokens; -1 = not reported."""

    prompt: int = -1
    cached: int = -1


def usage(answer: Answer) -> ReportedUsage:
    try:
        reported = answer.json()["usage"]
        details = reported.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return ReportedUsage(int(reported["prompt_tokens"]), -1 if cached is None else int(cached))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ReportedUsage()


#: What vLLM says of a path that its model cannot serve, besides 404 for those that it does not have.
_CANNOT = "does not support"
_NO_PATH = ("404 ", "405 ", "501 ")
_EMBEDDINGS = "/v1/embeddings"


async def answers_none(site: Site, endpoint: Endpoint, error: str) -> bool:
    """Whether a model server answers no prompts, as those of embedding models. `error`: what it said to a completion,
    as `shown` gives it. A wrong address or path prefix gives 404 and its like too, so then embeddings are asked for."""
    if _CANNOT in error:
        return True
    if not error.startswith(_NO_PATH):
        return False
    body = json.dumps({"model": await site.model(endpoint), "input": [_FIRST_ID]}).encode()
    url = f"http://{endpoint.address}{_EMBEDDINGS}"
    answer = await tried(site.client.post(url, body, await site.upstream_headers()))
    return isinstance(answer, Answer) and answer.status == 200


#: The block size in tokens if none is known, and the largest of which a prompt fills several.
_USUAL_SIZE, _LARGEST_SIZE = 16, 1024
#: The fewest blocks that a prompt fills: of up to 64 tokens, and larger ones, as hybrid models have.
_BLOCKS, _LARGE_BLOCKS = 6, 3
#: The fewest tokens of such a prompt: a block of any size that is usual, for engines that do not say theirs.
_LEAST = 256
#: The most tokens that stand around the words of a chat, with the answer. An engine keeps at least one token of a
#: prompt to compute.
_AROUND = 128


class Filling(Struct, frozen=True):
    """A prompt of `tokens` fills at least one block. `why_not`: why no prompt can; empty = one can."""

    tokens: int
    why_not: str = ""


async def filling(site: Site, endpoint: Endpoint, size: int = 0) -> Filling:
    """The prompt that fills some blocks of an endpoint, within its `max_model_len`. Engines report only full blocks.
    `size`: of a block, in tokens, if more is known than the metrics page says."""
    reading = await site.reading(endpoint)
    size = max(size, reading.sample.block_size if reading is not None else 0) or _USUAL_SIZE
    least = size + _AROUND
    wanted = max(_LEAST, _BLOCKS * min(size, 64), _LARGE_BLOCKS * min(size, _LARGEST_SIZE), least)
    context = (await site.contexts(endpoint)).get(await site.model(endpoint), wanted + _AROUND)
    if least + _AROUND > context:
        needed = (
            f"blocks of {size:,} tokens: needs {least + _AROUND:,} tokens with the answer, max_model_len is {context:,}"
        )
        return Filling(0, f"{needed}; not probed")
    return Filling(min(wanted, context - _AROUND))


def shown(answer: Answer) -> str:
    """A short text that describes an error response."""
    return f"{answer.status} {answer.body[:160].decode('utf-8', 'replace').strip()}"
