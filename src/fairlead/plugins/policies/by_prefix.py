"""Published policies that weigh the cached prefix against load."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from xxhash import xxh3_64_intdigest

from fairlead.core.columns import FloatColumn, scalar
from fairlead.core.policy import Answer, Context, Cycle, Filter, Picked, Scorer, prefix_share
from fairlead.core.profile import Profile
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.filters.availability import PrefixAffinity, PrefixAffinityParams
from fairlead.plugins.params import NoParams, Params
from fairlead.plugins.pickers import MaxScore, MaxScoreParams, TopK, TopKParams
from fairlead.plugins.policies.ranked import Ranked
from fairlead.plugins.scorers.load import (
    ActiveRequests,
    ActiveRequestsParams,
    InflightTokens,
    InflightTokensParams,
    KvUtilization,
    LoadAware,
    LoadAwareParams,
    Queue,
)
from fairlead.plugins.scorers.prefix import PrefixAware, PrefixAwareParams


class Weights322(Profile):
    """Σ weight · score; ties are broken at random.

    Source: llm-d's optimised baseline up to 0.10 (2026) and its tuning guide: prefix 3, queue 2, KV cache 2.
    """

    type = "weights-322"
    Params = NoParams
    takes_filters = True

    def __init__(self, params: Any = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        scorers: list[tuple[Scorer, float]] = [
            (PrefixAware(PrefixAwareParams()), 3.0),
            (Queue(), 2.0),
            (KvUtilization(), 2.0),
        ]
        super().__init__(name, filters, scorers, MaxScore(MaxScoreParams(near_tie=0.0)))


# `sticky-until-saturated`: endpoints with the prompt cached, unless they cost too much waiting; then the least load.
#
# Source: llm-d router 0.10 and 0.11 (August and September 2026), the default of its guides: the prefix-cache-affinity
# filter, then token-load-scorer for pools limited by prefill, or active-request-scorer for pools limited by decode. The
# filter's settings are the original ones: 80 % of the prompt, 18 s at 15,928 tokens/s, which is Qwen3-32B on two H100
# (a chunk of 8,192 tokens). The example in its README has 5 s and explores 1 %. Operators are asked to measure the
# throughput of their own servers.

#: Tokens in flight at which an endpoint counts as full.
QUEUE_THRESHOLD_TOKENS = 4_194_304


class StickyParams(PrefixAffinityParams):
    load: Literal["tokens", "requests"] = Field(
        default="tokens", description="The load that is compared: uncached tokens in flight, or requests in flight."
    )


class StickyUntilSaturated(Profile):
    """The filter `prefix-affinity` after the configured filters, then the least load."""

    type = "sticky-until-saturated"
    Params = StickyParams
    takes_filters = True

    def __init__(self, params: StickyParams | None = None, name: str = type, filters: Sequence[Filter] = ()) -> None:
        params = params or StickyParams()
        load: Scorer = InflightTokens(InflightTokensParams(threshold_tokens=QUEUE_THRESHOLD_TOKENS))
        if params.load == "requests":
            load = ActiveRequests(ActiveRequestsParams())
        super().__init__(
            name, [*filters, PrefixAffinity(params)], [(load, 1.0)], MaxScore(MaxScoreParams(near_tie=0.0))
        )


# `sglang-cache-aware`: the policy of SGLang's router.
#
# Source: SGLang's model gateway (sgl-model-gateway, 2026), its policy cache_aware with the default settings of its
# command line. If loads differ too much (max - min > 64 requests and max > 1.5 · min), the shortest queue; else the
# longest match if it is more than 0.3 of the prompt; else the shortest queue again. (Earlier versions and their
# documents took the smallest tree in the last case.)


MAX_DIFFERENCE = 64
MAX_RATIO = 1.5
MIN_MATCH = 0.3


class SglangCacheAware(Ranked):
    """The longest match, or the fewest requests in flight."""

    type = "sglang-cache-aware"

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        load: FloatColumn = table.queue + table.active
        living = load[table.alive]
        if living.max() - living.min() > MAX_DIFFERENCE and living.max() > MAX_RATIO * living.min():
            return load
        share = prefix_share(request, fleet, cycle)
        return -share if share is not None and share[table.alive].max() > MIN_MATCH else load


# `aibrix-prefix-cache`: the policy of AIBrix's gateway.
#
# Source: AIBrix 0.5 (November 2025 and later), the README of its routing algorithms, with its default settings. If the
# numbers of requests in flight differ by more than 16, the endpoint with the fewest; else the longest match among
# endpoints with at most mean + 2 · standard deviation of requests, and among equal matches the fewest requests; without
# a match the fewest. Its blocks are 128 characters.


class AibrixParams(Params):
    imbalance: float = Field(default=16, ge=0, description="Difference of requests in flight above which load decides.")
    deviations: float = Field(
        default=2, ge=0, description="Standard deviations above the mean load from which an endpoint is too busy."
    )


class AibrixPrefixCache(Ranked):
    """The longest match at an endpoint that is not too busy."""

    type = "aibrix-prefix-cache"
    Params = AibrixParams

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table, params = fleet.table, self.params
        load: FloatColumn = table.queue + table.active
        living = load[table.alive]
        share = prefix_share(request, fleet, cycle)
        if share is None or living.max() - living.min() > params.imbalance:
            return load
        matches = (share > 0.0) & (load <= living.mean() + params.deviations * living.std())
        # Loads are far below 1e6, and different shares differ by more than a millionth.
        return np.where(matches, load - 1e12 * np.round(share, 6), load)


# `consistent-hashing-bounded`: prompts with equal beginnings go to the same endpoint, unless it is overloaded.
#
# Every endpoint gets a rank from a hash of (beginning of the prompt, endpoint id). This is rendezvous hashing, so
# several schedulers agree, and if an endpoint leaves, only its prompts move. The best rank among endpoints with at most
# 1.25 times the mean load is taken (Mirrokni, Thorup, Zadimoghaddam 2018).


_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


class ConsistentHashingParams(Params):
    load_factor: float = Field(
        default=1.25, ge=1, description="Bound of an endpoint's requests in flight, as a multiple of the mean."
    )
    blocks: int = Field(
        default=8,
        ge=1,
        description="Blocks of the prompt that are hashed (64 tokens each in the beginning); a session id takes their "
        "place.",
    )


class ConsistentHashingBounded(Ranked):
    """Equal sessions or beginnings of prompts go to the same endpoint, unless it is overloaded. Requests without a
    session or a whole block are spread by their id."""

    type = "consistent-hashing-bounded"
    Params = ConsistentHashingParams
    _ids: tuple[str, ...] = ()
    _hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def cost(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn:
        table = fleet.table
        if table.ids is not self._ids:
            self._ids = table.ids
            self._hashes = np.array([xxh3_64_intdigest(name.encode()) for name in table.ids], dtype=np.uint64)
        mixed = (self._hashes ^ np.uint64(self._key(request))) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER
        rank: FloatColumn = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
        load = table.queue + table.active + 1.0
        bound = self.params.load_factor * float(load[table.alive].mean())
        return np.where(load <= bound, rank, 1.0 + load)

    def _key(self, request: Request) -> int:
        if request.session:
            return xxh3_64_intdigest(request.session.encode("utf-8", "surrogatepass"))
        hashes = request.prefix.hashes
        if hashes:
            return hashes[min(len(hashes), int(self.params.blocks)) - 1] & 0xFFFF_FFFF_FFFF_FFFF
        return xxh3_64_intdigest(request.id.to_bytes(8, "little"))


# `dynamic-weights`: the weights of prefix and load follow the recent hit rate.
#
# The documents' tuning guide as a policy: follow the cache if most prompt tokens are cached, spread the load if hardly
# any are, and weigh both equally in between.


Share = Annotated[float, Field(ge=0, le=1)]
#: Weights of (prefix-aware, load-aware) at high, low and middling hit rates.
HIGH, LOW, MIDDLE = (100.0, 30.0), (20.0, 100.0), (60.0, 60.0)
#: Decay per request of the hit rate, which thus covers about the last hundred requests, by tokens.
MEMORY = 0.99


class DynamicWeightsParams(Params):
    high_hit_rate: Share = Field(default=0.7, description="Hit rate (0..1) above which the cache counts most.")
    low_hit_rate: Share = Field(default=0.2, description="Hit rate below which the load counts most.")
    top_k: int = Field(default=3, ge=1, description="A random one of this many best endpoints is taken.")


class DynamicWeights(Profile):
    """Weights of prefix and load follow the predicted hit rate."""

    type = "dynamic-weights"
    Params = DynamicWeightsParams
    takes_filters = True

    def __init__(
        self, params: DynamicWeightsParams | None = None, name: str = type, filters: Sequence[Filter] = ()
    ) -> None:
        params = params or DynamicWeightsParams()
        prefix, load = PrefixAware(PrefixAwareParams()), LoadAware(LoadAwareParams())
        super().__init__(name, filters, [(prefix, MIDDLE[0]), (load, MIDDLE[1])], TopK(TopKParams(k=params.top_k)))
        self._high, self._low = params.high_hit_rate, params.low_hit_rate
        self._ways = {
            pair: ((prefix, pair[0], scalar(pair[0])), (load, pair[1], scalar(pair[1]))) for pair in (HIGH, LOW, MIDDLE)
        }
        self._hits = self._tokens = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of recent prompt tokens that were expected to be cached; 0.5 before the first request."""
        return self._hits / self._tokens if self._tokens else 0.5

    def choose(self, request: Request, fleet: FleetView, context: Context) -> Answer:
        rate = self.hit_rate
        self._weighted = self._ways[HIGH if rate > self._high else LOW if rate < self._low else MIDDLE]
        pick = super().choose(request, fleet, context)
        if isinstance(pick, Picked):
            self._hits = MEMORY * self._hits + pick.hit_share * request.prompt_tokens
            self._tokens = MEMORY * self._tokens + request.prompt_tokens
        return pick
