"""What a decision expected of its request, to be compared with what came."""

from msgspec import Struct


class Forecast(Struct, frozen=True, gc=False):
    """Of one request at one endpoint, in milliseconds."""

    ttft_ms: float = 0.0
    #: 90 % of first tokens come in between.
    low_ms: float = 0.0
    high_ms: float = 0.0
    #: Between output tokens.
    tpot_ms: float = 0.0
    #: Both as the model has them, before what was learned of its errors. Errors are judged by these: what is learned
    #: moves while requests are in flight, and judged by it the corrections would chase each other.
    model_ttft_ms: float = 0.0
    model_tpot_ms: float = 0.0
    #: Which forecasts it is compared with.
    kind: int = 0
