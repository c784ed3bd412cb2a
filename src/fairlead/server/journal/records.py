"""The content of a block: records of (kind, clock seconds, body) as msgpack. Also packs the details of decisions.

    segment   the first record of every segment: its run, and what a replay that begins there needs
    an event  by its class name (`RequestArrived`, …): what the pipeline received, in order
    decided   what the pipeline decided: one for every decision
    detail    the reasons of a decision: verdicts, scores and the numbers behind them; only of sampled decisions
    ended     how a routed request ended
    policy    the event `Reconfigured`: the scheduling part of its document (`fairlead.compat.recorded`)
    lost      how many records are missing here, because the disk was too slow or full

Rules
* Unknown kinds and unknown fields are skipped, so older programs can read newer journals.
* A text that is not valid Unicode (half a surrogate pair in a model's name) is written with escapes.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec import Struct

from fairlead.core.endpoint import BaseModels, Endpoint
from fairlead.core.events import AdaptersListed, Event, ModelsChanged, Reconfigured, RequestArrived
from fairlead.core.records import DecisionRecord, Forecast, Snapshot, SplitCosts, Trace, Waited
from fairlead.core.request import Request

SEGMENT, DECIDED, DETAIL, ENDED, POLICY, LOST = "segment", "decided", "detail", "ended", "policy", "lost"
#: The prefix of the directories of other workers' journals, inside the first worker's directory.
WORKER = "worker-"
VERSION = 1
_ARRAY = struct.Struct(">BI")

Item = tuple[str, float, Any]


class Segment(Struct, frozen=True, kw_only=True):
    """The head of a segment."""

    version: int = VERSION
    #: Identifies one run of the scheduler. Its decision ids begin with this.
    run: str
    #: The version of Fairlead that wrote the segment; empty = an old version that did not record it.
    program: str = ""
    #: 0 = the first segment of its run: a replay that begins there repeats the decisions exactly.
    number: int = 0
    #: The time (seconds since 1970) at which the scheduler's clock was 0.
    epoch: float = 0.0
    #: The scheduling part of the configuration, see `fairlead.compat.recorded`.
    scheduling: Any = None
    #: State of the random generator before the first decision of the run; `None` = not at the beginning of the run.
    chance: Any = None
    #: The endpoints and model definitions at the beginning of the segment.
    endpoints: tuple[Endpoint, ...] = ()
    models: ModelsChanged | None = None
    listed: tuple[AdaptersListed, ...] = ()
    #: Inputs that influence decisions but are not recorded, in words. If there are any, a replay cannot be exact.
    beside: tuple[str, ...] = ()
    #: Share of the decisions (0..1) that have a detail.
    sample: float = 1.0
    #: Whether the scheduler shared facts with other schedulers of its pool.
    shared: bool = False


class Decided(Struct, frozen=True, array_like=True):
    """A decision without its reasons. `endpoint` is empty if the request was refused."""

    request_id: int
    endpoint: str = ""
    outcome: str = "routed"
    status: int = 200
    prefill: str = ""
    hit_tokens: int = 0
    best_hit_tokens: int = 0
    overloaded: bool = False
    queued_ms: float = 0.0
    policy: str = ""
    address: str = ""
    forecast: Forecast | None = None
    #: The model to which the request was sent, and the rewrite that chose it; empty = the requested model.
    target: str = ""
    rewritten_by: str = ""
    priority: int = 0
    asked_ms: float = 0.0


class Ended(Struct, frozen=True, array_like=True):
    """The end of a routed request. -1 = unknown."""

    request_id: int
    endpoint: str = ""
    status: int = 0
    cause: str = "natural"
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1


class Lost(Struct, frozen=True):
    records: int


class Unknown(Struct, frozen=True):
    """A record that this program cannot read."""

    kind: str
    problem: str = ""


EVENTS: dict[str, type[Struct]] = {POLICY if kind is Reconfigured else kind.__name__: kind for kind in get_args(Event)}
_BODIES: dict[str, Any] = {
    **EVENTS,
    POLICY: Any,
    SEGMENT: Segment,
    DECIDED: Decided,
    DETAIL: dict,
    ENDED: Ended,
    LOST: Lost,
}
_DECODERS = {kind: msgspec.msgpack.Decoder(body) for kind, body in _BODIES.items()}
_ANYTHING = msgspec.msgpack.Decoder()
_ROWS = msgspec.msgpack.Decoder(list[tuple[str, float, msgspec.Raw]])
_ENCODER = msgspec.msgpack.Encoder()


def encode(item: Item) -> bytes:
    """One record. Raises `ValueError`, `OverflowError` or `TypeError` if msgpack cannot encode its body."""
    kind, time_s, body = item
    if type(body) is RequestArrived:
        item = kind, time_s, RequestArrived(recorded(body.request))
    try:
        return _ENCODER.encode(item)
    except UnicodeEncodeError:
        return _ENCODER.encode(writable(msgspec.to_builtins(item), "backslashreplace"))


def recorded(request: Request) -> Request:
    """The request without the fields that journals do not keep."""
    if request.blocks is None and request.trace is None:
        return request
    return msgspec.structs.replace(request, blocks=None, trace=None)


def joined(encoded: Iterable[bytes], count: int) -> bytearray:
    """The content of a block of `count` records."""
    content = bytearray(_ARRAY.pack(0xDD, count))
    for part in encoded:
        content += part
    return content


def decode(content: bytes) -> Iterator[Item]:
    """The records of a block; a body that cannot be read becomes `Unknown`. Raises `msgspec.DecodeError` if the whole
    block cannot be read."""
    for kind, time_s, raw in _ROWS.decode(content):
        try:
            body = _DECODERS.get(kind, _ANYTHING).decode(raw)
            yield kind, time_s, Reconfigured(body) if kind == POLICY else body
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield kind, time_s, Unknown(kind, str(error))


def writable(value: Any, errors: str) -> Any:
    """A copy of plain values in which all texts are valid Unicode. `errors`: how invalid characters are replaced, as
    for `str.encode`."""
    if isinstance(value, str):
        return value.encode("utf-8", errors).decode()
    if isinstance(value, dict):
        return {writable(key, errors): writable(item, errors) for key, item in value.items()}
    return [writable(item, errors) for item in value] if isinstance(value, list | tuple) else value


# Converts the detail of a decision to plain values and back. Columns become bytes.
#
# Rules
# * Within a block, only the slots of a snapshot are written that changed since the previous one: between two decisions
#   few endpoints change. The first snapshot of a block is complete, so every block can be read alone.
# * Numbers are written unchanged (IEEE 754, 64 bits), so a decision that is repeated from them has exactly the same
#   result.


class Detail(Struct, frozen=True):
    """The reasons of a decision, which `decided` leaves out."""

    request: Request
    trace: Trace


class Packer(Struct, eq=False):
    """Packs the details of one block, in order."""

    _before: Any = None
    _roster: Any = None
    _waiting: tuple[frozenset[str], ...] = ()

    def pack(self, record: DecisionRecord) -> dict[str, Any]:
        trace = record.trace
        assert trace is not None
        known: dict[int, int] = {}
        arrays: list[Any] = []
        packed: dict[str, Any] = {
            "request": recorded(record.request),
            "filters": [(name, _array(column, known, arrays)) for name, column in trace.filters],
            "scorers": [(name, float(weight), _array(column, known, arrays)) for name, weight, column in trace.scorers],
            "total": _array(trace.total, known, arrays),
            "candidates": _array(trace.candidates, known, arrays),
            "held": _array(trace.held, known, arrays),
            "outcome": trace.outcome,
            "arrays": arrays,
        }
        if trace.loading is not None:
            packed["loading"] = _array(trace.loading, known, arrays)
        if trace.waited is not None:
            packed["waited"] = trace.waited
        if trace.failed:
            packed["failed"] = trace.failed
        if trace.split is not None:
            packed["split"] = trace.split
        if trace.snapshot is not None:
            packed["snapshot"] = self._snapshot(trace.snapshot)
        if trace.snapshot is None or trace.endpoints != _ids(trace.snapshot.endpoints):
            packed["ids"] = trace.endpoints
        return packed

    def _snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        gauges = snapshot.gauges
        numbers = np.concatenate((snapshot.floats, snapshot.learned, *(column[None] for column in gauges.values())))
        packed: dict[str, Any] = {"at": snapshot.at, "hold_ms": snapshot.hold_ms, "steps": snapshot.answer_steps}
        roster = (snapshot.endpoints, snapshot.adapters, snapshot.listed, snapshot.based, *gauges)
        if self._before is None or roster != self._roster:
            packed |= {"endpoints": snapshot.endpoints, "adapters": snapshot.adapters, "listed": snapshot.listed}
            packed |= {"based": snapshot.based, "all": numbers.tobytes(), "rows": len(snapshot.floats)}
            packed |= {"gauges": [*gauges]} if gauges else {}
        else:
            # Bits are compared, because NaN differs from itself.
            slots = np.flatnonzero((numbers.view(np.int64) != self._before.view(np.int64)).any(axis=0))
            packed |= {"slots": slots.tolist(), "values": numbers.take(slots, axis=1).tobytes()}
        if snapshot.waiting_adapters != self._waiting:
            packed["waiting_adapters"] = self._waiting = snapshot.waiting_adapters
        self._before, self._roster = numbers, roster
        return packed


_Names = tuple[frozenset[str] | None, ...]


class Unpacker(Struct, eq=False):
    """The reverse of `Packer`. Unpack the details of one block in their order."""

    _before: Any = None
    _rows: int = 0
    _gauges: list[str] = []
    _endpoints: tuple[Endpoint | None, ...] = ()
    _adapters: _Names = ()
    _listed: _Names = ()
    _based: tuple[BaseModels, ...] = ()
    _waiting: tuple[frozenset[str], ...] = ()

    def unpack(self, packed: dict[str, Any]) -> Detail:
        """Raises `ValueError` if `packed` is not a detail."""
        try:
            snapshot = self._snapshot(packed["snapshot"]) if "snapshot" in packed else None
            arrays = [_read(array) for array in packed["arrays"]]
            ids = packed.get("ids")
            if ids is None:
                ids = _ids(snapshot.endpoints if snapshot else ())
            trace = Trace(
                endpoints=tuple(ids),
                filters=[(name, _item(arrays, place)) for name, place in packed["filters"]],
                scorers=[(name, weight, _item(arrays, place)) for name, weight, place in packed["scorers"]],
                total=_item(arrays, packed["total"]),
                candidates=_item(arrays, packed["candidates"]),
                outcome=packed["outcome"],
                held=_item(arrays, packed["held"]),
                loading=_item(arrays, packed.get("loading")),
                snapshot=snapshot,
                waited=msgspec.convert(packed.get("waited"), Waited | None),
                split=msgspec.convert(packed.get("split"), SplitCosts | None),
                failed=msgspec.convert(packed.get("failed", []), list[tuple[str, str]]),
            )
            return Detail(msgspec.convert(packed["request"], Request), trace)
        except (KeyError, IndexError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"no detail of a decision: {error}") from None

    def _snapshot(self, packed: dict[str, Any]) -> Snapshot:
        if "all" in packed:
            self._endpoints = msgspec.convert(packed["endpoints"], tuple[Endpoint | None, ...])
            self._adapters = msgspec.convert(packed["adapters"], _Names)
            self._listed = msgspec.convert(packed.get("listed") or [None] * len(self._endpoints), _Names)
            self._based = msgspec.convert(packed.get("based", ()), tuple[BaseModels, ...])
            self._rows, self._gauges = int(packed["rows"]), msgspec.convert(packed.get("gauges", ()), list[str])
            self._before = np.frombuffer(packed["all"]).reshape(-1, len(self._endpoints))
        else:
            if self._before is None:
                raise ValueError("a change without what it changes")
            numbers = self._before.copy()
            slots = packed["slots"]
            numbers[:, slots] = np.frombuffer(packed["values"]).reshape(len(numbers), len(slots))
            self._before = numbers
        if "waiting_adapters" in packed:
            self._waiting = msgspec.convert(packed["waiting_adapters"], tuple[frozenset[str], ...])
        numbers, gauges = self._before, len(self._before) - len(self._gauges)
        return Snapshot(
            at=packed["at"],
            endpoints=self._endpoints,
            adapters=self._adapters,
            listed=self._listed,
            floats=numbers[: self._rows],
            learned=tuple(numbers[self._rows : gauges]),
            hold_ms=packed["hold_ms"],
            answer_steps=packed["steps"],
            based=self._based,
            gauges=dict(zip(self._gauges, numbers[gauges:], strict=True)),
            waiting_adapters=self._waiting,
        )


def _ids(endpoints: tuple[Endpoint | None, ...]) -> tuple[str, ...]:
    return tuple(endpoint.id if endpoint else "" for endpoint in endpoints)


def _array(column: Any, known: dict[int, int], arrays: list[Any]) -> int | None:
    """The column's index in `arrays`, which it is added to; `None` = no column. An array that occurs twice is written
    once. `known`: indexes by the id of the array."""
    if column is None:
        return None
    place = known.get(id(column))
    if place is None:
        place = known[id(column)] = len(arrays)
        values = np.asarray(column)
        bits = values.dtype == np.bool_
        arrays.append((len(values), np.packbits(values).tobytes()) if bits else values.astype(np.float64).tobytes())
    return place


def _read(stored: Any) -> Any:
    if isinstance(stored, bytes):
        return np.frombuffer(stored)
    length, bits = stored
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=length).astype(np.bool_)


def _item(arrays: list[Any], place: int | None) -> Any:
    return None if place is None else arrays[place]
