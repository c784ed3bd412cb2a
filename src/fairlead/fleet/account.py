"""One endpoint's load: what it said last, corrected by what we sent it and saw of it since.

A scrape says W requests wait and R run, at some moment after it was sent. Of our leases O were charged before that; the
later ones it cannot know. Three cases:

* W + R ≥ O. The engine knows all of ours; what is above O belongs to other clients. The effective load is W and R plus
  what we charged since.
* W + R < O. The gauges are behind: they move only when an engine step ends, a request still in the tokeniser is in
  none of them, and at the end of a batch they show nothing running for a whole step. Ours are there all the same, so
  the ledger is the floor. Believing the gauge here is what sends a burst to one endpoint.
* W + R < the leases that have had their first token seconds ago, again and again. Such requests cannot hide; their ends
  got lost. The surplus no longer counts as active, and when the endpoint is idle for long the leases are dropped.

Between two scrapes only our own leases move, each exactly once and from where it was counted, so nothing drifts. The
effective columns are always

    queue  = own before their first token - those of them that run + others' waiting
    active = own past their first token - lost ones + own that run before it + others' running

"Those that run" are there because a request that does not stream has no first token before its end: an engine that
says W = 0 with thirty of ours running says that none of them waits.
"""

from collections.abc import Set
from copy import copy
from itertools import takewhile

from fairlead.fleet.lease import Lease

#: Scrapes in a row before the engine's word is taken against the ledger's; a step's end can fake one or two.
PATIENCE_SCRAPES = 3
#: Seconds from a lease's charge after which a request past its first token cannot be missing in the gauges.
SETTLED = 2.0
#: Seconds that an endpoint must show itself idle before leases are dropped: ends may come late, in batches of a
#: gateway's access log (flushed every second). A first prefill is invisible while it lasts, so those wait longer.
IDLE_SECONDS = 5.0
IDLE_SECONDS_PENDING = 30.0


class Account:
    """Numbers are requests, or tokens where the name says so."""

    __slots__ = (
        "_idle_scrapes",
        "_idle_since",
        "_scraped",
        "_surpluses",
        "blind",
        "blind_tokens",
        "blind_work",
        "early",
        "growth_tokens",
        "kv_tokens",
        "leases",
        "lost",
        "others_running",
        "others_waiting",
        "pending",
        "pending_tokens",
        "pending_work",
        "prefill_since",
    )

    def __init__(self) -> None:
        #: By request id, in the order of their charge.
        self.leases: dict[int, Lease] = {}
        self.pending = 0
        self.pending_tokens = 0.0
        self.pending_work = 0.0
        #: Of those pending: answers that do not stream, whose first token nobody sees.
        self.blind = 0
        self.blind_tokens = 0.0
        self.blind_work = 0.0
        self.prefill_since = 0.0
        self.kv_tokens = 0.0
        self.growth_tokens = 0.0
        self.forget_scrapes()

    def forget_scrapes(self) -> None:
        """The scraped values are too old: from now on only our own leases count."""
        #: Own leases before their first token that the last scrape showed running. Never more than `pending`.
        self.early = 0.0
        #: Own leases past their first token that the engine does not have.
        self.lost = 0.0
        self.others_waiting = 0.0
        self.others_running = 0.0
        self._scraped = float("-inf")
        self._surpluses: tuple[float, ...] = ()
        self._idle_scrapes = 0
        self._idle_since = 0.0

    @property
    def queue(self) -> float:
        return self.pending - self.early + self.others_waiting

    @property
    def active(self) -> float:
        own = len(self.leases) - self.pending
        return max(own - self.lost, 0.0) + self.early + self.others_running

    def queued(self) -> tuple[float, float]:
        """Tokens, and microseconds at the prior's speed, still to be computed. Blind ones that run are past it."""
        if not self.blind or not self.early:
            return self.pending_tokens, self.pending_work
        share = min(self.early / self.blind, 1.0)
        return self.pending_tokens - share * self.blind_tokens, max(self.pending_work - share * self.blind_work, 0.0)

    def charge(self, lease: Lease) -> None:
        self.leases[lease.request.id] = lease
        if not self.pending:
            self.prefill_since = lease.charged_at
        self.pending += 1
        self.pending_tokens += lease.uncached_tokens
        self.pending_work += lease.work_us
        if not lease.request.stream:
            self.blind += 1
            self.blind_tokens += lease.uncached_tokens
            self.blind_work += lease.work_us
        self.kv_tokens += lease.kv_tokens
        self.growth_tokens += lease.growth_tokens

    def end_prefill(self, lease: Lease) -> None:
        lease.pending = False
        self.pending -= 1
        self.pending_tokens -= lease.uncached_tokens
        self.pending_work -= lease.work_us
        if not lease.request.stream:
            self.blind -= 1
            self.blind_tokens -= lease.uncached_tokens
            self.blind_work -= lease.work_us
        if lease.charged_at < self._scraped and self.early:
            self.early = max(self.early - 1.0, 0.0)
        if not self.pending:  # sums of floats: no request has exactly no tokens
            self.pending_tokens = self.pending_work = 0.0

    def release(self, lease: Lease) -> None:
        del self.leases[lease.request.id]
        if lease.pending:
            self.end_prefill(lease)
        self.kv_tokens -= lease.kv_tokens
        self.growth_tokens -= lease.growth_tokens
        if not self.leases:
            self.kv_tokens = self.growth_tokens = 0.0

    def without(self, numbers: Set[int]) -> "Account":
        """A copy in which the leases of these ids are over."""
        other = copy(self)
        other.leases = dict(self.leases)
        for number in numbers & self.leases.keys():
            other.release(copy(self.leases[number]))
        return other

    def reconcile(self, started: float, waiting: float, running: float) -> list[int]:
        """Take a scrape sent at `started`. `waiting` and `running` are finite and not negative.

        Returns ids of leases that the endpoint provably holds no more; they are still charged.
        """
        later = list(takewhile(lambda lease: lease.charged_at >= started, reversed(self.leases.values())))
        later_pending = sum(lease.pending for lease in later)
        pending = self.pending - later_pending
        active = len(self.leases) - self.pending - (len(later) - later_pending)
        self._scraped = started
        self.early = min(max(pending - waiting, 0.0), max(running - active, 0.0))
        others = max(waiting + running - pending - active, 0.0)
        self.others_waiting = min(max(waiting - (pending - self.early), 0.0), others)
        self.others_running = others - self.others_waiting
        self._find_lost(started, active, waiting + running)
        return self._dropped(started, waiting + running)

    def _find_lost(self, started: float, active: int, seen: float) -> None:
        surplus = 0.0
        if active > seen:
            settled = sum(not lease.pending and lease.charged_at < started - SETTLED for lease in self.leases.values())
            surplus = max(settled - seen, 0.0)
        self._surpluses = (*self._surpluses[1 - PATIENCE_SCRAPES :], surplus)
        self.lost = min(self._surpluses) if len(self._surpluses) == PATIENCE_SCRAPES else 0.0

    def _dropped(self, started: float, seen: float) -> list[int]:
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
            number
            for number, lease in self.leases.items()
            if lease.charged_at < (min(self._idle_since, old) if lease.pending else self._idle_since)
        ]

    def validate(self) -> None:
        """Raise `AssertionError` unless the sums are those of the leases and no part is negative."""
        pending = [lease for lease in self.leases.values() if lease.pending]
        assert self.pending == len(pending)
        assert abs(self.pending_tokens - sum(lease.uncached_tokens for lease in pending)) < 1e-3
        assert self.blind == sum(not lease.request.stream for lease in pending)
        assert min(self.queued()) >= 0
        assert self.pending_work == sum(lease.work_us for lease in pending)
        assert abs(self.kv_tokens - sum(lease.kv_tokens for lease in self.leases.values())) < 1e-3
        assert abs(self.growth_tokens - sum(lease.growth_tokens for lease in self.leases.values())) < 1e-3
        assert 0 <= self.early <= self.pending
        assert min(self.lost, self.others_waiting, self.others_running) >= 0
