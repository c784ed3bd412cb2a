"""The native record: one request of a workload, and optionally its recorded outcome.

A workload is a list of records and a dispatch mode. Prompts are not text but block ids: `hash_ids[i]` stands for the
tokens `i·block_size .. (i+1)·block_size`, with or without all tokens before them. Both readings are equivalent as long
as two prompts share an id only if they share the beginning, and `lab.workload.describe` chains the ids so that they do.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from fairlead.apis.parsed import MAX_N

#: `timestamp`: open loop, every record starts at its `arrival_us`. `think`: a record with a parent starts `think_ms`
#: after the parent's end, as with a person or an agent; its `arrival_us` then only shows when it was recorded.
Dispatch = Literal["timestamp", "think"]
DISPATCHES: tuple[Dispatch, ...] = ("timestamp", "think")


def dispatch_of(text: str) -> Dispatch:
    """Return the dispatch of this name. Raise `ValueError` if there is none."""
    for dispatch in DISPATCHES:
        if dispatch == text:
            return dispatch
    raise ValueError(f"unknown dispatch {text!r}; known: {', '.join(DISPATCHES)}")


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The recorded outcome of a request. -1, empty, and 0 as `status` = not recorded."""

    endpoint: str = ""
    candidates: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    cached_tokens: int = -1
    queue_ms: float = -1.0
    ttft_ms: float = -1.0
    e2e_ms: float = -1.0
    itl: tuple[float, ...] = ()
    status: int = 0
    #: The InferenceModelRewrite that set the target of the request.
    rewritten_by: str = ""


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request."""

    #: Unique in its workload; `parent` refers to it.
    id: str
    in_tokens: int
    #: Tokens of each answer.
    out_tokens: int
    #: The number of answers to the prompt.
    n: int = 1
    #: Microseconds after the start of the workload.
    arrival_us: int = 0
    session: str = ""
    #: Id of the request whose answer this one continues; empty = none.
    parent: str = ""
    #: Milliseconds from the parent's end to this request's start, in `think` dispatch.
    think_ms: float = 0.0
    model: str = ""
    #: The model that the endpoint is asked for, if it is not `model`; empty = none.
    target: str = ""
    lora: str = ""
    tenant: str = ""
    #: Higher priorities go first; requests below 0 may be shed.
    priority: int = 0
    #: The latencies that the client asks for; 0 = none.
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    #: The client's limit of output tokens; 0 = none given.
    max_tokens: int = 0
    #: Tokens per hash id; 0 = the prompt shares nothing with any other.
    block_size: int = 0
    hash_ids: tuple[int, ...] = ()
    text: str = ""
    stream: bool = True
    #: The client gives up this long after the request's arrival; 0 = never.
    cancel_after_ms: float = 0.0
    outcome: Outcome | None = None


class Workload(Struct, kw_only=True):
    """A list of records in the order of their arrival."""

    name: str
    records: list[Record]
    dispatch: Dispatch = "timestamp"

    def __len__(self) -> int:
        return len(self.records)

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.records[-1].arrival_us * 1e-6 if self.records else 0.0

    @property
    def block_size(self) -> int:
        """Tokens per hash id; 0 if no record has hash ids. Raises `ValueError` if records have different sizes."""
        sizes = {record.block_size for record in self.records if record.hash_ids}
        if len(sizes) > 1:
            raise ValueError(f"workload {self.name!r} mixes block sizes {sorted(sizes)}")
        return sizes.pop() if sizes else 0


#: The latest arrival, 285 years after the start: up to here, floats have every microsecond.
LATEST_US = 2**53


def problem_of(record: Record) -> tuple[str, str] | None:
    """(field, problem) of the first invalid field; `None` if the record is valid."""
    if record.in_tokens < 1:
        return "in_tokens", f"a prompt must have at least 1 token, not {record.in_tokens}"
    if record.out_tokens < 1:
        return "out_tokens", f"an answer must have at least 1 token, not {record.out_tokens}"
    if record.n < 1:
        return "n", f"at least 1 answer is needed, not {record.n}"
    if record.n > MAX_N:
        return "n", f"at most {MAX_N} answers are possible, not {record.n}"
    if record.arrival_us < 0:
        return "arrival_us", f"{record.arrival_us} is before the start"
    if record.arrival_us > LATEST_US:
        return "arrival_us", "is more than 285 years after the start"
    for field, value in (
        ("think_ms", record.think_ms),
        ("cancel_after_ms", record.cancel_after_ms),
        ("slo_ttft_ms", record.slo_ttft_ms),
        ("slo_tpot_ms", record.slo_tpot_ms),
    ):
        if value < 0:
            return field, "must not be negative"
    if record.hash_ids and record.block_size < 1:
        return "block_size", "hash_ids need a block_size, the number of tokens of each of them"
    most = -(-record.in_tokens // record.block_size) if record.block_size else 0
    if len(record.hash_ids) > most:
        return "hash_ids", f"{len(record.hash_ids)} ids for {most} blocks"
    return None


def from_first(workload: Workload) -> Workload:
    """The workload with arrival times that count from its first request."""
    first = min((record.arrival_us for record in workload.records), default=0)
    if not first:
        return workload
    records = [replace(record, arrival_us=record.arrival_us - first) for record in workload.records]
    return replace(workload, records=records)


def arranged(name: str, records: Sequence[Record], dispatch: Dispatch = "timestamp") -> Workload:
    """A workload of these records in the order of their arrival; records with equal times keep their order."""
    return Workload(name=name, records=sorted(records, key=lambda record: record.arrival_us), dispatch=dispatch)
