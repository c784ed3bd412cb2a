"""Leases: what we sent to each endpoint and have not yet seen end; and its load, by these and its scrapes.

Rules
* A lease is charged in the very call that decides. Between two scrapes it is the only thing that keeps a burst from
  herding onto one endpoint.
* The prefill part is released at the first token, the rest at the end. Cancel, loss, expiry and the departure of the
  endpoint release whatever is left. Each part is released once; a lease remembers what it charged, so nothing that
  changed in between can make the columns drift.
* A reservation keeps room for a request whose endpoint is still being asked for: a lease that is
  charged like any other. Who asks is not to be led by it (`without_reserved`), and who reserves ends it.
* Every lease expires: end-of-request signals can be lost (a gateway drops access-log entries while nobody listens).
* What scrapes do to the sums, and when leases are dropped because of them: see above `Account`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import accumulate, takewhile
from math import inf
from typing import Any

from msgspec import Struct

from fairlead.core.adapters import Cold
from fairlead.core.records import Forecast
from fairlead.core.request import Request
from fairlead.core.table import EndpointTable

# A lease: one request at one endpoint, from its charge to its end.


class Lease(Struct, eq=False, gc=False):
    """One request at one endpoint. Leases are the same only if they are one object."""

    request: Request
    slot: int
    #: Who held the slot when it was charged; slots are reused.
    endpoint_id: str
    charged_at: float
    #: Prompt tokens to compute, and tokens of KV held to the end (prompt + half the expected output).
    uncached_tokens: float
    kv_tokens: float
    #: Predicted cached prompt tokens, to compare with what the engine reports.
    hit_tokens: int
    #: Whole microseconds that computing them takes at the prior's speed (`fairlead.core.rates`).
    work_us: float = 0.0
    #: Half the expected output.
    growth_tokens: float = 0.0
    #: What was expected of it when it was charged.
    forecast: Forecast = Forecast()
    #: A reservation, or the prefill part of a pair: nobody's end, so no record comes of it.
    auxiliary: bool = False
    #: Nobody will see its first token: it is not streamed, or the gateway shows no responses.
    blind: bool = False
    #: That it is in the engine. Tokens are of all of them.
    sequences: int = 1
    #: It is on the books.
    held: bool = False
    #: Of a pair: the lease at the endpoint that computes the prompt for this one. Ends with this one's first token.
    prefill: "Lease | None" = None
    #: Clock seconds; below 0 = not seen.
    first_token_at: float = -1.0
    #: What was computed for others there until then, and what decoding added to a step (`Predictor.mark`). Where it is
    #: not seen: of its charge; `None` = nothing is learned of it.
    mark: tuple[float, float] | None = None
    #: Still before its first token.
    pending: bool = True
    #: Id of the endpoint that it was meant for and that could not be reached; empty = this is the one.
    unreached: str = ""
    #: Clock seconds when it was told to make way; below 0 = it was not.
    evicted_at: float = -1.0
    #: What exact prefix knowledge predicted of it; see `ExactKnowledge.sent`.
    predicted: Any = None
    #: Milliseconds that the request waited in a queue of ours before it was charged.
    queued_ms: float = 0.0
    #: The LoRA adapter that it needs; empty = none, or none that is known. What it met where it was not running.
    adapter: str = ""
    cold: Cold | None = None
    #: Under which others are told of it (`fairlead.core.reports`); 0 = they are not.
    number: int = 0
    #: Of `hit_tokens`, at most so many are cached there: what it shares beyond them was sent with a refused request.
    hit_at_most: float = inf


# One endpoint's load: what it said last, corrected by what we sent it and saw of it since.
#
# A scrape says W requests wait and R run, at some moment after it was sent. Of our leases O were charged before that;
# the later ones it cannot know. Three cases:
#
# * W + R ≥ O. The engine knows all of ours; what is above O belongs to other clients. The effective load is W and R
#   plus what we charged since.
# * W + R < O. The gauges are behind: they move only when an engine step ends, a request still in the tokeniser is in
#   none of them, and at the end of a batch they show nothing running for a whole step. Ours are there all the same, so
#   the ledger is the floor. Believing the gauge here is what sends a burst to one endpoint.
# * W + R < the leases that have had their first token seconds ago, again and again. Such requests cannot hide; their
#   ends got lost. The surplus no longer counts as active, and when the endpoint is idle for long the leases are
#   dropped.
#
# Between two scrapes only our own leases move, each exactly once and from where it was counted, so nothing drifts. The
# effective columns are always
#
#     queue  = own before their first token - those of them that run + others' waiting
#     active = own past their first token - lost ones + own that run before it + others' running
#
# "Those that run" are there because some requests have no first token before their end that anybody sees: they do not
# stream, or the gateway shows no responses (`Lease.blind`). An engine that says W = 0 with thirty of ours running says
# that none of them waits. The oldest of those run. Their prompts count as computed when that was forecast as well: an
# engine says from the first step of a long prompt on that it runs. Ends tell the rest. What is queued then began when
# the last of those was forecast to be done, or at the scrape if that shows somebody waiting.

#: Scrapes in a row before the engine's word is taken against the ledger's; a step's end can fake one or two.
PATIENCE_SCRAPES = 3
#: Seconds from a lease's charge after which a request past its first token cannot be missing in the gauges.
SETTLED = 2.0
#: Seconds that an endpoint must show itself idle before leases are dropped: ends may come late, in batches of a
#: gateway's access log (flushed every second). A first prefill is invisible while it lasts, so those wait longer.
IDLE_SECONDS = 5.0
IDLE_SECONDS_PENDING = 30.0
#: Leases of other schedulers are heard of so many seconds after their charge, mostly.
HEARD_S = 0.25


class Account:
    """Numbers are sequences, which engines call requests, or tokens where the name says so."""

    __slots__ = (
        "_idle_scrapes",
        "_idle_since",
        "_surpluses",
        "active",
        "blind",
        "blind_work",
        "early",
        "growth_tokens",
        "head_work",
        "kv_tokens",
        "leases",
        "lost",
        "others_running",
        "others_waiting",
        "pending",
        "pending_tokens",
        "pending_work",
        "prefill_since",
        "scraped",
        "waited",
    )

    def __init__(self) -> None:
        #: In the order of their charge; an ordered set.
        self.leases: dict[Lease, None] = {}
        #: Before and past their first token.
        self.pending = self.active = 0
        self.pending_tokens = 0.0
        self.pending_work = 0.0
        #: Leases of those pending: whose first token nobody sees.
        self.blind = 0
        #: Of all that were ever charged.
        self.blind_work = 0.0
        self.prefill_since = 0.0
        #: What the engine began to compute then.
        self.head_work = 0.0
        self.kv_tokens = 0.0
        self.growth_tokens = 0.0
        self.forget_scrapes()

    def forget_scrapes(self) -> None:
        """The scraped values are too old: from now on only our own leases count."""
        #: Own leases before their first token that the last scrape showed running. Never more than `pending`.
        self.early = 0.0
        #: Somebody waited there then.
        self.waited = False
        #: Own leases past their first token that the engine does not have.
        self.lost = 0.0
        self.others_waiting = 0.0
        self.others_running = 0.0
        self.scraped = float("-inf")
        self._surpluses: tuple[float, ...] = ()
        self._idle_scrapes = 0
        self._idle_since = 0.0

    def row(self) -> tuple[float, ...]:
        """What stands in the columns of `fairlead.core.table.LOAD`, in their order."""
        pending, active, early = self.pending, self.active, self.early
        running = max(active - self.lost, 0.0) if self.lost else active
        return (
            pending - early + self.others_waiting,
            running + early + self.others_running,
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
        """It is another scheduler's, and a scrape since its charge showed it as somebody else's."""
        if self.others_waiting >= lease.sequences:
            self.others_waiting -= lease.sequences
        elif self.others_running >= lease.sequences:
            self.others_running -= lease.sequences
            self.early += lease.sequences

    def release(self, lease: Lease, prefill_only: bool = False) -> None:
        """It is over, or its prefill is."""
        if lease.pending:
            lease.pending = False
            self.pending -= lease.sequences
            self.pending_tokens -= lease.uncached_tokens
            self.pending_work -= lease.work_us
            if lease.blind:
                self.blind -= 1
            if self.early and lease.charged_at < self.scraped:
                self.early = max(self.early - lease.sequences, 0.0)
            if not self.pending:  # sums of floats: no request has exactly no tokens
                self.pending_tokens = self.pending_work = 0.0
            elif lease.blind:  # it was computed by now, and the next one since it was expected to be
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
        """A copy in which these leases are over."""
        reduced = copy(self)
        reduced.leases = dict(self.leases)
        for lease in leases:
            if lease in self.leases:
                pending = lease.pending
                reduced.release(lease)
                lease.pending = pending
        return reduced

    def reconcile(self, started: float, waiting: float, running: float) -> list[Lease]:
        """Take a scrape sent at `started`. `waiting` and `running` are finite and not negative.

        Returns leases that the endpoint provably holds no more; they are still charged.
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
        """The oldest of those whose first token nobody sees, as many as ran, all or some of their sequences, at the
        scrape sent at `started`: from now on their prompts count as computed."""
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

    def _find_lost(self, started: float, active: int, seen: float) -> None:
        surplus = 0.0
        if active > seen:
            old = (lease for lease in self.leases if not lease.pending and lease.charged_at < started - SETTLED)
            settled = sum(lease.sequences for lease in old)
            surplus = max(settled - seen, 0.0)
        self._surpluses = (*self._surpluses[1 - PATIENCE_SCRAPES :], surplus)
        self.lost = min(self._surpluses) if len(self._surpluses) == PATIENCE_SCRAPES else 0.0

    def _dropped(self, started: float, seen: float) -> list[Lease]:
        if seen or not self.leases:
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
            if lease.charged_at < (min(self._idle_since, old) if lease.pending else self._idle_since)
        ]

    def validate(self) -> None:
        """Raise `AssertionError` unless the sums are those of the leases and no part is negative."""
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
    """All leases, and the columns they add up to."""

    def __init__(self, table: EndpointTable, ttl: float = 900.0) -> None:
        self._table = table
        self.ttl = ttl
        #: In the order of their charge; an ordered set, as is that of the reservations, which `Fleet.charge` adds to.
        self._leases: dict[Lease, None] = {}
        self.reserved: dict[Lease, None] = {}
        self._accounts: defaultdict[int, Account] = defaultdict(Account)
        #: By slot: adapters of leases before their first token, and how many.
        self.starting: dict[int, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """In the order of their charge."""
        return iter(self._leases)

    def charge(self, lease: Lease) -> None:
        """Take it on the books."""
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
        """Take another scheduler's lease on the books, which was charged a moment ago."""
        self.charge(lease)
        account = self._accounts[lease.slot]
        if lease.charged_at < account.scraped:
            account.was_shown(lease)
            self._write(lease.slot, account)

    def first_token(self, lease: Lease, now: float | None = None) -> bool:
        """The prefill is over, and that of the next one begins (`now`). False = that is known."""
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
        """It is over, one way or another: off the books, with its prefill part. False = it was off them already."""
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
        """It was charged, and needs an adapter."""
        names = self.starting.setdefault(lease.slot, {})
        names[lease.adapter] = names.get(lease.adapter, 0) + 1

    def _started(self, lease: Lease) -> None:
        names = self.starting[lease.slot]
        names[lease.adapter] -= 1
        if not names[lease.adapter]:
            del names[lease.adapter]
            if not names:
                del self.starting[lease.slot]

    def _release_prefill(self, part: Lease, now: float | None) -> None:
        """The part of a lease at another endpoint is over, if it is not already."""
        if not part.held:
            return
        account = self._accounts[part.slot]
        if now is not None:
            account.prefill_since, account.head_work = now, account.pending_work
        self.release(part)

    @contextmanager
    def without_reserved(self) -> Iterator[None]:
        """The table as it is without reservations, for as long as this lasts. Nothing may change meanwhile."""
        slots = {lease.slot for lease in self.reserved}
        for slot in slots:
            self._write(slot, self._accounts[slot].without(self.reserved))
        try:
            yield
        finally:
            for slot in slots:
                self._write(slot, self._accounts[slot])

    def blind_ms(self, slot: int) -> float:
        """All that was ever charged there to requests whose first token nobody sees, at the prior's speed."""
        return self.account(slot).blind_work * 1e-3

    def of_slot(self, slot: int) -> list[Lease]:
        account = self._accounts.get(slot)
        return list(account.leases) if account else []

    def abandon(self, slot: int) -> list[Lease]:
        """The endpoint left: its leases are released, in one go, and returned."""
        leases = self.of_slot(slot)
        self.starting.pop(slot, None)
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
        """Leases past their time, oldest first, up to `most`."""
        old: list[Lease] = []
        for lease in self._leases:
            if lease.charged_at + self.ttl > now or len(old) == most:
                break
            if not lease.auxiliary:
                old.append(lease)
        return old

    def reconcile(self, slot: int, started: float, waiting: float, running: float) -> list[Lease]:
        """Set the effective columns from a scrape sent at `started`. Returns leases that the endpoint cannot hold any
        more; they are on the books still.

        `waiting` and `running` are finite and not negative; `Fleet.sampled` sees to it.
        """
        account = self.account(slot)
        dropped = account.reconcile(started, waiting, running)
        for lease in account.begun(started):
            self.began(lease)
        self._write(slot, account)
        return dropped

    def began(self, lease: Lease) -> None:
        """A scrape shows that its prompt is computed, though nobody saw a first token."""
        if lease.adapter:
            self._started(lease)

    def own_accounting(self, slot: int) -> None:
        """No fresh scrape: the effective columns are what we know ourselves."""
        account = self.account(slot)
        account.forget_scrapes()
        self._write(slot, account)

    def _write(self, slot: int, account: Account) -> None:
        self._table.load[slot] = account.row()
        self._table.stale.add(slot)

    def account(self, slot: int) -> Account:
        """What the leases at one slot add up to."""
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
