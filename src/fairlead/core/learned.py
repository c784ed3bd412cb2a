"""Learned state as values. A running scheduler saves it, and a starting one restores it (`fairlead.core.state`).

Rules
* Values may come from a file that others can write. Decoding refuses values that are not finite; code that restores
  them applies its own bounds.
* Times are durations, never clock readings, because each process has its own clock.
"""

from typing import Annotated

from msgspec import Meta, Struct

from fairlead.core.endpoint import Sample

#: The bounds also refuse NaN and infinity.
Number = Annotated[float, Meta(ge=-1e15, le=1e15)]
Amount = Annotated[float, Meta(ge=0.0, le=1e15)]
Three = tuple[Amount, Amount, Amount]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
#: Identifies a class of engines, see `Fleet`.
Look = tuple[tuple[str, str] | int, ...]
#: Hash of a block of a prompt; a negative number is an answer, with which no prompt begins.
Block = Annotated[int, Meta(gt=-(1 << 63))]


class ClassLearned(Struct, frozen=True, array_like=True):
    """What was learned of a class of engines, see `fairlead.core.rates`."""

    look: Look
    factors: Three
    noise: Amount
    drift: Number
    limit: tuple[Amount, Amount, Amount, Amount]
    #: The normal equations: xx, yy, zz; xy, xz, yz; the right-hand sides.
    squares: Three
    products: Three
    observed: Three
    #: The terms of the lag: its products with the three factors, its square, its right-hand side.
    lagged: tuple[Amount, Amount, Amount, Amount, Amount] = (0.0, 0.0, 0.0, 0.0, 0.0)


class SpeedsLearned(Struct, frozen=True, array_like=True):
    pool: Three
    observed: Count
    classes: tuple[ClassLearned, ...]


class ForecastsLearned(Struct, frozen=True, array_like=True):
    """See `fairlead.core.predictor`. A band has its newest log ratios; an empty band stands for that of all kinds."""

    hold_ms: Amount
    answer_steps: Amount
    answers: Count
    all_kinds: tuple[Number, ...]
    bands: tuple[tuple[Number, ...], ...]
    speeds: SpeedsLearned


class ModelLearned(Struct, frozen=True, array_like=True):
    """What was learned of a model and an API, see `fairlead.core.tokens`."""

    model: str
    api: str
    bytes_seen: Amount
    tokens_seen: Amount
    output: Amount


class Common(Struct, frozen=True, tag="common"):
    """What was learned of the pool as a whole. `activate_ms`, `load_ms`: times of adapters (`core.adapters`)."""

    forecasts: ForecastsLearned
    models: tuple[ModelLearned, ...]
    bytes_per_token: Amount
    activate_ms: Amount
    load_ms: Amount


class OwnLearned(Struct, frozen=True, array_like=True):
    """How one endpoint differs from its class: `ratio`, computed `idle_s` seconds ago from `mean` and `weight`."""

    mean: Number
    weight: Amount
    ratio: Amount
    idle_s: Amount
    kappa: Amount
    tpot_kappa: Amount


class EndpointLearned(Struct, frozen=True, tag="endpoint"):
    """One endpoint. Its blocks follow in separate parts. `age_s`: seconds between the saving of this part and that of
    the other parts, if the endpoint has not been in the pool since; 0 = saved together."""

    endpoint_id: str
    address: str
    look: Look
    own: OwnLearned
    #: Its last metrics page, whose counters show whether the engine is still the same.
    sample: Sample | None
    #: Capacity of its cache, in bytes of prompt text.
    capacity: Count
    age_s: Amount = 0.0


class PrefixesLearned(Struct, frozen=True, tag="prefixes"):
    """Blocks that an endpoint has cached, the newest first, and their bytes. `number`: of this part, from 0."""

    endpoint_id: str
    number: Count
    blocks: tuple[Block, ...]
    sizes: tuple[Count, ...]


Part = Common | EndpointLearned | PrefixesLearned
