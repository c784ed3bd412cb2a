"""Answers questions to an indexer: makes a prompt's block keys, and looks up which endpoints hold how much of it.

Rules
* A question never changes the index.
* Long texts, and prompts with many blocks, are prepared in a thread. The index itself is read on the event loop's
  thread, the only one that changes it.
* A question names pods by an endpoint's id, the part of the id after the last `/`, or its address. The answer uses the
  names from the question.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import UNSET, Struct, convert, field

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.apis.tokens.pieces import NO_TOKENISER, packed
from fairlead.core.endpoint import Endpoint
from fairlead.core.exact import ExactKnowledge
from fairlead.core.kv.answered import RankState
from fairlead.core.kv.cache import RankCache
from fairlead.core.kv.index import keys_of, numbers
from fairlead.core.kv.match import BlockChain, KvMatch
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.server.indexer.wire import TIERS, Answer, PodAnswer, PodState, Query, QueryError, StateAnswer

_Result = TypeVar("_Result")
#: Prompts with more bytes of text or more token ids are prepared in a thread.
_LONG_TEXT, _LONG_IDS = 16 << 10, 16_384
_NOTHING = PodAnswer(matched=0, hit_rate=0.0)
_TIER_NAMES = tuple(TIERS.values())
#: At most this many prompts wait for the thread.
_MOST_WAITING = 32


class Asked(Struct):
    """Counts since the start. `looked_up`: blocks of all prompts. `hit`: those of them that the best endpoint holds."""

    questions: int = 0
    looked_up: int = 0
    hit: int = 0
    #: Refused questions, by HTTP status.
    refused: dict[int, int] = {}


class IndexService(Struct, eq=False):
    """`endpoints` returns the slot and endpoint of all endpoints, `tokeniser` the present tokenisers. `took` receives
    the seconds that each answer took."""

    _exact: ExactKnowledge
    _endpoints: Callable[[], Iterable[tuple[int, Endpoint]]]
    _tokeniser: Callable[[], PromptTokeniser]
    _took: Callable[[float], object] = lambda seconds: None
    asked: Asked = field(default_factory=Asked)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "indexer"))
    _waiting: int = 0

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, query: Query) -> Answer:
        """Answer a question. Raises `QueryError`."""
        started = perf_counter()
        tokens = await self._tokens(query)
        chains = self._chains(query) if tokens is None else await self._named(tokens, query.model)
        looked_up = self._look_up(query, chains, len(query.prompt_hash or ()))
        self._took(perf_counter() - started)
        return looked_up

    def state(self) -> StateAnswer:
        exact = self._exact
        pods = {
            endpoint.id: PodState(address=endpoint.address, ranks=_states(exact.index.caches_of(slot)))
            for slot, endpoint in self._endpoints()
        }
        adapters, sizes = sorted(exact.adapters), list(exact.sizes)
        space = exact.index.space.name
        return StateAnswer(space=space, index_size=exact.index.entries, pods=pods, adapters=adapters, block_sizes=sizes)

    # ---------------------------------------------------------------- the prompt

    async def _tokens(self, query: Query) -> PromptTokens | None:
        """The question's token ids; `None` = it has block keys or hashes instead. Raises `QueryError`."""
        if query.token_ids is not None:
            try:
                ids = packed(query.token_ids)
            except (OverflowError, ValueError, TypeError):
                raise QueryError(400, "token_ids must be integers from 0 to 4294967295") from None
            return PromptTokens(ids, len(ids) // 4, salt=query.cache_salt)
        if query.prompt is None and query.messages is None:
            return None
        tokens = await self._encoded(query)
        if tokens.reason:
            hint = "; an indexer needs modelPath under tokens.models" if tokens.reason == NO_TOKENISER else ""
            raise QueryError(422, f"the prompt has no token ids: {tokens.reason}: {tokens.detail}{hint}")
        return tokens

    async def _encoded(self, query: Query) -> PromptTokens:
        chat = query.messages is not None
        fields = {"messages": query.messages, "tools": query.tools} if chat else {"prompt": query.prompt}
        given = {"model": query.model, **fields, "cache_salt": query.cache_salt or None}
        try:
            body = json.dumps({name: value for name, value in given.items() if value is not None}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise QueryError(400, f"the messages are not JSON: {error}") from None
        path = "/v1/chat/completions" if chat else "/v1/completions"
        parsed = parse_request(path, body)
        tokeniser = self._tokeniser()
        if len(body) <= _LONG_TEXT and not tokeniser.in_thread(parsed, query.model):
            return tokeniser.tokens_of(parsed, body, query.model)
        return await self._in_thread(tokeniser.tokens_of, parsed, body, query.model)

    async def _named(self, tokens: PromptTokens, model: str) -> list[BlockChain]:
        exact = self._exact
        if tokens.count > _LONG_IDS:
            prepared = await self._in_thread(exact.prepare, tokens, model)
        else:
            prepared = exact.prepare(tokens, model)
        return list(prepared.chains.values())

    async def _in_thread(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        if self._waiting >= _MOST_WAITING:
            raise QueryError(503, f"{self._waiting} other long prompts are waiting; ask again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        finally:
            self._waiting -= 1

    def _chains(self, query: Query) -> list[BlockChain]:
        if query.keys is not None:
            return [BlockChain(np.frombuffer(query.keys, "<u8").astype(np.uint64), query.block_size)]
        try:
            hashes = numbers(query.prompt_hash or [])
        except ValueError as error:
            raise QueryError(400, f"prompt_hash: {error}") from None
        return [BlockChain(keys_of(self._exact.index, hashes, ANY_MODEL), 0)]

    # ---------------------------------------------------------------- the answer

    def _look_up(self, query: Query, chains: Sequence[BlockChain], given_blocks: int) -> Answer:
        endpoints = list(self._endpoints())
        slots = max((slot for slot, _ in endpoints), default=-1) + 1
        wanted, unknown = _wanted(query.pods, endpoints)
        if unknown and query.strict:
            raise QueryError(404, f"unknown pods: {', '.join(unknown[:5])}")
        index = self._exact.index
        matches = [(index.look_up(chain, slots), chain) for chain in chains]
        best = [_columns(match, chain, given_blocks) for match, chain in matches if match is not None]
        total, size = max(((max(given_blocks, len(chain.keys)), chain.block_size) for chain in chains), default=(0, 0))
        pods = {name: _best(best, slot, max(size, 1)) for name, slot in wanted.items()}
        pods |= dict.fromkeys(unknown, _NOTHING)
        if query.hits_only:
            pods = {name: pod for name, pod in pods.items() if pod.matched}
        self.asked.questions += 1
        self.asked.looked_up += total
        self.asked.hit += max((pod.matched for pod in pods.values()), default=0)
        return Answer(total=total, pods=pods, block_size=size, unknown=unknown)


def _wanted(pods: Sequence[str] | None, endpoints: Sequence[tuple[int, Endpoint]]) -> tuple[dict[str, int], list[str]]:
    """The slots of the requested endpoints by the names in the question, and the unknown names. `pods`: `None` = all
    endpoints, by their ids."""
    if pods is None:
        return {endpoint.id: slot for slot, endpoint in endpoints}, []
    known: dict[str, int] = {}
    for slot, endpoint in endpoints:
        for name in (endpoint.id.rpartition("/")[2], endpoint.address, endpoint.id):
            known[name] = slot
    unknown = [name for name in dict.fromkeys(pods) if name not in known]
    return {name: known[name] for name in pods if name in known}, unknown


class _Columns(NamedTuple):
    """The match of one chain, and its columns as lists, one entry per slot. `total`: blocks of the prompt. `size`:
    tokens per block; 1 = unknown."""

    match: KvMatch
    blocks: list[float]
    tiers: list[list[float]]
    total: int
    size: int


def _columns(match: KvMatch, chain: BlockChain, given_blocks: int) -> _Columns:
    total = max(given_blocks, len(chain.keys))
    return _Columns(match, match.blocks.tolist(), match.tiers.T.tolist(), total, max(chain.block_size, 1))


def _best(matches: Sequence[_Columns], slot: int, size: int) -> PodAnswer:
    """The match of an endpoint that holds most tokens, in blocks of its own size; few endpoints have several.
    `size`: the block size of the answer as a whole."""
    best, most = _NOTHING, 0.0
    for columns in matches:
        blocks = columns.blocks[slot]
        if blocks * columns.size > most:
            most = blocks * columns.size
            tiers = {_TIER_NAMES[tier]: int(count) for tier, count in enumerate(columns.tiers[slot]) if count}
            best = PodAnswer(
                matched=int(blocks),
                hit_rate=round(blocks / columns.total, 4),
                tiers=tiers,
                ranks=columns.match.by_rank(slot) or UNSET,
                total=UNSET if columns.size == size else columns.total,
                block_size=UNSET if columns.size == size else columns.size,
            )
    return best


def _states(caches: Iterable[RankCache]) -> list[RankState]:
    return [convert(cache, RankState, from_attributes=True) for cache in caches]
