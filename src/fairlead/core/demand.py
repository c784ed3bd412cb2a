"""How many endpoints the load needs, so that an autoscaler can add them before requests have to wait.

Theory. The cost kernel knows how much of an engine's time a request takes: its uncached prompt tokens, and what each
token of its answer adds to a step. The rest of a step (`c0`) is the same for any number of requests. If tokens may take
T ms on average (`tpot_ms` / `SPREAD`), an endpoint makes at least 1000 / T steps per second, and 1 - c0 / T of its time
is left for requests. This gives the first lower bound on the number of endpoints. If that share is below `LEAST_LEFT`,
more endpoints hardly make a step shorter, so the lower it is, the less T counts: at least that share, and at most twice
it, counts as left. The second bound comes from waiting.
Requests go to free endpoints, so N endpoints behave much like a queue with N servers. With s = the time that a prompt
takes there and a = the load in endpoints (rate times s), the wait is longer than t with probability

    C(N) · exp(-(N - a) · t / s),      C(N) = (a / N) ^ (sqrt(2 (N + 1)) - 1)

(Sakasegawa's approximation of Erlang's C, with an error of a few percent). 95 % of the first tokens are in time if this
is at most 5 % for t = `ttft_ms` - s. The third bound is on memory: the memory in use grows with the load and may reach
`MEMORY` of the total.

The load is that of the last `RECENT_S` seconds. If it grows, it is extrapolated by `startup_s`, since an endpoint that
is ordered now serves only after that time. A falling load is not extrapolated.

With several schedulers, each one counts the requests that all of them route. So all publish about the same number, that
of the pool. When a peer comes or is lost, the measurement starts again (`forget`), because the requests that the peer
routed meanwhile cannot be counted. It also starts again when a standby begins to lead: its zeros are not the load.

Where a policy splits requests, prefill servers and decode servers have a `Demand` each. A prompt that may be split is
load of the prefill servers, wherever it was computed: else a lack of them would look like a lack of decode servers. For
the decode servers such a prompt counts as cached.
"""

from collections import deque
from collections.abc import Callable
from math import ceil, exp, sqrt
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from fairlead.core.columns import BoolColumn
from fairlead.core.cost import STEP_TOKENS, Known
from fairlead.core.facts import Charged
from fairlead.core.flow_control import FlowController
from fairlead.core.table import EndpointTable

#: Seconds over which the load is measured, and over which its trend is; and seconds between two totals that are kept.
RECENT_S, TREND_S, APART_S = 60.0, 300.0, 5.0
#: Share of first tokens that may be late, and of memory that may be in use.
LATE_SHARE, MEMORY = 0.05, 0.85
#: In 95 % of answers the time per token is at most this many times the mean: its standard deviation is usually a fifth.
SPREAD = 1.4
#: The share of an endpoint's time that must be left for requests, or the time per token is out of reach.
LEAST_LEFT = 0.25
#: Upper bounds: of the forecast load as a multiple of the present load, and of endpoints.
AHEAD, MOST = 2.0, 10_000
#: Roles with a number of their own. An endpoint that does both has the role `DECODE`.
PREFILL, DECODE = "prefill", "decode"
#: (API, or empty = not known; prompt tokens; those of them to compute) → whether a policy may have another endpoint
#: compute them.
MaySplit = Callable[[str, int, int], bool]


class Objective(Struct, frozen=True, kw_only=True):
    """`ttft_ms`: the TTFT that 95 % of requests must keep. `tpot_ms`: the time for each further token. `startup_s`:
    from ordering an endpoint until it serves."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0
    startup_s: float = 120.0


class Totals(NamedTuple):
    """Totals over all routed requests since the scheduler started. Tokens are prompt tokens."""

    time: float
    requests: float
    tokens: float
    cached_tokens: float


class Load(Struct):
    """As in `Totals`."""

    requests: int = 0
    tokens: int = 0
    cached_tokens: int = 0

    def add(self, tokens: int, cached_tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.cached_tokens += cached_tokens


class PeersLoad(Load):
    """What peers have routed, by the leases that they report."""

    #: How often a peer came or was lost. What it routed in between is not counted.
    breaks: int = 0
    #: The prompts among them that may be split; `None` = the policy splits none.
    prompts: Load = field(default_factory=Load)
    may_split: MaySplit | None = None

    def count(self, charged: Charged) -> None:
        prompt = charged.kv - charged.growth
        if charged.more:  # the prompt is in the request's other lease
            self.cached_tokens -= charged.uncached
        else:
            self.add(prompt, prompt - charged.uncached)
        if self.may_split and charged.more:
            self.prompts.add(charged.uncached, 0)  # how much of the prompt was cached is not known
        elif self.may_split and charged.uncached > 1 and self.may_split("", prompt, charged.uncached):
            self.prompts.add(prompt, prompt - charged.uncached)


class Demand:
    """`role`: of the endpoints that are counted; empty = all."""

    def __init__(self, objective: Objective | None = None, role: str = "") -> None:
        self.objective, self._role = objective or Objective(), role
        self._totals: deque[Totals] = deque(maxlen=ceil(TREND_S / APART_S) + 2)
        #: Milliseconds of a step that only decodes, if more endpoints hardly keep `tpot_ms`; else 0.
        self.out_of_reach_ms = 0.0
        self._last = 1, 1  # pods and endpoints of the pool when it last had any

    @property
    def longest_step_ms(self) -> float:
        """The longest step that leaves requests the share `LEAST_LEFT` of the time, in milliseconds."""
        return self.objective.tpot_ms * (1.0 - LEAST_LEFT) / SPREAD

    def __len__(self) -> int:
        """The number of totals that are kept."""
        return len(self._totals)

    def forget(self) -> None:
        """Start the measurement again: later totals cannot be compared with the earlier ones."""
        self._totals.clear()

    def observe(self, totals: Totals) -> None:
        """Take the present totals, every few seconds; more frequent calls are ignored. If totals fall, the older ones
        are dropped."""
        kept = self._totals
        if kept and (totals.requests < kept[-1].requests or totals.time < kept[-1].time):
            kept.clear()
        if not kept or totals.time - kept[-1].time >= APART_S:
            kept.append(totals)
        while len(kept) > 2 and kept[1].time < totals.time - TREND_S:
            kept.popleft()

    def desired(self, fleet: Known, flow: FlowController | None, now: float) -> int | None:
        """Return the number of endpoints needed by the load and by the waiting requests (`flow`), which need no fewer
        than there are; `None` = nothing waits, and not enough is known of the load yet."""
        asked, slots = self.endpoints(fleet), self._slots(fleet.table)
        if flow is None or not len(flow.flow):
            return asked
        # What waits, waits for a server that answers.
        waited_for = int(np.count_nonzero(slots)) if self._role == PREFILL else flow.wanted(slots, now)
        return max(asked or 0, waited_for)

    def pods(self, endpoints: int, fleet: Known) -> int:
        """Return how many pods have so many endpoints: autoscalers count pods, and each port of a pod is an endpoint.
        New pods have as many as the present ones, or in an empty pool as the last ones."""
        slots = self._slots(fleet.table)
        if slots.any():
            self._last = fleet.table.pods(slots), int(np.count_nonzero(slots))
        pods, of = self._last
        return ceil(endpoints * pods / of)

    def present(self, fleet: Known) -> int:
        """Return how many pods there are."""
        return fleet.table.pods(self._slots(fleet.table))

    def _slots(self, table: EndpointTable) -> BoolColumn:
        if not self._role:
            return table.alive
        return table.alive & (table.only_prefills if self._role == PREFILL else ~table.only_prefills)

    def endpoints(self, fleet: Known) -> int | None:
        """Return the number of endpoints needed by the load, 0 if no requests come or run, of whatever client; `None` =
        it was not observed for long enough."""
        recent = self._since(RECENT_S)
        if recent is None or recent.time < 0.5 * RECENT_S:
            return None
        if not recent.requests:
            table = fleet.table
            running = np.any((table.queue + table.active)[self._slots(table)] > 0.0)
            return max(self._for_memory(1.0, fleet), 1) if running else 0
        rate = recent.requests / recent.time
        expected = rate + max(self._slope() * self.objective.startup_s, 0.0)
        expected = min(expected, AHEAD * rate)
        return min(max(*self._needed(recent, expected, fleet), self._for_memory(expected / rate, fleet), 1), MOST)

    def _since(self, seconds: float) -> Totals | None:
        """Return the totals of the last `seconds`; `time` is the seconds that they actually cover."""
        kept = self._totals
        if len(kept) < 2:
            return None
        last = kept[-1]
        first = next((totals for totals in reversed(kept) if totals.time <= last.time - seconds), kept[0])
        return Totals(*(now - then for now, then in zip(last, first, strict=True)))

    def _slope(self) -> float:
        """Return the growth in requests per second, per second: least squares over the kept totals; 0 = too few."""
        kept = self._totals
        if len(kept) < 3 or kept[-1].time - kept[0].time < 2.0 * RECENT_S:
            return 0.0
        times, requests = (np.array(column) for column in zip(*((t.time, t.requests) for t in kept), strict=True))
        middle = 0.5 * (times[1:] + times[:-1])
        return float(np.polyfit(middle - middle[0], np.diff(requests) / np.diff(times), 1)[0])

    def _needed(self, recent: Totals, rate: float, fleet: Known) -> tuple[int, int]:
        """Return the numbers of endpoints needed to keep steps short enough, and to keep first tokens in time."""
        learned, alive = fleet.predictor, self._slots(fleet.table)
        rates = learned.rates
        # `kappa` corrects the error of the learned factors.
        columns = (rates.prefill, learned.kappa), (rates.step, learned.tpot_kappa), (rates.load, learned.tpot_kappa)
        prefill, step, load = (
            float((factor[alive] * kappa[alive]).mean()) if alive.any() else 1.0 for factor, kappa in columns
        )
        prompt = recent.tokens / recent.requests
        uncached = max((recent.tokens - recent.cached_tokens) / recent.requests, 1.0)
        answer = max(learned.answer_steps, 1.0)
        prompt_ms = prefill * rates.prior.prefill_ms(prompt, uncached)
        token_ms = load * rates.prior.load_ms(1.0, prompt + 0.5 * answer)
        fixed_ms = step * rates.prior.c0
        left = 1.0 - fixed_ms * SPREAD / self.objective.tpot_ms
        self.out_of_reach_ms = fixed_ms if left < LEAST_LEFT else 0.0
        own = max(left, min(2.0 * LEAST_LEFT - left, 2.0 * LEAST_LEFT))
        answer_ms = answer * token_ms
        decoding = own * answer_ms / (prompt_ms + answer_ms)
        if self._role == PREFILL:  # no answer there needs short steps
            answer_ms, own, decoding, self.out_of_reach_ms = fixed_ms * uncached / STEP_TOKENS, 1.0, 0.0, 0.0
        engines = float(np.maximum(fleet.table.ranks[alive], 1.0).mean()) if alive.any() else 1.0
        enough = ceil(rate * (prompt_ms + answer_ms) * 1e-3 / own / engines)
        serves_ms = prompt_ms + (ceil(uncached / STEP_TOKENS) + 0.5) * fixed_ms / (1.0 - decoding)
        timely = in_time(rate * serves_ms * 1e-3, self.objective.ttft_ms / serves_ms - 1.0)
        return enough, ceil(timely / engines)

    def _for_memory(self, growth: float, fleet: Known) -> int:
        table = fleet.table
        used = float(np.minimum(table.kv[self._slots(table)], 1.0).sum())
        return ceil(used * growth / MEMORY)


def in_time(load: float, patience: float) -> int:
    """Return the least number of servers, at least 1, with which at most `LATE_SHARE` of requests wait longer than
    `patience` service times. `load` in servers."""
    patience = max(patience, 0.1)
    servers = ceil(load) + (load == ceil(load))
    while servers < MOST:
        waits = (load / servers) ** (sqrt(2.0 * (servers + 1.0)) - 1.0) if load else 0.0
        if waits * exp(-(servers - load) * patience) <= LATE_SHARE:
            return max(servers, 1)
        servers += 1
    return MOST
