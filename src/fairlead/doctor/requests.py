"""The requests that checks send: with one output token, and marked so that they can be recognised in logs."""

import json
import secrets

from msgspec import Struct

from fairlead.doctor.http import Answer
from fairlead.doctor.site import Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: Token ids of the made-up prompt: within every vocabulary in use, above the control tokens.
_FIRST_ID, _IDS = 1_000, 20_000


async def gateway_request(site: Site) -> tuple[str, bytes]:
    """Path and body of a request that clients of this pool could send."""
    model = ""
    for endpoint in site.endpoints:
        model = model or await site.model(endpoint)
    return CHAT, chat(model, 4)


def chat(model: str, words: int) -> bytes:
    """A chat with a new prompt of at least this many tokens."""
    nonce = secrets.token_hex(8)
    text = " ".join(
        ["fairlead doctor", nonce, *(f"{nonce[index % 12 : index % 12 + 4]}{index}" for index in range(words))]
    )
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


def answers_none(error: str) -> bool:
    """Whether a model server answers no prompts at all, as those of embedding models. `error`: as `shown` gives it. The
    name of the model is the server's own, so 404 is not about that."""
    return error.startswith(_NO_PATH) or _CANNOT in error


#: The block size in tokens if none is known, and the largest for which prompts are made longer.
_USUAL_SIZE, _LARGEST_SIZE = 16, 1024
#: The fewest blocks that a prompt fills: of up to 64 tokens, and larger ones, as hybrid models have.
_BLOCKS, _LARGE_BLOCKS = 6, 3


def filling(size: int) -> int:
    """The tokens of a prompt that fills some blocks of `size` tokens; 0 = unknown. Engines report only full blocks."""
    size = size or _USUAL_SIZE
    return max(_BLOCKS * min(size, 64), _LARGE_BLOCKS * min(size, _LARGEST_SIZE))


def shown(answer: Answer) -> str:
    """A short text that describes an error response."""
    return f"{answer.status} {answer.body[:160].decode('utf-8', 'replace')}"
