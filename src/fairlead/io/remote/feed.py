"""What a scheduler in another process is told about the fleet: all of it once, then what has changed since.

Theory. Between two batches a handful of numbers change: the row of an endpoint that was charged, a scrape. The columns
lie in one array, so finding them is one comparison (5 µs for 8 endpoints, 60 µs for 1,000), and only changed columns of
changed slots travel.
"""

import numpy as np

from fairlead.fleet.fleet import Fleet
from fairlead.fleet.rates import PRIOR
from fairlead.fleet.table import FLOATS
from fairlead.model.endpoint import Endpoint
from fairlead.model.instructions import AskRemote
from fairlead.model.snapshot import Snapshot
from fairlead.wire.scheduler import COLUMNS, Asked, EndpointState, Forecast, Speeds, State

_FACTORS = 4
_ROWS = [FLOATS.index(name) for name in list(COLUMNS.values())[:-_FACTORS]]
_NUMBERS = list(COLUMNS)
#: What a new endpoint begins with, by the contract.
_NEW = np.array([-np.inf if COLUMNS[number] in ("sampled_at", "ejected_until") else 0.0 for number in COLUMNS])
_NEW[-_FACTORS:] = 1.0
#: Changes of learned sums below this share are not worth a message.
_SAME = 0.01


class StateFeed:
    """One per stream."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._version = 0
        self._ids: tuple[str, ...] | None = None
        self._told: list[tuple[Endpoint, frozenset[str] | None] | None] = []
        self._table_version = -1
        self._sent = np.zeros((len(COLUMNS), 0))
        self._speeds = Speeds()

    def changes(self, settled: int, snapshot: Snapshot | None = None) -> State | None:
        """Since the last call; `None` = nothing. `settled`: the last batch whose picks are charged, or never will be.

        `snapshot`: tell its numbers, not those of now; it must have the endpoints of now.
        """
        state = State(full=self._version == 0, settled=settled)
        if self._fleet.table.version != self._table_version:
            self._endpoints(state)
        self._load(state, snapshot)
        self._learned(state)
        if not (state.full or state.endpoints or state.gone or len(state.slots) or state.speeds):
            return None
        self._version += 1
        state.version = self._version
        return state

    def _endpoints(self, state: State) -> None:
        table = self._fleet.table
        self._table_version = table.version
        while len(self._told) < len(table):
            self._told.append(None)
            self._sent = np.column_stack((self._sent, _NEW))
        for slot, before in enumerate(self._told):
            endpoint = table.endpoints[slot]
            if before is not None and (endpoint is None or endpoint.id != before[0].id):
                state.gone.append(slot)
                self._sent[:, slot] = _NEW
                self._told[slot] = before = None
            if endpoint is None:
                continue
            now = (endpoint, table.adapters[slot])
            if now != before:
                self._told[slot] = now
                state.endpoints.append(_endpoint(slot, *now))

    def _load(self, state: State, snapshot: Snapshot | None) -> None:
        table, predictor = self._fleet.table, self._fleet.predictor
        rates = predictor.rates
        floats, learned = table.floats, (predictor.kappa, predictor.tpot_kappa, rates.prefill, rates.step)
        if snapshot is not None:
            floats, learned = snapshot.floats, snapshot.learned
        ttft, tpot, prefill, step = learned
        factors = np.stack((prefill, step, ttft, tpot))
        current = np.concatenate((floats[_ROWS], factors[:, : len(table)]))
        changed = current != self._sent
        if not changed.any():
            return
        slots = np.flatnonzero(changed.any(axis=0) & table.alive)
        if not len(slots):
            return
        state.slots = slots
        for row in np.flatnonzero(changed[:, slots].any(axis=1)).tolist():
            state.columns[_NUMBERS[row]] = current[row, slots]
        self._sent[:, slots] = current[:, slots]

    def _learned(self, state: State) -> None:
        predictor, before = self._fleet.predictor, self._speeds
        hold, steps = predictor.hold_ms, predictor.answer_steps
        near = abs(hold - before.hold_ms) <= _SAME * hold and abs(steps - before.answer_steps) <= _SAME * steps
        if near and before.c0:
            return
        state.speeds = self._speeds = Speeds(
            c0=PRIOR.c0,
            c_pf=PRIOR.c_pf,
            c_attn=PRIOR.c_attn,
            c_seq=PRIOR.c_seq,
            c_kv=PRIOR.c_kv,
            hold_ms=hold,
            answer_steps=steps,
        )


def _endpoint(slot: int, endpoint: Endpoint, adapters: frozenset[str] | None) -> EndpointState:
    return EndpointState(
        slot=slot,
        id=endpoint.id,
        address=endpoint.address,
        labels=dict(endpoint.labels),
        adapters=None if adapters is None else tuple(sorted(adapters)),
    )


def asked(ask: AskRemote, fleet: Fleet, now: float, forecasts: bool) -> Asked:
    """A request with what is known about it. Columns that are older than the newest endpoint end before it."""
    one = Asked(request=ask.request, expected_output=ask.expected_output)
    if ask.hits is not None:
        one.hit_slots = np.flatnonzero(ask.hits)
        one.hit_shares = ask.hits[one.hit_slots]
    if ask.able is not None:
        one.candidates = np.flatnonzero(ask.able)
    if forecasts:
        one.forecast = _forecast(ask, fleet, now)
    return one


def _forecast(ask: AskRemote, fleet: Fleet, now: float) -> Forecast:
    size = len(fleet.table)
    hits = ask.hits
    if hits is not None and len(hits) < size:
        hits = np.concatenate((hits, np.zeros(size - len(hits))))
    tokens = ask.request.prompt_tokens
    terms = fleet.predictor.estimate(tokens, None if hits is None else hits * tokens, now)
    # A term that is the same everywhere is a number.
    ttft, prefill, step, used = (
        np.broadcast_to(term, (size,)) for term in (terms.ttft, terms.prefill, terms.step, terms.used)
    )
    return Forecast(ttft_ms=ttft, prefill_ms=prefill, step_ms=step, used=used)
