"""A copy of another process's fleet (the sender's): the same columns, written from its messages.

Rules
* Received values are kept apart from own charges. After every change the columns are the received values plus the own
  charges that these do not include yet. So nothing drifts, even if messages are lost or arrive twice.
* The sender's slot numbers differ from ours: an endpoint gets the next free slot here, and `slots_of` translates.
* The cached shares of a prompt arrive with its request (`Request.blocks`), so `match` returns them.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fairlead.core.columns import FloatColumn
from fairlead.core.endpoint import Endpoint
from fairlead.core.fleet import MOST, MOST_WORK, Fleet
from fairlead.core.request import Request
from fairlead.core.table import FLOATS

_ROW = {name: row for row, name in enumerate(FLOATS)}
_FACTORS = ("prefill_factor", "step_factor", "ttft_factor", "tpot_factor", "load_factor")


class _Charge(Struct):
    batch: int
    endpoint: str
    uncached: float
    work_ms: float
    kv_tokens: float
    growth: float


class MirrorFleet(Fleet):
    def __init__(self) -> None:
        super().__init__()
        self._reported = np.zeros((len(FLOATS), 0))
        self._charges: list[_Charge] = []
        self._here: dict[int, int] = {}

    # ---- endpoints ----

    def join(self, slot: int, endpoint: Endpoint, adapters: frozenset[str] | None) -> None:
        """An endpoint joined or changed; `slot` is the sender's."""
        here = self._here.get(slot)
        old = self.table.endpoints[here] if here is not None else None
        if old is not None and old.id != endpoint.id:
            self.leave(slot)
        elif old is None and self.table.slot(endpoint.id) is not None:
            raise ValueError(f"endpoint {endpoint.id!r} has two slots")
        if here is None or self.table.slot(endpoint.id) is None:
            self.up(endpoint)
            here = self.table.slot(endpoint.id)
            assert here is not None
            self._here[slot] = here
            rates = self.predictor.rates
            rates.prefill[here] = rates.step[here] = rates.load[here] = 1.0
            if self._reported.shape[1] < len(self.table):
                self._reported = np.hstack((self._reported, np.zeros((len(FLOATS), 1))))
            self._reported[:, here] = 0.0
            for name in ("sampled_at", "ejected_until"):
                self._reported[_ROW[name], here] = -np.inf
        else:
            self.table.replace(here, endpoint)
        self.table.set_adapters(here, adapters)
        self._reported[_ROW["loaded_adapters"], here] = len(adapters or ())

    def leave(self, slot: int) -> None:
        here = self._here.pop(slot, None)
        endpoint = self.table.endpoints[here] if here is not None else None
        if endpoint is not None:
            self.down(endpoint.id)

    def forget(self) -> None:
        for slot in list(self._here):
            self.leave(slot)
        self._charges.clear()

    def slots_of(self, remote_slots: Iterable[int]) -> NDArray[np.intp]:
        """Return our slots for the sender's slots. Raise `ValueError` for a slot without an endpoint."""
        try:
            return np.array([self._here[slot] for slot in remote_slots], dtype=np.intp)
        except KeyError as error:
            raise ValueError(f"slot {error.args[0]} has no endpoint") from None

    # ---- load ----

    def load(self, remote_slots: Iterable[int], columns: Mapping[str, FloatColumn]) -> None:
        """Take new values for the sender's slots. `columns`: names as in `fleet.table`, or factors (`_FACTORS`)."""
        here = self.slots_of(remote_slots)
        predictor = self.predictor
        rates = predictor.rates
        factors = (rates.prefill, rates.step, predictor.kappa, predictor.tpot_kappa, rates.load)
        for name, column in columns.items():
            if name in _FACTORS:
                factors[_FACTORS.index(name)][here] = column
            else:
                self._reported[_ROW[name], here] = column
        if "capacity_tokens" in columns or "ranks" in columns:
            capacity, ranks = self._reported[_ROW["capacity_tokens"], here], self._reported[_ROW["ranks"], here]
            per_capacity = np.maximum(ranks, 1.0) / np.maximum(capacity, 1e-9)
            self._reported[_ROW["per_capacity"], here] = np.where(capacity > 0, per_capacity, 0.0)
        if "max_adapters" in columns:
            for slot, value in zip(here.tolist(), columns["max_adapters"].tolist(), strict=True):
                self.table.set_max_adapters(slot, value)

    def learned(self, hold_ms: float, answer_steps: float) -> None:
        """Take what the sender has learned about all answers."""
        self.predictor.hold_ms, self.predictor.answer_steps = hold_ms, max(answer_steps, 1.0)

    # ---- own charges ----

    def take(self, request: Request, slot: int, hit_share: float, expected_output: float, batch: int) -> None:
        """Charge a request that was sent to the endpoint at `slot` (ours), in answer to that batch."""
        endpoint = self.table.endpoints[slot]
        assert endpoint is not None
        uncached = min(max(request.prompt_tokens * (1.0 - hit_share), 1.0), MOST)
        work = min(self.predictor.rates.prior.prefill_ms(request.prompt_tokens, uncached), MOST_WORK * 1e-3)
        growth = min(max(expected_output / 2, 0.0), MOST)
        charge = _Charge(batch, endpoint.id, uncached, work, request.prompt_tokens + growth, growth)
        self._charges.append(charge)
        self._add(charge)

    def settle(self, batch: int) -> None:
        """Rebuild the columns: the received values include the charges of batches up to `batch`; add the later ones."""
        self._charges = [later for later in self._charges if later.batch > batch]
        self.table.floats[:] = self._reported
        for charge in self._charges:
            self._add(charge)
        self.table.rewritten()

    def _add(self, charge: _Charge) -> None:
        table = self.table
        slot = table.slot(charge.endpoint)
        if slot is None:
            return
        table.queue[slot] += 1.0
        table.inflight[slot] += 1.0
        table.pending[slot] += 1.0
        table.pending_tokens[slot] += charge.uncached
        table.queued_tokens[slot] += charge.uncached
        table.queued_ms[slot] += charge.work_ms
        table.kv_tokens[slot] += charge.kv_tokens
        table.growth_tokens[slot] += charge.growth

    def match(self, request: Request) -> FloatColumn | None:
        """Return `Request.blocks`: the sender's estimate of the share of the prompt that each slot has cached."""
        hits: FloatColumn | None = request.blocks
        return hits
