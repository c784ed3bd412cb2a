"""One request inside the engine, from arrival to its last token."""

from enum import IntEnum

from fairlead.lab.engine.tokens import TOKEN_BYTES


class Phase(IntEnum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


class EngineRequest:
    """What a client requested, and its progress, which only the engine writes. Compared by identity.

    `tokens` are the prompt's token ids as little-endian 32-bit integers. A simulator without text may leave them empty
    and pass `prompt_tokens` and the `hashes` of the prompt's full blocks instead.
    """

    __slots__ = (
        "arrived",
        "base",
        "blocks",
        "cached_tokens",
        "computed",
        "end_step",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "hashes",
        "id",
        "last_token_at",
        "limit",
        "limit_reason",
        "loaded",
        "lora",
        "max_tokens",
        "output",
        "params_n",
        "phase",
        "preemptions",
        "prompt_tokens",
        "ring",
        "salt",
        "scheduled_at",
        "seed",
        "target",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        tokens: bytes,
        max_tokens: int,
        *,
        seed: int = 0,
        lora: str = "",
        salt: str = "",
        stop_after: int = 0,
        params_n: int = 1,
        prompt_tokens: int = 0,
        hashes: list[int] | None = None,
        loaded: int = 0,
    ) -> None:
        self.id = id
        self.tokens = tokens
        self.prompt_tokens = prompt_tokens or len(tokens) // TOKEN_BYTES
        #: Hashes of the full blocks of prompt and output, as far as known; `None` until the engine has computed them.
        self.hashes = hashes
        #: The client's limit, and the tokens to be generated: the model stops by itself after `stop_after` (0 = never).
        self.max_tokens = max_tokens
        self.limit = min(max_tokens, stop_after) if stop_after else max_tokens
        self.limit_reason = "stop" if 0 < stop_after < max_tokens else "length"
        self.seed = seed
        self.lora = lora
        self.salt = salt
        #: Prompt tokens whose KV another server computed and handed over. They take memory but no time.
        self.loaded = loaded
        #: For the `request_params_n` histogram; 0 on all but one of the siblings of a request with n > 1.
        self.params_n = params_n

        self.phase = Phase.WAITING
        self.blocks: list[int] = []
        #: Prompt tokens found in the cache when the request was first scheduled; -1 before.
        self.cached_tokens = -1
        #: Tokens whose KV was computed up to the last finished step; exact only while not decoding.
        self.computed = 0
        #: Tokens to compute before the next output token can be sampled (prompt; after a preemption also output).
        self.target = 0
        #: Output tokens. While decoding, the number is `engine steps - base`, see `Engine.output_tokens`.
        self.output = 0
        self.base = 0
        #: Which step of a block's period needs a new block; see `DecodeBatch`.
        self.ring = 0
        self.end_step = -1
        self.preemptions = 0

        #: Engine seconds; -1 = not yet.
        self.arrived = -1.0
        self.scheduled_at = -1.0
        self.first_token_at = -1.0
        self.last_token_at = -1.0
        self.finished_at = -1.0
        #: `stop`, `length`, `abort`, or empty.
        self.finish_reason = ""


# What the steps of one call did.


class StepResult:
    """What the steps of one `Engine.step` call did. Decoding requests got a token per step (`output_tokens`)."""

    __slots__ = ("finished", "first", "steps")

    def __init__(self) -> None:
        #: Steps that ended.
        self.steps = 0
        #: Requests that got their first token, in order. A request that also ended is in both lists.
        self.first: list[EngineRequest] = []
        #: Requests that are complete, in order, with `finish_reason` and `finished_at`.
        self.finished: list[EngineRequest] = []

    def add(self, part: "StepResult") -> None:
        """Add what the steps of another engine did."""
        self.steps += part.steps
        self.first += part.first
        self.finished += part.finished
