"""What decisions know of prompts beyond their bytes: token ids, and where there are KV events, who holds their blocks.

`Knowledge` alone reads prompts with the tokenisers of `tokens:`, so that their tokens are counted instead of estimated.
With an `ExactKnowledge` the prompts are offered to it, and what answers report is compared with what it predicted.
Subclasses say where the blocks are known: here (`live.kv`), or in another process (`live.asking`).
"""

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from fairlead.config.kv_events import KvEvents
from fairlead.config.schema import Config
from fairlead.fleet.diagnosis import Finding
from fairlead.fleet.exact import ExactKnowledge
from fairlead.fleet.fleet import Fleet
from fairlead.fleet.recipe import Recipe
from fairlead.fleet.selfcheck import Verdict
from fairlead.io.receive.session import Host
from fairlead.live.parity import TokenParity
from fairlead.live.prompts import PromptReading
from fairlead.model.endpoint import MODEL_LABEL
from fairlead.model.errors import ConfigError
from fairlead.model.events import EndpointDown, EndpointUp
from fairlead.observe.exposition import Registry
from fairlead.observe.log import get
from fairlead.observe.token_metrics import TokenMetrics

log = get("kv-events")

#: Answers that are followed for their cached tokens until one reports them.
_FOLLOWED = 200


class Knowledge:
    """Made before the first endpoint is known; `start` loads tokenisers; all on the loop's thread."""

    def __init__(self, config: Config, fleet: Fleet, registry: Registry, exact: ExactKnowledge | None = None) -> None:
        self._settings = config.kv_events
        self._fleet = fleet
        self.exact = exact
        self.prompts = PromptReading(config.tokens, exact, self._some_engine)
        self.parity = TokenParity(lambda: self.prompts.tokeniser, self.prompts.asks, self._suspect)
        without = self.prompts.without if exact is None else None  # else `KvMetrics` shows it
        TokenMetrics(registry, lambda: self.prompts.tokeniser, self.parity.states, without)
        self._budget = _FOLLOWED
        self._turn = 0
        if exact is not None:
            fleet.exact = exact
            exact.check.report = self._verdict

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Raises `ConfigError` when something that is configured cannot be used."""
        await self.prompts.start()
        if self.exact is not None and not self.prompts.configured:
            log.warning("KV events serve only requests that carry token ids: no model has a tokeniser under tokens:")
        stack.push_async_callback(self.prompts.close)
        if self.prompts.configured:
            self.parity.start()
            stack.push_async_callback(self.parity.close)

    def endpoint(self, event: EndpointUp | EndpointDown) -> None:
        """An endpoint came, changed or went. To be called after the pipeline was told, before anything else happens."""
        if isinstance(event, EndpointUp) and self.prompts.configured:
            self.parity.up(event.endpoint)

    def serve(self, host: Host) -> None:
        """Read the prompts of its requests, and follow what answers report."""
        host.inspect = self.inspecting(host.inspect)
        host.understanding.read_prompt = self.prompts.read
        host.understanding.reading = self.prompts.reading
        if self.exact is not None:
            self.exact.check.heard = self._heard

    def inspecting(self, usual: Callable[[bool], bool]) -> Callable[[bool], bool]:
        """Which responses are followed to their end: as usual, and so that predictions can be compared.

        While an endpoint has not proved itself, all; but no more than `_FOLLOWED` in vain, since engines may not report
        cached tokens at all, and streams only if the client asks for usage.
        """
        exact, share, rng = self.exact, self._settings.check, Random()
        if exact is None:
            return usual

        def inspect(stream: bool) -> bool:
            if exact.curious and self._budget > 0:
                self._budget -= 1
                return True
            return usual(stream) or (not stream and rng.random() < share)

        return inspect

    def page(self) -> dict[str, Any]:
        """For people: tokenisers, whether engines agree, and how far each endpoint's events are relied on."""
        exact = self.exact
        found: dict[str, Any] = {
            "tokenisers": {
                name: {"state": model.state, "template": model.template_state}
                for name, model in self.prompts.tokeniser.states().items()
            },
            "parity": self.parity.results,
            "prompts_without_tokens": self.prompts.without,
        }
        if exact is not None:
            found["index"] = {
                "blocks": exact.index.entries,
                "bytes": exact.index.nbytes,
                "keys": exact.index.space.name,
            }
            found["endpoints"] = {
                name: {
                    "source": exact.source(slot),
                    "trust": exact.check.trust(slot).level,
                    "finding": exact.check.finding(slot),
                }
                for slot, name in self._endpoints()
            }
        return found

    def _suspect(self, finding: Finding) -> None:
        if self.exact is not None:
            self.exact.check.suspect = finding

    def _heard(self) -> None:
        self._budget = _FOLLOWED

    def _some_engine(self, model: str) -> str:
        """An endpoint that can be asked for the tokens of a prompt; in turn, so that none is asked for all."""
        endpoints = [endpoint for _, endpoint in self._fleet.table.slots()]
        # Where endpoints are labelled with models, one that serves this one; an adapter's name is on no label.
        endpoints = [one for one in endpoints if one.labels.get(MODEL_LABEL) == model] or endpoints
        self._turn += 1
        return endpoints[self._turn % len(endpoints)].address if endpoints else ""

    def _endpoints(self) -> Iterator[tuple[int, str]]:
        for slot, endpoint in self._fleet.table.slots():
            yield slot, endpoint.id

    def _scraped_sizes(self) -> tuple[int, ...]:
        """Tokens per block, as metrics pages say."""
        return tuple({sample.block_size for sample in self._fleet.table.samples if sample and sample.block_size})

    def _verdict(self, verdict: Verdict) -> None:
        endpoint = self._fleet.table.endpoints[verdict.slot]
        name = endpoint.id if endpoint is not None else ""
        if verdict.trusted:
            log.info("KV events of an endpoint agree with its cached tokens and are relied on", endpoint=name)
            return
        finding = verdict.finding
        log.warning(
            "KV events of an endpoint disagree with its cached tokens; until they agree, learned prefixes count",
            endpoint=name,
            cause=finding.cause if finding else "unknown",
            detail=finding.detail if finding else "",
            predicted=verdict.predicted,
            reported=verdict.reported,
        )


def recipe_of(settings: KvEvents) -> Recipe:
    """Raises `ConfigError`."""
    try:
        return Recipe(settings.keys, settings.hash_algorithm, settings.hash_seed, settings.block_size)
    except ValueError as error:
        raise ConfigError(str(error), "$.kvEvents.hashAlgorithm") from None
