"""What decisions know of a prompt besides its bytes: its token ids and, with KV events, the endpoints that hold its
blocks.

`Knowledge` alone reads prompts with the tokenisers of `tokens:`, so that their tokens are counted instead of estimated.
With an `ExactKnowledge`, prompts are offered to it, and its predictions are compared with what responses report.
Subclasses say where the blocks are known: in this process (`live.kv`) or in another one (`live.kv_lookup`).
`TokenCheck` compares our token ids with those of engines.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import aiohttp

from fairlead.apis.tokens import PromptTokeniser
from fairlead.config.schema import Config, KvEvents
from fairlead.core.endpoint import MODEL_LABEL, Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.answered import AnsweredIndex
from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.recipe import ANY_MODEL, Recipe
from fairlead.core.request import Request
from fairlead.core.trust import TEMPLATE, TOKENISER, Finding, Verdict
from fairlead.gateway.host import Inspect
from fairlead.pool.aio import cancelled, read_at_most
from fairlead.pool.render import PROBES, RenderClient, TokenCheckResult, compare
from fairlead.pool.scrape import NO_TOKEN, TokenFile
from fairlead.pool.served_models import read_model_list
from fairlead.server.live.prompts import Asker, PromptReading
from fairlead.server.observe.component_metrics import TokenMetrics
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.log import get

log = get("kv-events")

#: At most this many responses are read to the end for their cached tokens before one reports a result.
_FOLLOWED = 200


class Knowledge:
    """Make this before the first endpoint is known. `fleet.exact` is the result of `exact_knowledge(config)`.

    `start` loads tokenisers. All methods run on the event loop's thread. `asker`: see `PromptReading`.
    """

    def __init__(self, config: Config, fleet: Fleet, registry: Registry, asker: Asker | None = None) -> None:
        self._settings = config.kv_events
        self._fleet = fleet
        self.exact = exact = fleet.exact
        token = TokenFile(config.gateway.upstream_token_file)
        self.prompts = PromptReading(config.tokens, exact, self._some_engine, fleet.table.bases, asker, token)
        self.token_check = TokenCheck(lambda: self.prompts.tokeniser, self.prompts.asks, token=token)
        without = self.prompts.without if exact is None else None  # else `KvMetrics` shows it
        TokenMetrics(registry, lambda: self.prompts.tokeniser, self.token_check.states, without)
        self._budget = _FOLLOWED
        self._turn = 0
        if exact is not None:
            exact.check.tell(self._verdict, self._follow_longer)
            exact.check.suspect(self._suspicion)

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Raises `ConfigError` if something that is configured cannot be used."""
        await self.prompts.start()
        for model, reason in self.prompts.unusable.items():
            log.warning("a tokeniser cannot be used; prompts of its models are not read", model=model, reason=reason)
        if self.exact is not None and not self.prompts.configured:
            log.warning("KV events serve only requests that carry token ids: no model has a tokeniser under tokens:")
        stack.push_async_callback(self.prompts.close)
        if self.prompts.configured:
            self.token_check.start()
            stack.push_async_callback(self.token_check.close)

    def endpoint(self, event: EndpointUp | EndpointDown) -> None:
        """Handle an endpoint that appeared, changed or was removed. Call this right after the pipeline has handled the
        same event."""
        if isinstance(event, EndpointDown):
            self.token_check.down(event.endpoint_id)
        elif self.prompts.configured:
            self.token_check.up(event.endpoint)

    def inspecting(self, usual: Inspect) -> Inspect:
        """Return a function that says whether to read a response to the end: those that `usual` selects, plus samples
        that check predictions.

        While an endpoint's KV events are unproven, all responses are read, but at most `_FOLLOWED` without a result:
        some engines never report cached tokens, and in streams engines report them only if the client asks for usage.
        """
        exact, share, rng = self.exact, self._settings.check, Random()
        if exact is None:
            return usual

        def inspect(request: Request, stream: bool) -> bool:
            if exact.curious and self._budget > 0:
                self._budget -= 1
                return True
            return usual(request, stream) or (not stream and rng.random() < share)

        return inspect

    def page(self) -> dict[str, Any]:
        """The content of `/debug/knowledge`: tokenisers, whether engines' token ids agree with ours, and how far each
        endpoint's KV events are trusted."""
        exact = self.exact
        content: dict[str, Any] = {
            "tokenisers": {
                name: {"state": model.state, "template": model.template_state}
                for name, model in self.prompts.tokeniser.states().items()
            },
            "token_check": self.token_check.results,
            "prompts_without_tokens": self.prompts.without,
        }
        if exact is not None:
            index = exact.index
            content["index"] = {"blocks": index.entries, "bytes": index.nbytes, "keys": index.space.name}
            content["endpoints"] = {
                name: {
                    "source": exact.source(slot),
                    "trust": exact.check.trust(slot).level,
                    "finding": exact.check.finding(slot),
                }
                for slot, name in self._endpoints()
            }
        return content

    def trouble(self) -> str:
        """Which tokenisers cannot be used, and why; empty = all can."""
        return "; ".join(f"no tokeniser of {model}: {reason}" for model, reason in self.prompts.unusable.items())

    def _suspicion(self, slot: int) -> Finding | None:
        endpoint = self._fleet.table.endpoints[slot]
        return self.token_check.finding(endpoint.id) if endpoint is not None else None

    def _follow_longer(self) -> None:
        self._budget = _FOLLOWED

    def _some_engine(self, model: str) -> str:
        """The address of an endpoint to ask for the token ids of a prompt, chosen round-robin; empty = no endpoint."""
        slots, has = self._fleet.table.slots(), self._fleet.table.base(model)
        # Prefer endpoints whose base model is `model`. If none has it (an adapter's name, for example), use any.
        endpoints = [endpoint for slot, endpoint in slots if has[slot]] or [endpoint for _, endpoint in slots]
        self._turn += 1
        return endpoints[self._turn % len(endpoints)].address if endpoints else ""

    def _endpoints(self) -> Iterator[tuple[int, str]]:
        for slot, endpoint in self._fleet.table.slots():
            yield slot, endpoint.id

    def _scraped_sizes(self) -> tuple[int, ...]:
        """The block sizes in tokens that metrics pages report."""
        return tuple({sample.block_size for sample in self._fleet.table.samples if sample and sample.block_size})

    def _verdict(self, verdict: Verdict) -> None:
        endpoint = self._fleet.table.endpoints[verdict.slot]
        name = endpoint.id if endpoint is not None else ""
        if verdict.trusted:
            log.info("KV events of an endpoint agree with its cached tokens and are used", endpoint=name)
            return
        finding = verdict.finding
        log.warning(
            "KV events of an endpoint disagree with its cached tokens; learned prefixes are used until they agree",
            endpoint=name,
            cause=finding.cause if finding else "unknown",
            detail=finding.detail if finding else "",
            predicted=verdict.predicted,
            reported=verdict.reported,
        )


def exact_knowledge(config: Config) -> ExactKnowledge | None:
    """The exact knowledge for a scheduler's fleet. Its index is in this process or in an indexer; `None` = KV events
    are off.

    Raises `ConfigError`.
    """
    events = config.kv_events
    if not events.enabled:
        return None
    recipe = recipe_of(events)
    if events.indexer.url:
        return ExactKnowledge(recipe, AnsweredIndex(ANY_MODEL, recipe.space()))
    return ExactKnowledge(recipe, KvIndex(events.max_blocks, recipe.space()))


def recipe_of(settings: KvEvents) -> Recipe:
    """The recipe of block keys that the settings describe. Raises `ConfigError`."""
    try:
        return Recipe(settings.keys, settings.hash_algorithm, settings.hash_seed, settings.block_size)
    except ValueError as error:
        raise ConfigError(str(error), "$.kvEvents.hashAlgorithm") from None


# Checks for each model whether engines make the same token ids as this process.
#
# A different tokeniser or chat template causes no error anywhere: blocks just never match. So each endpoint is asked
# for the token ids of a few probes (`pool.render`), independently of client requests.
#
# Rules
# * One endpoint at a time is asked, with a limit of `TIMEOUT` seconds per question. What fails is tried up to `TRIES`
#   times with the same endpoint. A result lasts as long as its endpoint.
# * A model differs while it does at any endpoint.
# * At most `MOST_MODELS` models are compared. Adapters use their base model's tokeniser and are left out.

TIMEOUT, TRIES, LATER = 2.0, 3, 20.0
MOST_MODELS, _MOST_BYTES = 64, 1 << 20
UNKNOWN = "unknown"


class TokenCheck:
    """`asks(model)`: whether the engine itself supplies that model's token ids, so that there is nothing to compare.

    `later`: seconds until a failed comparison is tried again. `token`: what engines require.
    """

    def __init__(
        self,
        tokeniser: Callable[[], PromptTokeniser],
        asks: Callable[[str], bool],
        later: float = LATER,
        token: TokenFile = NO_TOKEN,
    ) -> None:
        #: By endpoint: its address, and its results by model name, as the engine reports it.
        self._compared: dict[str, tuple[str, dict[str, TokenCheckResult]]] = {}
        self._tokeniser, self._asks = tokeniser, asks
        self._later, self._token = later, token
        self._waiting: dict[str, tuple[Endpoint, int]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        await cancelled(self._task)
        self._task = None

    def up(self, endpoint: Endpoint) -> None:
        """Queue an endpoint that appeared or changed for the check."""
        address, _ = self._compared.get(endpoint.id, ("", None))
        if address != endpoint.address:
            self._compared[endpoint.id] = endpoint.address, {}
        self._waiting[endpoint.id] = endpoint, TRIES
        self._wake.set()

    def down(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        self._compared.pop(endpoint_id, None)
        self._waiting.pop(endpoint_id, None)

    @property
    def results(self) -> dict[str, TokenCheckResult]:
        """The result by model: of an endpoint that differs, else of one that agrees, else of any."""
        results: dict[str, TokenCheckResult] = {}
        for _, compared in self._compared.values():
            for model, result in compared.items():
                if model not in results or _weight(result) > _weight(results[model]):
                    results[model] = result
        return results

    def finding(self, endpoint_id: str) -> Finding | None:
        """Why predicted blocks of a model will not match at the endpoint, because its token ids differ."""
        _, compared = self._compared.get(endpoint_id, ("", dict[str, TokenCheckResult]()))
        for model, result in compared.items():
            if result.differing:
                return Finding(cause_of(result), f"{model} at {endpoint_id} {result.state}")
        return None

    def states(self) -> Mapping[str, str]:
        """The result by model: `agrees`, `differs` or `unknown`."""
        return {model: result.state.partition(":")[0] for model, result in self.results.items()}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        client = RenderClient(TIMEOUT, loop.time, 4, self._token)
        try:
            async with aiohttp.ClientSession() as session:
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    while self._waiting:
                        endpoint, tries = self._waiting.pop(next(iter(self._waiting)))
                        if not await self._check(session, client, endpoint) and tries > 1:
                            loop.call_later(self._later, self._retry, endpoint, tries - 1)
        finally:
            await client.close()

    def _retry(self, endpoint: Endpoint, tries: int) -> None:
        if self._compared.get(endpoint.id, ("",))[0] == endpoint.address:
            self._waiting.setdefault(endpoint.id, (endpoint, tries))
            self._wake.set()

    async def _check(self, session: aiohttp.ClientSession, client: RenderClient, endpoint: Endpoint) -> bool:
        """Check the models of the endpoint. True = no retry is needed: it lists models, and none is `unknown`."""
        url = f"http://{endpoint.address}"
        _, compared = self._compared[endpoint.id]
        settled = True
        names = await self._served(session, url) or {endpoint.labels.get(MODEL_LABEL, "")} - {""}
        for model in sorted(names):
            results = self.results
            own, before = compared.get(model), results.get(model)
            if own is not None and own.agreed and not own.differing:
                continue
            if self._asks(model) or not self._tokeniser().knows(model):
                continue
            if before is None and len(results) >= MOST_MODELS:
                continue
            result = await compare(self._tokeniser(), client, url, model)
            known = not result.state.startswith(UNKNOWN)
            settled &= known
            if known or own is None:
                compared[model] = result
            if before is None or self.results.get(model, before).state != before.state:
                self._tell(model, endpoint, result)
        return settled and bool(names)

    async def _served(self, session: aiohttp.ClientSession, url: str) -> set[str]:
        """The names of the base models that the engine lists; empty if it has no usable list."""
        url += "/v1/models"
        try:
            headers = await self._token.headers()
            async with asyncio.timeout(TIMEOUT), session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    return set()
                body = await read_at_most(response.content, _MOST_BYTES, ValueError("no list of models is so long"))
            return set(read_model_list(body).base.names)
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError):
            return set()

    def _tell(self, model: str, endpoint: Endpoint, result: TokenCheckResult) -> None:
        if result.differing:
            log.warning(
                "an engine's token ids differ from ours; its KV blocks will not match",
                model=model,
                endpoint=endpoint.id,
                cause=cause_of(result),
                detail=result.state,
            )
        elif result.agreed:
            log.info("an engine's token ids equal ours", model=model, endpoint=endpoint.id)
        else:
            log.info("token ids could not be compared", model=model, endpoint=endpoint.id, reason=result.state)


def _weight(result: TokenCheckResult) -> int:
    return 2 if result.differing else bool(result.agreed)


def cause_of(result: TokenCheckResult) -> str:
    """The cause of a difference: the template if chats differ and plain texts agree, else the tokeniser."""
    plain = {name for name, (path, _) in PROBES.items() if path == "/v1/completions"}
    return TEMPLATE if plain & {*result.agreed} and not plain & {*result.differing} else TOKENISER
