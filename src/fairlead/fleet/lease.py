"""A lease: one request at one endpoint, from its charge to its end."""

from msgspec import Struct

from fairlead.model.request import Request


class Lease(Struct):
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
    #: Still before its first token.
    pending: bool = True
