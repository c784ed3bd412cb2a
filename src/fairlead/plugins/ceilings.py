"""Usage ceilings by the reference's names; what they do is in `fairlead.admit.ceilings`."""

from typing import Annotated, Literal

from msgspec import Meta

from fairlead.admit.ceilings import Holdback, Reflective, Static
from fairlead.plugins.params import NoParams, Params

Ceiling = Annotated[float, Meta(gt=0, le=100)]


class StaticCeilingParams(Params, frozen=True, kw_only=True):
    threshold: Ceiling = 1.0


class StaticCeiling(Static):
    """The same for all bands."""

    type = "static-usage-limit-policy"
    Params = StaticCeilingParams

    def __init__(self, params: StaticCeilingParams | None = None, name: str = type) -> None:
        super().__init__((params or StaticCeilingParams()).threshold)
        self.name = name


class HoldbackCeilingParams(Params, frozen=True, kw_only=True):
    #: Of the lowest band, and of the highest.
    min_ceiling: Ceiling
    max_ceiling: Ceiling = 1.0
    shape: Literal["linear"] = "linear"
    #: Between them by the bands' ranks, or by their priorities.
    domain: Literal["rank", "value"] = "rank"


class HoldbackCeiling(Holdback):
    """Lower for lower bands: what they may not use is kept free for those above."""

    type = "priority-holdback-policy"
    Params = HoldbackCeilingParams

    def __init__(self, params: HoldbackCeilingParams, name: str = type) -> None:
        super().__init__(params.min_ceiling, params.max_ceiling, params.domain)
        self.name = name


class ReflectiveCeiling(Reflective):
    """The fuller the pool, the less often lower bands are looked at."""

    type = "soft-reflective-ceiling-policy"
    Params = NoParams

    def __init__(self, params: NoParams | None = None, name: str = type) -> None:
        super().__init__()
        self.name = name
