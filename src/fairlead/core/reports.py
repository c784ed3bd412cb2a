"""Reports of what this scheduler did and saw, for the other schedulers of the pool (`fairlead.core.facts`).

Rules
* Facts are recorded where they happen, as references, and are encoded once per batch. A plain `Fleet` records nothing,
  so a single scheduler pays nothing.
* Memory is bounded. Batches that are not fetched are lost; peers notice the gap in the sequence.
* Reservations are not reported: they last for milliseconds, and the lease that follows is reported.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Any

from fairlead.core.apis import untimed
from fairlead.core.facts import (
    AGE_UNIT,
    BROKEN,
    MOST_FACTS,
    POLICY_NAME,
    VERSION,
    Avoided,
    Batch,
    Charged,
    Dictionary,
    Ended,
    FirstToken,
    Held,
    Sent,
    Snapshot,
    block_bytes,
    block_sizes,
    encode,
    endpoint_hash,
)
from fairlead.core.fleet import Fleet
from fairlead.core.flow import FlowKey
from fairlead.core.flow_control import FlowControl
from fairlead.core.ledger import Lease, Ledger
from fairlead.core.request import PrefixChain
from fairlead.core.table import EndpointTable

#: Failures that count less are not reported: other schedulers count each fully.
REPORTED_BLAME = 0.5
#: Blocks in a dictionary. Then a new one begins, and each live chain is sent in full once more.
DICTIONARY = 32_768
#: Prompts in a snapshot: the last ones sent.
RECENT = 512
#: Prompts and leases in one part of the work on a snapshot; each part takes about a millisecond.
PART_PROMPTS, PART_LEASES = 64, 512
#: Forecasts are cut at one day.
LONGEST_MS = 86_400_000.0
#: Flows in a batch.
MOST_FLOWS = 256


class Reports:
    """Collects facts. The transport calls `batch` and `snapshot`; neither affects decisions."""

    def __init__(self, ledger: "ReportingLedger", table: EndpointTable) -> None:
        self._ledger, self._table = ledger, table
        #: Number of the last batch.
        self.sequence = 0
        self._next = 1
        self._charged: list[Lease] = []
        self._first_tokens: list[tuple[int, float]] = []
        self._ended: dict[int, int] = {}
        self._failed: list[str] = []
        #: Avoided endpoints, and until when (clock seconds); whether peers know the current state.
        self._avoided: dict[str, float] = {}
        self._avoided_told = True
        #: Blocks sent since the dictionary began; and a test whether a peer has sent a block.
        self.dictionary = Dictionary()
        self.known_elsewhere: Callable[[int], bool] = _never
        self._generation = 1
        #: The name of the policy that decides here, and what peers were told.
        self.policy = self._policy_told = ""
        self._recent: deque[tuple[str, PrefixChain]] = deque(maxlen=RECENT)
        self._now = 0.0
        self._flow: FlowControl | None = None
        #: The flow whose requests are not counted (`FlowControl.uncounted`), as last reported.
        self._only: FlowKey | None = None

    def follow(self, flow: FlowControl) -> None:
        """Also report the flows of this flow control."""
        self._flow = flow
        flow.queues.changed = set()

    def decide_by(self, policy: str) -> None:
        """From now on this policy decides. Peers learn that with the next batch."""
        self.policy = policy[:POLICY_NAME]

    # ---- recorded ----

    def charged(self, lease: Lease) -> None:
        lease.number = self._next
        self._next += 1
        self._charged.append(lease)
        if len(self._charged) > MOST_FACTS:
            self._drop()

    def first_token(self, lease: Lease, now: float) -> None:
        self._first_tokens.append((lease.number, now))
        if len(self._first_tokens) > MOST_FACTS:
            self._drop()

    def ended(self, lease: Lease, tokens: int = BROKEN) -> None:
        self._ended[lease.number] = tokens
        if len(self._ended) > MOST_FACTS:
            self._drop()

    def failed(self, endpoint_id: str) -> None:
        self._failed.append(endpoint_id)
        if len(self._failed) > MOST_FACTS:
            self._drop()

    def avoided(self, endpoint_id: str, until: float) -> None:
        """Record that an endpoint is avoided until then (clock seconds); -inf = no longer."""
        self._avoided_told = False
        if until > -inf:
            self._avoided[endpoint_id] = until
        else:
            self._avoided.pop(endpoint_id, None)

    def _drop(self) -> None:
        """Drop facts that are not fetched. They become a gap in the sequence, so peers will ask for a snapshot."""
        self.sequence += 1
        self._forget()
        self._begin_dictionary()

    def _forget(self) -> None:
        self._charged, self._first_tokens, self._ended, self._failed = [], [], {}, []

    def _begin_dictionary(self) -> None:
        self.dictionary.begin()
        self._generation += 1

    # ---- sent ----

    def batch(self, now: float) -> bytes:
        """Return the facts since the last batch, encoded; `b""` = none. `now`: clock seconds."""
        self._now = now
        held = self._changed(now)
        if not (self._charged or self._first_tokens or self._ended or held or self._failed) and self._avoided_told:
            return b""
        if len(self.dictionary.blocks) > DICTIONARY:
            self._begin_dictionary()
        self.sequence += 1
        endpoints = _Endpoints()
        prompts = _Prompts(endpoints, self.dictionary, self.known_elsewhere)
        charged = []
        for lease in self._charged:
            charged.append(_charge(lease, endpoints, now))
            prefix = lease.request.prefix
            if prefix.hashes:
                prompts.add(lease.endpoint_id, prefix)
                self._recent.append((lease.endpoint_id, prefix))
        next_number = self._next
        failed = tuple([endpoints.of(endpoint_id) for endpoint_id in self._failed])
        avoided = None if self._avoided_told else self._avoiding(endpoints)
        message = Batch(
            VERSION,
            self.sequence,
            self._generation,
            tuple(endpoints),
            next_number - len(charged),
            tuple(charged),
            tuple([FirstToken(next_number - number, _age(now - seen)) for number, seen in self._first_tokens]),
            tuple([Ended(next_number - number, tokens) for number, tokens in self._ended.items()]),
            tuple(prompts.sent),
            block_bytes(prompts.hashes),
            block_sizes(prompts.parts),
            held,
            failed,
            avoided,
            "" if self.policy == self._policy_told else self.policy,
        )
        self._avoided_told, self._policy_told = True, self.policy
        self._forget()
        return encode(message)

    def snapshot(self) -> Iterator[bytes]:
        """Make a snapshot, for a peer that missed some or all batches. Yield nothing (`b""`) after each part of the
        work, and at the end the encoded message. Facts, and `batch`, may come in between: the message has the leases of
        the first call, and what happens to them meanwhile is in later batches too."""
        now, sequence, following, endpoints = self._now, self.sequence, self._next, _Endpoints()
        leases = [lease for lease in self._ledger if lease.number]
        # Peers that have lost an endpoint, too, could not use its prompts, and would ask again and again.
        recent = [(name, prefix) for name, prefix in self._recent if self._table.slot(name) is not None]
        held = self._held(self._flow.queues.active() if self._flow is not None else [], now)
        avoided = self._avoiding(endpoints)
        self._begin_dictionary()
        prompts = _Prompts(endpoints, Dictionary(), _never)
        for begin in range(0, len(recent), PART_PROMPTS):
            for endpoint_id, prefix in recent[begin : begin + PART_PROMPTS]:
                prompts.add(endpoint_id, prefix)
            yield b""
        numbers, charged, pending = list[int](), list[Charged](), list[int]()
        for begin in range(0, len(leases), PART_LEASES):
            part = [lease for lease in leases[begin : begin + PART_LEASES] if lease.held]
            charged += [_charge(lease, endpoints, now) for lease in part]
            numbers += [lease.number for lease in part]
            pending += [lease.number for lease in part if lease.pending or _untold(lease)]
            yield b""
        message = Snapshot(
            VERSION,
            sequence,
            tuple(endpoints),
            following,
            tuple(numbers),
            tuple(charged),
            tuple(pending),
            tuple(prompts.sent),
            block_bytes(prompts.hashes),
            block_sizes(prompts.parts),
            held,
            avoided,
            self.policy,
        )
        yield encode(message)

    def _avoiding(self, endpoints: "_Endpoints") -> tuple[Avoided, ...]:
        self._avoided = {name: until for name, until in self._avoided.items() if until > self._now}
        left_ms = {name: int((until - self._now) * 1e3) for name, until in self._avoided.items()}
        return tuple([Avoided(endpoints.of(name), ms) for name, ms in left_ms.items()])

    def _changed(self, now: float) -> tuple[Held, ...]:
        """Return up to `MOST_FLOWS` flows that changed since they were last reported."""
        if self._flow is None or self._flow.queues.changed is None:
            return ()
        changed, only = self._flow.queues.changed, self._flow.uncounted
        keys = list(islice(changed, MOST_FLOWS))
        changed.difference_update(keys)
        if only != self._only:
            keys += [key for key in (self._only, only) if key is not None]
            self._only = only
        held = self._held(keys, now)
        if only is not None:  # peers are told that it has requests, so its sum must not begin at 0 again
            self._flow.queues.keep(only, now)
        return held

    def _held(self, keys: Iterable[FlowKey], now: float) -> tuple[Held, ...]:
        flow_control = self._flow
        if flow_control is None:
            return ()
        rows = []
        for key in keys:
            _, flow = flow_control.queues.named(key, now)
            age = _age(now - flow.waiting[0][2].since) if flow.waiting else 0
            wanted = flow.wanted + (key == flow_control.uncounted)
            rows.append(Held(key.priority, key.model, key.tenant, len(flow), age, wanted, max(flow.served, 0.0)))
        return tuple(rows)


class _Endpoints(dict[int, int]):
    """The hash of an endpoint's id → position."""

    def of(self, endpoint_id: str) -> int:
        return self.setdefault(endpoint_hash(endpoint_id), len(self))


class _Prompts:
    """The chains of one message. `dictionary`: blocks sent before; new ones are added. `known_elsewhere`: as in
    `Reports`."""

    def __init__(self, endpoints: _Endpoints, dictionary: Dictionary, known_elsewhere: Callable[[int], bool]) -> None:
        self._endpoints = endpoints
        self._dictionary, self._known_elsewhere = dictionary, known_elsewhere
        self.sent: list[Sent] = []
        self.hashes: list[int] = []
        #: For the new blocks of each chain: where they begin, and the end of each.
        self.parts: list[tuple[int, tuple[int, ...]]] = []

    def add(self, endpoint_id: str, prefix: PrefixChain) -> None:
        hashes, blocks, elsewhere = prefix.hashes, self._dictionary.blocks, self._known_elsewhere
        # If only a part of a chain is known, it is the first blocks.
        depth = bisect_left(hashes, True, key=lambda block: not (block in blocks or elsewhere(block)))
        fresh = hashes[depth:]
        if fresh:
            self._dictionary.add(prefix, depth)
            self.hashes += fresh
            self.parts.append((prefix.ends[depth - 1] if depth else 0, prefix.ends[depth:]))
        self.sent.append(Sent(self._endpoints.of(endpoint_id), hashes[depth - 1] if depth else 0, len(fresh)))


def _never(block: int) -> bool:
    return False


def _charge(lease: Lease, endpoints: _Endpoints, now: float) -> Charged:
    return Charged(
        endpoints.of(lease.endpoint_id),
        _age(now - lease.charged_at),
        int(lease.uncached_tokens),
        int(lease.kv_tokens),
        int(lease.growth_tokens),
        int(lease.work_us),
        lease.blind,
        int(min(lease.forecast.ttft_ms, LONGEST_MS)),
        lease.adapter,
        lease.sequences,
        lease.auxiliary or bool(lease.unreached),
        untimed(lease.request.api, lease.request.path),
    )


def _age(seconds: float) -> int:
    return int(max(seconds, 0.0) / AGE_UNIT)


def _untold(lease: Lease) -> bool:
    return lease.unshown and lease.first_token_at < 0.0


class ReportingLedger(Ledger):
    """A ledger that reports own leases. Leases of peers have no number and are not reported."""

    reports: Reports

    def first_token(self, lease: Lease, now: float | None = None) -> bool:
        seen = super().first_token(lease, now)
        if (seen or lease.unshown) and lease.number:
            self.reports.first_token(lease, lease.charged_at if now is None else now)
        return seen

    def release(self, lease: Lease) -> bool:
        if lease.held and lease.number:
            self.reports.ended(lease)
        return super().release(lease)

    def began(self, lease: Lease) -> None:
        super().began(lease)
        if lease.number:
            self.reports.first_token(lease, inf)

    def abandon(self, slot: int) -> list[Lease]:
        leases = super().abandon(slot)
        for lease in leases:
            if lease.number:
                self.reports.ended(lease)
        return leases


class SharedFleet(Fleet):
    """A fleet shared with other schedulers: events of own leases are recorded in `reports`."""

    ledger: ReportingLedger

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "ledger": ReportingLedger})
        self.reports = self.ledger.reports = Reports(self.ledger, self.table)

    def charge(self, *charge: Any, reserved: bool = False, **marks: Any) -> Lease:
        lease = super().charge(*charge, reserved=reserved, **marks)
        if not reserved:
            self.reports.charged(lease)
        return lease

    def answered(self, slot: int, ok: bool, now: float, own: bool = True, blame: float = 1.0) -> None:
        super().answered(slot, ok, now, own, blame)
        endpoint = self.table.endpoints[slot]
        if own and not ok and blame >= REPORTED_BLAME and endpoint is not None:
            self.reports.failed(endpoint.id)

    def avoid(self, slot: int, until: float, own: bool = True) -> None:
        super().avoid(slot, until, own)
        endpoint = self.table.endpoints[slot]
        if own and endpoint is not None:
            self.reports.avoided(endpoint.id, until)

    def completed(self, lease: Lease, now: float, completion_tokens: int, *times_ms: float) -> None:
        super().completed(lease, now, completion_tokens, *times_ms)
        if lease.number:
            self.reports.ended(lease, completion_tokens)
