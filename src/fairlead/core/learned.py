"""What was learned, as values: a running scheduler takes it down, one that starts is given it (`fairlead.core.state`).

Rules
* Values may come from a file that anybody could write. Decoding them refuses what is not finite; whoever is given them
  keeps its own bounds.
* Times are durations, never clock readings: each process has a clock of its own.
"""

from typing import Annotated

from msgspec import Meta, Struct

from fairlead.core.endpoint import Sample

#: Refuses NaN and infinity, too.
Number = Annotated[float, Meta(ge=-1e15, le=1e15)]
Amount = Annotated[float, Meta(ge=0.0, le=1e15)]
Three = tuple[Amount, Amount, Amount]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
#: What tells classes of engines apart, see `Fleet`.
Look = tuple[tuple[str, str] | int, ...]
#: A block of a prompt by its hash; a negative number is an answer, which no prompt begins with.
Block = Annotated[int, Meta(gt=-(1 << 63))]


class ClassLearned(Struct, frozen=True, array_like=True):
    """Engines that look alike, see `fairlead.core.rates`."""

    look: Look
    factors: Three
    noise: Amount
    drift: Number
    limit: tuple[Amount, Amount, Amount, Amount]
    #: The normal equations: xx, yy, zz; xy, xz, yz; the right-hand sides.
    squares: Three
    products: Three
    observed: Three
    #: The same of the lag: its products with the three, its square, its right-hand side.
    lagged: tuple[Amount, Amount, Amount, Amount, Amount] = (0.0, 0.0, 0.0, 0.0, 0.0)


class SpeedsLearned(Struct, frozen=True, array_like=True):
    pool: Three
    observed: Count
    classes: tuple[ClassLearned, ...]


class ForecastsLearned(Struct, frozen=True, array_like=True):
    """See `fairlead.core.predictor`. A band is its newest log ratios; an empty one is that of all."""

    hold_ms: Amount
    answer_steps: Amount
    answers: Count
    all_kinds: tuple[Number, ...]
    bands: tuple[tuple[Number, ...], ...]
    speeds: SpeedsLearned


class ModelLearned(Struct, frozen=True, array_like=True):
    """Of a model and an API, see `fairlead.core.tokens`."""

    model: str
    api: str
    bytes_seen: Amount
    tokens_seen: Amount
    output: Amount


class Common(Struct, frozen=True, tag="common"):
    """What is known of the pool as a whole. `activate_ms`, `load_ms`: what adapters take."""

    forecasts: ForecastsLearned
    models: tuple[ModelLearned, ...]
    bytes_per_token: Amount
    activate_ms: Amount
    load_ms: Amount


class OwnLearned(Struct, frozen=True, array_like=True):
    """How one endpoint differs from its class, `ratio`, which was found `idle_s` seconds ago from the two before."""

    mean: Number
    weight: Amount
    ratio: Amount
    idle_s: Amount
    kappa: Amount
    tpot_kappa: Amount


class EndpointLearned(Struct, frozen=True, tag="endpoint"):
    """One endpoint. Its blocks follow in parts of their own. `age_s`: seconds since it was taken down, before all of
    this was; of one that was not there since."""

    endpoint_id: str
    address: str
    look: Look
    own: OwnLearned
    #: Its last metrics page: by its counters the same engine is known again.
    sample: Sample | None
    #: Bytes of prompt text that its cache holds.
    capacity: Count
    age_s: Amount = 0.0


class PrefixesLearned(Struct, frozen=True, tag="prefixes"):
    """Blocks that an endpoint has, the newest first, and their bytes. `number` counts an endpoint's parts from 0."""

    endpoint_id: str
    number: Count
    blocks: tuple[Block, ...]
    sizes: tuple[Count, ...]


Part = Common | EndpointLearned | PrefixesLearned
