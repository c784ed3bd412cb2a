"""`kv-agreement`: whether predictions from KV events come true: the self-check of a running scheduler, on demand.

To each endpoint goes a prompt that nobody has sent before, one output token long, and then the same once more. After
the first the events should tell its blocks; what they then predict is held against the `cached_tokens` of the second.
"""

import asyncio
from typing import NamedTuple

from msgspec import Struct

from fairlead.doctor.checks.tokens import settings_of
from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.kv_listening import KvListening, listening
from fairlead.doctor.requests import CHAT, COMPLETIONS, Told, chat, completion, shown, usage
from fairlead.doctor.run import Check, Skipped
from fairlead.doctor.site import Site
from fairlead.fleet import diagnosis
from fairlead.fleet.diagnosis import Case, diagnose
from fairlead.fleet.trust import agrees
from fairlead.io.render import RenderClient
from fairlead.parse.request import parse_request
from fairlead.tokens import PromptTokeniser, PromptTokens

_DOCS = "docs/kv-events.md#the-self-check"
_CAUSED = "docs/troubleshooting.md#the-hit-rate-is-low"

SILENT = Kind(
    "kv-agreement.silent", Severity.ERROR, "an engine computed a prompt and told nothing of it",
    "are its KV events of this server, and of this model's blocks? Look at its log for the publisher", _CAUSED,
)  # fmt: skip
SIZE = Kind(
    "kv-agreement.block-size", Severity.ERROR, "predictions are wrong: the block size is not the engine's",
    "leave kvEvents.blockSize out: events tell it", _DOCS,
)  # fmt: skip
HASH = Kind(
    "kv-agreement.hash", Severity.ERROR, "predictions are wrong: the engine hashes otherwise than configured",
    "set kvEvents.hashAlgorithm and kvEvents.hashSeed to the engine's, or take keys: own", _DOCS,
)  # fmt: skip
TEMPLATE = Kind(
    "kv-agreement.chat-template", Severity.ERROR, "predictions are wrong: the engine renders chats otherwise",
    "set chatTemplate and templateKwargs under tokens.models to what the engine was started with, or render: engine",
    _DOCS,
)  # fmt: skip
TOKENISER = Kind(
    "kv-agreement.tokeniser", Severity.ERROR, "predictions are wrong: the engine makes other tokens of a prompt",
    "set tokens.models.….modelPath to the directory that the engine loads, or render: engine", _DOCS,
)  # fmt: skip
DISAGREES = Kind(
    "kv-agreement.other", Severity.ERROR, "predictions from KV events do not come true",
    "the evidence names the likely cause; the table of causes says what can be done", _DOCS,
)  # fmt: skip
NO_CACHE = Kind(
    "kv-agreement.no-cache", Severity.ERROR, "an engine does not reuse a prompt that it has just computed",
    "start it with --enable-prefix-caching", _CAUSED,
)  # fmt: skip
NOT_TOLD = Kind(
    "kv-agreement.not-told", Severity.WARNING, "an engine does not report cached tokens: wrong predictions stay unseen",
    "start it with --enable-prompt-tokens-details", _DOCS,
)  # fmt: skip
UNTOKENISED = Kind(
    "kv-agreement.no-tokens", Severity.WARNING, "chats have no token ids, so KV events cannot serve them",
    "set tokens.models (docs/tokens.md)", "docs/tokens.md",
)  # fmt: skip
NOT_ALLOWED = Kind(
    "kv-agreement.not-allowed", Severity.NOTE, "a model server takes requests only with credentials",
    "nothing need be done; what KV events predict could not be compared", _DOCS,
)  # fmt: skip
FAILED = Kind(
    "kv-agreement.failed", Severity.CRITICAL, "a small request to an endpoint fails", "see the evidence", _CAUSED,
)  # fmt: skip
_CAUSES = {
    diagnosis.BLOCK_SIZE: SIZE,
    diagnosis.SEED: HASH,
    diagnosis.ALGORITHM: HASH,
    diagnosis.TEMPLATE: TEMPLATE,
    diagnosis.TOKENISER: TOKENISER,
}
#: Blocks that the prompt fills at least, and the block size where none is known.
_BLOCKS, _USUAL_SIZE = 6, 16
_LARGEST_SIZE = 1024
#: Seconds until an engine has told (vLLM 0.32: 6 ms at the median).
_TELLING = 2.0
_PATIENCE = 20.0


class _Prompt(Struct, frozen=True):
    path: str
    body: bytes
    tokens: PromptTokens


class _Pair(NamedTuple):
    """Cached tokens."""

    predicted: int
    told: Told


async def _prompt(site: Site, model: str, address: str, size: int) -> _Prompt:
    """A chat where chats can be read, else token ids; `tokens.reason` says why not."""
    tokeniser, settings = await site.tokeniser(), settings_of(site, model)
    words = _BLOCKS * min(size, _LARGEST_SIZE)
    body = chat(model, words)
    parsed = parse_request(CHAT, body)
    if settings is not None and settings.render == "engine":
        client = RenderClient(5.0, asyncio.get_running_loop().time)
        try:
            return _Prompt(CHAT, body, await client.tokens_of(parsed, body, f"http://{address}"))
        finally:
            await client.close()
    tokens = tokeniser.tokens_of(parsed, body, model)
    if not tokens.reason:
        return _Prompt(CHAT, body, tokens)
    body = completion(model, words)
    ids = PromptTokeniser().tokens_of(parse_request(COMPLETIONS, body), body, model)
    return _Prompt(COMPLETIONS, body, ids)


def _predicted(kv: KvListening, slot: int, tokens: PromptTokens) -> int:
    kv.exact.refresh()
    best = 0
    for size in kv.exact.sizes:
        chain = kv.recipe.chain(kv.exact.index.space, tokens, size, "")
        found = kv.exact.index.look_up(chain, len(kv.endpoints)) if chain is not None else None
        if found is not None:
            best = max(best, int(found.hit_tokens(tokens.count)[slot]))
    return best


async def _sent(site: Site, address: str, prompt: _Prompt) -> Told | str:
    """Usage of the answer, or why there is none."""
    try:
        answer = await site.client.post(f"http://{address}{prompt.path}", prompt.body, seconds=_PATIENCE)
    except Unreached as error:
        return str(error)
    return usage(answer) if answer.status == 200 else shown(answer)


async def _one(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    endpoint = kv.endpoints[slot]
    model, reading = await site.model(endpoint), await site.reading(endpoint)
    size = (reading.sample.block_size if reading is not None else 0) or _USUAL_SIZE
    prompt = await _prompt(site, model, endpoint.address, size)
    if prompt.tokens.reason:
        return []  # the check `tokens` tells why
    before = kv.told(slot)
    first = await _sent(site, endpoint.address, prompt)
    if isinstance(first, str):
        kind = NOT_ALLOWED if first.startswith(("401 ", "403 ")) else FAILED
        return [kind.at(endpoint.id, first)]
    heard = await kv.until(lambda: kv.told(slot) > before, _TELLING)
    predicted = _predicted(kv, slot, prompt.tokens)
    second = await _sent(site, endpoint.address, prompt)
    if isinstance(second, str):
        return [FAILED.at(endpoint.id, second)]
    missing = [UNTOKENISED.at("", "")] if prompt.path == COMPLETIONS else []
    return missing + _judged(kv, slot, prompt.tokens, heard, _Pair(predicted, second))


def _judged(kv: KvListening, slot: int, tokens: PromptTokens, heard: bool, pair: _Pair) -> list[Finding]:
    name, (predicted, told) = kv.endpoints[slot].id, pair
    if not heard:
        evidence = f"nothing within {_TELLING:g} s of a prompt of {told.prompt} tokens"
        return [SILENT.at(name, evidence)]
    if told.cached < 0:
        wrong = diagnose(kv.recipe, _case(tokens, predicted, tokens.count, told), kv.heads(slot))
        blind = [NOT_TOLD.at(name, "its usage has no prompt_tokens_details.cached_tokens")]
        return blind + (
            [_CAUSES[wrong.cause].at(name, wrong.detail)] if not predicted and wrong.cause in _CAUSES else []
        )
    if not told.cached and predicted:
        return [NO_CACHE.at(name, f"0 of {told.prompt} tokens were cached the second time")]
    block = max((cache.block_size for cache in kv.caches(slot)), default=1)
    if agrees(predicted, told.cached, tokens.count, max(block, 1)):
        return []
    wrong = diagnose(kv.recipe, _case(tokens, predicted, told.cached, told), kv.heads(slot))
    evidence = f"predicted {predicted}, reported {told.cached} cached tokens; {wrong.cause}: {wrong.detail}"
    return [_CAUSES.get(wrong.cause, DISAGREES).at(name, evidence)]


def _case(tokens: PromptTokens, predicted: int, reported: int, told: Told) -> Case:
    return Case(tokens.ids, tokens.count, "", tokens.salt, predicted, reported, told.prompt)


async def _run(site: Site) -> list[Finding]:
    if site.config.kv_events.bind:
        raise Skipped("publishers dial in, and cannot be listened to by two")
    kv = await listening(site)
    linked = [slot for slot in kv.watched if kv.linked(slot)]
    found = await asyncio.gather(*(_one(site, kv, slot) for slot in linked))
    return [finding for part in found for finding in part]


CHECK = Check(
    name="kv-agreement",
    about="what KV events predict comes true",
    kinds=(FAILED, SIZE, HASH, TEMPLATE, TOKENISER, SILENT, NO_CACHE, DISAGREES, NOT_TOLD, UNTOKENISED, NOT_ALLOWED),
    run=_run,
    needs=("probe", "endpoints", "events"),
    budget=60.0,
)
