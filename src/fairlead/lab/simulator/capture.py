"""A journal → a workload: what was requested, when, and which prompts share a beginning; no prompt text and no names.

Rules
* Block ids are keyed hashes (BLAKE2b) of the journal's hashes of prompt beginnings. If the key is thrown away, they
  show which prompts share a beginning and nothing else. Captures with the same key give equal blocks equal ids.
  The same applies to sessions and tenants. Endpoints become e0, e1, … . Names of models and adapters stay, because they
  decide which endpoints can serve.
* The journal records prompt beginnings in growing steps of bytes (1/32 of the depth). A block of tokens counts as
  shared up to the next step after it: never more than was shared, and at most 1/32 less.
* Prompt tokens are the reported ones. Without a report, they are estimated from the bytes by the rate of the reported
  prompts. The same applies to answers, by the bytes of the response.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from statistics import fmean
from typing import Any

from msgspec import Struct, field, structs
from msgspec.structs import asdict, replace

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import AdaptersListed, EndpointDown, EndpointUp, MetricsSampled, RequestArrived, UsageReported
from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request, Usage
from fairlead.core.text import plain
from fairlead.lab.simulator.journal import Run, decisions
from fairlead.lab.simulator.world import ADAPTER_SLOTS, Replica
from fairlead.lab.workload.record import Outcome, Record, Workload, arranged
from fairlead.server.journal.records import Segment


class Pool(Struct):
    """The endpoints of a run by id: those at the time of the last record, and those of the moment with the most."""

    last: dict[str, Endpoint] = {}
    most: dict[str, Endpoint] = {}
    #: The names of all adapters; and by endpoint how many of them one batch may have, where it is reported.
    adapters: set[str] = set()
    slots: dict[str, int] = {}

    def begin(self, head: Segment) -> None:
        """Take the first segment's head of a run."""
        self.last = {endpoint.id: endpoint for endpoint in head.endpoints}
        self.adapters.update(*(listed.adapters or () for listed in head.listed), *(e.promised for e in head.endpoints))
        self._count()

    def take(self, kind: str, body: Any) -> None:
        """Take a record of the run."""
        if kind == EndpointUp.__name__:
            self.last[body.endpoint.id] = body.endpoint
            self.adapters |= body.endpoint.promised
            self._count()
        elif kind == EndpointDown.__name__:
            self.last.pop(body.endpoint_id, None)
        elif kind == AdaptersListed.__name__:
            self.adapters |= body.adapters or set()
        elif kind == MetricsSampled.__name__ and body.sample.adapters is not None:
            self.adapters |= body.sample.adapters | body.sample.waiting_adapters
            if body.sample.max_adapters:
                self.slots[body.endpoint_id] = body.sample.max_adapters

    def _count(self) -> None:
        if len(self.last) >= len(self.most):
            self.most = dict(self.last)

    def like(self, servers: Sequence[Replica], endpoints: Sequence[Endpoint]) -> tuple[Replica, ...]:
        """The servers with the labels and adapter slots of these endpoints, which are repeated in turn; without
        endpoints as they are. Those that report no slots, as before their first adapter, have as many as others."""
        if not endpoints:
            return tuple(servers)
        usual = max(self.slots.values(), default=ADAPTER_SLOTS) if self.adapters else 0
        made = []
        for i, server in enumerate(servers):
            endpoint = endpoints[i % len(endpoints)]
            engine = structs.replace(server.engine, max_loras=self.slots.get(endpoint.id, usual))
            made.append(structs.replace(server, labels=endpoint.labels, engine=engine))
        return tuple(made)


def mixed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """The endpoints in an order in which the first ones, however many, have about the roles of all."""
    listed = list(endpoints)
    sizes, seen, places = Counter(endpoint.role for endpoint in listed), Counter[str](), []
    for endpoint in listed:
        role = endpoint.role
        places.append(((seen[role] + 0.5) / sizes[role], endpoint.only_prefills))
        seen[role] += 1
    return [listed[i] for i in sorted(range(len(listed)), key=places.__getitem__)]


#: Assumed bytes per token if no request of the model reported token counts: for prompts, English text in JSON; for
#: answers, by whether they are streamed, with one small JSON object per token.
BYTES_PER_TOKEN = 4.2
BYTES_PER_ANSWER_TOKEN = {True: 180.0, False: 5.0}
#: Assumed tokens of an answer if neither its size nor the token count of any answer of its model is known.
ANSWER_TOKENS = 256


class Captured(Struct):
    workload: Workload
    #: Requests that were left out: refused before they were served, or without a prompt that could be repeated.
    refused: int = 0
    without_prompt: int = 0
    #: Requests in the workload whose token counts are estimates.
    estimated_prompts: int = 0
    estimated_answers: int = 0
    #: The endpoints that served it.
    pool: Pool = field(default_factory=Pool)


class _Rate(Struct):
    """Bytes per token where both numbers are known, and the mean of the known token counts of one prompt or answer."""

    default: float
    bytes: float = 0.0
    tokens: float = 0.0
    known: list[float] = []

    def add(self, size: float, tokens: float, answers: int = 1) -> None:
        """Add a prompt, or `answers` to one: `size` and `tokens` are of all of them together."""
        if tokens > 0:
            self.known.append(tokens / answers)
        if size > 0 and tokens > 0:
            self.bytes += size
            self.tokens += tokens

    @property
    def value(self) -> float:
        return max(self.bytes / self.tokens, 0.01) if self.tokens else self.default

    @property
    def mean_tokens(self) -> int:
        return round(fmean(self.known)) if self.known else ANSWER_TOKENS


class _Names:
    """Keyed hashes in place of names that must not be revealed."""

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key, digest_size=32).digest()
        self._endpoints: dict[str, str] = {}

    def number(self, chain: int, place: int) -> int:
        """The id of a block: 48 bits, which every JSON reader can represent."""
        data = chain.to_bytes(8, "little") + place.to_bytes(4, "little")
        return int.from_bytes(blake2b(data, key=self._key, digest_size=6).digest(), "little")

    def text(self, kind: str, name: str) -> str:
        if not name:
            return ""
        data = f"{kind}:{name}".encode("utf-8", "backslashreplace")
        return f"{kind}-{blake2b(data, key=self._key, digest_size=6).hexdigest()}"

    def endpoint(self, name: str) -> str:
        return self._endpoints.setdefault(name, f"e{len(self._endpoints)}") if name else ""


def capture(
    run: Run,
    model: str = "",
    *,
    key: bytes,
    block_size: int = 64,
    stretch: float = 1.0,
    name: str = "capture",
    refused: bool = False,
) -> Captured:
    """Make a workload from a run and the runs of other workers beside it. `key`: see the rules. `stretch`: a factor on
    all times, for servers that ran faster than real ones. `refused`: also keep refused requests. `model`: only requests
    that were sent for this model; empty = all. Raises `OSError`."""
    made = Captured(Workload(name=name, records=[]))
    pairs = (pair for each in (*run.beside, run) for pair in _outcomes(each, made.pool))
    outcomes = [pair for pair in pairs if model in ("", pair[0].request.target_model)]
    begin = min((pair[0].request.arrived for pair in outcomes), default=0.0)
    recorder = _Recorder(made, _rates(outcomes), _Names(key), block_size, stretch, begin)
    records: list[Record] = []
    for decision, outcome in sorted(outcomes, key=lambda pair: pair[0].request.arrived):
        if not decision.endpoint and not refused:
            made.refused += 1
        elif decision.request.prompt_tokens <= 0:
            made.without_prompt += 1
        else:
            record = recorder.record(len(records), decision, outcome)
            records.append(recorder.following(record, outcome, decision.request))
    made.workload = arranged(plain(name), records)
    return made


def _outcomes(run: Run, pool: Pool) -> Iterator[tuple[DecisionRecord, OutcomeRecord | None]]:
    """The decisions with their outcomes, including token counts that were reported late. Decisions whose request is not
    in the journal are left out. `pool` takes the endpoints."""
    reported: dict[int, Usage] = {}
    arrived: set[int] = set()
    pool.begin(run.head)
    for kind, _, body in run.items():
        pool.take(kind, body)
        if kind == UsageReported.__name__:
            reported[body.request_id] = body.usage
        elif kind == RequestArrived.__name__:
            arrived.add(body.request.id)
    for entry in decisions(run):
        outcome, usage = entry.outcome, reported.get(entry.decision.request.id)
        if outcome is not None and usage is not None and outcome.prompt_tokens < 0:
            outcome = replace(outcome, **asdict(usage))
        if entry.decision.request.id in arrived:
            yield entry.decision, outcome


Rates = tuple[dict[str, _Rate], dict[tuple[str, bool], _Rate]]


def _rates(outcomes: list[tuple[DecisionRecord, OutcomeRecord | None]]) -> Rates:
    prompts: dict[str, _Rate] = defaultdict(lambda: _Rate(BYTES_PER_TOKEN))
    answers: dict[tuple[str, bool], _Rate] = {}
    for decision, outcome in outcomes:
        request = decision.request
        key = request.model, request.stream
        rate = answers.setdefault(key, _Rate(BYTES_PER_ANSWER_TOKEN[request.stream]))
        if outcome is not None:
            prompts[request.model].add(request.prompt_bytes, outcome.prompt_tokens)
            rate.add(outcome.response_bytes, outcome.completion_tokens, request.sequences)
    return prompts, answers


class _Recorder(Struct):
    """Makes records, and counts in `made` what is estimated."""

    made: Captured
    rates: Rates
    names: _Names
    block_size: int
    stretch: float
    #: When the first request arrived.
    begin: float
    #: Session → the id of its last record, and when that request ended.
    last: dict[str, tuple[str, float]] = {}

    def record(self, index: int, decision: DecisionRecord, outcome: OutcomeRecord | None) -> Record:
        request, names, stretch = decision.request, self.names, self.stretch
        rate = self.rates[0][request.model].value
        # The `n` of a refused request may be any number that the client sent.
        n = request.sequences if outcome is None or outcome.status < 400 else 1
        reported = outcome.prompt_tokens if outcome is not None else -1
        self.made.estimated_prompts += reported <= 0
        in_tokens = reported if reported > 0 else max(round(request.prompt_bytes / rate), 1) or request.prompt_tokens
        gone = outcome is not None and outcome.cause == "client-disconnect" and outcome.duration_ms > 0
        return Record(
            id=str(index),
            in_tokens=in_tokens,
            out_tokens=self._answer(request, outcome, n),
            n=n,
            arrival_us=max(round((request.arrived - self.begin) * 1e6 * stretch), 0),
            session=names.text("s", request.session),
            model=request.model,
            target=request.target,
            lora=request.target_model if request.target_model in self.made.pool.adapters else "",
            tenant=names.text("t", request.fairness_id),
            priority=request.priority,
            slo_ttft_ms=request.slo_ttft_ms * stretch,
            slo_tpot_ms=request.slo_tpot_ms * stretch,
            max_tokens=request.max_tokens,
            block_size=self.block_size,
            hash_ids=self._blocks(request, rate, in_tokens),
            stream=request.stream,
            cancel_after_ms=outcome.duration_ms * stretch if gone and outcome is not None else 0.0,
            outcome=self._outcome(decision, outcome),
        )

    def following(self, record: Record, outcome: OutcomeRecord | None, request: Request) -> Record:
        """The record, with the previous request of its session as its parent if that had ended before this one came."""
        if not record.session:
            return record
        before = self.last.get(record.session)
        ended = request.arrived + max(outcome.duration_ms, 0.0) * 1e-3 if outcome is not None else request.arrived
        self.last[record.session] = record.id, ended
        if before is None or before[1] > request.arrived:
            return record
        return replace(record, parent=before[0], think_ms=(request.arrived - before[1]) * 1e3 * self.stretch)

    def _answer(self, request: Request, outcome: OutcomeRecord | None, n: int) -> int:
        """The tokens of each of the `n` answers."""
        if outcome is not None and outcome.completion_tokens > 0:
            return -(-outcome.completion_tokens // n)
        self.made.estimated_answers += 1
        rate = self.rates[1][request.model, request.stream]
        tokens = rate.mean_tokens
        if outcome is not None and outcome.response_bytes > 0:
            tokens = -(-round(outcome.response_bytes / rate.value) // n)
        return max(min(tokens, request.max_tokens or tokens), 1)

    def _blocks(self, request: Request, rate: float, in_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt's blocks, as far as the journal knows the prompt."""
        chain = request.prefix
        numbers = []
        for place in range(in_tokens // self.block_size):
            step = bisect_left(chain.ends, (place + 1) * self.block_size * rate)
            if step >= len(chain.ends):
                break
            numbers.append(self.names.number(chain.hashes[step], place))
        return tuple(numbers)

    def _outcome(self, decision: DecisionRecord, outcome: OutcomeRecord | None) -> Outcome | None:
        if outcome is None:
            return None
        return Outcome(
            endpoint=self.names.endpoint(decision.endpoint),
            cached_tokens=outcome.cached_tokens,
            queue_ms=decision.queued_ms * self.stretch,
            ttft_ms=outcome.ttft_ms * self.stretch if outcome.ttft_ms >= 0 else -1.0,
            e2e_ms=outcome.duration_ms * self.stretch if outcome.duration_ms >= 0 else -1.0,
            status=outcome.status,
            rewritten_by=decision.request.rewritten_by,
        )
