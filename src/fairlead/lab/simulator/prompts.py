"""Converts records for both sides of the simulation: `Request` for the scheduler, `EngineRequest` for a server."""

from functools import lru_cache

from xxhash import xxh3_64_intdigest

from fairlead.core.request import NO_PREFIX, PrefixChain, Request
from fairlead.core.tokens import TokenEstimator
from fairlead.lab.engine.request import EngineRequest
from fairlead.lab.engine.tokens import root_hash
from fairlead.lab.simulator.world import World
from fairlead.lab.workload.describe import Borders, chained, continues, engine_hashes
from fairlead.lab.workload.record import Record, Workload

#: Bytes of a chat body around its prompt.
_ENVELOPE = 160


#: Scheduler and server need the same hashes, and so do later simulations of the same workload.
_chained = lru_cache(maxsize=8192)(chained)


class Prompts:
    """Makes both forms of a record's prompt from the same block ids."""

    def __init__(self, workload: Workload, world: World) -> None:
        self._world = world
        self._borders: dict[int, Borders] = {}
        self._followers = _followers(workload)

    def request(self, index: int, record: Record, now: float, tokens: TokenEstimator) -> Request:
        """The request as the live server would have understood it. Its prompt tokens are an estimate."""
        size = max(int(record.in_tokens * self._world.bytes_per_token), 1)
        api = "chat"
        return Request(
            id=index + 1,
            arrived=now,
            api=api,
            path="/v1/chat/completions",
            model=record.lora or record.model,
            target=record.target,
            stream=record.stream,
            body_bytes=size + _ENVELOPE,
            prompt_bytes=size,
            prompt_tokens=tokens.estimate(record.lora or record.model, size, api),
            max_tokens=record.max_tokens if self._world.lengths_told else 0,
            sequences=record.n,
            prefix=self._chain(record),
            session=record.session,
            priority=record.priority,
            fairness_id=record.tenant,
            slo_ttft_ms=record.slo_ttft_ms,
            slo_tpot_ms=record.slo_tpot_ms,
            blind=not self._world.watched,
        )

    def engine_request(
        self, index: int, record: Record, block_size: int, *, max_tokens: int = 0, loaded: int = 0, choice: int = 0
    ) -> EngineRequest:
        """The request for a server. `max_tokens`: of the answer, 0 = as in the record. `loaded`: prompt tokens whose KV
        another server hands over. `choice`: the index of the answer; later prompts continue the answer of choice 0.

        Raises `ValueError` if the engine's blocks do not fit the trace's."""
        hashes: list[int] = []
        if record.hash_ids:
            root = root_hash(record.lora)
            longest = record if choice else self._followers.get(index, record)
            known = min(longest.in_tokens, record.in_tokens + record.out_tokens)
            chain = _chained(longest.hash_ids, root)
            hashes = engine_hashes(chain, record.block_size, known, block_size)
        full_blocks = record.in_tokens // block_size
        if len(hashes) < full_blocks:  # a block without an id is shared with no other request
            own = xxh3_64_intdigest(f"{index}/{record.id}".encode())
            hashes += [(own + i) % 2**64 for i in range(len(hashes), full_blocks)]
        return EngineRequest(
            str(index),
            b"",
            max_tokens or record.out_tokens,
            seed=index * 977 + choice * 7919,
            lora=record.lora,
            prompt_tokens=record.in_tokens,
            hashes=hashes,
            loaded=loaded,
        )

    def _chain(self, record: Record) -> PrefixChain:
        if not record.hash_ids:
            return NO_PREFIX
        borders = self._borders.get(record.block_size)
        if borders is None:
            borders = self._borders[record.block_size] = Borders(record.block_size, self._world.bytes_per_token)
        hashes = _chained(record.hash_ids, root_hash(record.lora))
        return borders.chain(hashes, min(len(hashes), record.in_tokens // record.block_size))


def _followers(workload: Workload) -> dict[int, Record]:
    """Records whose answer is the beginning of a later prompt: index → the later record.

    The later prompt hits the blocks that such an answer fills, as on a real server.
    """
    places = {record.id: index for index, record in enumerate(workload.records)}
    followers: dict[int, Record] = {}
    for record in workload.records:
        place = places.get(record.parent) if record.parent else None
        if place is None or place in followers:
            continue
        if continues(record, workload.records[place]):
            followers[place] = record
    return followers
