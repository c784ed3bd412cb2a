"""Endpoints that hang: there is work, and nothing of it moves, although the metrics page may still answer.

Theory
* Progress of an endpoint is: a first token, an answer that ends well, or a scrape with other counters of tokens
  (generated, or looked up in the cache) or more memory in use than the last one; of an engine that does
  not count tokens at each step, also one with less memory in use, other requests that run or fewer that wait. Neither
  more that wait nor, where tokens are so counted, fewer that run: fronts take requests, and give up those whose clients
  left, while the engine hangs.
* Silence is the time since the last progress, or since there is work: requests that only peers told of, and that the
  page does not show, are none. Where the page shows no work, it is no longer than the oldest request is there, for
  refused ones come and go without progress. What clients gave up lately is no excuse.
* It is plausible for as long as the longest of

      PLAUSIBLE_S                                whatever the engine is
      PACED × the longest silence that ended     of the last minute or so: its own recent pace. One silence teaches at
                                                 most twice what was known, so that a hang teaches little
      forecast × band of the largest prompt      that waits for its first token: computing it alone, as learned.
                                                 A prompt that takes 30 s is no hang

  and where no page tells tokens or memory at each step, or it stands still while first tokens come, until the first
  answer that is due is overdue (`overdue_s`).
* An endpoint is *suspect* when its silence is longer than that, and *out* after `OUT` times that. With the floors a
  scrape every 0.2 s means: suspect after 1.4 s, out after 3.2 s. Suspect endpoints get requests only if no other can
  serve them, those that are out only if all others are out too (`plugins.filters.availability.Health`).
* It recovers at the first progress. Where nothing is left that could move, one request tries it every `RETRIED_S`.

A request is *overdue* where `Route.hedge_after_ms` lets the gateway send it to the fallback endpoint too:

      stream   OVERDUE × `Forecast.known_high_ms`, at least `OVERDUE_S`
      other    that, and twice what the most tokens that it may generate would take (without a limit, ten times the
               expected ones), at least `OVERDUE_WHOLE_S`; above `NEVER_S` it is never

Hedges that were in vain (the first endpoint answered after all, or did not hang) lengthen all of these by a quarter,
each other request shortens them again: about one request in fifty is hedged in vain at most, also where forecasts are
bad or the pool is overloaded.
"""

from math import inf

from msgspec import Struct

from fairlead.core.endpoint import Sample
from fairlead.core.ledger import Lease, Ledger
from fairlead.core.predictor import Predictor
from fairlead.core.records import StallRecord
from fairlead.core.table import EndpointTable

#: Levels of `EndpointTable.suspicion`.
WELL, SUSPECT, OUT_OF_USE = 0.0, 1.0, 2.0
LEVELS = ("well", "suspect", "out")

PLAUSIBLE_S = 1.2
PACED = 2.0
OUT = 2.5
RETRIED_S = 5.0
#: The pace of an endpoint that is not known, in seconds, and how long it takes to forget half of it.
PACE_S = 0.5
PACE_HALVES_S = 30.0
#: Bounds of the band that is taken for how far off a forecast may be.
BAND = (1.0, 4.0)
#: A page that does not know of a first token so long after it, in seconds, stands still.
SEEN_S = 0.3
#: A page of so many seconds ago still says that the endpoint tells tokens at each step.
TELLS_S = 10.0
#: Seconds between two looks at all endpoints.
LOOK_S = 0.2

#: Seconds per millisecond.
OVERDUE = 3.0 * 1e-3
OVERDUE_S, OVERDUE_WHOLE_S, NEVER_S = 4.0, 10.0, 600.0
#: What a hedge in vain and any other request make of the factor on it, and the most that it becomes.
IN_VAIN, WORTH_IT, MOST = 1.25, 0.995, 16.0


class _Watched(Struct):
    """One endpoint. Clock seconds."""

    #: The last progress, or look without work.
    since: float = -inf
    #: The longest silence of late that ended, in seconds, and when it did.
    pace: float = PACE_S
    paced_at: float = -inf
    #: Since when there is nothing that could move, while it is suspect; inf = there is.
    empty_since: float = inf
    #: When it was out for the last time: what was sent there before teaches nothing about its speed.
    out_until: float = -inf
    #: The first token that came since its page last changed; inf = none.
    unseen_since: float = inf
    #: The page does not change although first tokens come: its silence says nothing.
    still: bool = False
    #: When a client gave up a request that had no token yet for the last time.
    given_up_at: float = -inf


class Stalls:
    """See the module's rules. Writes the table's column `suspicion`, and nothing else."""

    def __init__(self, table: EndpointTable, ledger: Ledger, predictor: Predictor) -> None:
        self._table = table
        self._ledger = ledger
        self._predictor = predictor
        self._watched: list[_Watched] = []
        #: Clock seconds of the next look that is worth it.
        self.due = -inf
        #: What changed, until somebody takes it; always the same list.
        self.changes: list[StallRecord] = []
        #: Lengthens what is overdue, 1 to `MOST`.
        self.caution = 1.0
        #: When any endpoint was out for the last time.
        self._any_out = -inf
        #: Slots that were suspect, have nothing left that could move, and wait for a request that tries them.
        self.retried: set[int] = set()

    def reset(self, slot: int) -> None:
        """A new endpoint stands at `slot`."""
        while slot >= len(self._watched):
            self._watched.append(_Watched())
        self._watched[slot] = _Watched()
        self.retried.discard(slot)

    def take_changes(self) -> list[StallRecord]:
        """Those since the last call."""
        changes = self.changes.copy()
        self.changes.clear()
        return changes

    # ---- progress ----

    def moved(self, slot: int, now: float) -> None:
        """Something of its work moves. On every request's way: one that comes soon after another costs little."""
        watched = self._watched[slot]
        silent = now - watched.since
        watched.since = now
        if silent > PACE_S:
            pace = self._pace(watched, now)
            if pace < silent < inf:
                watched.pace, watched.paced_at = min(silent, 2.0 * pace), now
        if self._table.troubled and self._table.suspicion[slot]:
            self._judged(slot, WELL, silent, now)

    def first_token(self, slot: int, now: float) -> None:
        self.moved(slot, now)
        watched = self._watched[slot]
        if watched.unseen_since == inf:
            watched.unseen_since = now

    def sampled(self, slot: int, before: Sample | None, sample: Sample, now: float) -> None:
        """A scrape came; `before` is the one before it."""
        if before is None:
            return
        moved = sample.generation_tokens != before.generation_tokens or sample.prefix_queries != before.prefix_queries
        moved = moved or (sample.kv_usage or 0.0) > (before.kv_usage or 0.0)
        if not (moved or (sample.each_step and sample.generation_tokens is not None)):
            moved = sample.kv_usage != before.kv_usage or sample.running != before.running
            moved = moved or (sample.waiting or 0.0) < (before.waiting or 0.0)
        watched = self._watched[slot]
        if moved:
            self.moved(slot, now)
            watched.unseen_since, watched.still = inf, False
        elif now - watched.unseen_since > SEEN_S:
            watched.still = True

    def charged(self, slot: int, now: float) -> None:
        """A request goes to one of `retried`: it is enough until something moves."""
        if slot in self.retried:
            self.retried.discard(slot)
            self._watched[slot].since = now
            self._judged(slot, SUSPECT, 0.0, now)

    def given_up(self, slot: int, now: float) -> None:
        """A client left before the first token: that does not excuse the endpoint's silence."""
        self._watched[slot].given_up_at = now

    # ---- silence ----

    def look(self, now: float) -> None:
        """At all endpoints. To be called when `due`, before a decision and after a scrape."""
        self.due = now + LOOK_S
        table = self._table
        for slot, work in enumerate((table.queue + table.active).tolist()):
            watched = self._watched[slot]
            silent = now - watched.since
            if work <= 0.0 or silent == inf or (silent > PLAUSIBLE_S and self._only_told(slot)):
                self._idle(slot, watched, now, now)
            elif silent > PLAUSIBLE_S:
                given_up = watched.given_up_at > now - PLAUSIBLE_S
                begun = watched.since if given_up else max(watched.since, self._begun(slot))
                if now - begun > PLAUSIBLE_S:
                    watched.since = begun
                    self._judge(slot, watched, now)
                else:
                    self._idle(slot, watched, begun, now)

    def _idle(self, slot: int, watched: _Watched, since: float, now: float) -> None:
        """Nothing is there that could have moved before `since`."""
        watched.since = since
        if self._table.suspicion[slot]:
            watched.empty_since = min(watched.empty_since, now)
            if now - watched.empty_since > RETRIED_S:
                self._judged(slot, WELL, 0.0, now)
                self.retried.add(slot)

    def _begun(self, slot: int) -> float:
        """Since when the oldest request is there, if the page shows no others. Requests that a server refuses come and
        go without progress: they are short, and no sign that it hangs."""
        table = self._table
        if table.waiting[slot] + table.running[slot] > 0.0:
            return -inf
        return min((lease.charged_at for lease in self._ledger.of_slot(slot)), default=-inf)

    def _only_told(self, slot: int) -> bool:
        """Peers told of all its work, and a later page shows none: who died cannot tell of an end."""
        table, leases = self._table, self._ledger.of_slot(slot)
        newest = max((lease.charged_at if lease.request.id < 0 else inf for lease in leases), default=inf)
        return bool(table.sampled_at[slot] > newest + SEEN_S and table.waiting[slot] + table.running[slot] <= 0.0)

    def silence(self, slot: int, now: float) -> float:
        """Seconds without progress, as of the last look; 0 = nothing is there that could move."""
        since = self._watched[slot].since
        return max(now - since, 0.0) if since > -inf else 0.0

    def was_out(self, lease: Lease) -> bool:
        """Its endpoint hung while it was there."""
        sent = lease.charged_at
        return sent <= self._any_out and sent <= self._watched[lease.slot].out_until

    def _judge(self, slot: int, watched: _Watched, now: float) -> None:
        watched.empty_since = inf
        silent = now - watched.since
        known = self._table.suspicion[slot]
        if known == OUT_OF_USE:
            watched.out_until = self._any_out = now
            return
        plausible = self._plausible(slot, watched, now)
        level = OUT_OF_USE if silent > OUT * plausible else SUSPECT if silent > plausible else WELL
        if level > known:
            self._judged(slot, level, silent, now, plausible)

    def _plausible(self, slot: int, watched: _Watched, now: float) -> float:
        """Seconds, see the module's rules."""
        plausible = max(PLAUSIBLE_S, PACED * self._pace(watched, now))
        pending = [lease for lease in self._ledger.of_slot(slot) if lease.pending or lease.blind]
        if pending:
            largest = max(pending, key=lambda lease: lease.work_us)
            forecast = largest.forecast
            band = forecast.known_high_ms / forecast.model_ttft_ms if forecast.model_ttft_ms > 0.0 else 1.0
            alone_ms = largest.work_us * 1e-3 * float(self._predictor.rates.prefill[slot]) + forecast.model_tpot_ms
            plausible = max(plausible, 1e-3 * alone_ms * min(max(band, BAND[0]), BAND[1]))
        sample, fresh = self._table.samples[slot], now - float(self._table.sampled_at[slot]) < TELLS_S
        speaks = sample is not None and sample.each_step and (sample.generation_tokens, sample.kv_usage) != (None, None)
        if speaks and fresh and not watched.still:
            return plausible
        due = min((lease.charged_at + overdue_s(lease, not lease.blind) for lease in pending), default=inf)
        return max(plausible, due - watched.since)

    def _pace(self, watched: _Watched, now: float) -> float:
        halves = (now - watched.paced_at) / PACE_HALVES_S
        return max(watched.pace * float(0.5**halves), PACE_S)

    def _judged(self, slot: int, level: float, silent: float, now: float, plausible: float = 0.0) -> None:
        table, watched = self._table, self._watched[slot]
        endpoint = table.endpoints[slot]
        assert endpoint is not None, "who is not there has no work"
        if OUT_OF_USE in (level, float(table.suspicion[slot])):
            watched.out_until = self._any_out = now
        watched.empty_since = inf
        self.retried.discard(slot)
        table.set_suspicion(slot, level)
        self.changes.append(
            StallRecord(endpoint.id, now, LEVELS[int(level)], silent, plausible, int(table.inflight[slot]))
        )

    # ---- hedges ----

    def hedge_after_ms(self, lease: Lease) -> float:
        """Milliseconds after which the gateway may send it to the fallback endpoint too; 0 = never."""
        after = overdue_s(lease, lease.request.stream)
        if self.caution > 1.0:
            self.caution = max(self.caution * WORTH_IT, 1.0)
            after *= self.caution
        return after * 1e3 if after <= NEVER_S else 0.0

    def hedged_in_vain(self) -> None:
        self.caution = min(self.caution * IN_VAIN, MOST)


def overdue_s(lease: Lease, begins: bool) -> float:
    """Seconds from its charge after which its answer should have begun, or, unless it is seen when it `begins`, should
    be over; `inf` = nobody can say."""
    first = OVERDUE * lease.forecast.known_high_ms
    if not first:
        return inf
    if begins:
        return first if first > OVERDUE_S else OVERDUE_S
    tokens = lease.request.max_tokens or 20.0 * lease.growth_tokens / lease.sequences
    full = first + 2e-3 * tokens * lease.forecast.tpot_ms
    return full if full > OVERDUE_WHOLE_S else OVERDUE_WHOLE_S
