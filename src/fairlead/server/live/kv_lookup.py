"""Exact knowledge from an indexer, a process that is asked about each prompt before its request arrives.

    read        a prompt's token ids become block keys; the indexer is asked who holds them, within the budget
    offer       the answer accompanies the request; without an answer (late, broken, down) learned prefixes are used
    follow      twice a second the indexer reports the state of each endpoint's feed, and the adapters it has seen

For the pipeline nothing changes: it reads an index (`core.kv.answered`) that has the blocks of the answer. This process
itself keeps the trust in each endpoint, the prompts that were just sent, and the comparison with the cached tokens that
responses report.
"""

import asyncio
import contextlib
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from fairlead.config.schema import Config
from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.exact import ExactKnowledge, Prepared
from fairlead.core.fleet import Fleet
from fairlead.core.kv.answered import AnsweredIndex, bounded
from fairlead.core.kv.match import BlockChain, Held
from fairlead.core.text import masked
from fairlead.server.indexer.client import IndexClient
from fairlead.server.indexer.wire import MOST_BLOCKS, TIERS, Answer, StateAnswer
from fairlead.server.live.knowledge import Knowledge
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.kv_metrics import KvMetrics, show_questions
from fairlead.server.observe.log import get

log = get("kv-events")

_REFRESH = 0.1
_TIER_NAMES = tuple(TIERS.values())


class KvLookup(Knowledge):
    """Knowledge from an indexer. `start` also opens the connection. No request waits while the indexer is down."""

    exact: ExactKnowledge

    def __init__(self, config: Config, fleet: Fleet, registry: Registry) -> None:
        super().__init__(config, fleet, registry, self._ask)
        assert isinstance(self.exact.index, AnsweredIndex), "the fleet has what `exact_knowledge` gives"
        self._index = self.exact.index
        took = show_questions(registry, lambda: self.client)
        indexer = config.kv_events.indexer
        self.client = IndexClient(indexer.url, indexer.budget, self._on_state, self._say, took)
        KvMetrics(registry, self.exact, self._endpoints, list, lambda: 0, self.prompts.without)
        #: The indexer's last report; `None` = it is not connected.
        self._state: StateAnswer | None = None
        #: The indexer's name for each of our endpoints → the endpoint's slot and tenure.
        self._named: dict[str, tuple[int, int]] = {}
        #: Ids of our endpoints that the indexer does not know.
        self._unnamed: set[str] = set()
        #: Why the indexer's answers cannot be used; empty = they can.
        self._complaint = ""
        #: The block sizes in tokens that the indexer reports.
        self._sizes: tuple[int, ...] = ()

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        await super().start(stack)
        self._loop = asyncio.get_running_loop()
        self.client.start()
        stack.push_async_callback(self.client.close)
        log.info("asking an indexer for KV blocks", url=self.client.url)
        self._timer = self._loop.call_later(_REFRESH, self._refresh)
        stack.callback(lambda: self._timer.cancel())

    def endpoint(self, event: EndpointUp | EndpointDown) -> None:
        super().endpoint(event)
        if self._state is not None:
            self._take(self._state)

    def page(self) -> dict[str, Any]:
        client, state = self.client, self._state
        indexer = {
            "url": masked(client.url),
            "up": client.up,
            "complaint": self._complaint,
            "index_size": state.index_size if state is not None else None,
            "questions": client.ends,
        }
        return super().page() | {"indexer": indexer}

    def _refresh(self) -> None:
        self._fleet.refresh_exact((*self._scraped_sizes(), *self._sizes))
        self._timer = self._loop.call_later(_REFRESH, self._refresh)

    # ---------------------------------------------------------------- one prompt

    async def _ask(self, prepared: Prepared) -> Prepared | None:
        """Return `prepared` with the indexer's answer in every chain; `None` = an answer is missing."""
        chains = {size: chain for size, chain in prepared.chains.items() if len(chain.keys)}
        if not chains or self._complaint or any(len(chain.keys) > MOST_BLOCKS for chain in chains.values()):
            return None
        answers = await asyncio.gather(*map(self._question, chains.values()))
        held_chains: dict[int, BlockChain] = {}
        for (size, chain), answer in zip(chains.items(), answers, strict=True):
            if answer is None:
                return None
            held_chains[size] = chain._replace(held=self._held(answer, len(chain.keys)))
        return msgspec.structs.replace(prepared, chains=held_chains)

    def _question(self, chain: BlockChain) -> "asyncio.Task[Answer | None]":
        keys = np.ascontiguousarray(chain.keys, "<u8").tobytes()
        return self._loop.create_task(self.client.ask(keys=keys, block_size=chain.block_size, hits_only=True))

    def _held(self, answer: Answer, total: int) -> tuple[Held, ...]:
        held = []
        for name, pod in answer.pods.items():
            where = self._named.get(name)
            if where is not None and pod.matched > 0:
                tiers = bounded([pod.tiers.get(tier, 0) for tier in _TIER_NAMES], total)
                ranks = pod.ranks if pod.ranks is not UNSET else []
                held.append(Held(*where, tiers, tuple(float(min(max(blocks, 0), total)) for blocks in ranks)))
        return tuple(held)

    # ---------------------------------------------------------------- state

    def _on_state(self, state: StateAnswer | None) -> None:
        self._state = state
        if state is None:
            self._index.silent()
            return
        ours = self._index.space.name
        complaint = f"its keys are of '{state.space}', ours of '{ours}'" if state.space != ours else ""
        if not complaint:
            self._take(state)
            if not self._named and state.pods and self._fleet.table.count:
                complaint = "it knows none of our endpoints, neither by name nor by address"
        if complaint and complaint != self._complaint:
            log.warning(
                "cannot use the indexer; learned prefixes are used instead", url=self.client.url, reason=complaint
            )
        self._complaint = complaint

    def _take(self, state: StateAnswer) -> None:
        index = self._index
        by_address = {pod.address: name for name, pod in state.pods.items() if pod.address}
        self._named, unnamed = {}, set[str]()
        for slot, endpoint in self._fleet.table.slots():
            own = state.pods.get(endpoint.id)
            name = by_address.get(endpoint.address)
            if own is not None and (own.address == endpoint.address or (name is None and not own.address)):
                name = endpoint.id
            if name is None:
                index.report(slot, ())  # answers say nothing about it, which is no miss
                unnamed.add(endpoint.id)
            else:
                index.report(slot, state.pods[name].ranks)
                self._named[name] = slot, index.tenure(slot)
        for endpoint_id in unnamed - self._unnamed:
            log.info("the indexer does not know an endpoint; it keeps learned prefixes", endpoint=endpoint_id)
        self._unnamed = unnamed
        self.exact.know_adapters(state.adapters)
        self._sizes = tuple(size for size in state.block_sizes if size > 0)[:8]

    def _say(self, what: str, why: str) -> None:
        (log.warning if why else log.info)(what, url=self.client.url, reason=why)
