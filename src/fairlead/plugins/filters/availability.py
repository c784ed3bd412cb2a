"""Filters for preferred endpoints: healthy, not too full, with the prompt cached, within SLOs. A filter that would
leave no endpoint is ignored."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fairlead.core.columns import BoolColumn
from fairlead.core.policy import Cycle, Stage, prefix_share
from fairlead.core.request import Request
from fairlead.core.stalls import OUT_OF_USE, SUSPECT
from fairlead.core.view import FleetView
from fairlead.plugins.columns import backlog_ms, headroom, ttft_ms, unless_all
from fairlead.plugins.params import Params, Plain


class HealthParams(Params):
    failed_scrapes: int = Field(default=3, ge=1, description="Failed scrapes in a row that make an endpoint suspect.")


class Health(Plain[HealthParams]):
    """Removes endpoints that failed several scrapes, or several recent responses, and those that hang.

    It never removes all endpoints: if all look unhealthy, the fault is more likely ours, and the pool must go on
    serving. If all hang, it keeps those that are only suspect (`fairlead.core.stalls`).
    It is about availability, not load: if load filters leave no endpoint, the fallback still avoids unhealthy ones.
    """

    type = "health"
    Params = HealthParams
    stage = Stage.AVAILABILITY
    steady = True

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        table = fleet.table
        if not table.troubled:
            return None  # by far the most frequent case: no endpoint has failed or hangs
        answers = (table.failures < self._params.failed_scrapes) & (table.ejected_until <= cycle.now)
        for well in (answers & (table.suspicion < SUSPECT), answers & (table.suspicion < OUT_OF_USE)):
            healthy = np.count_nonzero(well & table.alive)
            if healthy:
                return None if healthy == table.count else well
        return None


class UtilizationParams(Params):
    queue_depth_threshold: float = Field(default=5.0, gt=0, description="Waiting requests that count as saturated.")
    kv_cache_util_threshold: float = Field(
        default=0.8, gt=0, le=1, description="Share of KV blocks in use that counts as saturated."
    )
    headroom: float = Field(default=0.0, ge=0, description="How far past 1 an endpoint may be and still be kept.")


class Utilization(Plain[UtilizationParams]):
    """Keeps endpoints with max(waiting / threshold, kv / threshold) < 1 + headroom; all if none is below.

    Source: the reference picker's utilization-detector, used as a filter.
    """

    type = "utilization"
    Params = UtilizationParams
    stage = Stage.AVAILABILITY

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        params, most = self._params, 1.0 + self._params.headroom
        few: BoolColumn = fleet.table.queue < params.queue_depth_threshold * most
        return unless_all(few & (fleet.table.kv < params.kv_cache_util_threshold * most))


Share = Annotated[float, Field(ge=0, le=1)]


#: A share that always says that an endpoint is a home; the default threshold.
_SURE = 0.8


class PrefixAffinityParams(Params):
    affinity_threshold: Share = Field(
        default=_SURE,
        description="Share of the prompt that an endpoint must hold to count as its home. Above 0.8, it is enough to "
        "hold all whole blocks.",
    )
    exploration_probability: Share = Field(
        default=0.0, description="Probability that all endpoints are kept, to spread hot prefixes."
    )
    max_ttft_penalty_ms: float = Field(
        default=18_000.0,
        validation_alias="maxTTFTPenaltyMs",
        serialization_alias="maxTTFTPenaltyMs",
        ge=0,
        description="Keep all endpoints if the best home would answer more than this many ms later than the best "
        "other; 0 = never.",
    )
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = Field(
        default="prefillThroughput",
        description="How an endpoint's wait is estimated: its prompt tokens in flight over a fixed throughput, or by "
        "the predictor.",
    )
    peak_prefill_throughput: float = Field(
        default=15_928.0, gt=0, description="Prompt tokens per second of one endpoint."
    )


class PrefixAffinity(Plain[PrefixAffinityParams]):
    """Keeps endpoints that hold at least `affinityThreshold` of the prompt; all if none does, or if these are too slow.

    Source: the reference picker's prefix-cache-affinity-filter, "sticky until saturated". The penalty only limits the
    wait, so it deliberately ignores the work that a hit saves.
    """

    type = "prefix-affinity"
    Params = PrefixAffinityParams
    stage = Stage.AVAILABILITY

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        params = self._params
        share = prefix_share(request, fleet, cycle)
        if share is None or (params.exploration_probability and cycle.rng.random() < params.exploration_probability):
            return None
        left = fleet.table.alive if cycle.left is None else cycle.left
        sticky = (share >= _attainable(request, fleet, params.affinity_threshold)) & left
        unsticky = left & ~sticky
        if not np.count_nonzero(sticky) or not np.count_nonzero(unsticky):
            return None
        if not params.max_ttft_penalty_ms:
            return sticky
        if params.ttft_source == "latencyPredictor":
            waits = ttft_ms(request, fleet, cycle)
        else:
            waits = backlog_ms(fleet, params.peak_prefill_throughput)
        if float(waits[sticky].min() - waits[unsticky].min()) > params.max_ttft_penalty_ms:
            return None
        return sticky


def _attainable(request: Request, fleet: FleetView, threshold: float) -> float:
    """Return the threshold; if no share can reach it, because the end of a prompt is in no block, the highest share
    that can. Not less than `_SURE`: what a short prompt has in blocks may only be what all prompts begin with."""
    ends, tokens = request.prefix.ends, request.prompt_tokens
    if threshold <= _SURE or not ends or not request.prompt_bytes:
        return threshold
    highest = ends[-1] / max(request.prompt_bytes, ends[-1])
    if request.blocks is not None and tokens:  # with KV events, shares are of tokens, in the blocks of engines
        size = max((sample.block_size for sample in fleet.table.samples if sample is not None), default=0) or 1
        highest = min(highest, (tokens - 1) // size * size / tokens)
    return min(threshold, max(highest, _SURE))


class SloTierParams(Params):
    epsilon_explore_neg: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Probability that only endpoints that will miss an SLO are kept, to test the predictions.",
    )


class SloTier(Plain[SloTierParams]):
    """Keeps endpoints whose predicted latency is within the SLOs; all if none is. Does nothing without an SLO.

    Source: the reference picker's slo-headroom-tier-filter. There, separate services predict; here, the fleet's
    predictor does.
    """

    type = "slo-tier"
    Params = SloTierParams
    stage = Stage.AVAILABILITY

    def keep(self, request: Request, fleet: FleetView, cycle: Cycle) -> BoolColumn | None:
        if request.slo_ttft_ms <= 0 and request.slo_tpot_ms <= 0:
            return None
        left = fleet.table.alive if cycle.left is None else cycle.left
        keeps = headroom(request, fleet, cycle, 1.0, 1.0)[1] & left
        count = np.count_nonzero(keeps)
        if not count or count == np.count_nonzero(left):
            return None
        if self._params.epsilon_explore_neg and cycle.rng.random() < self._params.epsilon_explore_neg:
            return unless_all(~keeps)
        return keeps
