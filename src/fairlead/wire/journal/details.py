"""The detail of a decision ↔ plain values: columns become bytes, and only what changed since the one before is written.

Rules
* Within a block, a snapshot is the one before with some slots changed: between two decisions few endpoints move. The
  first of a block is whole, so every block can be read alone.
* Numbers are written as they are (IEEE 754, 64 bits): a decision that is made again from them comes out the same to the
  last bit.
"""

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from fairlead.model.decision import DecisionRecord, Trace
from fairlead.model.endpoint import Endpoint
from fairlead.model.request import Request
from fairlead.model.snapshot import Snapshot


class Detail(Struct, frozen=True):
    """What `decided` leaves out."""

    request: Request
    trace: Trace


class Packer:
    """Details of one block, in order."""

    def __init__(self) -> None:
        self._before: Any = None
        self._roster: Any = None

    def pack(self, record: DecisionRecord) -> dict[str, Any]:
        trace = record.trace
        assert trace is not None
        known: dict[int, int] = {}
        arrays: list[Any] = []
        packed: dict[str, Any] = {
            "request": record.request,
            "filters": [(name, _array(column, known, arrays)) for name, column in trace.filters],
            "scorers": [(name, float(weight), _array(column, known, arrays)) for name, weight, column in trace.scorers],
            "total": _array(trace.total, known, arrays),
            "candidates": _array(trace.candidates, known, arrays),
            "held": _array(trace.held, known, arrays),
            "outcome": trace.outcome,
            "arrays": arrays,
        }
        if trace.snapshot is not None:
            packed["snapshot"] = self._snapshot(trace.snapshot)
        if trace.snapshot is None or trace.endpoints != _ids(trace.snapshot.endpoints):
            packed["ids"] = trace.endpoints
        return packed

    def _snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        numbers = np.concatenate((snapshot.floats, snapshot.learned))
        packed: dict[str, Any] = {"at": snapshot.at, "hold_ms": snapshot.hold_ms, "steps": snapshot.answer_steps}
        roster = (snapshot.endpoints, snapshot.adapters)
        if self._before is None or roster != self._roster:
            packed |= {"endpoints": snapshot.endpoints, "adapters": snapshot.adapters, "all": numbers.tobytes()}
            packed["rows"] = len(snapshot.floats)
        else:
            slots = np.flatnonzero((numbers != self._before).any(axis=0))
            packed |= {"slots": slots.tolist(), "values": numbers.take(slots, axis=1).tobytes()}
        self._before, self._roster = numbers, roster
        return packed


class Unpacker:
    """The way back. Details of one block must come in their order."""

    def __init__(self) -> None:
        self._before: Any = None
        self._rows = 0
        self._endpoints: tuple[Endpoint | None, ...] = ()
        self._adapters: tuple[frozenset[str] | None, ...] = ()

    def unpack(self, packed: dict[str, Any]) -> Detail:
        """Raises `ValueError` when it is none."""
        try:
            snapshot = self._snapshot(packed["snapshot"]) if "snapshot" in packed else None
            arrays = [_read(one) for one in packed["arrays"]]
            ids = packed.get("ids")
            if ids is None:
                ids = _ids(snapshot.endpoints if snapshot else ())
            trace = Trace(
                endpoints=tuple(ids),
                filters=[(name, _at(arrays, place)) for name, place in packed["filters"]],
                scorers=[(name, weight, _at(arrays, place)) for name, weight, place in packed["scorers"]],
                total=_at(arrays, packed["total"]),
                candidates=_at(arrays, packed["candidates"]),
                outcome=packed["outcome"],
                held=_at(arrays, packed["held"]),
                snapshot=snapshot,
            )
            return Detail(msgspec.convert(packed["request"], Request), trace)
        except (KeyError, IndexError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"no detail of a decision: {error}") from None

    def _snapshot(self, packed: dict[str, Any]) -> Snapshot:
        if "all" in packed:
            self._endpoints = msgspec.convert(packed["endpoints"], tuple[Endpoint | None, ...])
            self._adapters = msgspec.convert(packed["adapters"], tuple[frozenset[str] | None, ...])
            self._rows = int(packed["rows"])
            self._before = np.frombuffer(packed["all"]).reshape(-1, len(self._endpoints))
        else:
            if self._before is None:
                raise ValueError("a change without what it changes")
            numbers = self._before.copy()
            slots = packed["slots"]
            numbers[:, slots] = np.frombuffer(packed["values"]).reshape(len(numbers), len(slots))
            self._before = numbers
        numbers = self._before
        return Snapshot(
            at=packed["at"],
            endpoints=self._endpoints,
            adapters=self._adapters,
            floats=numbers[: self._rows],
            learned=tuple(numbers[self._rows :]),
            hold_ms=packed["hold_ms"],
            answer_steps=packed["steps"],
        )


def _ids(endpoints: tuple[Endpoint | None, ...]) -> tuple[str, ...]:
    return tuple(endpoint.id if endpoint else "" for endpoint in endpoints)


def _array(column: Any, known: dict[int, int], arrays: list[Any]) -> int | None:
    """Its place among the arrays of this decision; those that stand there twice are written once."""
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


def _at(arrays: list[Any], place: int | None) -> Any:
    return None if place is None else arrays[place]
