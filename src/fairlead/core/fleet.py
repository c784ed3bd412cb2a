"""The fleet: the one object that changes what is known about endpoints, and the view of it that policies read."""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from math import inf, log2, log10
from typing import cast

import numpy as np
from msgspec import Struct

from fairlead.core.adapters import Adapters, Cold
from fairlead.core.apis import PROMPT_LISTS
from fairlead.core.columns import FloatColumn
from fairlead.core.cost import CROWDED, LONG_TOKENS, PRIOR, StepModel, forecast
from fairlead.core.endpoint import MODEL_LABEL, NOT_LISTED, NOT_READ, BaseModels, Endpoint, Sample, Topology
from fairlead.core.exact import ExactKnowledge
from fairlead.core.learned import Common, EndpointLearned, Look, Part, PrefixesLearned
from fairlead.core.ledger import Lease, Ledger
from fairlead.core.predictor import HANDOVER_MOST, HANDOVER_SHARE, Predictor
from fairlead.core.prefix import DEFAULT_CAPACITY, PrefixIndex
from fairlead.core.rates import PrefillShare
from fairlead.core.records import Forecast
from fairlead.core.request import Request
from fairlead.core.stalls import Stalls, overdue_s
from fairlead.core.table import ON_DEMAND, EndpointTable
from fairlead.core.tokens import MAX_BYTES_PER_TOKEN, MIN_BYTES_PER_TOKEN

#: Prompt bytes per token, until responses report it. Turns a KV cache's capacity in tokens into a budget in bytes.
BYTES_PER_TOKEN = 4.2
#: Weight of a report of bytes per token (less with fewer bytes than `FULL`), and the relative change from which budgets
#: are set again.
BYTES_SHARE, BYTES_CHANGED = 0.2, 0.02
#: Failed responses in a row before an endpoint is avoided, and for how many seconds.
ERRORS_TO_EJECT = 3
EJECT_SECONDS = 3.0
#: Scrapes in a row without an answer from which an endpoint may be unreachable.
SCRAPES_LOST = 3
#: Failed requests that are remembered, and for how many seconds.
FAILED, FAILED_S = 256, 60.0
#: How much a response counts as a failure if it broke off and it is unknown whether client or endpoint caused that.
UNFINISHED = 0.25
#: Seconds, per endpoint, between two blind leases (`Lease.blind`) from which the engine's speed is learned.
BLIND_S = 1.0
#: The gateway's log has durations in whole milliseconds, rounded down.
LOG_MS = 1.0
#: Number of completed requests that are remembered, because the gateway may report a refused request late.
ANSWERED = 512
#: Labels with one of these words in their name distinguish engines of different speed. Others may be unique to a pod.
LOOKS = ("model", "role", "gpu", "accelerator", "hardware", "instance-type", "engine", "version", "template-hash")
#: Requests wait for a sequence slot where less than this share of an engine's time goes into prompts, while at least
#: this share of those that run have their first token.
PROMPTS, ANSWERING = 0.5, 0.75
#: What was learned of an endpoint that leaves is kept for so many seconds after its last scrape.
KEPT_S = 300.0
#: More requests or tokens than any endpoint really has. Higher readings are cut to it, so that sums stay exact.
MOST = 1e9
#: Upper bound of one lease's prefill work, in microseconds. Thousands of them still add up without rounding.
MOST_WORK = 1e12


class Left(Struct, frozen=True):
    """An endpoint that left, and what was learned of it at clock seconds `taken_at`."""

    endpoint: Endpoint
    learned: EndpointLearned
    taken_at: float


class Fleet:
    """All endpoints. Policies get this as their view: they read `table`, `prefix` and `stale`, and change nothing."""

    def __init__(
        self,
        lease_ttl: float = 900.0,
        staleness: float = 2.0,
        max_prefix_entries: int = 2_000_000,
        exact: ExactKnowledge | None = None,
        prior: StepModel = PRIOR,
        ledger: type[Ledger] = Ledger,
        topology: Topology = Topology(),  # noqa: B008 frozen
    ) -> None:
        """Times in seconds. `exact`: `None` = no KV events. `prior`: the speed of engines until it is learned."""
        self._prior = prior
        self.table = EndpointTable()
        self.topology = topology
        self.ledger = ledger(self.table, lease_ttl)
        #: Corrects the forecasts, learned from past requests.
        self.predictor = Predictor(self.table, prior)
        self.adapters = Adapters(self.table, self.ledger.starting, self.ledger.starting_at)
        self.stalls = Stalls(self.table, self.ledger, self.predictor)
        self.prefix = PrefixIndex(max_prefix_entries)
        #: The exact index, from KV events; `None` = there are no KV events.
        self.exact = exact
        #: Seconds after which a scrape no longer counts.
        self.staleness = staleness
        #: By slot: the key of the endpoint's class, see `_looks_like`.
        self._looks: dict[int, Hashable] = {}
        #: The learned value, and the value from which the current budgets were computed.
        self.bytes_per_token = self._budgeted_with = BYTES_PER_TOKEN
        #: By slot: state restored for an endpoint that has not been scraped since, and the clock seconds of its saving.
        self._recalled: dict[int, tuple[EndpointLearned, float]] = {}
        #: By slot: the endpoint that left it, whose prefixes are set aside.
        self._left: dict[int, Left] = {}
        #: By slot the share of its time that the engine spends on prompts.
        self._prompts = defaultdict[int, PrefillShare](PrefillShare)
        #: By slot: how many parts of its prefixes were restored, and the oldest block among them.
        self._extending: dict[int, tuple[int, int | None]] = {}
        #: Ids of endpoints whose cache was found empty. The pipeline takes them out.
        self.cold: list[str] = []
        #: The requests completed last: clock seconds of the end, and the lease.
        self._answered = deque[tuple[float, Lease]](maxlen=ANSWERED)
        #: By slot: the sessions and first blocks of requests whose answers broke off there since the last that ended.
        self._broken_off: dict[int, set[str | int]] = {}
        #: The requests that failed last, where the endpoint was not avoided already: clock seconds, slot, `_prompt` and
        #: `_kind`.
        self._failed = deque[tuple[float, int, tuple[int, ...], tuple[str, str, bool]]](maxlen=FAILED)
        #: Clock seconds of the last page, or in times of trouble the last answer, and of the last request that failed,
        #: of whatever endpoint, also one that has left; -inf = there was none.
        self.good_at = self._failed_at = -inf
        #: By slot: clock seconds until which the endpoint is avoided, reported by other schedulers and found by us.
        self._avoided: dict[int, list[float]] = {}

    def up(self, endpoint: Endpoint, listing: bool = False) -> list[Lease]:
        """Add or change an endpoint. If its address changed, release the leases at the old one and return them.
        `listing`: the list of models of a new endpoint is about to be read. One that comes while none is reachable is
        not either, before it answers."""
        slot, leases = self.table.slot(endpoint.id), list[Lease]()
        old = None if slot is None else self.table.endpoints[slot]
        moved = old is not None and old.address != endpoint.address
        lost = (slot is None or moved) and (self.unreachable if self.table.count else self._failed_at > self.good_at)
        if moved:
            leases, slot = self.down(endpoint.id), None
        if slot is None:
            slot = self._join(endpoint)
            if lost:
                self._lost(slot, SCRAPES_LOST)
            self.table.set_based(slot, NOT_READ if listing else NOT_LISTED)
            self.table.set_distance(slot, self.topology.ms(endpoint.labels))
            self.table.free_cache[slot] = self.prefix.free(slot)
            if self.exact is not None:
                self.exact.add_slot(slot)
            self._looks_like(slot)
            self.stalls.reset(slot)
            return leases
        self.table.replace(slot, endpoint)
        self.table.set_distance(slot, self.topology.ms(endpoint.labels))
        self._looks_like(slot)
        return []

    def _join(self, endpoint: Endpoint) -> int:
        """Give a new endpoint a slot. If the same one left shortly before, as when its readiness probe failed, it gets
        back what was learned of it; its first scrape shows whether its engine is the same."""
        before = [slot for slot, left in self._left.items() if _identity(endpoint) == _identity(left.endpoint)]
        slot = self.table.add(endpoint, *before[:1])
        left = self._left.pop(slot, None)
        if left is None or slot not in before:
            self.prefix.add_slot(slot)
        else:
            self.prefix.bring_back(slot, left.learned.capacity)
            self._recalled[slot] = left.learned, left.taken_at
        return slot

    def _looks_like(self, slot: int, restarted: bool = False) -> None:
        """Assign the endpoint to the class of engines that look alike, which share what is learned about speed. If its
        class changed or the engine restarted, what was learned of this endpoint is dropped."""
        table = self.table
        endpoint, sample = table.endpoints[slot], table.samples[slot]
        assert endpoint is not None
        labels = [item for item in endpoint.labels.items() if any(word in item[0].lower() for word in LOOKS)]
        capacity = table.capacity_tokens[slot]
        # The capacities of equal engines differ by a few blocks.
        size = round(2.0 * log2(capacity)) if capacity else 0
        look = (*sorted(labels), sample.block_size if sample is not None else 0, size)
        if restarted or look != self._looks.get(slot):
            self._looks[slot] = look
            self.predictor.reset(slot, look)

    def down(self, endpoint_id: str) -> list[Lease]:
        """Remove an endpoint that left. Release its leases and return those that are not auxiliary."""
        slot = self.table.slot(endpoint_id)
        if slot is None:
            return []
        leases = self.ledger.abandon(slot)
        if slot in self._avoided:
            self.avoid(slot, -inf)
            del self._avoided[slot]
        self._set_aside(slot)
        if self.exact is not None:
            self.exact.drop_slot(slot)
        self.table.remove(slot)
        del self._looks[slot]
        self._prompts.pop(slot, None)
        self._extending.pop(slot, None)
        self._broken_off.pop(slot, None)
        self._failed.clear()
        self._answered.clear()
        return [lease for lease in leases if not lease.auxiliary]

    def _set_aside(self, slot: int) -> None:
        """Keep what was learned of an endpoint that leaves, if there is a scrape to compare a later one with."""
        endpoint, sampled_at = self.table.endpoints[slot], float(self.table.sampled_at[slot])
        assert endpoint is not None
        recalled = self._recalled.pop(slot, None)
        if recalled is None and sampled_at == -inf:
            self.prefix.drop_slot(slot)
            return
        learned, taken_at = recalled or (self.taken(slot, sampled_at), sampled_at)
        self._left[slot] = Left(endpoint, learned, taken_at)
        self.prefix.set_aside(slot)

    def _forget_left(self, now: float) -> None:
        """Forget the endpoint that left first, if that is long ago."""
        slot, left = next(iter(self._left.items()))
        if now - left.taken_at > KEPT_S:
            del self._left[slot]
            self.prefix.forget(slot)

    def sampled(self, endpoint_id: str, started: float, now: float, sample: Sample) -> list[Lease]:
        """Apply a scrape that was sent at `started` and arrived at `now`. Return leases that the endpoint provably no
        longer has; they are still charged."""
        table = self.table
        slot = table.slot(endpoint_id)
        if slot is None:
            return []
        table.stale.add(slot)
        if self._left:
            self._forget_left(now)
        before = table.samples[slot]
        self.stalls.sampled(slot, before, sample, now)
        table.sampled(slot, sample)
        if table.failures[slot]:
            self._lost(slot, 0.0)
        table.sampled_at[slot] = self.good_at = now
        if sample.adapters is not None:
            table.set_adapters(slot, sample.adapters)
            table.set_max_adapters(slot, _gauge(sample.max_adapters, 0.0))
            if sample.adapters:
                self.adapters.seen(slot, self._looks[slot])
        self._sized(slot, sample)
        restarted = before is not None and _restarted(before, sample)
        if restarted:
            self._emptied(slot)
        if restarted or (before is None and not sample.prefix_queries and slot not in self._recalled):
            self.cold.append(endpoint_id)
        if (
            restarted
            or before is None
            or before.block_size != sample.block_size
            or before.num_blocks != sample.num_blocks
        ):
            self._looks_like(slot, restarted)
        if not self._confirmed(slot, started, sample, now):
            self.cold.append(endpoint_id)
        waited, ran = float(table.waiting[slot]), float(table.running[slot])
        table.waiting[slot] = waiting = _gauge(sample.waiting, waited)
        table.running[slot] = running = _gauge(sample.running, ran)
        if running or not ran or not (waiting or table.inflight[slot]):
            # Otherwise a batch may just have ended: then the engine reports no memory in use for one step.
            table.kv[slot] = min(_gauge(sample.kv_usage, table.kv[slot]), 1.0)
        if sample.waiting is None and sample.running is None:
            return []
        dropped = self.ledger.reconcile(slot, started, waiting, running, self.stalls.moved_at(slot, now))
        self._learn_limit(slot, waiting, running, (waited, ran), now)
        # The limit is that of the endpoint's class, so it may have been learned at other endpoints.
        table.max_seqs[slot] = self.predictor.rates.limit(slot)
        over: list[Lease] = []
        for lease in dropped:
            if self.stalls.holds(lease, now):
                self.ledger.not_shown(lease)
            elif lease.auxiliary:
                self.ledger.release(lease)
            else:
                over.append(lease)
        return over

    def _learn_limit(self, slot: int, waiting: float, running: float, before: tuple[float, float], now: float) -> None:
        """Learn from a scrape how many sequences the engine runs at once. What waits there can only wait for a sequence
        slot while memory has room for about two more requests, nearly all that run are past their prompts, and the
        queued work, or one whole step of it, is overdue; or the engine spends little of its time on prompts: where
        answers are short, some request always begins. `before`: the last (waiting, running).

        Both go by the prior's speed if that is faster than the learned one: while the limit is unknown, waits for a
        sequence slot are learned as slow prefill."""
        table, account, endpoint = self.table, self.ledger.account(slot), self.table.endpoints[slot]
        if endpoint is None or endpoint.only_prefills:
            return
        engines = max(table.ranks[slot], 1.0)
        factor = min(self.predictor.rates.prefill[slot], 1.0)
        due_ms = factor * min(table.queued_ms[slot] / engines, self._prior.whole_step_ms)
        overdue = now * 1e3 - table.prefill_since_ms[slot] > due_ms
        prompts = self._prompts[slot]
        prompts.sampled(now, account.done_work / engines, waiting >= 1.0)
        # Nobody sees the first token of a blind lease: one that runs counts as past its prompt.
        ran = account.active + min(account.early, account.blind)
        answering = ran >= ANSWERING * (running - account.others_running)
        roomy = table.kv[slot] * (1.0 + 2.0 / max(running / engines, 1.0)) < CROWDED
        shows = answering and roomy and (overdue or factor * prompts.value < PROMPTS)
        self.predictor.rates.sampled(slot, waiting, running, bool(shows), before)

    def _sized(self, slot: int, sample: Sample) -> None:
        """Store how many engines share the address, and the capacity of their KV caches in tokens. Where an engine
        reuses no prefix, nothing is learned of its cache."""
        table = self.table
        ranks = _gauge(sample.ranks or None, table.ranks[slot])
        known = table.capacity_tokens[slot]
        capacity = _gauge(sample.block_size * sample.num_blocks, 0.0) or known
        reuses = sample.prefix_caching
        changed = capacity != known or reuses != (self.prefix.capacity(slot) > 0)
        if ranks == table.ranks[slot] and not changed:
            return
        if ranks != table.ranks[slot]:
            table.set_ranks(slot, ranks)
        if changed:
            table.capacity_tokens[slot] = capacity
            of_prompts = int(capacity * self._budgeted_with) or DEFAULT_CAPACITY
            self.prefix.set_capacity(slot, of_prompts if reuses else 0)
        table.per_capacity[slot] = max(ranks, 1.0) / capacity if capacity else 0.0

    def adapters_listed(self, endpoint_id: str, adapters: frozenset[str] | None, base: BaseModels = NOT_LISTED) -> None:
        """Apply an endpoint's list of models. `adapters`: `None` = the server does not provide a list."""
        slot = self.table.slot(endpoint_id)
        if slot is None:
            return
        if adapters and self.exact is not None:
            self.exact.know_adapters(adapters)
        self.table.set_based(slot, base)
        look, known = self._looks[slot], self.table.dynamic[slot]
        dynamic = self.adapters.listed(adapters, look)
        self._list(slot, adapters, dynamic)
        if dynamic and not known:
            self._same_for(look, dynamic)

    def _list(self, slot: int, adapters: frozenset[str] | None, dynamic: bool) -> None:
        if adapters is not None:
            adapters = adapters | {ON_DEMAND} if dynamic else adapters - {ON_DEMAND}
        self.table.set_listed(slot, adapters)

    def _same_for(self, look: Hashable, dynamic: bool) -> None:
        """Set for all endpoints of this class whether they load adapters on demand."""
        for slot, like in self._looks.items():
            if like == look:
                self._list(slot, self.table.listed[slot], dynamic)

    def unlisted(self, model: str, slot: int) -> bool:
        """Whether `model` must be an adapter there: it takes adapters, and its known base models differ."""
        names = self.table.based[slot].names
        return bool(model and names and model not in names and self.table.max_adapters[slot])

    def without_model(self, slot: int, model: str) -> bool:
        """Handle a 404 of the endpoint. Return whether its list of models should be read again, because the model may
        be an adapter. Until then the known list stays: a server also answers 404 for an unknown path."""
        table = self.table
        endpoint = table.endpoints[slot]
        if not model or endpoint is None or endpoint.labels.get(MODEL_LABEL) == model:
            return False
        look = self._looks[slot]
        if self.adapters.refused(model, slot, look):
            self._same_for(look, False)
        return True

    def loading(self, request: Request) -> FloatColumn | None:
        """Return the ms until each endpoint can run the request's adapter; `None` = it has none, or all are equal."""
        return self.adapters.waits(request.target_model, self.predictor.hold_ms)

    def scrape_failed(self, endpoint_id: str, now: float, answered: bool = False) -> None:
        """Record a failed scrape. If the last good one is too old, the load columns count only our own requests.

        `answered`: the endpoint answered without a usable reading, so it does not count as failing.
        """
        table = self.table
        slot = table.slot(endpoint_id)
        if slot is None:
            return
        self._lost(slot, 0.0 if answered else table.failures[slot] + 1.0)
        if self.stale(slot, now):
            self.ledger.own_accounting(slot)
            capacity = table.capacity_tokens[slot]
            table.kv[slot] = min(table.kv_tokens[slot] / capacity, 1.0) if capacity else 0.0
            table.stale.add(slot)

    def _lost(self, slot: int, scrapes: float) -> None:
        """Set how many scrapes in a row the endpoint has not answered."""
        table = self.table
        if (scrapes >= SCRAPES_LOST) != (table.failures[slot] >= SCRAPES_LOST):
            table.version += 1  # what is remembered for waiting requests is looked up again
        table.failures[slot] = scrapes
        table.judge_trouble()

    def doubt(self, now: float) -> None:
        """Take the endpoint that comes next to an empty pool for unreachable before it answers, as after a failure."""
        self._failed_at = now

    @property
    def unreachable(self) -> bool:
        """Whether no endpoint answers scrapes, and a request failed after the last page and the last good answer."""
        table = self.table
        if not table.troubled or np.count_nonzero(table.alive & (table.failures < SCRAPES_LOST)):
            return False
        failed = self._failed_at
        return failed > self.good_at and not any(lease.first_token_at >= failed for lease in self.ledger)

    def answered(self, slot: int, ok: bool, now: float, own: bool = True, blame: float = 1.0) -> None:
        """Count a response that ended. After `ERRORS_TO_EJECT` failures in a row, policies avoid the endpoint for
        `EJECT_SECONDS`, or until a response succeeds. `own`: False = another scheduler reported it (for `SharedFleet`).
        `blame`: how much a failure counts.
        """
        table = self.table
        if ok:
            self.good_at = now
            if table.errors[slot]:
                table.errors[slot] = 0
                self._broken_off.pop(slot, None)
                self.avoid(slot, -inf)
            return
        self._failed_at = now
        if not blame:
            return
        known = table.errors[slot]
        table.errors[slot] = blame + (known if known < ERRORS_TO_EJECT else ERRORS_TO_EJECT - 1)
        table.troubled = True
        if table.errors[slot] >= ERRORS_TO_EJECT:
            # An own reason even if other schedulers reported the failures: it is reported to peers, and one that missed
            # some of those messages learns of it.
            self.avoid(slot, now + EJECT_SECONDS)

    def ended(self, lease: Lease, ok: bool, now: float, *, alone: bool = False) -> None:
        """Count an answer for its endpoint. Who failed in a pair is unknown before the first token, so both may have,
        unless it failed `alone`; the next success of each proves that it was the other."""
        blame = 1.0 if ok else self.blame(lease, now)
        self.answered(lease.slot, ok, now, blame=blame)
        part = lease.prefill if ok or (not alone and lease.first_token_at < 0.0) else None
        if part is not None and self.table.ids[part.slot] == part.endpoint_id:
            self.answered(part.slot, ok, now, blame=blame)

    def blame(self, lease: Lease, now: float) -> float:
        """Note that a request failed. Return how much that tells against its endpoint, 0 to 1.

        Nothing if its prompt failed elsewhere too, and one of these endpoints answers others: clients repeat what
        failed. Otherwise by the share of requests like it that fail at other endpoints which go on answering: if that
        is a tenth or less, failures in a row count fully, and else only as much as they are unlikely by chance. So
        requests that fail everywhere put no endpoint out of use, and one that fails alone is out as soon as ever."""
        slot, prompt, kind = lease.slot, _prompt(lease.request), _kind(lease)
        since = max(now - FAILED_S, self._failed[0][0] if len(self._failed) == FAILED else -inf)
        failed = [each for each in self._failed if each[0] >= since and each[1] != slot]
        slots = {slot, *(place for _, place, failing, _ in failed if failing == prompt != ())}
        failed = [each for each in failed if each[3] == kind]
        if self.table.errors[slot] < ERRORS_TO_EJECT:
            self._failed.append((now, slot, prompt, kind))
        if not failed and len(slots) == 1:
            return 1.0
        last_answers, answering, good = dict[int, float](), set[int](), ERRORS_TO_EJECT
        for ended_at, done in self._answered:
            if ended_at >= now - FAILED_S:
                last_answers[done.slot] = ended_at
                if _prompt(done.request) != prompt:
                    answering.add(done.slot)
                good += ended_at >= since and done.slot != slot and _kind(done) == kind
        if len(slots) > 1 and slots & answering:
            return 0.0
        begun = self._answered[0][0] if self._answered else inf
        bad = sum(begun <= failed_at < last_answers.get(place, -inf) for failed_at, place, _, _ in failed)
        return min(-log10(bad / (bad + good)), 1.0) if bad else 1.0

    def unfinished(self, lease: Lease, now: float) -> bool:
        """Count a response that broke off for an unknown reason. Return whether it counts as a failure of the endpoint:
        many in a row do, while another endpoint has no errors. One client's prompts go to one endpoint for its cache,
        so requests of one session or with one beginning count once, unless such a request ended well elsewhere."""
        table, slot, marks = self.table, lease.slot, _marks(lease.request)
        if table.errors[slot] < ERRORS_TO_EJECT:  # from there on each counts: none ended since it was avoided
            known = self._broken_off.setdefault(slot, set())
            elsewhere = (_marks(done.request) for _, done in self._answered if done.slot != slot)
            if marks & known and not any(marks & theirs for theirs in elsewhere):
                return False
            known |= marks
        table.errors[slot] = min(table.errors[slot] + UNFINISHED, ERRORS_TO_EJECT)
        table.troubled = True
        failed = table.errors[slot] >= ERRORS_TO_EJECT and bool(np.any(table.alive & (table.errors < 1.0)))
        if failed:
            self.avoid(slot, now + EJECT_SECONDS)
        return failed

    def avoid(self, slot: int, until: float, own: bool = True) -> None:
        """Avoid an endpoint until then (clock seconds, -inf = not). `own`: for our own reasons, else because another
        scheduler reported it. The later of both counts."""
        known = self._avoided.setdefault(slot, [-inf, -inf])
        known[own] = until
        self.table.ejected_until[slot] = max(known)
        self.table.judge_trouble()

    def charge(
        self,
        request: Request,
        slot: int,
        now: float,
        hit_tokens: int,
        expected_output: float,
        *,
        auxiliary: bool = False,
        reserved: bool = False,
    ) -> Lease:
        """Charge a lease and add the prompt's prefix to the learned index of the endpoint. `expected_output`: tokens of
        all sequences. `auxiliary`: the prefill part of a pair. `reserved`: a reservation; the request may still go
        elsewhere, so the prefix is not added."""
        table, prompt = self.table, request.prompt_tokens
        half = expected_output / 2
        uncached = float(min(max(prompt - hit_tokens, 1), MOST))
        refused = uncached * table.per_capacity[slot] > 1.0
        if refused:  # larger than all the engine's memory, but each prompt of a list may be short
            refused = request.api not in PROMPT_LISTS or uncached * table.per_capacity[slot] > request.sequences
            if refused:  # the engine refuses it at once and computes nothing
                prompt, half, uncached = 1, 0.0, 1.0
        alone_ms = self._prior.prefill_ms(prompt, uncached)
        blind = request.blind or not request.stream
        lease = Lease(
            request,
            slot,
            table.ids[slot],
            now,
            uncached,
            # Whole tokens, so that sums of them stay exact. NaN becomes 1.
            min(max(1.0, prompt + half), MOST) // 1.0,
            hit_tokens,
            min(round(1e3 * alone_ms), MOST_WORK),
            min(max(0.0, half), MOST) // 1.0,
            forecast(slot, prompt, uncached, alone_ms, self, now),
            auxiliary or reserved,
            blind,
            request.sequences,
        )
        if blind and now >= self.predictor.marks_at[slot]:
            self.predictor.marks_at[slot] = now + BLIND_S
            lease.mark = self.predictor.blind_mark(slot, self.ledger.blind_ms(slot), now)
        self.ledger.charge(lease)
        if table.lora:
            self._meet(lease)
        if uncached >= LONG_TOKENS and not reserved:
            self.sent_long_prompt(slot, alone_ms, now)
        if auxiliary:
            self.ledger.prefilling.add(slot)
        if reserved:
            self.ledger.reserved[lease] = None
        elif not refused:
            table.free_cache[slot] = self.prefix.insert(slot, request.prefix)
        return lease

    def sent_long_prompt(self, slot: int, alone_ms: float, now: float) -> None:
        """Record that a long prompt was sent to the slot, so that others avoid it: see `pauses` in `core.cost`.
        `alone_ms`: milliseconds to compute the prompt at the prior's speed."""
        table, now_ms, took_ms = self.table, now * 1e3, alone_ms * float(self.predictor.rates.prefill[slot])
        until_ms = max(float(table.long_until_ms[slot]), now_ms) + 2.0 * took_ms
        table.long_until_ms[slot] = until_ms = min(until_ms, now_ms + 4.0 * took_ms)
        table.long_until = max(table.long_until, until_ms)

    def _meet(self, lease: Lease) -> None:
        """If the request needs an adapter that some endpoint has: note it in the lease, and forecast its wait."""
        model, waits = lease.request.target_model, self.loading(lease.request)
        if waits is None:
            return
        cold = self.adapters.cold(model, lease.slot, waits, self.predictor.hold_ms)
        if cold is not None and cold.wait_ms:
            lease.forecast = self.predictor.behind(lease.slot, lease.forecast, cold.wait_ms)
        lease.adapter, lease.cold = model, cold
        self.ledger.starts(lease)

    def charge_pair(
        self,
        request: Request,
        slot: int,
        prefill_slot: int,
        now: float,
        hit_tokens: int,
        expected_output: float,
        handover_ms: float = -1.0,
    ) -> Lease:
        """Charge a pair: `prefill_slot` computes the prompt, `slot` the answer. `hit_tokens`: prompt tokens cached at
        `prefill_slot`. The whole prompt counts as cached at `slot`, which receives it. `handover_ms`: as in `Picked`.
        Return the lease at `slot`."""
        none_kept = -2.0 * request.prompt_tokens  # no step there decodes, so queued prompts make none longer
        prefill = self.charge(request, prefill_slot, now, hit_tokens, none_kept, auxiliary=True)
        prefill.handover_ms = handover_ms
        lease = self.charge(request, slot, now, request.prompt_tokens, expected_output)
        lease.prefill = prefill
        lease.hit_tokens = hit_tokens
        steps = lease.forecast.tpot_ms, lease.forecast.model_tpot_ms
        lease.forecast = Forecast(tpot_ms=steps[0], model_tpot_ms=steps[1])  # the transfer's time is only believed
        return lease

    def move(self, lease: Lease, slot: int, now: float, first_token: bool) -> Lease:
        """Move a lease to `slot`, whose endpoint answers the request instead of the chosen one. It counts as a failure
        of the chosen endpoint, unless that has left the pool, or only takes long although it makes progress: before the
        request is overdue, only a failure has it repeated. Return the new lease. `first_token`: it comes now, so the
        prefill endpoint of a pair is not to blame."""
        if lease.held:
            self.ledger.release(lease)
            waited = now - lease.charged_at
            if waited > overdue_s(lease, lease.request.stream) and not self.table.suspicion[lease.slot]:
                self.stalls.hedged_in_vain()
            else:
                self.ended(lease, False, now, alone=first_token)
        if first_token:
            self.stalls.moved(slot, now)
        moved = self.charge(lease.request, slot, now, 0, 2 * lease.growth_tokens)
        moved.unreached = lease.endpoint_id
        moved.forecast = Forecast()  # the forecast was for the chosen endpoint
        moved.evicted_at, moved.predicted, moved.queued_ms = lease.evicted_at, lease.predicted, lease.queued_ms
        moved.preceded = lease.preceded
        moved.mark = None  # it is not known when the request came here
        self.ledger.first_token(moved)
        moved.first_token_at = now if first_token and lease.request.stream else lease.first_token_at
        return moved

    def first_token(self, lease: Lease, now: float) -> None:
        """Process the first token of a lease. To be called only when its first response byte was really seen."""
        if self.exact is not None:
            self.exact.first_token(lease.predicted, now)
        self.stalls.first_token(lease.slot, now)
        if lease.prefill is not None:
            self._handed_over(lease, lease.prefill, now)
        if lease.request.stream:
            lease.first_token_at = now
            if lease.prefill is None and not self.stalls.was_out(lease):
                if lease.cold is not None:
                    self._loaded(lease, lease.cold, (now - lease.charged_at) * 1e3)
                self.predictor.first_token(lease, now)
                lease.mark = self.predictor.mark(lease.slot)
        self.ledger.first_token(lease, now)

    def _handed_over(self, lease: Lease, part: Lease, now: float) -> None:
        """Process the first token of a pair for the endpoint that computed the prompt (`part`)."""
        if part.held:
            self.stalls.first_token(part.slot, now)
        if not lease.request.stream:
            return
        lease.mark = self.predictor.mark(lease.slot)
        if self._tells_of(part, lease):
            self.predictor.handed_over(part, now, cold=part.cold is not None or lease.cold is not None)

    def _tells_of(self, part: Lease, lease: Lease) -> bool:
        """Whether a pair's times tell how fast its prompt was computed: the endpoint (of `part`) does nothing else, so
        that it has no first tokens of its own, and the other had room for the request."""
        table, slot, there = self.table, lease.slot, self.table.endpoints[part.slot]
        full = table.kv[slot] > CROWDED or 0.0 < table.max_seqs[slot] <= table.active[slot]
        if full or part.handover_ms < 0.0 or there is None or there.id != part.endpoint_id:
            return False
        return there.only_prefills and not self.stalls.was_out(part)

    def _loaded(self, lease: Lease, cold: Cold, took_ms: float) -> None:
        """Learn how long the adapter took to load. `took_ms`: milliseconds from the charge to the first token."""
        without_ms = (lease.forecast.model_ttft_ms - cold.wait_ms) * float(self.predictor.kappa[lease.slot])
        self.adapters.took(cold, took_ms - without_ms)

    def completed(
        self, lease: Lease, now: float, completion_tokens: int, ttft_ms: float = -1.0, duration_ms: float = -1.0
    ) -> None:
        """Learn from a complete answer; its lease is released. Times: from the arrival at the gateway, < 0 = unknown.

        The answer's tokens stay in the engine's cache until they are the least recently used. No prompt matches them,
        but they displace prompts. On a workload of 1000-token answers the believed hits are 79 % with them (real: 78 %)
        and 88 % without.

        Of several sequences the longest ends last. Its steps are only known if all reached the token limit.
        """
        self._answered.append((now, lease))
        output = completion_tokens if completion_tokens >= 0 else 2 * lease.growth_tokens
        if lease.sequences > 1:
            limit = lease.request.max_tokens
            completion_tokens = limit if 0 < limit * lease.sequences <= completion_tokens else -1
        if lease.first_token_at < 0.0:
            self.stalls.moved(lease.slot, now)
        if (lease.mark is not None or lease.request.stream) and not self.stalls.was_out(lease):
            if lease.first_token_at < 0.0:
                held_ms = self._unseen(lease, now, completion_tokens, ttft_ms, duration_ms)
            else:
                held_ms = (now - lease.first_token_at) * 1e3
                if duration_ms > 0.0:  # by the log, which reports ends late
                    held_ms = min(held_ms, duration_ms - ttft_ms + LOG_MS)
            self.predictor.ended(lease, held_ms, -1 if lease.blind else completion_tokens, now)
        if output > 0.0:
            self.prefix.occupy(lease.slot, int(min(output, MOST) * self._budgeted_with))

    def _unseen(self, lease: Lease, now: float, tokens: int, ttft_ms: float, duration_ms: float) -> float:
        """Learn from a response whose first token was not seen. If it was streamed, the gateway's log tells when the
        first token came (`ttft_ms`). Otherwise the forecast TTFT is used instead. Return the milliseconds from the
        first token to the end; -1 = unknown."""
        predictor, slot, mark = self.predictor, lease.slot, lease.mark
        complete_ms = (now - lease.charged_at) * 1e3
        if duration_ms > 0.0:
            complete_ms = min(duration_ms - lease.queued_ms, complete_ms)
        took_ms = min(lease.forecast.ttft_ms, complete_ms)
        if lease.request.stream:
            took_ms = lease.ttft_ms(ttft_ms) - lease.queued_ms
            if took_ms <= 0.0 or lease.prefill is not None:
                return -1.0
            predictor.judge(slot, lease.forecast, took_ms)
            if mark is not None:
                predictor.logged(lease, took_ms, mark[1], now)
        if lease.prefill is not None:
            return self._pair_ended(lease, lease.prefill, complete_ms, tokens, now)
        if mark is not None and tokens > 0:
            blind_ms = self.ledger.blind_ms(slot)
            predictor.complete(lease, lease.uncached_tokens, complete_ms, tokens, mark, blind_ms, now)
        lease.first_token_at = lease.charged_at + took_ms * 1e-3
        return max(complete_ms - took_ms, LOG_MS)

    def _pair_ended(self, lease: Lease, part: Lease, complete_ms: float, tokens: int, now: float) -> float:
        """Learn from a whole answer of a pair. The time is divided in proportion to what each endpoint was expected to
        take: which of them was slow shows when they are paired with others. If another time of the handover
        (`HANDOVER_MOST`) explains the whole, neither was."""
        predictor, mark = self.predictor, lease.mark
        if mark is None or tokens <= 0 or part.handover_ms < 0.0 or part.forecast.ttft_ms <= 0.0:
            return -1.0
        answer_ms = (tokens - 1.0) * lease.forecast.tpot_ms
        both_ms, share = part.forecast.ttft_ms + answer_ms, HANDOVER_SHARE / (1.0 - HANDOVER_SHARE)
        fastest = complete_ms / (both_ms + HANDOVER_MOST * part.handover_ms)
        scale = min(max(1.0, fastest), complete_ms / (both_ms + min(part.handover_ms, share * both_ms)))
        predictor.complete(lease, 0.0, scale * answer_ms, tokens, mark, self.ledger.blind_ms(lease.slot), now)
        lease.first_token_at = lease.charged_at + 1e-3 * (complete_ms - scale * answer_ms)
        if self._tells_of(part, lease):
            took_ms, load_ms = scale * part.forecast.ttft_ms, predictor.mark(part.slot)[1]
            predictor.logged(part, took_ms, load_ms, now, part.hit_tokens)
        return scale * answer_ms

    def refused(self, lease: Lease) -> None:
        """Take the prompt of a refused request (4xx) back from the learned index, because the server computed nothing.
        The lease is released already. Blocks stay if another request has computed them since, or is there now and
        shares them; if that one is refused as well, its blocks are taken back then.

        Other schedulers keep the prompt in their index: their messages cannot take a prompt back.
        """
        request, there = lease.request, lease.prefill or lease
        hashes, ends = request.prefix.hashes, request.prefix.ends
        if not hashes or request.recomputed or lease.unreached or self.table.ids[there.slot] != there.endpoint_id:
            return
        before = min(lease.hit_tokens, lease.hit_at_most)
        token_bytes = max(request.prompt_bytes, ends[-1]) / max(request.prompt_tokens, 1)
        depth = bisect_right(ends, (before + 1) * token_bytes)
        for ended, done in self._answered:
            if ended >= there.charged_at and (done.prefill or done).endpoint_id == there.endpoint_id:
                depth = _shared(hashes, done.request.prefix.hashes, depth)
        for beside in self.ledger.of_slot(there.slot):
            alone = depth
            depth = _shared(hashes, beside.request.prefix.hashes, depth)
            if depth > alone:
                beside.hit_at_most = min(before, beside.hit_at_most)
        self.table.free_cache[there.slot] = self.prefix.take_back(there.slot, hashes[depth:])

    def left(self, lease: Lease, now: float) -> None:
        """The client left before the first token; the lease is released. If the server can hardly have computed the
        prompt yet, take it back as if refused: who leaves again and again would displace what the server really has
        from the learned index."""
        self.stalls.given_up(lease.slot, now)
        if 1e3 * (now - lease.charged_at) < max(lease.forecast.ttft_ms, 1e-3 * lease.work_us):
            self.refused(lease)

    def measured(self, bytes_per_token: float, share: float = BYTES_SHARE) -> None:
        """Learn the reported bytes per prompt token (`share`: weight), and adapt the bytes that each cache holds."""
        self.bytes_per_token += share * (bytes_per_token - self.bytes_per_token)
        if abs(self.bytes_per_token / self._budgeted_with - 1.0) > BYTES_CHANGED:
            self._budgeted_with = self.bytes_per_token
            for slot, capacity in enumerate(self.table.capacity_tokens.tolist()):
                if capacity and self.table.endpoints[slot] is not None and self.prefix.capacity(slot):
                    self.prefix.set_capacity(slot, int(capacity * self._budgeted_with))

    # ---- saved and restored ----

    def taken(self, slot: int, now: float) -> EndpointLearned:
        """Return what was learned of one endpoint, without its prefixes."""
        table = self.table
        endpoint, sample = table.endpoints[slot], table.samples[slot]
        assert endpoint is not None
        if sample is None and slot in self._recalled:
            sample = self._recalled[slot][0].sample
        look = cast(Look, self._looks[slot])
        own = self.predictor.own(slot, now)
        return EndpointLearned(endpoint.id, endpoint.address, look, own, sample, self.prefix.capacity(slot))

    def restore(self, part: Part, age_s: float, now: float, instead: bool = False) -> None:
        """Restore a part that is `age_s` seconds old; that of an endpoint only if its address is the same. `instead`:
        in place of the prefixes that are known. Its scrape may be newer than ours, so that the next one confirms it."""
        if isinstance(part, Common):
            self.predictor.restore(part.forecasts, instead)
            self.adapters.restore(part.activate_ms, part.load_ms)
            self.measured(min(max(part.bytes_per_token, MIN_BYTES_PER_TOKEN), MAX_BYTES_PER_TOKEN), 1.0)
            return
        slot = self.table.slot(part.endpoint_id)
        if slot is None:
            return
        endpoint, sample = self.table.endpoints[slot], self.table.samples[slot]
        if isinstance(part, PrefixesLearned):
            number, oldest = self._extending.pop(slot, (-1, None))
            if number == part.number:
                oldest = self.prefix.extend(slot, part.blocks, part.sizes, oldest)
                self.table.free_cache[slot] = self.prefix.free(slot)
                if oldest is not None:
                    self._extending[slot] = number + 1, oldest
        elif endpoint is not None and endpoint.address == part.address:
            if instead:
                self._unlearn(slot)
            self._extending[slot] = 0, None
            if sample is None:
                self.prefix.set_capacity(slot, part.capacity)
            if sample is None or instead:
                self._recalled[slot] = part, now - age_s
            else:
                self._confirm(slot, part, now - age_s, sample, now)

    def _confirmed(self, slot: int, started: float, sample: Sample, now: float) -> bool:
        """Compare what was restored with the first scrape that was sent since, as `_confirm` does."""
        recalled = self._recalled.get(slot)
        if recalled is None or recalled[1] > started:
            return True
        del self._recalled[slot]
        return self._confirm(slot, *recalled, sample, now)

    def _confirm(self, slot: int, part: EndpointLearned, taken_at: float, sample: Sample, now: float) -> bool:
        """Compare a restored endpoint with its first scrape since. If the engine restarted, forget its cache and return
        False. Otherwise restore its speed, if its class is the same, and count the tokens computed since `taken_at` as
        cached."""
        before = part.sample
        if before is not None and (_restarted(before, sample) or sample.started != before.started):
            self._extending.pop(slot, None)
            self._emptied(slot)
            return False
        if part.look == self._looks[slot]:
            self.predictor.restore_own(slot, part.own, now - taken_at, now)
        unseen = _computed(sample) - _computed(before) if before is not None else 0.0
        if unseen > 0.0:
            self.prefix.occupy(slot, int(min(unseen, MOST) * self._budgeted_with))
        return True

    def _emptied(self, slot: int) -> None:
        """Forget the cached prefixes of an engine that restarted."""
        self._unlearn(slot)
        if self.exact is not None:
            self.exact.emptied(slot)

    def _unlearn(self, slot: int) -> None:
        """Forget the learned prefixes of an engine that emptied its cache."""
        capacity = self.prefix.capacity(slot)
        self.prefix.drop_slot(slot)
        self.prefix.add_slot(slot, capacity)
        self._answered.clear()
        self.table.free_cache[slot] = 1.0

    def refresh_exact(self, sizes: tuple[int, ...]) -> None:
        """Take over what KV events said, see `ExactKnowledge.refresh`; learned prefixes end with the cache, too."""
        if self.exact is not None:
            for slot in self.exact.refresh(sizes):
                self._unlearn(slot)

    def settle_prompts(self, now: float) -> None:
        """Call this before `match` for a request that did not arrive just now; see `ExactKnowledge.settle`."""
        if self.exact is not None:
            self.exact.settle(now)

    def match(self, request: Request) -> FloatColumn | None:
        """Return the share of the prompt (0..1) that each endpoint can probably use from its cache; `None` = 0 for all.

        Shares from the learned index are of the prompt's bytes, those from `self.exact` of its tokens.
        """
        if request.recomputed:
            return None
        column = self.prefix.match(request.prefix, len(self.table.endpoints), request.prompt_bytes)
        if self.exact is not None:
            rates = self.predictor.rates
            return self.exact.refine(request, column, len(self.table), rates.prior.c_pf * rates.prefill)
        return column

    def stale(self, slot: int, now: float) -> bool:
        return bool(now - self.table.sampled_at[slot] > self.staleness)

    def age(self, slot: int, now: float) -> float:
        """Return the seconds since the last good scrape; infinite if there was none."""
        sampled = float(self.table.sampled_at[slot])
        return now - sampled if sampled > -inf else inf

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.ledger.validate()
        self.prefix.validate()
        self.predictor.validate()
        self.adapters.validate()
        table = self.table
        assert np.isfinite([table.queue, table.active, table.kv, table.pending_tokens, table.kv_tokens]).all()
        assert ((table.kv >= 0) & (table.kv <= 1)).all()
        assert (table.long_until_ms <= table.long_until).all()


def _shared(hashes: Sequence[int], theirs: Sequence[int], depth: int) -> int:
    """Return how many of their first blocks two prompts share, but at least `depth`."""
    most = min(len(hashes), len(theirs))
    while depth < most and hashes[depth] == theirs[depth]:
        depth += 1
    return depth


def _identity(endpoint: Endpoint) -> tuple[str, str, str]:
    return endpoint.id, endpoint.address, endpoint.uid


def _marks(request: Request) -> set[str | int]:
    """What brings requests to one endpoint: the session, and the prompt's beginning."""
    marks: set[str | int] = {*request.prefix.hashes[:1]}
    return {*marks, request.session} if request.session else marks


def _kind(lease: Lease) -> tuple[str, str, bool]:
    """What requests have in common that fail for one reason: the client, the model, and, because policies send what is
    cached to where it is, whether the prompt is new."""
    return lease.request.fairness_id, lease.request.target_model, lease.hit_tokens > 0


def _prompt(request: Request) -> tuple[int, ...]:
    """What tells prompts apart: the last full block and the length. Empty for one without a block."""
    return (*request.prefix.hashes[-1:], request.prompt_bytes) if request.prefix.hashes else ()


def _restarted(before: Sample, sample: Sample) -> bool:
    """Whether the engine restarted: a cumulative counter has fallen."""
    return sample.prefix_queries is not None and (before.prefix_queries or 0.0) > sample.prefix_queries


def _computed(sample: Sample) -> float:
    """Return the tokens that the engine put into its cache since its start; counters that it lacks count as 0."""
    return (sample.prefix_queries or 0.0) - (sample.prefix_hits or 0.0) + (sample.generation_tokens or 0.0)


def _gauge(value: float | None, older: float) -> float:
    """Return a reading clipped to 0..`MOST`; the older one if there is none, or it is NaN or infinite."""
    return float(min(max(value, 0.0), MOST)) if value is not None and value < inf else float(older)
