"""The endpoint table: columns of the endpoints' last scrapes, and of the leases charged to them.

Rules
* An endpoint keeps its slot as long as it is in the pool. Slots of departed endpoints are reused; until then `alive` is
  False there.
* Columns are live: a decision is one synchronous call, so nothing changes during it and no copy is made. Plugins read,
  only `Fleet` writes. Bool columns are never changed, only replaced, because traces of decisions keep them.
* `queue`, `active` and `kv` are *effective*: the last scrape, corrected by our own charges since. Scraped gauges alone
  lag by the scrape interval and show 0 at the end of an engine step (28 % of scrapes at 32 concurrent requests of a
  vLLM 0.32). Our own ledger alone does not know other clients. If scrapes stop, only our own leases count.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from heapq import heapify, heappop, heappush
from math import inf, nan
from typing import Any, TypeVar

import numpy as np

from fairlead.core.columns import BoolColumn, FloatColumn, read_only
from fairlead.core.endpoint import MODEL_LABEL, NOT_LISTED, BaseModels, Endpoint, Sample

FLOATS = (
    "waiting", "running", "kv", "queue", "active", "inflight", "pending", "pending_tokens", "queued_tokens",
    "queued_ms", "prefill_since_ms", "kv_tokens", "growth_tokens", "head_ms",
    "sampled_at", "failures", "errors", "ejected_until", "suspicion", "max_adapters", "loaded_adapters",
    "capacity_tokens", "per_capacity", "max_seqs", "distance_ms", "free_cache", "ranks", "long_until_ms",
)  # fmt: skip
#: The columns that the ledger writes (`fairlead.core.ledger.Account.row`); contiguous in `FLOATS`.
LOAD = (
    "queue", "active", "inflight", "pending", "pending_tokens", "queued_tokens", "queued_ms", "prefill_since_ms",
    "kv_tokens", "growth_tokens", "head_ms",
)  # fmt: skip
_LOAD = slice(FLOATS.index(LOAD[0]), FLOATS.index(LOAD[-1]) + 1)
#: Added to an endpoint's listed adapters if it loads any adapter on demand.
ON_DEMAND = ""
#: Number of masks that are remembered, and the longest part of a remembered key (characters of a name, addresses of a
#: subset). Clients choose some of them, and without a bound a few million long model names would fill the memory.
_MAX_MASKS = 1024
_MAX_KEY = 1024
#: Names that are remembered. Adapters may come and go for months.
_MAX_MODELS = 100_000
T = TypeVar("T")


def _remember(names: set[str], more: Collection[str]) -> None:
    if len(names) < _MAX_MODELS:
        names |= {*more}


class EndpointTable:
    """The columns. See the module's rules; every `FloatColumn` and `BoolColumn` has length `len(table)`."""

    #: Scraped: requests waiting / running in the engine, share of KV blocks in use (0..1).
    waiting: FloatColumn
    running: FloatColumn
    kv: FloatColumn
    #: Effective requests waiting for, and past, their first token.
    queue: FloatColumn
    active: FloatColumn
    #: Own leases: all, those before the first token, their uncached prompt tokens, KV tokens of all.
    inflight: FloatColumn
    pending: FloatColumn
    pending_tokens: FloatColumn
    kv_tokens: FloatColumn
    #: Half the expected output tokens of all own leases, by which they may still grow.
    growth_tokens: FloatColumn
    #: The part of `queued_ms` that the next first token waits for; infinite if any lease before its first token is
    #: blind (`Lease.blind`).
    head_ms: FloatColumn
    #: Prompt tokens of own leases that are believed still to be computed, and the milliseconds that takes at the
    #: prior's speed. Clock milliseconds since when the endpoint computes the first of them; meaningless if there are
    #: none.
    queued_tokens: FloatColumn
    queued_ms: FloatColumn
    prefill_since_ms: FloatColumn
    #: Clock seconds of the last good scrape; -inf = never.
    sampled_at: FloatColumn
    #: Consecutive failed scrapes / failed responses; clock seconds until which the endpoint is avoided.
    failures: FloatColumn
    errors: FloatColumn
    ejected_until: FloatColumn
    #: LoRA slots; 0 = unknown. Adapters reported as loaded. KV capacity in tokens; 0 = unknown.
    max_adapters: FloatColumn
    loaded_adapters: FloatColumn
    capacity_tokens: FloatColumn
    #: The share of a rank's cache that one token takes, 0 = unknown.
    per_capacity: FloatColumn
    #: Sequences that the engine runs at once; 0 = no limit is known.
    max_seqs: FloatColumn
    #: Additional cost of reaching the endpoint from here, in milliseconds (`core.endpoint.Topology`).
    distance_ms: FloatColumn
    #: Share of the KV cache (0..1) that can take prompts before older ones are evicted, by the learned index; as of the
    #: last prompt sent there.
    free_cache: FloatColumn
    #: Data-parallel engines behind the address; 0 = unknown. All other columns are sums over these engines, except
    #: `kv`, which is that of the fullest.
    ranks: FloatColumn
    #: Clock milliseconds until which the next long prompt is likely to go there; see `pauses` in `core.cost`.
    long_until_ms: FloatColumn
    #: 0 = well, 1 = suspect, 2 = out (`fairlead.core.stalls`).
    suspicion: FloatColumn

    def __init__(self) -> None:
        self.endpoints: list[Endpoint | None] = []
        #: Endpoint ids by slot; empty = no endpoint. A new tuple whenever endpoints come, go or change.
        self.ids: tuple[str, ...] = ()
        #: By slot: adapters on the metrics page, which vLLM names only while requests use them; `None` = not reported.
        self.adapters: list[frozenset[str] | None] = []
        #: Slots at which they may have changed since `core.adapters` looked.
        self.adapters_at: set[int] = set()
        #: By slot: adapters in the endpoint's list of models, in use or not; `None` = not known.
        self.listed: list[frozenset[str] | None] = []
        #: By slot: the base models in that list.
        self.based: list[BaseModels] = []
        #: Models that the definitions send requests for.
        self.targets: Collection[str] = ()
        #: Names that are defined; and those that an endpoint had as a base model and as an adapter when it left.
        self._defined, self._were_base, self._were_adapters = set[str](), set[str](), set[str]()
        #: How many times each context length is known, and whether there are several.
        self._contexts = Counter[float]()
        self.mixed_contexts = False
        #: Endpoints whose list of models is not known; endpoints that load adapters on demand, whatever the list says.
        self.unlisted: BoolColumn = np.zeros(0, dtype=np.bool_)
        self.dynamic: BoolColumn = np.zeros(0, dtype=np.bool_)
        #: Whether any endpoint has slots for adapters.
        self.lora = False
        #: 1 / `ranks`: the share of an endpoint's load that one of its engines has; `None` = all have one engine.
        self.per_rank: FloatColumn | None = None
        #: Whether any `distance_ms` is not 0.
        self.distant = False
        self.samples: list[Sample | None] = []
        #: By slot: adapters for which requests in the engine wait. Replaced as a whole, so that snapshots can keep it.
        self.waiting_adapters: tuple[frozenset[str], ...] = ()
        #: The columns of configured gauges by name, as far as an endpoint reported them or a policy asked for them.
        self.gauges: dict[str, FloatColumn] = {}
        self.alive: BoolColumn = np.zeros(0, dtype=np.bool_)
        #: All float columns as the rows of one array, in the order of `FLOATS`, so that one call copies them; and the
        #: larger array of which it is a part, so that an endpoint that joins does not copy the others.
        self.floats = self._reserved = np.zeros((len(FLOATS), 0))
        self._name_rows()
        self.count = 0
        #: Rises when endpoints come, go or change labels, and when adapters or `suspicion` change.
        self.version = 0
        #: Whether any endpoint has failed scrapes or responses, is avoided, or hangs.
        self.troubled = False
        #: Upper bound of `long_until_ms`.
        self.long_until = 0.0
        #: By slot: milliseconds that a prompt which is cached nowhere may lose to requests that peers have sent but not
        #: yet reported; `None` = there are no peers.
        self.collisions: FloatColumn | None = None
        #: Slots whose values changed since `cost.renew` last read them. Code that writes a column must add the slot.
        self.stale: set[int] = set()
        self._slots: dict[str, int] = {}
        #: The ids by slot; a heap of the slots without endpoint.
        self._names: list[str] = []
        self._free: list[int] = []
        self._masks: dict[tuple[Hashable, ...], BoolColumn] = {}
        self._keeping: dict[tuple[Hashable, ...], BoolColumn | None] = {}
        self._answers: dict[tuple[Hashable, ...], Any] = {}
        self._holders: dict[str, BoolColumn] = {}
        self._listing: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self.endpoints)

    def slot(self, endpoint_id: str) -> int | None:
        return self._slots.get(endpoint_id)

    def slots(self) -> list[tuple[int, Endpoint]]:
        """Return (slot, endpoint) of all endpoints in the pool."""
        return [(slot, e) for slot, e in enumerate(self.endpoints) if e is not None]

    def pods(self, among: BoolColumn) -> int:
        """Return the number of pods that the endpoints in these slots belong to."""
        return len({endpoint.pod for slot, endpoint in self.slots() if among[slot]})

    def add(self, endpoint: Endpoint, before: int | None = None) -> int:
        """`before`: the slot that it had before; it gets that one if nothing else is there."""
        if before in self._free:
            slot = before
            self._free.remove(slot)
            heapify(self._free)
        else:
            slot = heappop(self._free) if self._free else self._grow()
        self._slots[endpoint.id] = slot
        self.count += 1
        self._put(slot, endpoint)
        return slot

    def replace(self, slot: int, endpoint: Endpoint) -> None:
        """Replace an endpoint by one with the same id and other labels or address."""
        self.endpoints[slot] = endpoint
        self._changed()

    def remove(self, slot: int) -> None:
        endpoint = self.endpoints[slot]
        assert endpoint is not None
        del self._slots[endpoint.id]
        self.count -= 1
        _remember(self._were_base, self.base_names(slot, endpoint))
        for names in (endpoint.promised, self.listed[slot], self.adapters[slot]):
            _remember(self._were_adapters, names or ())
        self.set_adapters(slot, None)
        self.set_listed(slot, None)
        self.set_based(slot, NOT_LISTED)
        self._put(slot, None)
        heappush(self._free, slot)

    def set_adapters(self, slot: int, adapters: frozenset[str] | None) -> None:
        before = self.adapters[slot]
        if adapters == before:
            return
        self.adapters[slot] = adapters
        self.adapters_at.add(slot)
        old, new = before or frozenset(), adapters or frozenset()
        self.loaded_adapters[slot] = len(new)
        for name in old ^ new:
            held = self.holders(name)
            self._holders.pop(name, None)
            held = np.zeros(len(self), dtype=np.bool_) if held is None else held.copy()
            held[slot] = name in new
            if np.count_nonzero(held):
                self._holders[name] = held
        self._adapters_changed()

    def set_listed(self, slot: int, listed: frozenset[str] | None) -> None:
        before = self.listed[slot]
        if listed == before:
            return
        self.listed[slot] = listed
        for name in before or ():
            slots = self._listing[name]
            slots.discard(slot)
            if not slots:
                del self._listing[name]
        for name in listed or ():
            self._listing.setdefault(name, set()).add(slot)
        self._judge_unlisted(slot)
        self._adapters_changed()

    def set_based(self, slot: int, base: BaseModels) -> None:
        if base != self.based[slot]:
            self._contexts -= Counter(self.based[slot].contexts.values())
            self._contexts.update(base.contexts.values())
            self.mixed_contexts = len(self._contexts) > 1
            self.based[slot] = base
            self._changed()

    def know(self, models: Collection[str], targets: Collection[str]) -> None:
        """Remember models that are defined, and those that requests are sent for."""
        _remember(self._defined, models)
        self.targets = targets

    def had(self, model: str) -> bool:
        """Whether this model is defined, or an endpoint that had it left, so that one may bring it back. After very
        many names, any may have been among them."""
        known = self._defined, self._were_base, self._were_adapters
        return any(model in names or len(names) >= _MAX_MODELS for names in known)

    def was(self, model: str) -> tuple[bool, bool]:
        """Whether an endpoint that left had `model` as a base model; as an adapter."""
        return model in self._were_base, model in self._were_adapters

    def base_names(self, slot: int, endpoint: Endpoint) -> Collection[str]:
        """Return the endpoint's base models: by the label, or without it by the list of models; empty = not known."""
        label = endpoint.labels.get(MODEL_LABEL)
        return self.based[slot].names if label is None else (label,)

    def base(self, model: str) -> BoolColumn:
        """Return the slots where `model` is a base model."""
        return self.mask(("base", model), lambda slot, endpoint: model in self.base_names(slot, endpoint))

    def bases(self, model: str) -> frozenset[frozenset[str]]:
        """Return the names of the base models of each endpoint that has `model`, as base model or as adapter."""

        def look() -> frozenset[frozenset[str]]:
            has, listing = self.base(model), self.listing(model)
            having = [(slot, endpoint) for slot, endpoint in self.slots() if has[slot] or slot in listing]
            groups = {frozenset(self.base_names(slot, endpoint)) for slot, endpoint in having}
            return frozenset(groups - {frozenset()})

        return self.answer(("bases", model), look)

    def contexts(self, model: str) -> FloatColumn | None:
        """Return the model's context length in tokens by slot, infinite where unknown; `None` = all known are equal."""

        def look() -> FloatColumn | None:
            contexts = [base.context(model) for base in self.based]
            return np.array(contexts) if len({*contexts} - {inf}) > 1 else None

        return self.answer(("contexts", model), look) if self.mixed_contexts else None

    def holders(self, adapter: str) -> BoolColumn | None:
        """Return the slots with the adapter on the metrics page; `None` = there is none."""
        held = self._holders.get(adapter)
        if held is not None and len(held) < len(self):
            held = self._holders[adapter] = np.append(held, np.zeros(len(self) - len(held), dtype=np.bool_))
        return held

    @property
    def listed_names(self) -> Collection[str]:
        """The adapters in the endpoints' lists of models."""
        return self._listing.keys()

    def listing(self, adapter: str) -> Collection[int]:
        """Return the slots with the adapter in the list of models."""
        return self._listing.get(adapter, ())

    def loaded(self, adapter: str) -> BoolColumn | None:
        """Return the slots with the adapter on the metrics page or in the list of models; `None` = there is none."""
        slots, running = self._listing.get(adapter), self.holders(adapter)
        if not slots:
            return running
        loaded = np.zeros(len(self), dtype=np.bool_) if running is None else running.copy()
        loaded[list(slots)] = True
        return loaded

    def extra(self, name: str) -> FloatColumn:
        """Return the column of a configured gauge (`Sample.extra`), read only; NaN where an endpoint does not report
        it."""
        return read_only(self._gauge(name))

    def _gauge(self, name: str) -> FloatColumn:
        column = self.gauges.get(name)
        if column is None:
            column = np.full(len(self), np.nan)
            for slot, sample in enumerate(self.samples):
                if sample is not None and name in sample.extra:
                    column[slot] = sample.extra[name]
            self.gauges[name] = column
        return column

    def sampled(self, slot: int, sample: Sample) -> None:
        self.samples[slot] = sample
        self._wait_for(slot, sample.waiting_adapters)
        for name, value in sample.extra.items():
            self._gauge(name)[slot] = value

    def _wait_for(self, slot: int, adapters: frozenset[str]) -> None:
        before = self.waiting_adapters
        if adapters != before[slot]:
            self.waiting_adapters = (*before[:slot], adapters, *before[slot + 1 :])

    def mask(self, key: tuple[Hashable, ...], keep: Callable[[int, Endpoint], bool]) -> BoolColumn:
        """Return the slots for which `keep(slot, endpoint)` is true. It may only depend on labels, addresses and base
        models, because the mask is remembered under `key` until an endpoint comes, goes or changes."""
        known = self._masks.get(key)
        if known is None:
            known = np.fromiter(
                (e is not None and keep(slot, e) for slot, e in enumerate(self.endpoints)), np.bool_, len(self)
            )
            known.setflags(write=False)  # a filter that writes to what another left raises
            if all(len(part) <= _MAX_KEY for part in key if isinstance(part, str | frozenset)):
                if len(self._masks) >= _MAX_MASKS:
                    self._masks.clear()
                    self._keeping.clear()
                self._masks[key] = known
        return known

    @property
    def only_prefills(self) -> BoolColumn:
        """The slots of endpoints that compute prompts for others only."""
        return self.mask(("only prefills",), lambda _, endpoint: endpoint.only_prefills)

    def keeping(self, key: tuple[Hashable, ...], keep: Callable[[int, Endpoint], bool]) -> BoolColumn | None:
        """Return the slots whose endpoint passes `keep(slot, endpoint)`, as a filter's answer: `None` if all do. `key`
        remembers the mask until endpoints or models change; it names the filter and its parameters."""
        if key in self._keeping:
            return self._keeping[key]
        mask = self.mask(key, keep)
        answer = None if np.count_nonzero(mask) == len(mask) else mask
        if key in self._masks:
            self._keeping[key] = answer
        return answer

    def answer(self, key: tuple[Hashable, ...], find: Callable[[], T]) -> T:
        """Return the result of `find`, remembered under `key` until endpoints, models or adapters change. It may only
        depend on these and on labels and addresses. One look-up replaces several column operations, which are most of a
        filter's cost with cold CPU caches."""
        try:
            return self._answers[key]  # type: ignore[no-any-return]
        except KeyError:
            known = find()
        if all(len(part) <= _MAX_KEY for part in key if isinstance(part, str)):
            if len(self._answers) >= _MAX_MASKS:
                self._answers.clear()
            self._answers[key] = known
        return known

    def set_max_adapters(self, slot: int, slots: float) -> None:
        if self.max_adapters[slot] != slots:
            self.max_adapters[slot] = slots
            self.lora = bool(np.count_nonzero(self.max_adapters))
            self._adapters_changed()

    def set_ranks(self, slot: int, ranks: float) -> None:
        """Set the number of engines behind the address. The caller must update `per_capacity`."""
        self.ranks[slot] = ranks
        self._judge_ranks()

    def set_distance(self, slot: int, ms: float) -> None:
        self.distance_ms[slot] = ms
        self.distant = bool(np.count_nonzero(self.distance_ms))

    def rewritten(self) -> None:
        """Update all derived values. Call it after whole columns were written from outside."""
        self.stale.update(range(len(self.endpoints)))
        self.lora = bool(np.count_nonzero(self.max_adapters))
        self.distant = bool(np.count_nonzero(self.distance_ms))
        self.long_until = float(self.long_until_ms.max(initial=0.0))
        self._judge_ranks()
        self.judge_trouble()

    def judge_trouble(self) -> None:
        """Update `troubled`. Call it when a failure counter, `ejected_until` or `suspicion` changed."""
        self.troubled = bool(
            np.count_nonzero(self.failures)
            or np.count_nonzero(self.errors)
            or np.count_nonzero(self.suspicion)
            or np.count_nonzero(self.ejected_until > -inf)
        )

    def set_suspicion(self, slot: int, level: float) -> None:
        """Set the level. The version rises, so that what is remembered for waiting requests is looked up again."""
        self.suspicion[slot] = level
        self.version += 1
        self.judge_trouble()

    def _put(self, slot: int, endpoint: Endpoint | None) -> None:
        """Put `endpoint`, or `None`, at `slot` and reset the slot's values."""
        self.endpoints[slot] = endpoint
        self._names[slot] = endpoint.id if endpoint else ""
        self.adapters[slot] = None
        self.samples[slot] = None
        self._wait_for(slot, frozenset())
        self.alive = self.alive.copy()
        self.alive[slot] = endpoint is not None
        self.alive.setflags(write=False)  # a policy that writes to it raises
        self._judge_unlisted(slot)
        self.floats[:, slot] = 0.0
        self._judge_ranks()
        for column in self.gauges.values():
            column[slot] = nan
        self.sampled_at[slot] = self.ejected_until[slot] = -inf
        self.stale.add(slot)
        self._changed()

    def _grow(self) -> int:
        slot = len(self)
        self.endpoints.append(None)
        self._names.append("")
        self.adapters.append(None)
        self.listed.append(None)
        self.based.append(NOT_LISTED)
        self.samples.append(None)
        self.waiting_adapters = (*self.waiting_adapters, frozenset())
        self.alive = np.append(self.alive, False)
        self.unlisted, self.dynamic = np.append(self.unlisted, False), np.append(self.dynamic, False)
        if slot == self._reserved.shape[1]:
            self._reserved = np.hstack((self.floats, np.zeros((len(FLOATS), slot + 1))))
        self.floats = self._reserved[:, : slot + 1]
        self._name_rows()
        for name, column in self.gauges.items():
            self.gauges[name] = np.append(column, nan)
        return slot

    def _name_rows(self) -> None:
        for name, row in zip(FLOATS, self.floats, strict=True):
            setattr(self, name, row)
        #: Views with one row per slot: of all columns, and of the `LOAD` columns, so that one assignment writes a slot.
        self.by_slot, self.load = self.floats.T, self.floats[_LOAD].T

    def _judge_ranks(self) -> None:
        ranks = np.maximum(self.ranks, 1.0)
        self.per_rank = 1.0 / ranks if np.count_nonzero(ranks > 1.0) else None

    def _judge_unlisted(self, slot: int) -> None:
        listed, alive = self.listed[slot], bool(self.alive[slot])
        self.unlisted, self.dynamic = self.unlisted.copy(), self.dynamic.copy()
        self.unlisted[slot] = alive and listed is None
        self.dynamic[slot] = alive and listed is not None and ON_DEMAND in listed

    def _adapters_changed(self) -> None:
        self.version += 1
        self._answers.clear()

    def _changed(self) -> None:
        self._adapters_changed()
        self.judge_trouble()
        self._masks.clear()
        self._keeping.clear()
        self.ids = tuple(self._names)
