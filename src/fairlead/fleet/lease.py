"""A lease: one request at one endpoint, from its charge to its end."""

from msgspec import Struct

from fairlead.model.forecast import Forecast
from fairlead.model.request import Request


class Lease(Struct, gc=False):
    """One request at one endpoint."""

    request: Request
    slot: int
    #: Who held the slot when it was charged; slots are reused.
    endpoint_id: str
    charged_at: float
    #: Prompt tokens to compute, and tokens of KV held to the end (prompt + half the expected output).
    uncached_tokens: float
    kv_tokens: float
    #: Predicted cached prompt tokens, to compare with what the engine reports.
    hit_tokens: int
    #: Whole microseconds that computing them takes at the prior's speed (`fairlead.fleet.rates`).
    work_us: float = 0.0
    #: Half the expected output.
    growth_tokens: float = 0.0
    #: What was expected of it when it was charged.
    forecast: Forecast = Forecast()
    #: Where another endpoint computes the prompt for this one; -1 = nowhere. That part has a lease of its own, with the
    #: id `~request.id`, and ends with the first token of this one.
    prefill_slot: int = -1
    #: Clock seconds; below 0 = not seen.
    first_token_at: float = -1.0
    #: Still before its first token.
    pending: bool = True
    #: Id of the endpoint that it was meant for and that could not be reached; empty = this is the one.
    unreached: str = ""
