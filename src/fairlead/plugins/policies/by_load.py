"""Published policies that send a request to the endpoint with the least work."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct, field
from pydantic import Field

from fairlead.core.columns import FloatColumn
from fairlead.core.policy import Cycle, Filter, prefix_share
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import entries
from fairlead.plugins.filters.availability import PrefixAffinity, PrefixAffinityParams
from fairlead.plugins.params import NoParams, Params
from fairlead.plugins.policies.ranked import Ranked


class LeastRequests(Ranked):
    """Waiting + running. The policy of LiteLLM (`least-busy`), AIBrix (`least-request`) and others, without caches."""

    type = "least-requests"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        return fleet.table.queue + fleet.table.active


class PowerOfTwo(Profile):
    """The less loaded of two random endpoints (Mitzenmacher 2001)."""

    type = "power-of-two"
    Params = NoParams
    takes_filters = True

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        super().__init__(name, filters, [], FewerOfTwo())


class FewerOfTwo:
    """The picker of `power-of-two`."""

    name = "fewer-of-two"

    def pick(self, request: Request, fleet: FleetView, totals: FloatColumn, cycle: Cycle) -> int:
        candidates = entries(totals > -np.inf)
        first = int(cycle.rng.random() * len(candidates))
        if len(candidates) == 1:
            return int(candidates[0])
        second = int(cycle.rng.random() * (len(candidates) - 1))
        second += second >= first
        load = fleet.table.queue[candidates] + fleet.table.active[candidates]
        return int(candidates[first if load[first] <= load[second] else second])


class Lpwl(Ranked):
    """argmin pending + max(1, prompt - hit).

    Source: the least-prefill-work-left rule as published with its figures in May 2026; it has no settings.
    """

    type = "lpwl"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        return fleet.table.pending_tokens + uncached(request, fleet, cycle)


def uncached(request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | float:
    """Return the prompt tokens that each endpoint would have to compute, at least 1."""
    share = prefix_share(request, fleet, cycle)
    tokens = float(max(request.prompt_tokens, 1))
    return tokens if share is None else (tokens - share * tokens).clip(1.0)


class Lmetric(Ranked):
    """argmin (pending + uncached) · (batch + 1). Without the + 1, an idle endpoint would cost nothing for any prompt.

    Source: the LMETRIC paper, which has no settings; SGLang's gateway and AIBrix also have rules of that name.
    """

    type = "lmetric"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        return (table.pending_tokens + uncached(request, fleet, cycle)) * (table.queue + table.active + 1.0)


# `remaining-work`: separate servers for long and for short prefills, by the tokens left to compute.
#
# Source: llm-d router 0.11 (September 2026), remaining-work routing as in the README of its context-length-aware
# scorer: first the prefix-cache-affinity filter, then the servers whose work range includes the tokens left to compute;
# here, the one of these with the fewest tokens in flight. The settings are the same: 8,192 tokens, a penalty of 18 s at
# 15,928 tokens/s. Its labels are parameters here. Servers do not fetch prefixes from each other, so the tokens left are
# those that the server itself lacks.


class RemainingWorkParams(Params):
    boundary_tokens: float = Field(
        default=8192,
        ge=0,
        description="A request with more tokens to compute than this is long work, which has servers of its own.",
    )
    long_share: float = Field(default=0.25, ge=0, le=1, description="Share of the servers that are for long work.")


class RemainingWork(Ranked):
    """Servers with the prompt cached, or all if those are saturated; of these, one for work of that length with the
    fewest tokens in flight."""

    type = "remaining-work"
    Params = RemainingWorkParams

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        super().__init__(params, name, [*filters, PrefixAffinity(PrefixAffinityParams())])

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        own = uncached(request, fleet, cycle)
        ahead = np.cumsum(table.alive)
        for_long = ahead > ahead[-1] - round(float(self.params.long_share) * float(ahead[-1]))
        wrong = np.not_equal(own > self.params.boundary_tokens, for_long)
        cost: FloatColumn = table.pending_tokens + own + _ELSEWHERE * wrong
        return cost


#: More than any number of tokens in flight.
_ELSEWHERE = 1e12

# `dynamo-linear`: the cost of Dynamo's KV router.
#
# Source: Dynamo 1.6's router design and configuration pages (September 2026). Since 1.3 the overlap credit may exceed
# 1, and the prefill part may be below 0. The defaults are Dynamo's: credit 1, scale 1, weight 0. Its preset `--agentic`
# is credit 2, scale 4, weight 64 (ai-dynamo/dynamo#13447). Blocks in use are counted as in Dynamo: those of the prompts
# that are being answered, shared blocks once, and those that the new prompt would add. Blocks of answers do not count,
# since Dynamo does not track them by default. A policy is not told which request ended, so the oldest is assumed.

BLOCK_TOKENS = 16


class DynamoLinearParams(Params):
    prefill_load_scale: float = Field(default=1.0, ge=0, description="Factor on blocks to prefill.")
    overlap_credit: float = Field(default=1.0, ge=0, description="Factor on cached blocks.")
    active_request_weight: float = Field(default=0.0, ge=0, description="Blocks that a request in flight counts.")


class _ActiveBlocks(Struct, eq=False):
    """The prompts in flight at one endpoint, by the hashes of their blocks."""

    _counts: dict[int, int] = {}
    _sent: deque[tuple[tuple[int, ...], list[float]]] = field(default_factory=deque)
    #: Tokens in blocks in use; shared blocks count once.
    tokens: float = 0.0

    def keep(self, count: int) -> None:
        """Forget the oldest prompts until `count` are left, the number of requests in flight."""
        while len(self._sent) > count:
            for digest, tokens in zip(*self._sent.popleft(), strict=True):
                left = self._counts[digest] - 1
                if left:
                    self._counts[digest] = left
                else:
                    del self._counts[digest]
                    self.tokens -= tokens

    def add(self, request: Request) -> None:
        hashes, sizes = _blocks(request)
        for digest, tokens in zip(hashes, sizes, strict=True):
            count = self._counts.get(digest, 0)
            self._counts[digest] = count + 1
            self.tokens += 0.0 if count else tokens
        self._sent.append((hashes, sizes))

    def more(self, request: Request) -> float:
        """Return the tokens in blocks that the request would add."""
        hashes, sizes = _blocks(request)
        shared = bisect_left(hashes, True, key=lambda digest: digest not in self._counts)
        return sum(sizes[shared:])


def _blocks(request: Request) -> tuple[tuple[int, ...], list[float]]:
    """Return the hashes of the request's blocks, and their tokens. The rest after the last whole block is a unique
    block."""
    chain, per_byte = request.prefix, request.prompt_tokens / max(request.prompt_bytes, 1)
    ends = (0, *chain.ends)
    sizes = [(end - begin) * per_byte for begin, end in pairwise(ends)]
    return (*chain.hashes, -request.id), [*sizes, max(request.prompt_tokens - ends[-1] * per_byte, 0.0)]


class DynamoLinear(Ranked):
    """scale · (blocks pending + incoming - credit · overlap) + blocks in use with this request + weight · requests in
    flight; temperature 0."""

    type = "dynamo-linear"
    Params = DynamoLinearParams

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        super().__init__(params, name, filters)
        self._active: dict[str, _ActiveBlocks] = {}

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table, params = fleet.table, self.params
        work = table.pending_tokens + request.prompt_tokens
        share = prefix_share(request, fleet, cycle)
        if share is not None:
            work = work - params.overlap_credit * share * request.prompt_tokens
        used = np.zeros(len(table))
        for slot, name in enumerate(table.ids):
            active = self._active.get(name)
            if active is None:
                used[slot] = request.prompt_tokens
            else:
                active.keep(int(table.inflight[slot]))
                used[slot] = active.tokens + active.more(request)
        weight = params.active_request_weight * table.inflight
        total: FloatColumn = (params.prefill_load_scale * work + used) / BLOCK_TOKENS + weight
        return total

    def chosen(self, request: Request, slot: int, fleet: FleetView, cycle: Cycle) -> None:
        ids, active = fleet.table.ids, self._active
        if len(active) > 2 * len(ids):
            for name in active.keys() - set(ids):
                del active[name]
        name = ids[slot]
        if name not in active:
            active[name] = _ActiveBlocks()
        active[name].add(request)
