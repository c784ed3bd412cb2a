"""What to send, and when: filler text, seeded or recorded sequences of requests, arrivals.

Pure: randomness comes from a seed, and no clock is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import shake_128
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

import msgspec
from msgspec.structs import asdict

from fairlead.core.errors import ConfigError
from fairlead.core.headers import (
    FAIRNESS_HEADERS,
    OBJECTIVE_HEADERS,
    SESSION_HEADERS,
    TPOT_SLO_HEADERS,
    TTFT_SLO_HEADERS,
)
from fairlead.lab.workload.arrivals import Arrivals, poisson
from fairlead.lab.workload.record import Record


class OpenLoop(Protocol):
    """The arrival times of requests. `fairlead.lab.load.runner.run` takes any such object, or a `ClosedLoop`."""

    def offsets(self) -> Iterator[float]:
        """Seconds after the start, ascending. The run ends with the iterator."""
        ...


class Poisson(msgspec.Struct, frozen=True, tag="poisson", forbid_unknown_fields=True):
    """Open loop with exponential gaps, as from independent users."""

    #: Requests per wall-clock second.
    rate: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError("must be above 0", "$.arrivals.rate")

    def offsets(self) -> Iterator[float]:
        """Seconds after the start, ascending, without end."""
        return poisson(self.rate)(Random(self.seed))


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed_loop", forbid_unknown_fields=True):
    """Each worker sends its next request when its previous one has ended. Measures capacity, but hides queueing."""

    workers: int = 8

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError("must be at least 1", "$.arrivals.workers")


AnyArrivals = Poisson | ClosedLoop


#: Bytes of text per token, the average of tokenizers for English.
BYTES_PER_TOKEN = 4

_WORDS = (
    b"ace act add ado ads age ago aid aim air ale all and ant any ape app arc are ark arm art ash ask ate awe axe aye "
    b"bad bag ban bar bat bay bed bee beg bet bid big bin bit bow box boy bud bug bun bus but buy cab can cap car cat "
    b"cow cry cub cue cup cut dad dam day den dew did die dig dim din dip dog dot dry due dug ear eat ebb egg ego elk "
    b"elm end era eve eye fan far fat fax fed fee few fig fin fir fit fix fly foe fog for fox fun fur gap gas gel gem "
    b"get gin god got gum gun gut guy gym had ham has hat hay hen her hid him hip his hit hop hot how hub hue hug hut "
    b"ice icy ill ink inn ion its ivy jam jar jaw jet job jog joy jug key kid kin kit lab lad lap law lay led leg let "
    b"lid lie lip lit log lot low mad man map mat may men met mid mix mob mom mud mug nap net new nod nor not now nut "
    b"oak oar odd off oil old one orb ore our out owe owl own pad pal pan par pat paw pay pea peg pen pet pie pig pin "
    b"pit ply pod pop pot pro pub put rag ram ran rap rat raw ray red rib rid rim rip rob rod row rub rug run rye sad "
    b"sap sat saw say sea"
).split()[:256]


# Word number -> its first, second and third letter.
_LETTERS = tuple(bytes(word[place] for word in _WORDS) for place in range(3))


def text(tokens: int, chance: Random) -> bytes:
    """`tokens` words, each followed by a space: `4 * tokens` bytes. Costs 20 ns per token."""
    return spell(chance.randbytes(tokens))


def spell(numbers: bytes) -> bytes:
    """The words with these numbers (one byte each), each followed by a space: four bytes per number."""
    out = bytearray(b" ") * (BYTES_PER_TOKEN * len(numbers))
    for place, letters in enumerate(_LETTERS):
        out[place::BYTES_PER_TOKEN] = numbers.translate(letters)
    return bytes(out)


# The requests: endless, seeded sequences, built one at a time when they are due.
#
# `SharedPrefix` is the workload behind most published figures on prefix-aware routing: several prompts in random order
# after each system prompt. A router either keeps a prompt's cache entry on few replicas or has it computed everywhere.

CHAT_PATH = "/v1/chat/completions"


class Call(msgspec.Struct, frozen=True):
    body: bytes = b""
    path: str = CHAT_PATH
    method: str = "POST"
    headers: dict[str, str] = {}
    #: The prefix group; -1 = none.
    group: int = -1
    #: Answers that it asks for.
    n: int = 1
    #: Seconds after which the client gives up; 0 = never.
    patience_s: float = 0.0


class Workload(Protocol):
    """A sequence of requests. `fairlead.lab.load.runner.run` takes any such object."""

    def calls(self) -> Iterator[Call]:
        """The requests in order. The run ends with the iterator."""
        ...


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="shared_prefix", forbid_unknown_fields=True):
    """`groups` system prompts with `prompts` questions each, in one shuffled order that repeats.

    Token counts are estimates at four bytes per token. Every repetition has the same questions, word for word.
    """

    groups: int = 150
    prompts: int = 5
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    seed: int = 0
    model: str = "default"
    stream: bool = True
    #: Additional top-level fields, e.g. `{"ignore_eos": true}` for a real vLLM.
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("groups", "prompts", "system_tokens", "question_tokens", "output_tokens"):
            _at_least_one(values[name], name)

    def calls(self) -> Iterator[Call]:
        ends = _chat_ends(self.model, self.output_tokens, self.stream, self.extra)
        order = [(group, prompt) for group in range(self.groups) for prompt in range(self.prompts)]
        Random(self.seed).shuffle(order)
        systems: dict[int, bytes] = {}
        while True:
            for group, prompt in order:
                system = systems.get(group)
                if system is None:
                    system = systems[group] = text(self.system_tokens, Random(f"{self.seed}/{group}"))
                question = text(self.question_tokens, Random(f"{self.seed}/{group}/{prompt}"))
                yield Call(body=_chat_body(ends, system, question), group=group)


class Chat(msgspec.Struct, frozen=True, kw_only=True, tag="chat", forbid_unknown_fields=True):
    """Independent chat requests of one size; no two prompts share a prefix."""

    body_bytes: int = 2048
    output_tokens: int = 100
    seed: int = 0
    model: str = "default"
    stream: bool = True
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _at_least_one(self.body_bytes, "body_bytes")
        _at_least_one(self.output_tokens, "output_tokens")

    def calls(self) -> Iterator[Call]:
        ends = _chat_ends(self.model, self.output_tokens, self.stream, self.extra, system=False)
        question_bytes = max(1, self.body_bytes - sum(map(len, ends)))
        chance = Random(self.seed)
        while True:
            question = text(question_bytes // BYTES_PER_TOKEN + 1, chance)[:question_bytes]
            yield Call(body=_chat_body(ends, b"", question))


AnyWorkload = SharedPrefix | Chat

_Ends = tuple[bytes, bytes, bytes]


def _chat_ends(model: str, output_tokens: int, stream: bool, extra: dict[str, Any], system: bool = True) -> _Ends:
    """The JSON before the system prompt, between the prompt and the question, and after the question."""
    name = msgspec.json.encode(model)
    fields: dict[str, Any] = {"max_tokens": output_tokens}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    after = b'"}],' + msgspec.json.encode(fields | extra)[1:]
    if not system:
        return b'{"model":%b,"messages":[{"role":"user","content":"' % name, b"", after
    before = b'{"model":%b,"messages":[{"role":"system","content":"' % name
    return before, b'"},{"role":"user","content":"', after


def _chat_body(ends: _Ends, system: bytes, question: bytes) -> bytes:
    return b"".join((ends[0], system, ends[1], question, ends[2]))


def _at_least_one(value: int, name: str) -> None:
    if value < 1:
        raise ConfigError("must be at least 1", f"$.workload.{name}")


# A recorded or generated workload, sent to a live server.
#
# Rules
# * Equal block ids at equal positions give equal bytes, in every run with the same seed. So a prefix hit in the
#   recorded workload can be a hit again.
# * The tail of a prompt that has no id, and a prompt without ids, are shared with no other request.
# * The text of a part of a block is a prefix of the block's text, so that the next turn of a conversation continues it.
# * What clients say in headers goes there: session, tenant, wanted latencies, and as the name of an objective the
#   priority. Another seed has other sessions, because it has other prompts.
#
# The text of a block is an extendable-output hash of its id: shorter output is a prefix of longer output. 16 tokens
# cost 1 µs, while seeding a generator costs 5 µs.


class Replay:
    """The requests of a workload, in the order of its records."""

    def __init__(
        self,
        records: Iterable[Record],
        *,
        model: str = "",
        fallback_model: str = "default",
        output_tokens: int = 0,
        extra: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """`model` and `output_tokens` replace the values of the records (empty and 0 = keep them); `fallback_model` is
        for records without a model.

        `extra`: additional top-level fields of every request.
        """
        self._records = records
        self._model = model
        self._fallback = fallback_model
        self._output_tokens = output_tokens
        self._extra = extra or {}
        self._seed = seed

    def calls(self) -> Iterator[Call]:
        for record in self._records:
            patience_s = record.cancel_after_ms * 1e-3
            yield Call(body=self._body(record), headers=self._headers(record), n=record.n, patience_s=patience_s)

    def _headers(self, record: Record) -> dict[str, str]:
        session = f"{record.session}.{self._seed}" if record.session and self._seed else record.session
        said = {
            SESSION_HEADERS[0]: session,
            FAIRNESS_HEADERS[0]: record.tenant,
            OBJECTIVE_HEADERS[0]: f"priority-{record.priority}" if record.priority else "",
            TTFT_SLO_HEADERS[0]: f"{record.slo_ttft_ms:.15g}" if record.slo_ttft_ms else "",
            TPOT_SLO_HEADERS[0]: f"{record.slo_tpot_ms:.15g}" if record.slo_tpot_ms else "",
        }
        lines = {name: " ".join(value.split()) for name, value in said.items()}  # a header has no line breaks
        return {name: line.encode(errors="replace").decode("latin-1") for name, line in lines.items() if line}

    def _body(self, record: Record) -> bytes:
        fields: dict[str, Any] = {
            "model": self._model or (record.model if record.target else record.lora or record.model) or self._fallback,
            "messages": [{"role": "user", "content": record.text or self._prompt(record).decode("ascii")}],
            "max_tokens": self._output_tokens or record.out_tokens,
        }
        if record.n > 1:
            fields["n"] = record.n
        if record.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields | self._extra)

    def _prompt(self, record: Record) -> bytes:
        size, left = record.block_size, record.in_tokens
        pieces = []
        for block in record.hash_ids:
            pieces.append(self._numbers(f"block/{block:x}", min(size, left)))
            left -= size
        if left > 0:
            pieces.append(self._numbers(f"own/{record.id}", left))
        return spell(b"".join(pieces))

    def _numbers(self, name: str, tokens: int) -> bytes:
        return shake_128(f"{self._seed}/{name}".encode("utf-8", "surrogatepass")).digest(tokens)


class Recorded:
    """Arrivals at the records' own times, `speedup` times as fast, the first at 0."""

    def __init__(self, records: Sequence[Record], speedup: float = 1.0) -> None:
        self._records = records
        self._speedup = speedup

    def offsets(self) -> Iterator[float]:
        begin = self._records[0].arrival_us if self._records else 0
        for record in self._records:
            yield (record.arrival_us - begin) * 1e-6 / self._speedup


class Turns:
    """Arrivals in `think` dispatch, `speedup` times as fast: a record with a parent comes `think_ms` after the parent's
    end, the others at their own times. Which is next depends on when answers end, so send those that have `begun`."""

    def __init__(self, records: Sequence[Record], speedup: float = 1.0) -> None:
        self._speedup = speedup
        #: (Seconds after the start, place in the workload, record) of those that wait for their time only.
        self._coming: list[tuple[float, int, Record]] = []
        #: Parent -> the records that wait for its end, and their places.
        self._following: dict[str, list[tuple[int, Record]]] = {}
        #: Those that have begun, in this order.
        self.begun: list[Record] = []
        known = {record.id for record in records}
        for place, record in enumerate(records):
            if record.parent in known:
                self._following.setdefault(record.parent, []).append((place, record))
            else:
                heappush(self._coming, ((record.arrival_us - records[0].arrival_us) * 1e-6 / speedup, place, record))

    @property
    def next(self) -> float | None:
        """Seconds from the start to the next arrival; None = none, until another request ends."""
        return self._coming[0][0] if self._coming else None

    def begin(self) -> None:
        """Let the next arrival happen."""
        self.begun.append(heappop(self._coming)[2])

    def ended(self, number: int, offset: float) -> None:
        """Take the end of a request by its place in `begun`, `offset` seconds after the start."""
        for place, record in self._following.pop(self.begun[number].id, ()):
            heappush(self._coming, (offset + record.think_ms * 1e-3 / self._speedup, place, record))


class Paced:
    """Seeded arrivals of the workload generators (`fairlead.lab.workload.arrivals`)."""

    def __init__(self, arrivals: Arrivals, seed: int = 0) -> None:
        self._arrivals = arrivals
        self._seed = seed

    def offsets(self) -> Iterator[float]:
        return self._arrivals(Random(self._seed))
