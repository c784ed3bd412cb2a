"""Endpoints that hang: they have work and make no progress, although the metrics page may still answer.

Theory
* Progress of an endpoint is a first token, an answer that ends well, or a scrape that differs from the last one: its
  token counters (generated, or looked up in the cache) have changed, or more memory is in use. If the engine does not
  count tokens at each step, it is also less memory in use, a changed number of running requests, or fewer waiting ones.
  More waiting requests are no progress, nor are fewer running ones if tokens are counted: the server in front of a
  hanging engine still accepts requests, and drops those whose clients left.
* Silence is the time since the last progress, or since there is work. Requests that only peers reported and that the
  metrics page does not show are not work. If the page shows no work, silence counts at most from the charge of the
  oldest request, because refused requests come and go without progress. This limit does not apply if clients gave up
  requests in the last `PLAUSIBLE_S`.
* Silence is plausible for as long as the longest of

      PLAUSIBLE_S                                for any engine
      PACED × the longest silence that ended     in the last minute or so: the endpoint's own recent pace. One silence
                                                 at most doubles it, so that a hang changes it little
      forecast × band of the largest prompt      that waits for its first token: the time to compute it alone.
                                                 A prompt that takes 30 s is no hang

  If the page does not report tokens or memory at each step, or does not change although first tokens come, silence is
  also plausible until the first answer is overdue (`overdue_s`).
* The server in front of an engine may hold requests, for example while it downloads their images. If the page shows no
  work, a request with media counts only from `MEDIA_S` after its charge, and one that was there `SETTLED` seconds
  before the page last showed a step does not count: that step's page would have shown it. What an endpoint without
  work on its page is out for stops counting (`_doubt`), so that it is tested after `RETRIED_S`, not only when its
  requests are known not to be shown.
* While an endpoint has a request for an image or speech (`apis.untimed`), any silence is plausible: no token counter
  moves, and no forecast says how long the answer takes.
* An endpoint is *suspect* when its silence is longer than plausible, and *out* after `OUT` times that. With the least
  values and a scrape every 0.2 s: suspect after 1.4 s, out after 3.2 s. Suspect endpoints get requests only if no other
  can serve them, endpoints that are out only if all others are out too (`plugins.filters.availability.Health`).
* Time in which this process stood still is no silence: signs of progress wait too. A timer fires every `TIMED_S`. While
  it is more than `LATE_S` overdue, no silence is judged: decisions that follow one another may hold up the event loop,
  too. When it fires, its delay moves the beginnings of all silences. Journals of versions without the timer are
  replayed by their rule: a look that is more than `LATE_S` late shows a standstill.
* Where the page does not follow the engine's steps, or shows no work, only the gateway could tell of progress. If a
  gateway's answers are followed (`gateway_answered`), that silence counts only up to the last one. A gap of more than
  `GATEWAY_S` between two of them is the gateway's own silence, and moves the beginnings of these silences.
* An endpoint recovers at the first progress. If it has no work left that could show progress, it may get one request
  every `RETRIED_S` as a test (`TRIED`). Until one makes progress, it counts as suspect for everyone who looks; but for
  `FORGOTTEN_S` at most if none comes, because nothing is known then, and an alert would last all night.
* The page of a suspect endpoint is no proof that it lost a request: the server in front of a hanging engine does not
  count what the engine has not taken. Such requests keep their leases (`holds`), and while there is one, the endpoint
  is tested but not forgotten.

Once a request is *overdue*, `Route.hedge_after_ms` lets the gateway send it to the fallback endpoint too:

      stream   OVERDUE × `Forecast.known_high_ms`, at least `OVERDUE_S`
      other    that, plus twice the time for the most tokens that it may generate (without a limit, ten times the
               expected ones), at least `OVERDUE_WHOLE_S`; if that is more than `NEVER_S`, it is never overdue

Images and speech are never overdue, unless their tokens have a limit.

Each wasted hedge (the first endpoint answered after all, or did not hang) lengthens these times by a quarter, up to
`MOST` times, and each other request shortens them again. So at most about one request in fifty is hedged needlessly,
even if forecasts are bad or the pool is overloaded. Requests to suspect endpoints do not wait longer.
"""

from collections.abc import Iterable
from math import ceil, inf

from msgspec import Struct

from fairlead.core.apis import untimed
from fairlead.core.endpoint import Sample
from fairlead.core.ledger import IDLE_SECONDS, SETTLED, Lease, Ledger
from fairlead.core.predictor import Predictor
from fairlead.core.records import StallRecord
from fairlead.core.table import EndpointTable

#: Levels of `EndpointTable.suspicion`. `TRIED`: it is suspect, and may get one request as a test.
WELL, TRIED, SUSPECT, OUT_OF_USE = 0.0, 0.5, 1.0, 2.0
LEVELS = ("well", "suspect", "out")

#: See the module's rules; seconds and factors.
PLAUSIBLE_S = 1.2
PACED = 2.0
OUT = 2.5
MEDIA_S = 10.0  # vLLM gives up the download of an image after 5 s, of a sound after 10 s
RETRIED_S = 5.0
FORGOTTEN_S = 60.0
#: The initial and least pace of an endpoint in seconds, and the seconds in which a longer pace is halved.
PACE_S = 0.5
PACE_HALVES_S = 30.0
#: Bounds of the factor by which a forecast may be too low.
BAND = (1.0, 4.0)
#: A metrics page that does not show a first token this many seconds after it does not follow the engine's steps.
SEEN_S = 0.3
#: Seconds for which a scrape proves that the page follows the engine's steps.
TELLS_S = 10.0
#: Seconds between two looks at all endpoints, and between two looks by the timer, for when nothing else happens.
LOOK_S, TIMED_S = 0.2, 0.5
#: A timer this many seconds late shows that this process stood still.
LATE_S = 0.5
#: A gateway that has not answered for this many seconds stands still.
GATEWAY_S = 1.0
#: Silent endpoints that are judged in one call, at most.
SILENT = 64

#: Three times the forecast; converts its milliseconds to seconds.
OVERDUE = 3.0 * 1e-3
OVERDUE_S, OVERDUE_WHOLE_S, NEVER_S = 4.0, 10.0, 600.0
#: Factors on `Stalls.caution`: of a wasted hedge, and of any other request; and the maximum of `caution`.
IN_VAIN, WORTH_IT, MOST = 1.25, 0.995, 16.0


def level_name(suspicion: float) -> str:
    """Return which of `LEVELS` people and metrics see for a value of `EndpointTable.suspicion`."""
    return LEVELS[ceil(suspicion)]


class _Watched(Struct):
    """The state of one endpoint. Times are clock seconds."""

    #: When the endpoint last made progress, or was last seen without work.
    since: float = -inf
    #: The longest recent silence that ended, in seconds, and when it ended.
    pace: float = PACE_S
    paced_at: float = -inf
    #: The last time that it made progress, or had no work, before it became suspect; and when it last became well.
    stopped_at: float = -inf
    recovered_at: float = -inf
    #: While it is suspect or out: since when it has no work that could show progress; inf = it has some.
    empty_since: float = inf
    #: The last time that it was out, or that the gateway stood still. Nothing about its speed is learned from requests
    #: sent there before.
    out_until: float = -inf
    #: The earliest first token since its page last changed; inf = none.
    unseen_since: float = inf
    #: The page does not change although first tokens come, so an unchanged page proves nothing.
    still: bool = False
    #: The last step of the engine that its page showed was not before this.
    stepped_at: float = -inf
    #: The last time that a client gave up a request before its first token.
    given_up_at: float = -inf


class Stalls:
    """Applies the module's rules. Of the table, it writes only the column `suspicion`."""

    def __init__(self, table: EndpointTable, ledger: Ledger, predictor: Predictor) -> None:
        self._table = table
        self._ledger = ledger
        self._predictor = predictor
        self._watched: list[_Watched] = []
        #: Clock seconds from which `look` should be called again.
        self.due = -inf
        #: When the timer should fire next; inf = not known.
        self._timer_due = inf
        #: The slot at which the next `look` begins; above 0 = the last one was not finished.
        self._next = 0
        #: Changed levels that `take_changes` has not returned yet. Always the same list object.
        self.changes: list[StallRecord] = []
        #: Factor on the time until a request is overdue, 1 to `MOST`.
        self.caution = 1.0
        #: The last time (clock seconds) that any endpoint was out.
        self._any_out = -inf
        #: When the gateway last answered; inf = its answers are not followed.
        self._gateway_at = inf
        #: Slots whose level is `TRIED`: they have no work left that could show progress.
        self.retried: set[int] = set()

    def reset(self, slot: int) -> None:
        """Begin with a new endpoint at `slot`."""
        while slot >= len(self._watched):
            self._watched.append(_Watched())
        self._watched[slot] = _Watched()
        self.retried.discard(slot)

    def take_changes(self) -> list[StallRecord]:
        changes = self.changes.copy()
        self.changes.clear()
        return changes

    # ---- progress ----

    def moved(self, slot: int, now: float) -> None:
        """Note progress of an endpoint. Called for every request, so the common case is cheap."""
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
        """Compare a scrape with the one before it; `None` = it is the first."""
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
            watched.stepped_at = float(self._table.sampled_at[slot])
        elif now - watched.unseen_since > SEEN_S:
            watched.still = True

    def charged(self, slots: Iterable[int], now: float) -> None:
        """Note a request that is sent to these slots. One of `retried` is tested by it, and gets no more requests until
        it makes progress."""
        for slot in self.retried.intersection(slots):
            self.retried.discard(slot)
            self._watched[slot].since = now
            self._judged(slot, SUSPECT, 0.0, now)

    def given_up(self, slot: int, now: float) -> None:
        """Record that a client left before the first token. It does not end the endpoint's silence."""
        self._watched[slot].given_up_at = now

    def gateway_answered(self, now: float) -> None:
        """Note that the gateway answers. Call it every half second while it does."""
        if now - self._gateway_at > GATEWAY_S:
            watched = [each for slot, each in enumerate(self._watched) if not self._tells(slot, each, now)]
            self._excuse(watched, now - self._gateway_at, now)
        self._gateway_at = now

    # ---- silence ----

    def timed(self, now: float) -> None:
        """Look because the timer fired. It should fire again after `TIMED_S`."""
        if now - self._timer_due > LATE_S:
            self._excuse(self._watched, now - self._timer_due, now)
        self._timer_due = now + TIMED_S
        self.look(now)

    def look(self, now: float) -> None:
        """Judge the silence of all endpoints. Call it before a decision and after a scrape, once `due` has passed. If
        more than `SILENT` are silent, `due` stays in the past, and the next call continues."""
        table, left = self._table, SILENT
        late = now - self._timer_due > LATE_S
        if self._timer_due == inf and not self._next and now - LATE_S > self.due > -inf:
            self._excuse(self._watched, now - self.due, now)
            late = True
        if now - self._gateway_at > GATEWAY_S:
            self._any_out = now
            for each in self._watched:
                each.out_until = now
        for slot, work in enumerate((table.queue + table.active).tolist()):
            if slot < self._next:
                continue
            watched = self._watched[slot]
            silent = now - watched.since
            if work <= 0.0 or silent == inf:
                self._idle(slot, watched, now, now)
            elif silent > PLAUSIBLE_S and not late:
                if not left:
                    self._next = slot
                    return
                left -= 1
                self._look_at(slot, watched, now)
        self._next = 0
        self.due = now + LOOK_S

    def _excuse(self, watched: Iterable[_Watched], standstill_s: float, now: float) -> None:
        for each in watched:
            each.since = min(each.since + standstill_s, now)

    def _look_at(self, slot: int, watched: _Watched, now: float) -> None:
        """Judge an endpoint that has work and is silent."""
        if self._only_told(slot):
            self._idle(slot, watched, now, now)
            return
        heard_at = now if self._tells(slot, watched, now) else min(self._gateway_at, now)
        begun = watched.since
        if not self._shows_work(slot) and watched.given_up_at <= now - PLAUSIBLE_S:
            begun = max(begun, self._begun(slot, watched, now))
        if heard_at - begun > PLAUSIBLE_S:
            watched.since = begun
            self._judge(slot, watched, heard_at - begun, now)
        else:
            self._idle(slot, watched, min(begun, now), now)

    def _idle(self, slot: int, watched: _Watched, since: float, now: float) -> None:
        """Record that the endpoint had no work before `since` that could have shown progress."""
        watched.since = since
        suspicion = self._table.suspicion[slot]
        if suspicion:
            watched.empty_since = min(watched.empty_since, now)
            empty_s = now - watched.empty_since
            if suspicion >= SUSPECT and empty_s > RETRIED_S:
                self._judged(slot, TRIED, 0.0, now)
                self.retried.add(slot)
            elif suspicion < SUSPECT and empty_s > FORGOTTEN_S and not self._holds_any(slot):
                self._judged(slot, WELL, 0.0, now)

    def holds(self, lease: Lease, now: float) -> bool:
        """Whether the endpoint may still have a request that its page has not shown for long: it is suspect, and has
        made no progress since it got the request (`SETTLED`: pages lag); or it was until a moment ago, so the end of
        the request may be on its way. Peers report the ends of theirs."""
        watched = self._watched[lease.slot]
        if lease.request.id < 0 or not (lease.pending or lease.unshown):
            return False
        if self._table.suspicion[lease.slot]:
            return lease.charged_at > watched.stopped_at - SETTLED
        return now < watched.recovered_at + IDLE_SECONDS

    def _holds_any(self, slot: int) -> bool:
        return any(lease.unshown for lease in self._ledger.of_slot(slot))

    def _begun(self, slot: int, watched: _Watched, now: float) -> float:
        """Return the clock seconds since which the engine has the oldest lease, for a page that shows no requests.
        Requests that a server refuses come and go without progress: they are short, and no sign that it hangs."""
        overtaken = watched.stepped_at - SETTLED if self._speaks(slot, watched, now) else -inf
        return min((_counts_from(lease, overtaken) for lease in self._ledger.of_slot(slot)), default=-inf)

    def _only_told(self, slot: int) -> bool:
        """Whether only peers reported the endpoint's work, and a later page shows none. A peer that died cannot report
        the ends of its requests. What the endpoint has not shown for long is no work either: a test tells more."""
        table, leases = self._table, self._ledger.of_slot(slot)
        charges = (lease.charged_at if lease.request.id < 0 or lease.unshown else inf for lease in leases)
        newest = max(charges, default=inf)
        return bool(table.sampled_at[slot] > newest + SEEN_S and not self._shows_work(slot))

    def silence(self, slot: int, now: float) -> float:
        """Return the seconds without progress, as of the last `look`; 0 = it has no work that could show progress."""
        since = self._watched[slot].since
        return max(now - since, 0.0) if since > -inf else 0.0

    def was_out(self, lease: Lease) -> bool:
        """Whether the lease's endpoint was out at any time since the lease was charged."""
        sent = lease.charged_at
        return sent <= self._any_out and sent <= self._watched[lease.slot].out_until

    def _judge(self, slot: int, watched: _Watched, silent: float, now: float) -> None:
        watched.empty_since = inf
        known = self._table.suspicion[slot]
        if known == OUT_OF_USE:
            watched.out_until = self._any_out = now
            return
        plausible = self._plausible(slot, watched, now)
        level = OUT_OF_USE if silent > OUT * plausible else SUSPECT if silent > plausible else WELL
        if level > known:
            if not known:
                watched.stopped_at = watched.since
            self._judged(slot, level, silent, now, plausible)
            if level == OUT_OF_USE and self._speaks(slot, watched, now) and not self._shows_work(slot):
                self._doubt(slot)

    def _doubt(self, slot: int) -> None:
        """Do not count what an endpoint is out for and does not show, so that it is tested soon: the server in front of
        the engine may hold it. Once: a test that is not shown either tells more."""
        if not self._holds_any(slot):
            for lease in list(self._ledger.of_slot(slot)):
                if lease.pending and lease.request.id >= 0:
                    self._ledger.not_shown(lease)

    def _plausible(self, slot: int, watched: _Watched, now: float) -> float:
        """Return the seconds for which silence is plausible, by the module's rules."""
        plausible = max(PLAUSIBLE_S, PACED * self._pace(watched, now))
        leases = self._ledger.of_slot(slot)
        if any(untimed(lease.request.api, lease.request.path) for lease in leases):
            return inf
        pending = [lease for lease in leases if lease.pending or lease.blind]
        if pending:
            largest = max(pending, key=lambda lease: lease.work_us)
            forecast = largest.forecast
            band = forecast.known_high_ms / forecast.model_ttft_ms if forecast.model_ttft_ms > 0.0 else 1.0
            alone_ms = largest.work_us * 1e-3 * float(self._predictor.rates.prefill[slot]) + forecast.model_tpot_ms
            plausible = max(plausible, 1e-3 * alone_ms * min(max(band, BAND[0]), BAND[1]))
        if self._speaks(slot, watched, now):
            return plausible
        due = min((lease.charged_at + overdue_s(lease, not lease.blind) for lease in pending), default=inf)
        return max(plausible, due - watched.since)

    def _speaks(self, slot: int, watched: _Watched, now: float) -> bool:
        """Whether the page follows the engine's steps."""
        sample = self._table.samples[slot]
        if sample is None or watched.still or now - self._table.sampled_at[slot] >= TELLS_S:
            return False
        return sample.each_step and (sample.generation_tokens, sample.kv_usage) != (None, None)

    def _shows_work(self, slot: int) -> bool:
        return bool(self._table.waiting[slot] + self._table.running[slot] > 0.0)

    def _tells(self, slot: int, watched: _Watched, now: float) -> bool:
        """Whether the page tells of progress by itself, without the gateway."""
        return self._shows_work(slot) and self._speaks(slot, watched, now)

    def moved_at(self, slot: int, now: float) -> float:
        """Return the clock seconds of the endpoint's last progress; infinite if its page does not tell."""
        watched = self._watched[slot]
        return watched.since if self._speaks(slot, watched, now) else inf

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
        if level == WELL:
            watched.recovered_at = now
        self.retried.discard(slot)
        table.set_suspicion(slot, level)
        self.changes.append(
            StallRecord(endpoint.id, now, level_name(level), silent, plausible, int(table.inflight[slot]))
        )

    # ---- hedges ----

    def hedge_after_ms(self, lease: Lease) -> float:
        """Return the ms after which the gateway may send the request to the fallback endpoint too; 0 = never."""
        after = overdue_s(lease, lease.request.stream)
        if self.caution > 1.0:
            self.caution = max(self.caution * WORTH_IT, 1.0)
            if not self._table.suspicion[lease.slot]:
                after *= self.caution
        return after * 1e3 if after <= NEVER_S else 0.0

    def hedged_in_vain(self) -> None:
        self.caution = min(self.caution * IN_VAIN, MOST)


def _counts_from(lease: Lease, overtaken: float) -> float:
    """Return the clock seconds from which a lease counts although the page shows no request; `inf` = never."""
    since = lease.there_since
    return inf if since < overtaken else since + MEDIA_S if lease.request.media else since


def overdue_s(lease: Lease, begins: bool) -> float:
    """Return the seconds from a lease's charge after which the request is overdue; `inf` = unknown. `begins`: whether
    the first token is seen. If so, the answer should have begun by then; if not, it should have ended."""
    first = OVERDUE * lease.forecast.known_high_ms
    if not first:
        return inf
    if begins:
        return inf if untimed(lease.request.api, lease.request.path) else max(first, OVERDUE_S)
    tokens = lease.request.max_tokens or _unlimited(lease)
    full = first + 2e-3 * tokens * lease.forecast.tpot_ms
    return full if full > OVERDUE_WHOLE_S else OVERDUE_WHOLE_S


def _unlimited(lease: Lease) -> float:
    """Return the most tokens that an answer without a limit plausibly has; `inf` = its tokens say nothing."""
    if untimed(lease.request.api, lease.request.path):
        return inf
    return 20.0 * lease.growth_tokens / lease.sequences
