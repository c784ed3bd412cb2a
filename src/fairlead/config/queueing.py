"""Sections of `flowControl`: how requests wait."""

from typing import Annotated

from msgspec import Meta

from fairlead.config.section import Section
from fairlead.config.units import DURATION, Bytes, PositiveSeconds

#: Requests, in a limit.
Count = Annotated[int, Meta(ge=1)]
#: The embedded gateway waits for 600 s at most; a gateway that is told more does not wait at all.
LONGEST_WAIT = 590.0
Wait = Annotated[float, Meta(gt=0, le=LONGEST_WAIT, extra={"unit": "duration"}, extra_json_schema=DURATION)]


class QueueLimit(Section, frozen=True, kw_only=True):
    """What may wait at most; `None` = any number."""

    requests: Count | None = None
    bytes: Bytes | None = None


class QueueLimits(Section, frozen=True, kw_only=True):
    total: QueueLimit = QueueLimit()
    #: Of one priority.
    band: QueueLimit = QueueLimit(requests=5000, bytes=1_000_000_000)
    #: Of one model and one tenant in a band.
    flow: QueueLimit = QueueLimit()


class BandSettings(Section, frozen=True, kw_only=True):
    """Of one entry of `flowControl.bands`, what is no plugin. What is `None` is as for all bands."""

    priority: int
    ttl: Wait | None = None
    limits: QueueLimit | None = None
    #: Share of the work that the band gets at least while it waits; 0 = what higher ones leave.
    share: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class FlowRules(Section, frozen=True, kw_only=True):
    """An entry of `flowControl.flows`: of which flows it speaks, and what it says. The first that fits counts."""

    #: `None` = any.
    model: str | None = None
    fairness_id: str | None = None
    ttl: Wait | None = None
    limits: QueueLimit | None = None
    #: Its part of the band's work is this over the sum of those that wait.
    weight: Annotated[float, Meta(ge=1, le=1000)] = 1.0


class Shedding(Section, frozen=True, kw_only=True):
    """Requests below priority 0 are refused with probability min(saturation^power · scale, 1)."""

    power: Annotated[float, Meta(gt=0, le=100)] = 5.0
    scale: Annotated[float, Meta(gt=0, le=1e9)] = 300.0


class Evicting(Section, frozen=True, kw_only=True):
    """Requests below priority 0 that run make way for higher ones."""

    #: Which have waited for so long.
    after: PositiveSeconds = 0.25


class FlowSettings(Section, frozen=True, kw_only=True):
    """Of `flowControl`, what is neither a plugin nor a band."""

    enabled: bool = True
    #: How long a request may wait, unless it says otherwise itself; the latter while the pool is empty.
    ttl: Wait = 60.0
    no_endpoint_ttl: Wait = 60.0
    #: Requests of the flow in turn among which the pair (request, endpoint) is chosen.
    window: Annotated[int, Meta(ge=1, le=1024)] = 256
    limits: QueueLimits = QueueLimits()
    #: Waiting for longer than this means that more replicas are wanted.
    target_delay: PositiveSeconds = 1.0
    flows: tuple[FlowRules, ...] = ()
    #: `None` = off.
    early_shedding: Shedding | None = None
    eviction: Evicting | None = None
