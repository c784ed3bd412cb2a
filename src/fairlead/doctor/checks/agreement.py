"""Checks of prompts: whether Fairlead and engines make the same tokens, and whether KV events predict cache hits."""

import asyncio
import json
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.config.schema import ModelTokens
from fairlead.core import trust as diagnosis
from fairlead.core.endpoint import Endpoint
from fairlead.core.exact import hits_by_rank
from fairlead.core.trust import Case, agrees, diagnose
from fairlead.doctor.http import Unreached
from fairlead.doctor.kv_listening import KvListening, listening
from fairlead.doctor.requests import (
    CHAT,
    COMPLETIONS,
    ReportedUsage,
    answers_none,
    chat,
    completion,
    filling,
    shown,
    usage,
)
from fairlead.doctor.run import Finding, Kind, Severity, Skipped, check
from fairlead.doctor.site import Site, tried
from fairlead.pool.render import PROBES, RenderClient, compare

_TOKENS = "docs/tokens.md"
_SELF_CHECK = "docs/kv-events.md#the-self-check"
_LOW_HITS = "docs/runbook.md#lowcachehitrate"

_TEXT = "completion"
#: The most endpoints to ask per model.
_MOST = 3

OTHER_TOKENS = Kind(
    "tokens.tokeniser", Severity.ERROR, "Fairlead's tokens of a text differ from the engine's: no block ever matches",
    "set tokens.models.….modelPath to the directory that the engine loads, or render: engine", _TOKENS,
)  # fmt: skip
OTHER_TEMPLATE = Kind(
    "tokens.chat-template", Severity.ERROR, "Fairlead renders chats differently from the engine: no block ever matches",
    "set chatTemplate to the engine's --chat-template and templateKwargs to its --default-chat-template-kwargs,"
    " or render: engine", _TOKENS,
)  # fmt: skip
UNUSABLE = Kind(
    "tokens.unusable", Severity.ERROR, "a tokeniser cannot be used", "correct the paths under tokens.models", _TOKENS,
)  # fmt: skip
NO_TOKENS = Kind(
    "tokens.engine-silent", Severity.ERROR, "the engine should make the token ids, but does not",
    "start it with --enable-scale-out, or leave /tokenize open; or set modelPath to make them here", _TOKENS,
)  # fmt: skip
UNCHECKED = Kind(
    "tokens.unchecked", Severity.NOTE, "Fairlead's tokens could not be compared with the engine's",
    "ask engines with /tokenize, or use --probe with KV events", _TOKENS,
)  # fmt: skip


def settings_of(site: Site, model: str) -> ModelTokens | None:
    """The entry of `tokens.models` for a model; `None` = there is none."""
    models = site.config.tokens.models
    return models.get(model, models.get("*"))


async def _compared(site: Site, client: RenderClient, endpoint: Endpoint, model: str) -> list[Finding]:
    tokeniser = await site.tokeniser()
    token_check = await compare(tokeniser, client, f"http://{endpoint.address}", model)
    if _TEXT in token_check.differing:
        return [OTHER_TOKENS.at(endpoint.id, f"{model}: {token_check.state}")]
    if token_check.differing:
        return [OTHER_TEMPLATE.at(endpoint.id, f"{model}: {token_check.state}")]
    if token_check.agreed:
        return []
    if not tokeniser.knows(model):
        return [UNUSABLE.at(model, tokeniser.state)]
    return [UNCHECKED.at(endpoint.id, f"{model}: {token_check.state}")]


async def _rendered(client: RenderClient, endpoint: Endpoint, model: str) -> list[Finding]:
    path, fields = PROBES["chat"]
    body = json.dumps({"model": model, "max_tokens": 1, **fields}).encode()
    tokens = await client.tokens_of(parse_request(path, body), body, f"http://{endpoint.address}")
    return [NO_TOKENS.at(endpoint.id, f"{model}: {tokens.detail}")] if tokens.reason else []


def _render_client(site: Site) -> RenderClient:
    return RenderClient(5.0, asyncio.get_running_loop().time, token=site.upstream_token)


@check("tokens", "prompts become the same tokens here as in the engines", needs=("endpoints", "tokens"), budget=60.0)
async def tokens(site: Site) -> list[Finding]:
    client = _render_client(site)
    asked: dict[str, int] = {}
    findings: list[Finding] = []
    try:
        for endpoint in site.endpoints:
            model = await site.model(endpoint)
            settings = settings_of(site, model)
            if not model or asked.get(model, 0) >= _MOST:
                continue
            asked[model] = asked.get(model, 0) + 1
            if settings is not None and settings.render == "engine":
                findings += await _rendered(client, endpoint, model)
            else:
                findings += await _compared(site, client, endpoint, model)
    finally:
        await client.close()
    return findings


# `kv-agreement`: whether predictions from KV events come true: the self-check of a running scheduler, on demand.
#
# Each endpoint gets a new prompt, one output token long, and then the same prompt again. After the first request the
# events should report its blocks; the prediction from them is compared with the `cached_tokens` of the second answer.
# Of several ranks the engine chooses one, which may not have the prompt yet. So the second request is repeated, at most
# once per rank, and the answer is compared with the rank that comes closest.


FAILED = Kind(
    "kv-agreement.failed", Severity.CRITICAL, "a small request to an endpoint fails",
    "see the evidence; after 404, 405 or 501, correct the endpoint's address", "docs/runbook.md#fairleaderrorshigh",
)  # fmt: skip
SIZE = Kind(
    "kv-agreement.block-size", Severity.ERROR, "predictions are wrong: the block size is not the engine's",
    "leave kvEvents.blockSize out: events carry it", _SELF_CHECK,
)  # fmt: skip
HASH = Kind(
    "kv-agreement.hash", Severity.ERROR, "predictions are wrong: the engine's hashes differ from the configured ones",
    "set kvEvents.hashAlgorithm and kvEvents.hashSeed to the engine's, or use keys: own", _SELF_CHECK,
)  # fmt: skip
TEMPLATE = Kind(
    "kv-agreement.chat-template", Severity.ERROR, "predictions are wrong: the engine renders chats differently",
    "set chatTemplate and templateKwargs under tokens.models to what the engine was started with, or render: engine",
    _SELF_CHECK,
)  # fmt: skip
TOKENISER = Kind(
    "kv-agreement.tokeniser", Severity.ERROR, "predictions are wrong: the engine's tokens of a prompt differ",
    "set tokens.models.….modelPath to the directory that the engine loads, or render: engine", _SELF_CHECK,
)  # fmt: skip
SILENT = Kind(
    "kv-agreement.silent", Severity.ERROR, "an engine computed a prompt and sent no KV event for it",
    "check that its publisher belongs to this server and model; its log says what the publisher does", _LOW_HITS,
)  # fmt: skip
NO_CACHE = Kind(
    "kv-agreement.no-cache", Severity.ERROR, "an engine does not reuse a prompt that it has just computed",
    "start it with --enable-prefix-caching", _LOW_HITS,
)  # fmt: skip
DISAGREES = Kind(
    "kv-agreement.other", Severity.ERROR, "predictions from KV events do not come true",
    "the evidence names the likely cause; the table of causes says what to do", _SELF_CHECK,
)  # fmt: skip
NOT_TOLD = Kind(
    "kv-agreement.not-told", Severity.WARNING, "an engine does not report cached tokens, which hides wrong predictions",
    "start it with --enable-prompt-tokens-details", _SELF_CHECK,
)  # fmt: skip
UNTOKENISED = Kind(
    "kv-agreement.no-tokens", Severity.WARNING, "chats get no token ids, so KV events cannot be used for them",
    "set tokens.models (docs/tokens.md)", "docs/tokens.md",
)  # fmt: skip
NOT_ALLOWED = Kind(
    "kv-agreement.not-allowed", Severity.NOTE, "a model server requires credentials",
    "nothing; the predictions of KV events could not be compared", _SELF_CHECK,
)  # fmt: skip
NO_ANSWERS = Kind(
    "kv-agreement.no-answers", Severity.NOTE, "a model server answers no prompts, or none that fills a block",
    "nothing; the predictions of KV events could not be compared", _SELF_CHECK,
)  # fmt: skip
_CAUSES = {
    diagnosis.BLOCK_SIZE: SIZE,
    diagnosis.SEED: HASH,
    diagnosis.ALGORITHM: HASH,
    diagnosis.TEMPLATE: TEMPLATE,
    diagnosis.TOKENISER: TOKENISER,
}
#: Seconds within which an engine should have sent its events (vLLM 0.32: 6 ms at the median).
_TELLING = 2.0
_PATIENCE = 20.0


class _Prompt(Struct, frozen=True):
    path: str
    body: bytes
    tokens: PromptTokens


class _Pair(NamedTuple):
    """Cached tokens of a prompt: predicted from KV events for each rank, and reported by the engine. `received`:
    whether there were events."""

    predicted: tuple[int, ...]
    reported: ReportedUsage
    received: bool


async def _prompt(site: Site, model: str, address: str, words: int) -> _Prompt:
    """The prompt to send: a chat if chats can be tokenised, otherwise token ids. `tokens.reason`: why neither works."""
    tokeniser, settings = await site.tokeniser(), settings_of(site, model)
    body = chat(model, words)
    parsed = parse_request(CHAT, body)
    if settings is not None and settings.render == "engine":
        client = _render_client(site)
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


def _predicted(kv: KvListening, slot: int, tokens: PromptTokens) -> tuple[int, ...]:
    """The cached tokens that each of the endpoint's ranks should report."""
    kv.exact.refresh()
    chains = [kv.recipe.chain(kv.exact.index.space, tokens, size, "") for size in kv.exact.sizes]
    looked_up = [kv.exact.index.look_up(chain, len(kv.endpoints)) for chain in chains if chain is not None]
    matches = [match for match in looked_up if match is not None]
    hits = [int(match.hit_tokens(tokens.count)[slot]) for match in matches]
    return hits_by_rank(matches, slot, tokens.count) or (max(hits, default=0),)


async def _sent(site: Site, address: str, prompt: _Prompt) -> ReportedUsage | str:
    """Send a prompt. Return the usage in the answer, or why there is none."""
    answer = await tried(
        site.client.post(f"http://{address}{prompt.path}", prompt.body, await site.upstream_headers(), _PATIENCE)
    )
    if isinstance(answer, Unreached):
        return str(answer)
    return usage(answer) if answer.status == 200 else shown(answer)


async def _kv_agreement_of(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    endpoint = kv.endpoints[slot]
    filled = await filling(site, endpoint, max((cache.block_size for cache in kv.caches(slot)), default=0))
    if filled.why_not:
        return [NO_ANSWERS.at(endpoint.id, filled.why_not)]
    prompt = await _prompt(site, await site.model(endpoint), endpoint.address, filled.tokens)
    if prompt.tokens.reason:
        return []  # the check `tokens` reports why
    known = kv.event_count(slot)
    first = await _sent(site, endpoint.address, prompt)
    if isinstance(first, str):
        if first.startswith(("401 ", "403 ")):
            return [NOT_ALLOWED.at(endpoint.id, first)]
        kind = NO_ANSWERS if await answers_none(site, endpoint, first) else FAILED
        return [kind.at(endpoint.id, f"{prompt.path}: {first}")]
    pair = await _asked_again(site, kv, slot, prompt, known)
    if isinstance(pair, str):
        return [FAILED.at(endpoint.id, pair)]
    missing = [UNTOKENISED.at("", "")] if prompt.path == COMPLETIONS else []
    return missing + _judged(kv, slot, prompt.tokens, pair)


async def _asked_again(site: Site, kv: KvListening, slot: int, prompt: _Prompt, known: int) -> _Pair | str:
    """Send a prompt that one of the ranks has just computed until some of it is cached. `known`: the number of the
    endpoint's events before. Return why an answer has no usage, if so."""
    pair = _Pair((0,), ReportedUsage(), received=False)
    for _ in kv.caches(slot):
        received = await kv.until(partial(kv.has_more_events, slot, known), _TELLING)
        predicted, known = _predicted(kv, slot, prompt.tokens), kv.event_count(slot)
        reported = await _sent(site, kv.endpoints[slot].address, prompt)
        if isinstance(reported, str):
            return reported
        pair = _Pair(predicted, reported, received)
        if reported.cached or not received:
            break
    return pair


def _judged(kv: KvListening, slot: int, tokens: PromptTokens, pair: _Pair) -> list[Finding]:
    name, (of_each, usage, received) = kv.endpoints[slot].id, pair
    predicted = min(of_each, key=lambda cached: abs(cached - usage.cached))
    if not received:
        evidence = f"nothing within {_TELLING:g} s of a prompt of {usage.prompt} tokens"
        return [SILENT.at(name, evidence)]
    if usage.cached < 0:
        predicted = max(of_each)
        wrong = diagnose(kv.recipe, _case(tokens, predicted, tokens.count, usage), kv.heads(slot))
        blind = [NOT_TOLD.at(name, "its usage has no prompt_tokens_details.cached_tokens")]
        return blind + (
            [_CAUSES[wrong.cause].at(name, wrong.detail)] if not predicted and wrong.cause in _CAUSES else []
        )
    if not usage.cached and any(of_each):
        return [NO_CACHE.at(name, f"0 of {usage.prompt} tokens were cached the second time")]
    block = max((cache.block_size for cache in kv.caches(slot)), default=1)
    if agrees(predicted, usage.cached, tokens.count, max(block, 1)):
        return []
    wrong = diagnose(kv.recipe, _case(tokens, predicted, usage.cached, usage), kv.heads(slot))
    evidence = f"predicted {predicted}, reported {usage.cached} cached tokens; {wrong.cause}: {wrong.detail}"
    return [_CAUSES.get(wrong.cause, DISAGREES).at(name, evidence)]


def _case(tokens: PromptTokens, predicted: int, reported: int, usage: ReportedUsage) -> Case:
    return Case(tokens.ids, tokens.count, "", tokens.salt, predicted, reported, usage.prompt)


@check("kv-agreement", "predictions from KV events come true", needs=("probe", "endpoints", "events"), budget=60.0)
async def kv_agreement(site: Site) -> list[Finding]:
    if site.config.kv_events.bind:
        raise Skipped("publishers connect to kvEvents.bind, where only one process can listen")
    kv = await listening(site)
    linked = [slot for slot in kv.watched if kv.linked(slot)]
    parts = await asyncio.gather(*(_kv_agreement_of(site, kv, slot) for slot in linked))
    return [finding for part in parts for finding in part]
