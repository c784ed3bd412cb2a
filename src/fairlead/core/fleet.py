"""The fleet: one mutating door for what is known about endpoints, and the view that policies read."""

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from math import inf, log2
from typing import cast

import numpy as np

from fairlead.core.adapters import Adapters, Cold
from fairlead.core.columns import FloatColumn
from fairlead.core.cost import CROWDED, LONG_TOKENS, PRIOR, StepModel, forecast
from fairlead.core.endpoint import MODEL_LABEL, NOT_LISTED, BaseModels, Endpoint, Sample, Topology
from fairlead.core.exact import ExactKnowledge
from fairlead.core.learned import Common, EndpointLearned, Look, Part, PrefixesLearned
from fairlead.core.ledger import Lease, Ledger
from fairlead.core.predictor import Predictor
from fairlead.core.prefix import DEFAULT_CAPACITY, PrefixIndex
from fairlead.core.records import Forecast
from fairlead.core.request import Request
from fairlead.core.stalls import OVERDUE_S, Stalls
from fairlead.core.table import ON_DEMAND, EndpointTable
from fairlead.core.tokens import MAX_BYTES_PER_TOKEN, MIN_BYTES_PER_TOKEN

#: Prompt bytes per KV token, when a capacity in tokens is turned into a budget of text, until answers tell it.
BYTES_PER_TOKEN = 4.2
#: Weight of the newest report of it, and by how much it must differ for budgets to be set anew.
BYTES_SHARE, BYTES_CHANGED = 0.2, 0.02
#: Failed responses in a row before an endpoint is avoided, and for how many seconds.
ERRORS_TO_EJECT = 3
EJECT_SECONDS = 3.0
#: What an answer counts for that broke off where nobody tells whether the client or the endpoint did it.
UNFINISHED = 0.25
#: Of requests whose first token nobody sees, one in so many seconds and endpoint teaches how fast engines are.
BLIND_S = 1.0
#: Requests that were answered last are remembered for as long as the gateway may tell late of a refused one.
ANSWERED = 512
#: Labels with such a word in their name tell engines apart that differ in speed. Others may be of one pod only.
LOOKS = ("model", "role", "gpu", "accelerator", "hardware", "instance-type", "engine", "version", "template-hash")
#: Above any true number of requests or tokens of one endpoint. Higher readings are cut, so that sums stay exact.
MOST = 1e9
#: Microseconds of one prefill. Thousands of them still add up without rounding.
MOST_WORK = 1e12


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
        """`prior`: what engines are believed to take before anything is learned of them."""
        self._prior = prior
        self.table = EndpointTable()
        self.topology = topology
        self.ledger = ledger(self.table, lease_ttl)
        #: What first tokens will take, learned from those that came.
        self.predictor = Predictor(self.table, prior)
        self.adapters = Adapters(self.table, self.ledger.starting)
        self.stalls = Stalls(self.table, self.ledger, self.predictor)
        self.prefix = PrefixIndex(max_prefix_entries)
        #: What KV events tell; `None` = nobody listens to any.
        self.exact = exact
        #: Seconds after which a scrape no longer counts.
        self.staleness = staleness
        self._looks: dict[int, Hashable] = {}
        #: As reported, and what the budgets of text were made with.
        self.bytes_per_token = self._budgeted_with = BYTES_PER_TOKEN
        #: By slot: what was restored of an endpoint that has not been scraped since, and when it was taken down; how
        #: many parts of its prefixes came, and its oldest block so far.
        self._recalled: dict[int, tuple[EndpointLearned, float]] = {}
        self._extending: dict[int, tuple[int, int | None]] = {}
        #: Endpoints whose cache was found empty since the last look at this.
        self.cold: list[str] = []
        #: The last that were answered completely.
        self._answered = deque[tuple[float, Lease]](maxlen=ANSWERED)
        #: By slot: until when it is avoided on the word of others, and for own reasons.
        self._avoided: dict[int, list[float]] = {}

    def up(self, endpoint: Endpoint) -> list[Lease]:
        """An endpoint joined or changed. Leases at an address it gave up are returned, released."""
        slot = self.table.slot(endpoint.id)
        if slot is None:
            slot = self.table.add(endpoint)
            self.table.set_distance(slot, self.topology.ms(endpoint.labels))
            self.prefix.add_slot(slot)
            self.table.free_cache[slot] = 1.0
            if self.exact is not None:
                self.exact.add_slot(slot)
            self._looks_like(slot)
            self.stalls.reset(slot)
            return []
        old = self.table.endpoints[slot]
        if old is not None and old.address != endpoint.address:
            leases = self.down(endpoint.id)
            self.up(endpoint)
            return leases
        self.table.replace(slot, endpoint)
        self.table.set_distance(slot, self.topology.ms(endpoint.labels))
        self._looks_like(slot)
        return []

    def _looks_like(self, slot: int, restarted: bool = False) -> None:
        """What is learned of an engine is first of all what is learned of all that look alike. One that looks otherwise
        now, or was started anew, begins again."""
        table = self.table
        endpoint, sample = table.endpoints[slot], table.samples[slot]
        assert endpoint is not None
        labels = [item for item in endpoint.labels.items() if any(word in item[0].lower() for word in LOOKS)]
        capacity = table.capacity_tokens[slot]
        # Like engines differ by a few blocks.
        size = round(2.0 * log2(capacity)) if capacity else 0
        look = (*sorted(labels), sample.block_size if sample is not None else 0, size)
        if restarted or look != self._looks.get(slot):
            self._looks[slot] = look
            self.predictor.reset(slot, look)

    def down(self, endpoint_id: str) -> list[Lease]:
        """An endpoint left. Its leases are released and returned."""
        slot = self.table.slot(endpoint_id)
        if slot is None:
            return []
        leases = self.ledger.abandon(slot)
        if slot in self._avoided:
            self.avoid(slot, -inf)
            del self._avoided[slot]
        self.prefix.drop_slot(slot)
        if self.exact is not None:
            self.exact.drop_slot(slot)
        self.table.remove(slot)
        del self._looks[slot]
        self._recalled.pop(slot, None)
        self._extending.pop(slot, None)
        self._answered.clear()
        return [lease for lease in leases if not lease.auxiliary]

    def sampled(self, endpoint_id: str, started: float, now: float, sample: Sample) -> list[Lease]:
        """A scrape arrived. Returns leases that the endpoint provably no longer holds; they are still charged."""
        table = self.table
        slot = table.slot(endpoint_id)
        if slot is None:
            return []
        table.stale.add(slot)
        before = table.samples[slot]
        self.stalls.sampled(slot, before, sample, now)
        table.sampled(slot, sample)
        if table.failures[slot]:
            table.failures[slot] = 0
            table.judge_trouble()
        table.sampled_at[slot] = now
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
        if slot in self._recalled:
            self._confirm(slot, *self._recalled.pop(slot), sample, now)
        ran = table.running[slot]
        table.waiting[slot] = waiting = _gauge(sample.waiting, table.waiting[slot])
        table.running[slot] = running = _gauge(sample.running, ran)
        if running or not ran or not (waiting or table.inflight[slot]):
            # Otherwise the batch may just have ended: for one step the engine shows no memory in use.
            table.kv[slot] = min(_gauge(sample.kv_usage, table.kv[slot]), 1.0)
        if sample.waiting is None and sample.running is None:
            return []
        # There is room for one or two more, and what waits, or a whole step of it, should have been computed by now. By
        # the prior, if that is sooner: a wait for a slot, while nobody knows it for one, was learned as slow prefill.
        engines = max(table.ranks[slot], 1.0)
        due_ms = min(self.predictor.rates.prefill[slot], 1.0) * min(
            table.queued_ms[slot] / engines, self._prior.whole_step_ms
        )
        overdue = now * 1e3 - table.prefill_since_ms[slot] > due_ms
        if overdue and table.kv[slot] * (1.0 + 2.0 / max(running / engines, 1.0)) < CROWDED:
            self.predictor.rates.sampled(slot, waiting, running)
        # What was seen at others of its class holds for it, too.
        table.max_seqs[slot] = self.predictor.rates.limit(slot)
        dropped = self.ledger.reconcile(slot, started, waiting, running)
        for lease in dropped:
            if lease.auxiliary:
                self.ledger.release(lease)
        return [lease for lease in dropped if not lease.auxiliary]

    def _sized(self, slot: int, sample: Sample) -> None:
        """Store how many engines the address has, and the size of their KV cache."""
        table = self.table
        ranks = _gauge(sample.ranks or None, table.ranks[slot])
        known = table.capacity_tokens[slot]
        capacity = _gauge(sample.block_size * sample.num_blocks, 0.0) or known
        if ranks == table.ranks[slot] and capacity == known:
            return
        if ranks != table.ranks[slot]:
            table.set_ranks(slot, ranks)
        if capacity != known:
            table.capacity_tokens[slot] = capacity
            self.prefix.set_capacity(slot, int(capacity * self._budgeted_with))
        table.per_capacity[slot] = max(ranks, 1.0) / capacity if capacity else 0.0

    def adapters_listed(self, endpoint_id: str, adapters: frozenset[str] | None, base: BaseModels = NOT_LISTED) -> None:
        """Its list of models was read; `None` = it does not tell."""
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
        """All engines of this look load adapters on demand, or none of them."""
        for slot, like in self._looks.items():
            if like == look:
                self._list(slot, self.table.listed[slot], dynamic)

    def unlisted(self, model: str, slot: int) -> bool:
        """Whether the endpoint takes adapters, and its base models are known and have another name."""
        names = self.table.based[slot].names
        return bool(model and names and model not in names and self.table.max_adapters[slot])

    def without_model(self, slot: int, model: str) -> bool:
        """It answered 404. Whether its list of models should be read again, because the model may be an adapter. Until
        then the list stays: a server answers 404 for paths that it does not have, too."""
        table = self.table
        endpoint = table.endpoints[slot]
        if not model or endpoint is None or endpoint.labels.get(MODEL_LABEL) == model:
            return False
        look = self._looks[slot]
        if self.adapters.refused(model, slot, look):
            self._same_for(look, False)
        return True

    def loading(self, request: Request) -> FloatColumn | None:
        """Milliseconds until each endpoint can run the request's adapter; `None` = there is none, or no difference."""
        return self.adapters.waits(request.target_model, self.predictor.hold_ms)

    def scrape_failed(self, endpoint_id: str, now: float, answered: bool = False) -> None:
        """No reading. When the last good one is too old, the columns become what we know of our own requests.

        `answered`: the endpoint did, so it does not count as failing.
        """
        table = self.table
        slot = table.slot(endpoint_id)
        if slot is None:
            return
        table.failures[slot] = 0 if answered else table.failures[slot] + 1
        table.troubled = table.troubled or not answered
        if self.stale(slot, now):
            self.ledger.own_accounting(slot)
            capacity = table.capacity_tokens[slot]
            table.kv[slot] = min(table.kv_tokens[slot] / capacity, 1.0) if capacity else 0.0
            table.stale.add(slot)

    def answered(self, slot: int, ok: bool, now: float, own: bool = True) -> None:
        """A response ended, an own one or one that another scheduler tells of. Some failures in a row make policies
        avoid the endpoint a moment, or until one works."""
        table = self.table
        if ok:
            if table.errors[slot]:
                table.errors[slot] = 0
                self.avoid(slot, -inf)
            return
        table.errors[slot] += 1
        table.troubled = True
        if table.errors[slot] >= ERRORS_TO_EJECT:
            # Told on, even if others saw the failures: a peer that missed some of those messages learns of it.
            self.avoid(slot, now + EJECT_SECONDS)

    def unfinished(self, slot: int, now: float) -> bool:
        """An answer broke off, and nobody tells by whom. Clients leave one endpoint as often as another: many such in a
        row, while others finish, are failures of the endpoint. Return whether it is one."""
        table = self.table
        table.errors[slot] = min(table.errors[slot] + UNFINISHED, ERRORS_TO_EJECT)
        table.troubled = True
        failed = table.errors[slot] >= ERRORS_TO_EJECT and bool(np.any(table.alive & (table.errors < 1.0)))
        if failed:
            self.avoid(slot, now + EJECT_SECONDS)
        return failed

    def avoid(self, slot: int, until: float, own: bool = True) -> None:
        """Avoid an endpoint until then (-inf = not), for reasons of our own or on the word of others."""
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
        """Charge a lease and remember the prompt's prefix for the endpoint. `expected_output`: tokens of all its
        sequences. `reserved`: only keep a place there for a request that may go elsewhere in the end; nothing is
        learned of it."""
        table, prompt = self.table, request.prompt_tokens
        half = expected_output / 2
        uncached = float(min(max(prompt - hit_tokens, 1), MOST))
        refused = uncached * table.per_capacity[slot] > 1.0
        if refused:  # larger than all its memory: the engine says so at once, and computes nothing
            prompt, half, uncached = 1, 0.0, 1.0
        alone_ms = self._prior.prefill_ms(prompt, uncached)
        blind = request.blind or not request.stream
        lease = Lease(
            request,
            slot,
            table.ids[slot],
            now,
            uncached,
            # Whole tokens: sums of them are exact whatever comes and goes. NaN counts as the least.
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
        if reserved:
            self.ledger.reserved[lease] = None
        elif not refused:
            table.free_cache[slot] = self.prefix.insert(slot, request.prefix)
        return lease

    def sent_long_prompt(self, slot: int, alone_ms: float, now: float) -> None:
        """Remember where prompts were sent that others had better keep away from: see `pauses` in `core.cost`.
        `alone_ms`: of computing it at the prior's speed."""
        table, now_ms, took_ms = self.table, now * 1e3, alone_ms * float(self.predictor.rates.prefill[slot])
        until_ms = max(float(table.long_until_ms[slot]), now_ms) + 2.0 * took_ms
        table.long_until_ms[slot] = until_ms = min(until_ms, now_ms + 4.0 * took_ms)
        table.long_until = max(table.long_until, until_ms)

    def _meet(self, lease: Lease) -> None:
        """A charged lease and its adapter, if it needs one that somebody has."""
        model, waits = lease.request.target_model, self.loading(lease.request)
        if waits is None:
            return
        cold = self.adapters.cold(model, lease.slot, waits, self.predictor.hold_ms)
        if cold is not None and cold.wait_ms:
            lease.forecast = self.predictor.behind(lease.slot, lease.forecast, cold.wait_ms)
        lease.adapter, lease.cold = model, cold
        self.ledger.starts(lease)

    def charge_pair(
        self, request: Request, slot: int, prefill_slot: int, now: float, hit_tokens: int, expected_output: float
    ) -> Lease:
        """The same for a request whose prompt `prefill_slot` computes and whose answer `slot` gives. `hit_tokens` is
        what the former holds; the latter is given all by it and has nothing to compute."""
        prefill = self.charge(request, prefill_slot, now, hit_tokens, 0.0, auxiliary=True)
        lease = self.charge(request, slot, now, request.prompt_tokens, expected_output)
        lease.prefill = prefill
        lease.hit_tokens = hit_tokens
        lease.forecast = Forecast()  # how long the transfer takes is not known
        return lease

    def move(self, lease: Lease, slot: int, now: float) -> Lease:
        """The request is at another endpoint than it was charged to; which one's failure that is, too, unless it left
        before. Its answer has begun."""
        if lease.held:
            if now - lease.charged_at > OVERDUE_S and not self.table.suspicion[lease.slot]:
                self.stalls.hedged_in_vain()
            self.ledger.release(lease)
            self.answered(lease.slot, False, now)
        self.stalls.moved(slot, now)
        moved = self.charge(lease.request, slot, now, 0, 2 * lease.growth_tokens)
        moved.unreached = lease.endpoint_id
        moved.forecast = Forecast()  # that of the one says nothing of the other
        moved.evicted_at, moved.predicted, moved.queued_ms = lease.evicted_at, lease.predicted, lease.queued_ms
        self.ledger.first_token(moved)
        if lease.request.stream:
            moved.first_token_at = now
        return moved

    def first_token(self, lease: Lease, now: float) -> None:
        """The first byte of an answer was seen, and not before."""
        if self.exact is not None:
            self.exact.first_token(lease.predicted, now)
        self.stalls.first_token(lease.slot, now)
        if lease.prefill is not None and lease.prefill.held:
            self.stalls.first_token(lease.prefill.slot, now)
        if lease.request.stream:
            lease.first_token_at = now
            if lease.prefill is None and not self.stalls.was_out(lease):
                cold = lease.cold is not None
                if lease.cold is not None:
                    self._loaded(lease, lease.cold, (now - lease.charged_at) * 1e3)
                self.predictor.first_token(
                    lease.slot,
                    lease.forecast,
                    lease.uncached_tokens,
                    lease.work_us * 1e-3,
                    lease.charged_at,
                    now,
                    lease.hit_tokens,
                    cold,
                )
                lease.mark = self.predictor.mark(lease.slot)
        self.ledger.first_token(lease, now)

    def _loaded(self, lease: Lease, cold: Cold, took_ms: float) -> None:
        """Learn of a first token that came so late what its adapter took."""
        without_ms = (lease.forecast.model_ttft_ms - cold.wait_ms) * float(self.predictor.kappa[lease.slot])
        self.adapters.took(cold, took_ms - without_ms)

    def completed(
        self, lease: Lease, now: float, completion_tokens: int, ttft_ms: float = -1.0, duration_ms: float = -1.0
    ) -> None:
        """An answer is complete (its lease is released). -1 tokens, or negative times since the request came = not
        known.

        Its tokens stay in the engine's cache as well, until they are the least recently used; nobody asks for them, but
        they push prompts out. On a workload of 1000-token answers the believed hits are 79 % with them (real: 78 %)
        and 88 % without.

        Of several sequences the longest ends last: how many steps that were is known if all were cut by the limit.
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
                self._unseen(lease, now, completion_tokens, ttft_ms, duration_ms)
            if lease.first_token_at >= 0.0:
                held_ms = (now - lease.first_token_at) * 1e3
                tokens = -1 if lease.blind else completion_tokens
                self.predictor.ended(lease.slot, lease.forecast, held_ms, tokens, lease.mark or (0.0, 0.0), now)
        if output > 0.0:
            self.prefix.occupy(lease.slot, int(min(output, MOST) * self._budgeted_with))

    def _unseen(self, lease: Lease, now: float, tokens: int, ttft_ms: float, duration_ms: float) -> None:
        """Nobody watched the response. When its first token came, the gateway's log tells, unless it was not streamed:
        then what was expected stands for it."""
        predictor, slot, uncached, mark = self.predictor, lease.slot, lease.uncached_tokens, lease.mark
        complete_ms = (now - lease.charged_at) * 1e3
        if duration_ms > 0.0:
            complete_ms = min(duration_ms - lease.queued_ms, complete_ms)
        took_ms = min(lease.forecast.ttft_ms, complete_ms)
        if lease.request.stream:
            took_ms = ttft_ms - lease.queued_ms
            if took_ms <= 0.0 or lease.prefill is not None:
                return
            predictor.judge(slot, lease.forecast, took_ms)
            if mark is not None:
                predictor.logged(slot, lease.forecast, uncached, lease.work_us * 1e-3, took_ms, mark[1], now)
        if mark is not None and tokens > 0:
            own_ms, blind_ms = lease.work_us * 1e-3, self.ledger.blind_ms(slot)
            predictor.complete(slot, uncached, complete_ms, tokens, mark, blind_ms, now, own_ms)
        lease.first_token_at = lease.charged_at + took_ms * 1e-3

    def refused(self, lease: Lease) -> None:
        """The server answered 4xx and computed nothing. Forget what it was believed to cache since this prompt was sent
        (its lease is released), unless another one computed it meanwhile, or is there now and computes it: if that is
        refused, too, it does.

        Schedulers that are told of the prompt keep believing it: their messages cannot take a prompt back.
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

    def measured(self, bytes_per_token: float, share: float = BYTES_SHARE) -> None:
        """Of prompts, as answers reported. A cache is believed to hold so much more or less text."""
        self.bytes_per_token += share * (bytes_per_token - self.bytes_per_token)
        if abs(self.bytes_per_token / self._budgeted_with - 1.0) > BYTES_CHANGED:
            self._budgeted_with = self.bytes_per_token
            for slot, capacity in enumerate(self.table.capacity_tokens.tolist()):
                if capacity and self.table.endpoints[slot] is not None:
                    self.prefix.set_capacity(slot, int(capacity * self._budgeted_with))

    # ---- taken down, and given back ----

    def taken(self, slot: int, now: float) -> EndpointLearned:
        """Of one endpoint, without its prefixes."""
        table = self.table
        endpoint, sample = table.endpoints[slot], table.samples[slot]
        assert endpoint is not None
        if sample is None and slot in self._recalled:
            sample = self._recalled[slot][0].sample
        look = cast(Look, self._looks[slot])
        own = self.predictor.own(slot, now)
        return EndpointLearned(endpoint.id, endpoint.address, look, own, sample, self.prefix.capacity(slot))

    def restore(self, part: Part, age_s: float, now: float) -> None:
        """What was known `age_s` seconds ago. Of an endpoint only while it is there, at the same address."""
        if isinstance(part, Common):
            self.predictor.restore(part.forecasts)
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
            self._extending[slot] = 0, None
            if sample is None:
                self.prefix.set_capacity(slot, part.capacity)
                self._recalled[slot] = part, now - age_s
            else:
                self._confirm(slot, part, now - age_s, sample, now)

    def _confirm(self, slot: int, part: EndpointLearned, taken_at: float, sample: Sample, now: float) -> None:
        """Its first reading since: whether it is the engine that it was, and what that has computed meanwhile."""
        before = part.sample
        if before is not None and (_restarted(before, sample) or sample.started != before.started):
            self._extending.pop(slot, None)
            self._emptied(slot)
            return
        if part.look == self._looks[slot]:
            self.predictor.restore_own(slot, part.own, now - taken_at, now)
        unseen = _computed(sample) - _computed(before) if before is not None else 0.0
        if unseen > 0.0:
            self.prefix.occupy(slot, int(min(unseen, MOST) * self._budgeted_with))

    def _emptied(self, slot: int) -> None:
        """Its engine was started anew, and its cache is empty."""
        capacity = self.prefix.capacity(slot)
        self.prefix.drop_slot(slot)
        self.prefix.add_slot(slot, capacity)
        self._answered.clear()
        self.table.free_cache[slot] = 1.0

    def match(self, request: Request) -> FloatColumn | None:
        """Share of the prompt (0..1) that each endpoint is believed to hold and will use; `None` = nobody anything.

        Learned shares are of its bytes, exact ones (`fleet.exact`) of its tokens.
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
        """Seconds since the last good scrape; infinite when there was none."""
        sampled = float(self.table.sampled_at[slot])
        return now - sampled if sampled > -inf else inf

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant of any part is broken."""
        self.ledger.validate()
        self.prefix.validate()
        self.predictor.validate()
        table = self.table
        assert np.isfinite([table.queue, table.active, table.kv, table.pending_tokens, table.kv_tokens]).all()
        assert ((table.kv >= 0) & (table.kv <= 1)).all()
        assert (table.long_until_ms <= table.long_until).all()


def _shared(hashes: Sequence[int], theirs: Sequence[int], depth: int) -> int:
    """How many of the first blocks two prompts share, at least `depth`."""
    most = min(len(hashes), len(theirs))
    while depth < most and hashes[depth] == theirs[depth]:
        depth += 1
    return depth


def _restarted(before: Sample, sample: Sample) -> bool:
    """Its counters began again."""
    return sample.prefix_queries is not None and (before.prefix_queries or 0.0) > sample.prefix_queries


def _computed(sample: Sample) -> float:
    """Tokens that the engine has put into its cache since it was started, as far as it tells."""
    return (sample.prefix_queries or 0.0) - (sample.prefix_hits or 0.0) + (sample.generation_tokens or 0.0)


def _gauge(value: float | None, older: float) -> float:
    """A reading in 0..`MOST`; the older one where there is none, or NaN or infinity."""
    return float(min(max(value, 0.0), MOST)) if value is not None and value < inf else float(older)


__all__ = ["DEFAULT_CAPACITY", "Fleet"]
