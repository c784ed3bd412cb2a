"""LoRA adapters: how long each endpoint needs until it can run one, and which engines load them on demand.

The states of an adapter at an endpoint, the best first:

    runs          its metrics page has it, or one of our requests for it is about to begin there: no wait
    is loaded     its list of models has it (static adapters are there from the start): it needs a slot, `activate_ms`
    could load    the engine is known to load adapters on demand (dynamic adapters): `load_ms`
    no slot left  as many other adapters run there as fit into a batch (`max_lora`): wait until one of them has no more
                  requests. This takes about as long as an answer, times the number of adapters that wait for a slot

Rules
* The wait is a term of the cost (`core.cost`), so adapters spread under load, and stay together without load.
* Both times are learned from first tokens that arrived later than expected without the wait.
* A server that runs an adapter which its list did not have either loads on demand, or was told to load it meanwhile. So
  all lists are read again. If another engine of the same look (`Fleet._looks_like`) still does not list it, engines of
  that look load on demand, and any of them can serve an adapter that at least one endpoint has. The first 404 for such
  an adapter ends this assumption permanently.
* If no endpoint has the adapter, or none has slots, all endpoints count the same.
"""

from collections.abc import Hashable, Mapping

import numpy as np
from msgspec import Struct

from fairlead.core.columns import FloatColumn
from fairlead.core.table import EndpointTable

#: Initial values in milliseconds: copying an adapter's weights to the GPU; reading them from disk.
ACTIVATE_MS, LOAD_MS = 10.0, 500.0
#: Weight of a new measurement, and the least deviation in milliseconds at which it is cut.
SHARE, BOUND_MS = 0.1, 20.0
MOST_MS = 60_000.0


class Cold(Struct, frozen=True):
    """The wait of a request whose adapter did not run at its endpoint when it was charged."""

    wait_ms: float
    #: The adapter was not in the endpoint's list of models either.
    absent: bool
    #: All slots were taken, so the time says nothing about loading.
    queued: bool


class Adapters:
    """The adapters of one table. `starting`: by slot, the adapters of our requests before their first token, and how
    many requests each has. `changed`: the slots at which it has changed, which are taken out of it here."""

    def __init__(self, table: EndpointTable, starting: Mapping[int, Mapping[str, int]], changed: set[int]) -> None:
        self._table, self._starting, self._changed = table, starting, changed
        #: By slot: the names of `starting`, and how many of them are not on its page. By name: its slots.
        self._names: dict[int, frozenset[str]] = {}
        self._more = np.zeros(0)
        self._begun: dict[str, set[int]] = {}
        self.activate_ms, self.load_ms = ACTIVATE_MS, LOAD_MS
        #: By look of engines: the adapter that one of them may have loaded on demand; and whether they load on demand.
        self._suspected: dict[Hashable, str] = {}
        self._dynamic: dict[Hashable, bool] = {}
        self._news = False

    # ---- what it costs ----

    def waits(self, model: str, hold_ms: float) -> FloatColumn | None:
        """Return the milliseconds until each endpoint can run the adapter `model`; `None` = no difference. `hold_ms`:
        milliseconds of an answer."""
        table = self._table
        running, listed = table.holders(model), table.listing(model)
        if running is None and not listed:
            return None
        self._follow()
        there = np.zeros(len(table), dtype=np.bool_) if running is None else running.copy()
        there[list(self._begun.get(model, ()))] = True
        taken = table.loaded_adapters + self._more
        lacks = table.dynamic.copy()
        lacks[list(listed)] = False
        waits: FloatColumn = np.where(there, 0.0, np.where(lacks, self.load_ms, self.activate_ms))
        over = hold_ms * np.maximum(taken + ~there - table.max_adapters, 0.0)
        waits += over if running is None else np.where(running, 0.0, over)
        waits[table.max_adapters <= 0.0] = 0.0
        return waits

    def _follow(self) -> None:
        """Follow what has begun or changed at some slots since the last call."""
        table, changed = self._table, self._changed | self._table.adapters_at
        if len(self._more) < len(table):
            self._more = np.append(self._more, np.zeros(len(table) - len(self._more)))
        for slot in changed:
            page, names = table.adapters[slot] or (), frozenset(self._starting.get(slot, ()))
            before = self._names.pop(slot, frozenset[str]())
            for name in before - names:
                self._begun[name].discard(slot)
                if not self._begun[name]:
                    del self._begun[name]
            for name in names - before:
                self._begun.setdefault(name, set()).add(slot)
            if names:
                self._names[slot] = names
            self._more[slot] = sum(name not in page for name in names)
        self._changed.clear()
        table.adapters_at.clear()

    def validate(self) -> None:
        """Raise `AssertionError` if what was counted step by step differs from a count of everything."""
        self._follow()
        assert self._names == {slot: frozenset(names) for slot, names in self._starting.items()}
        more = {slot: len(names - (self._table.adapters[slot] or frozenset())) for slot, names in self._names.items()}
        assert {slot: int(self._more[slot]) for slot in np.flatnonzero(self._more).tolist()} == {
            slot: number for slot, number in more.items() if number
        }
        assert {(name, slot) for name, slots in self._begun.items() for slot in slots} == {
            (name, slot) for slot, names in self._names.items() for name in names
        }

    def cold(self, model: str, slot: int, waits: FloatColumn, hold_ms: float) -> Cold | None:
        """Return the wait of a request for the adapter `model` at `slot`, before the request is charged there; `None` =
        the adapter runs there, or is about to."""
        if model in (self._table.adapters[slot] or ()):
            return None
        wait_ms, listed = float(waits[slot]), self._table.listed[slot]
        queued = wait_ms >= hold_ms
        if not queued and model in self._starting.get(slot, ()):
            return None
        return Cold(wait_ms, listed is not None and model not in listed, queued)

    def took(self, cold: Cold, more_ms: float) -> None:
        """Learn from a first token that arrived `more_ms` later than it would have without waiting for its adapter."""
        if cold.queued or not abs(more_ms) < MOST_MS:
            return
        known = self.load_ms if cold.absent else self.activate_ms
        bound = max(known, BOUND_MS)
        known = min(max(known + SHARE * min(max(more_ms - known, -bound), bound), 0.0), MOST_MS)
        if cold.absent:
            self.load_ms = known
        else:
            self.activate_ms = known

    def restore(self, activate_ms: float, load_ms: float) -> None:
        self.activate_ms, self.load_ms = min(activate_ms, MOST_MS), min(load_ms, MOST_MS)

    # ---- what is known ----

    def seen(self, slot: int, look: Hashable) -> None:
        """Check the running adapters of a new metrics page, which is already in the table."""
        page, listed = self._table.adapters[slot], self._table.listed[slot]
        if page is None or listed is None or look in self._dynamic:
            return
        unlisted = page - listed
        if unlisted and self._suspected.get(look) not in unlisted:
            self._suspected[look], self._news = min(unlisted), True

    def news(self) -> bool:
        """Whether lists should be read again since the last call: an adapter runs that its server's list lacks."""
        news, self._news = self._news, False
        return news

    def listed(self, names: frozenset[str] | None, look: Hashable) -> bool:
        """Take a list of models that was read. Return whether its endpoint loads adapters on demand."""
        suspected = self._suspected.get(look)
        if suspected is not None and names is not None and suspected not in names and look not in self._dynamic:
            self._dynamic[look] = True
        return self._dynamic.get(look, False)

    def refused(self, model: str, slot: int, look: Hashable) -> bool:
        """Take a 404 from a server. Return whether engines of this look turn out not to load on demand."""
        listed = self._table.listed[slot]
        if listed is None or model in listed or self._table.loaded(model) is None:
            return False  # no conclusion: its list is unknown or has the model, or no endpoint has it
        was, self._dynamic[look] = self._dynamic.get(look, False), False
        return was
