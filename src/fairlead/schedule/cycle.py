"""Typed state of one decision: written once, read by every plugin of the same decision."""

from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar, TypeVarTuple

from fairlead.fleet.columns import BoolColumn

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Key(Generic[T]):
    """Names a value of type `T` in a `Cycle`. Make one per module, at import; compared by identity."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key({self.name})"


class Context:
    """What a policy may know besides request and fleet: time and chance, both handed in."""

    __slots__ = ("now", "rng", "trace")

    def __init__(self, now: float, rng: Random, trace: bool = True) -> None:
        #: Clock seconds of this decision.
        self.now = now
        self.rng = rng
        #: Whether the reasons are wanted (`Pick.trace`).
        self.trace = trace


class Cycle:
    """One decision's scratch space. `once` computes a value at the first question and remembers it."""

    __slots__ = ("_values", "left", "now", "rng")

    def __init__(self, context: Context) -> None:
        self.now = context.now
        self.rng = context.rng
        #: For filters: a mask of what those before them left; `None` = all slots.
        self.left: BoolColumn | None = None
        self._values: dict[Key[Any], Any] = {}

    def once(self, key: Key[T], compute: Callable[[*Args], T], *args: *Args) -> T:
        try:
            value: T = self._values[key]
        except KeyError:
            value = self._values[key] = compute(*args)
        return value

    def get(self, key: Key[T]) -> T | None:
        return self._values.get(key)
