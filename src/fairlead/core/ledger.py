"""Leases: the requests sent to each endpoint that have not ended; and the endpoint's load by leases and scrapes.

Rules
* A lease is charged in the same call that decides. Between two scrapes, only leases keep a burst of requests from
  going to one endpoint.
* The prefill part is released at the first token, the rest at the end. Cancel, loss, expiry and the departure of the
  endpoint release whatever is left. Each part is released once. A lease stores the amounts that it charged and releases
  the same amounts, so the columns cannot drift.
* A reservation keeps room for a request while a remote scheduler is asked about it. It is a lease, charged like any
  other. The remote scheduler does not see it (`without_reserved`). The code that reserved it also releases it.
* Every lease expires, because end signals can be lost: a gateway drops access-log entries while no scheduler reads
  them.
* How scrapes correct the load, and when they show that leases are over: see above `Account`.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import accumulate, takewhile
from math import inf
from typing import Any

from msgspec import Struct

from fairlead.core.adapters import Cold
from fairlead.core.apis import RESPONSES, RESPONSES_STORED
from fairlead.core.records import Forecast
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable

#: APIs whose streams begin before their first token.
_BEGIN_EARLY = frozenset((RESPONSES, RESPONSES_STORED))

# Leases.


class Lease(Struct, eq=False, gc=False):
    """One request at one endpoint, from its charge to its end. Compared by identity."""

    request: Request
    slot: int
    #: Id of the endpoint that had the slot when the lease was charged; slots are reused.
    endpoint_id: str
    #: Clock seconds.
    charged_at: float
    #: Prompt tokens to compute, and tokens of KV cache held to the end (prompt + half the expected output).
    uncached_tokens: float
    kv_tokens: float
    #: Prompt tokens predicted to be cached, to compare with what the engine reports.
    hit_tokens: int
    #: Whole microseconds that computing `uncached_tokens` takes at the prior's speed (`fairlead.core.rates`).
    work_us: float = 0.0
    #: Half the expected output tokens.
    growth_tokens: float = 0.0
    #: The forecast made when the lease was charged.
    forecast: Forecast = Forecast()
    #: A reservation, or the prefill part of a pair. No request ends with it, so it gets no record.
    auxiliary: bool = False
    #: The first token will not be seen: the request does not stream, or the gateway does not report responses.
    blind: bool = False
    #: Sequences that the request becomes in the engine. The token counts above are sums over them.
    sequences: int = 1
    #: The ledger contains it: charged and not released.
    held: bool = False
    #: In a pair: the lease at the endpoint that computes the prompt. Released at this lease's first token, or before,
    #: when the endpoint's page no longer shows the prompt.
    prefill: "Lease | None" = None
    #: Clock seconds; below 0 = not seen. In the prefill part of a pair: when a scrape showed its prompt computed.
    first_token_at: float = -1.0
    #: Whether other bytes of the response passed before the first token, such as SSE comments.
    preceded: bool = False
    #: `Predictor.mark` at the first token: the work done at the endpoint for other requests until then, and what
    #: decoding added to a step. For a blind lease: the mark at its charge. `None` = nothing is learned from the lease.
    mark: tuple[float, float] | None = None
    #: Before its first token.
    pending: bool = True
    #: Its endpoint seems to hang, and does not show it: see `Ledger.not_shown`.
    unshown: bool = False
    #: Id of the endpoint that was chosen first and did not answer; empty = the request did not move.
    unreached: str = ""
    #: Clock seconds when its eviction was requested; below 0 = it was not.
    evicted_at: float = -1.0
    #: What the exact index predicted for it; see `ExactKnowledge.sent`.
    predicted: Any = None
    #: Milliseconds before the charge: in Fairlead's queue, or while a scheduler in another process was asked.
    queued_ms: float = 0.0
    #: The LoRA adapter that it needs; empty = none, or an unknown one.
    adapter: str = ""
    #: The wait for `adapter`, if the adapter was not running at the endpoint; `None` = it was.
    cold: Cold | None = None
    #: The number that identifies the lease in messages to other schedulers (`fairlead.core.reports`); 0 = not reported.
    number: int = 0
    #: In the prefill part of a pair: `Picked.handover_ms`.
    handover_ms: float = -1.0
    #: Upper bound for `hit_tokens`: the rest of the shared prefix was sent with a request that the endpoint refused.
    hit_at_most: float = inf

    @property
    def computed(self) -> float:
        """Tokens of the prompt that are computed for the request, in a pair at the other endpoint."""
        return self.uncached_tokens if self.prefill is None else self.prefill.uncached_tokens

    @property
    def there_since(self) -> float:
        """Clock seconds since when the endpoint has the request; infinite while another computes its prompt."""
        part = self.prefill
        if part is None:
            return self.charged_at
        return inf if part.held else max(self.charged_at, part.first_token_at)

    def sent_after(self, queued_ms: float) -> None:
        self.queued_ms = queued_ms

    def ttft_ms(self, first_byte_ms: float) -> float:
        """Until the first token of a stream, whose first byte came `first_byte_ms` after the request; -1 = unknown."""
        if not self.preceded and self.request.api not in _BEGIN_EARLY:
            return first_byte_ms
        return (self.first_token_at - self.request.arrived) * 1e3 if self.first_token_at >= 0.0 else -1.0


# One endpoint's load: the last scrape, corrected by the leases charged and released since.
#
# A scrape says that W requests wait and R run, at some moment after it was sent. O of our leases were charged before it
# was sent; it cannot include the later ones. Three cases:
#
# * W + R ≥ O. The engine has all our requests; those above O belong to other clients. The effective load is W and R
#   plus what we charged since.
# * W + R < O. The gauges lag: they change only when an engine step ends, they omit requests that are still being
#   tokenised, and at the end of a batch they show nothing running for a whole step. Our requests are there anyway, so
#   the load is never below the ledger's. Believing the gauges here would send a burst to one endpoint.
# * W + R < the leases that had their first token seconds ago, in several scrapes in a row. The gauges cannot omit such
#   requests, so their end signals were lost. The surplus no longer counts as active, and when the endpoint stays idle
#   the leases are dropped.
#
# Between two scrapes only our own leases change the sums, each part once, and in the sum that counted it. So nothing
# drifts. The effective columns are always
#
#     queue  = own before their first token - those of them that run + others' waiting
#     active = own past their first token - lost ones + own that run before it + others' running
#
# "Those of them that run" exist because the first token of a blind lease (`Lease.blind`) is never seen. If an engine
# reports W = 0 and thirty of our requests running, none of them waits. The oldest blind leases are taken to be the ones
# that run. Their prompts count as computed only after their forecast TTFT too: an engine reports a long prompt as
# running from its first step on. The other blind leases count as computed when they end. The prefill of the next queued
# request is taken to begin when the last of those was forecast to be done, or at the scrape if it shows W ≥ 1.

#: Scrapes in a row after which the engine is believed against the ledger. One or two can be wrong at a step's end.
PATIENCE_SCRAPES = 3
#: Seconds from a lease's charge after which a request past its first token cannot be missing in the gauges.
SETTLED = 2.0
#: Seconds from a lease's charge after which the gauges show a request, unless a step has just ended.
SHOWN_S = 0.5
#: Seconds that an endpoint must report itself idle before leases are dropped: ends may come late, in batches of a
#: gateway's access log (flushed every second). A prefill on an idle engine shows in no gauge, so leases before their
#: first token wait longer.
IDLE_SECONDS = 5.0
IDLE_SECONDS_PENDING = 30.0
#: Seconds after their charge within which most leases of other schedulers are reported to us.
HEARD_S = 0.25


class Account(Struct, eq=False):
    """The load of one endpoint. Counts are in sequences, which engines call requests; in tokens where the name says so,
    and in microseconds at the prior's speed where it says work."""

    #: An ordered set, oldest charge first.
    leases: dict[Lease, None] = {}
    #: Own sequences before their first token, and past it.
    pending: int = 0
    active: int = 0
    pending_tokens: float = 0.0
    pending_work: float = 0.0
    #: Pending leases (not sequences) that are blind.
    blind: int = 0
    #: Work of all leases whose prefill part is over; never reduced.
    done_work: float = 0.0
    #: Work of all blind leases that were ever charged; never reduced.
    blind_work: float = 0.0
    #: Clock seconds when the engine began with the first pending lease.
    prefill_since: float = 0.0
    #: The pending work that the engine began with at `prefill_since`.
    head_work: float = 0.0
    kv_tokens: float = 0.0
    growth_tokens: float = 0.0
    #: Own sequences before their first token that the last scrape showed running. Never more than `pending`.
    early: float = 0.0
    #: The last scrape showed at least one request waiting.
    waited: bool = False
    #: Own sequences past their first token that the engine does not have: their end signals were lost.
    lost: float = 0.0
    others_waiting: float = 0.0
    others_running: float = 0.0
    scraped: float = -inf
    _surpluses: tuple[float, ...] = ()
    _idle_scrapes: int = 0
    _idle_since: float = 0.0

    def forget_scrapes(self) -> None:
        """Drop the scraped values, which are too old: from now on only our own leases count."""
        self.early = self.lost = self.others_waiting = self.others_running = 0.0
        self.waited = False
        self.scraped = -inf
        self._surpluses = ()
        self._idle_scrapes = 0
        self._idle_since = 0.0

    def row(self) -> tuple[float, ...]:
        """Return the endpoint's values of the columns `fairlead.core.table.LOAD`, in their order."""
        pending, active, early = self.pending, self.active, self.early
        return (
            pending - early + self.others_waiting,
            (max(active - self.lost, 0.0) if self.lost else active) + early + self.others_running,
            pending + active,
            pending,
            self.pending_tokens,
            self.pending_tokens,
            self.pending_work * 1e-3,
            self.prefill_since * 1e3,
            self.kv_tokens,
            self.growth_tokens,
            inf if self.blind else min(self.head_work, self.pending_work) * 1e-3,
        )

    def was_shown(self, lease: Lease) -> None:
        """Recount a lease of another scheduler that a scrape since its charge counted as another client's request."""
        if self.others_waiting >= lease.sequences:
            self.others_waiting -= lease.sequences
        elif self.others_running >= lease.sequences:
            self.others_running -= lease.sequences
            self.early += lease.sequences

    def release(self, lease: Lease, prefill_only: bool = False) -> None:
        """Subtract a lease that is over, or only its prefill part."""
        if lease.pending:
            lease.pending = False
            self.pending -= lease.sequences
            self.pending_tokens -= lease.uncached_tokens
            self.pending_work -= lease.work_us
            self.done_work += lease.work_us
            if lease.blind:
                self.blind -= 1
            if self.early and lease.charged_at < self.scraped:
                self.early = max(self.early - lease.sequences, 0.0)
            if not self.pending:  # sums of floats: no request has exactly no tokens
                self.pending_tokens = self.pending_work = 0.0
            elif lease.blind:  # its prefill is taken to have ended when forecast, and the next one to begin then
                self.prefill_since = max(self.prefill_since, lease.charged_at + 1e-3 * lease.forecast.ttft_ms)
        else:
            self.active -= lease.sequences
        if prefill_only:
            self.active += lease.sequences
        else:
            del self.leases[lease]
            self.kv_tokens -= lease.kv_tokens
            self.growth_tokens -= lease.growth_tokens
            if not self.leases:
                self.kv_tokens = self.growth_tokens = 0.0

    def without(self, leases: Iterable[Lease]) -> "Account":
        """Return a copy of the account in which these leases of it are released."""
        reduced = copy(self)
        reduced.leases = dict(self.leases)
        for lease in leases:
            pending = lease.pending
            reduced.release(lease)
            lease.pending = pending
        return reduced

    def reconcile(self, started: float, waiting: float, running: float) -> list[Lease]:
        """Apply a scrape sent at `started` (clock seconds). `waiting` and `running` are finite and not negative.

        Return the leases that the endpoint provably no longer has; they are still charged.
        """
        newest = takewhile(lambda lease: lease.charged_at >= started - HEARD_S, reversed(self.leases))
        later = [lease for lease in newest if lease.charged_at >= started]
        later_pending = sum(lease.sequences for lease in later if lease.pending)
        pending = self.pending - later_pending
        active = self.active - (sum(lease.sequences for lease in later) - later_pending)
        self.scraped = started
        self.waited = waiting >= 1.0
        self.early = min(max(pending - waiting, 0.0), max(running - active, 0.0))
        foreign = max(waiting + running - pending - active, 0.0)
        self.others_waiting = min(max(waiting - (pending - self.early), 0.0), foreign)
        self.others_running = foreign - self.others_waiting
        self._find_lost(started, active, waiting + running)
        return self._dropped(started, waiting + running)

    def begun(self, started: float) -> list[Lease]:
        """Release the prefill part of the blind leases that ran at the scrape sent at `started`, and return them.

        These are the oldest pending leases, as many as `early`, if their forecast TTFT has passed as well."""
        if not self.blind:
            return []
        waited = [lease for lease in self.leases if lease.pending and lease.charged_at < started]
        before = accumulate((lease.sequences for lease in waited), initial=0)
        ran = [lease for lease, first in zip(waited, before, strict=False) if lease.blind and first < int(self.early)]
        begun = [lease for lease in ran if lease.charged_at + 1e-3 * lease.forecast.ttft_ms <= started]
        for lease in begun:
            self.release(lease, prefill_only=True)
        if self.waited:
            self.prefill_since = max(self.prefill_since, started)
        return begun

    def handed_over(self, started: float, seen: float, reserved: Container[Lease], moved: float) -> list[Lease]:
        """Return the prefill parts of pairs that the scrape sent at `started` no longer shows: the oldest, as many as
        it shows fewer requests (`seen`) than were charged, if their forecast TTFT has passed too, and the endpoint has
        made progress (last at `moved`) since. Their decoders may need minutes until the first token or the end is seen.
        `reserved`: leases that were not sent."""
        charged = [lease for lease in self.leases if lease.charged_at < started - SHOWN_S and lease not in reserved]
        gone, over = [], sum(lease.sequences for lease in charged) - seen
        for lease in charged:
            computed = lease.auxiliary and lease.charged_at + 1e-3 * lease.forecast.ttft_ms <= started
            computed = computed and lease.charged_at < moved and not lease.unshown
            own = lease.request.id >= 0  # others' parts end when their scheduler reports it
            if computed and own and lease.sequences <= over:
                gone.append(lease)
                over -= lease.sequences
        return gone

    def _find_lost(self, started: float, active: int, seen: float) -> None:
        surplus = 0.0
        if active > seen:
            old = (lease for lease in self.leases if not lease.pending and lease.charged_at < started - SETTLED)
            settled = sum(lease.sequences for lease in old)
            surplus = max(settled - seen, 0.0)
        self._surpluses = (*self._surpluses[1 - PATIENCE_SCRAPES :], surplus)
        self.lost = min(self._surpluses) if len(self._surpluses) == PATIENCE_SCRAPES else 0.0

    def _dropped(self, started: float, seen: float) -> list[Lease]:
        if seen or all(lease.there_since == inf for lease in self.leases):
            self._idle_scrapes = 0
            return []
        if not self._idle_scrapes:
            self._idle_since = started
        self._idle_scrapes += 1
        if self._idle_scrapes < PATIENCE_SCRAPES or started - self._idle_since < IDLE_SECONDS:
            return []
        old = started - IDLE_SECONDS_PENDING
        return [
            lease
            for lease in self.leases
            if lease.there_since < (old if lease.pending or lease.unshown else self._idle_since)
        ]

    def validate(self) -> None:
        """Raise `AssertionError` unless the sums equal those of the leases and no value is negative."""
        pending = [lease for lease in self.leases if lease.pending]
        assert all(lease.held for lease in self.leases)
        assert self.pending == sum(lease.sequences for lease in pending)
        assert self.active == sum(lease.sequences for lease in self.leases) - self.pending
        assert abs(self.pending_tokens - sum(lease.uncached_tokens for lease in pending)) < 1e-3
        assert self.blind == sum(lease.blind for lease in pending)
        queue, active, _, _, _, queued_tokens, queued_ms, *_ = self.row()
        assert min(queue, active, queued_tokens, queued_ms) >= 0
        assert self.pending_work == sum(lease.work_us for lease in pending)
        assert abs(self.kv_tokens - sum(lease.kv_tokens for lease in self.leases)) < 1e-3
        assert abs(self.growth_tokens - sum(lease.growth_tokens for lease in self.leases)) < 1e-3
        assert 0 <= self.early <= self.pending
        assert min(self.lost, self.others_waiting, self.others_running) >= 0


class Ledger:
    """All leases. Keeps the load columns of the table up to date."""

    def __init__(self, table: EndpointTable, ttl: float = 900.0) -> None:
        self._table = table
        self.ttl = ttl
        #: Ordered sets, oldest charge first. `Fleet.charge` adds to `reserved`.
        self._leases: dict[Lease, None] = {}
        self.reserved: dict[Lease, None] = {}
        self._accounts: defaultdict[int, Account] = defaultdict(Account)
        #: By slot and adapter name: number of leases before their first token. Slots at which it may have changed since
        #: `core.adapters` looked.
        self.starting: dict[int, dict[str, int]] = {}
        self.starting_at: set[int] = set()
        #: Slots that computed prompts for others. `Fleet.charge` adds to them.
        self.prefilling: set[int] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """In the order of their charge."""
        return iter(self._leases)

    def charge(self, lease: Lease) -> None:
        assert not lease.held, "a lease is charged once"
        lease.held = True
        self._leases[lease] = None
        slot = lease.slot
        account = self._accounts[slot]
        account.leases[lease] = None
        if not account.pending:
            account.prefill_since = lease.charged_at
            account.head_work = lease.work_us
        account.pending += lease.sequences
        account.pending_tokens += lease.uncached_tokens
        account.pending_work += lease.work_us
        if lease.blind:
            account.blind += 1
            account.blind_work += lease.work_us
        account.kv_tokens += lease.kv_tokens
        account.growth_tokens += lease.growth_tokens
        self._table.load[slot] = account.row()
        self._table.stale.add(slot)

    def charge_late(self, lease: Lease) -> None:
        """Add a lease that another scheduler charged a moment ago."""
        self.charge(lease)
        account = self._accounts[lease.slot]
        if lease.charged_at < account.scraped:
            account.was_shown(lease)
            self._write(lease.slot, account)

    def first_token(self, lease: Lease, now: float | None = None) -> bool:
        """Release the prefill part of a lease. `now`: clock seconds when the prefill of the next lease begins; `None` =
        unknown. Return False if the lease or its prefill part was released already."""
        if not (lease.held and lease.pending):
            return False
        account = self._accounts[lease.slot]
        if lease.adapter:
            self._started(lease)
        account.release(lease, prefill_only=True)
        if lease.prefill is not None:
            self._release_prefill(lease.prefill, now)
        if now is not None and lease.request.stream:
            account.prefill_since, account.head_work = now, account.pending_work
        self._write(lease.slot, account)
        return True

    def release(self, lease: Lease) -> bool:
        """Remove a lease and its load, with its prefill part. Return False if it was removed already."""
        if not lease.held:
            return False
        lease.held = False
        del self._leases[lease]
        if lease.auxiliary:
            self.reserved.pop(lease, None)
        slot = lease.slot
        account = self._accounts[slot]
        if lease.adapter and lease.pending:
            self._started(lease)
        account.release(lease)
        self._table.load[slot] = account.row()
        self._table.stale.add(slot)
        if lease.prefill is not None:
            self._release_prefill(lease.prefill, None)
        return True

    def starts(self, lease: Lease) -> None:
        """Count a charged lease that needs an adapter."""
        self.starting_at.add(lease.slot)
        names = self.starting.setdefault(lease.slot, {})
        names[lease.adapter] = names.get(lease.adapter, 0) + 1

    def _started(self, lease: Lease) -> None:
        self.starting_at.add(lease.slot)
        names = self.starting[lease.slot]
        names[lease.adapter] -= 1
        if not names[lease.adapter]:
            del names[lease.adapter]
            if not names:
                del self.starting[lease.slot]

    def _release_prefill(self, part: Lease, now: float | None) -> None:
        """Release the prefill part of a pair, at another endpoint, unless it is released already."""
        if not part.held:
            return
        self.release(part)
        if now is not None:
            account = self._accounts[part.slot]
            account.prefill_since, account.head_work = now, account.pending_work
            self._write(part.slot, account)

    @contextmanager
    def without_reserved(self) -> Iterator[None]:
        """Take the reservations out of the table while the context lasts. Nothing else may change meanwhile."""
        slots = defaultdict[int, list[Lease]](list)
        for lease in self.reserved:
            slots[lease.slot].append(lease)
        for slot, leases in slots.items():
            self._write(slot, self._accounts[slot].without(leases))
        try:
            yield
        finally:
            for slot in slots:
                self._write(slot, self._accounts[slot])

    def blind_ms(self, slot: int) -> float:
        """Return the milliseconds of prefill work of all blind leases ever charged there, at the prior's speed."""
        return self.account(slot).blind_work * 1e-3

    def of_slot(self, slot: int) -> list[Lease]:
        account = self._accounts.get(slot)
        return list(account.leases) if account else []

    def abandon(self, slot: int) -> list[Lease]:
        """Release all leases of an endpoint that left, and return them."""
        leases = self.of_slot(slot)
        if self.starting.pop(slot, None):
            self.starting_at.add(slot)
        for lease in leases:
            if lease.prefill is not None:
                self._release_prefill(lease.prefill, None)
        for lease in self._accounts.pop(slot, Account()).leases:
            lease.held = False
            del self._leases[lease]
            self.reserved.pop(lease, None)
        self._write(slot, Account())
        return leases

    def expired(self, now: float, most: float = inf) -> list[Lease]:
        """Return at most `most` leases older than `ttl`, oldest first, without auxiliary ones."""
        old: list[Lease] = []
        for lease in self._leases:
            if lease.charged_at + self.ttl > now or len(old) == most:
                break
            if not lease.auxiliary:
                old.append(lease)
        return old

    def reconcile(self, slot: int, started: float, waiting: float, running: float, moved: float = inf) -> list[Lease]:
        """Set the effective columns from a scrape sent at `started`. Return the leases that the endpoint provably no
        longer has; they are still charged. `moved`: clock seconds of its last progress; infinite = not known.

        `waiting` and `running` are finite and not negative; `Fleet.sampled` ensures it.
        """
        account = self.account(slot)
        if slot in self.prefilling:
            for lease in account.handed_over(started, waiting + running, self.reserved, moved):
                lease.first_token_at = started
                self.release(lease)
        dropped = account.reconcile(started, waiting, running)
        for lease in account.begun(started):
            self.began(lease)
        self._write(slot, account)
        return dropped

    def began(self, lease: Lease) -> None:
        """Record that a scrape showed the prompt of a blind lease computed."""
        if lease.adapter:
            self._started(lease)
        if lease.prefill is not None:
            self._release_prefill(lease.prefill, None)

    def not_shown(self, lease: Lease) -> None:
        """Record that an endpoint that seems to hang may have a lease that it does not show. It counts as active, and
        so as lost, but no longer as queued: another request may test the endpoint."""
        if not lease.unshown:
            lease.unshown = True
            Ledger.first_token(self, lease)  # no progress of which others are told

    def own_accounting(self, slot: int) -> None:
        """Set the effective columns from our own leases only, because the last scrape is too old."""
        account = self.account(slot)
        account.forget_scrapes()
        self._write(slot, account)

    def _write(self, slot: int, account: Account) -> None:
        self._table.load[slot] = account.row()
        self._table.stale.add(slot)

    def account(self, slot: int) -> Account:
        """Return the account of one slot; an empty one is created if there is none."""
        return self._accounts[slot]

    def validate(self) -> None:
        """Raise `AssertionError` unless every column is exactly the sum of the leases."""
        table = self._table
        empty = Account()
        for slot in range(len(table)):
            account = self._accounts.get(slot, empty)
            account.validate()
            assert table.endpoints[slot] is not None or not account.leases
            assert table.load[slot].tolist() == list(account.row())
        held = [lease for account in self._accounts.values() for lease in account.leases]
        starting = Counter((lease.slot, lease.adapter) for lease in held if lease.pending and lease.adapter)
        assert starting == {(slot, name): n for slot, names in self.starting.items() for name, n in names.items()}
        assert set(held) == set(self._leases) and len(held) == len(self._leases)
        assert all(lease.auxiliary and lease.held for lease in self.reserved)
