"""Scorers that prefer endpoints with little load: waiting and running requests, prompt tokens, KV memory."""

import numpy as np
from pydantic import Field

from fairlead.core.columns import FloatColumn, scalar
from fairlead.core.policy import CANDIDATES, Cycle, prefix_share
from fairlead.core.request import Request
from fairlead.core.view import FleetView
from fairlead.plugins.columns import lower_is_better, not_negative
from fairlead.plugins.params import NoParams, Params, Plain


class Queue(Plain[NoParams]):
    """(most - waiting) / (most - fewest), 1 if all are equal. One request more or less can be the whole range."""

    type = "queue"

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        return lower_is_better(fleet.table.queue, cycle.get(CANDIDATES))


_BEST = scalar(0.5)


class QueueThresholdParams(Params):
    threshold: int = Field(default=128, ge=1, description="Waiting requests at which the score reaches 0.")


class QueueThreshold(Plain[QueueThresholdParams]):
    """0.5 · (1 - waiting / threshold), at least 0. The best score is 0.5, half of that of other scorers.

    Source: the reference picker's load-aware-scorer.
    """

    type = "queue-threshold"
    Params = QueueThresholdParams

    def __init__(self, params: QueueThresholdParams, name: str = type) -> None:
        super().__init__(params, name)
        self._per_request = scalar(0.5 / params.threshold)

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        return not_negative(_BEST - self._per_request * fleet.table.queue)


class RunningRequests(Plain[NoParams]):
    """(most - running) / (most - fewest), 1 if all are equal."""

    type = "running-requests"

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        return lower_is_better(fleet.table.active, cycle.get(CANDIDATES))


class ActiveRequestsParams(Params):
    idle_threshold: int = Field(
        default=0, ge=0, description="An endpoint with at most this many requests counts as idle."
    )
    max_busy_score: float = Field(
        default=1.0, ge=0, le=1, description="The best score of an endpoint that is not idle."
    )


class ActiveRequests(Plain[ActiveRequestsParams]):
    """1 for idle endpoints, else (most - count) / most · `maxBusyScore`, over the candidates.

    Source: the reference picker's active-request-scorer. Counts are leases: charged at the decision, released at the
    end.
    """

    type = "active-requests"
    Params = ActiveRequestsParams

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        count, candidates, idle = fleet.table.inflight, cycle.get(CANDIDATES), self._params.idle_threshold
        among = count if candidates is None else count[candidates]
        most = float(among.max()) if len(among) else 0.0
        if most <= idle:
            return None if candidates is None else np.ones(len(count))
        busy = np.clip((most - count) / most, 0.0, 1.0) * self._params.max_busy_score
        return np.where(count <= idle, 1.0, busy)


#: Load at which the score reaches 0: a load of 0, 10, 25, 40, 50 scores 1, .8, .5, .2, 0.
FULL_LOAD = 50.0
_ONE = scalar(1.0)


class LoadAwareParams(Params):
    queue_weight_factor: float | None = Field(
        default=None, ge=0, description="Weight of waiting requests; 0.7 if only the other is given."
    )
    active_requests_weight: float | None = Field(
        default=None, ge=0, description="Weight of running requests; 0.3 if only the other is given."
    )


class LoadAware:
    """1 - load/50, at least 0. The load is the waiting requests; with parameters, 0.7 · waiting + 0.3 · running.

    Both are effective numbers: scraped, and corrected by our own charges.
    """

    type = "load-aware"
    Params = LoadAwareParams
    weight = 50.0

    def __init__(self, params: LoadAwareParams, name: str = type) -> None:
        self.name = name
        queue, active = params.queue_weight_factor, params.active_requests_weight
        if queue is None and active is None:
            queue, active = 1.0, 0.0
        self._queue = scalar((0.7 if queue is None else queue) / FULL_LOAD)
        self._active = scalar((0.3 if active is None else active) / FULL_LOAD)

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        table = fleet.table
        return not_negative(_ONE - self._queue * table.queue - self._active * table.active)


class InflightTokensParams(Params):
    threshold_tokens: float = Field(
        default=65_536,
        gt=0,
        description="Uncached prompt tokens in flight at which the score reaches 0. 65,536 is about 4 s of prefill of "
        "a 32B model.",
    )


class InflightTokens(Plain[InflightTokensParams]):
    """1 - (uncached tokens charged and not yet prefilled + those of this request) / threshold, at least 0."""

    type = "inflight-tokens"
    Params = InflightTokensParams

    def __init__(self, params: InflightTokensParams, name: str = type) -> None:
        super().__init__(params, name)
        self._per_token = scalar(1.0 / params.threshold_tokens)

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        own = request.prompt_tokens / self._params.threshold_tokens
        score = scalar(1.0 - own) - self._per_token * fleet.table.pending_tokens
        share = prefix_share(request, fleet, cycle)
        if share is not None:
            score += scalar(own) * share
        return not_negative(score)


class KvUtilization(Plain[NoParams]):
    """1 - share of KV blocks held by running requests, as scraped."""

    type = "kv-utilization"

    def score(self, request: Request, fleet: FleetView, cycle: Cycle) -> FloatColumn | None:
        return _ONE - fleet.table.kv
