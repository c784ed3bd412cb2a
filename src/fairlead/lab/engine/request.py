"""One request inside the engine, from arrival to its last token."""

from enum import IntEnum

from msgspec import Struct

from fairlead.lab.engine.tokens import TOKEN_BYTES


class Phase(IntEnum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


class EngineRequest(Struct, eq=False):
    """What a client requested, and its progress: the fields from `phase` on, which only the engine writes. Requests are
    compared by identity.

    `tokens` are the prompt's token ids as little-endian 32-bit integers. A simulator without text may leave them empty
    and pass `prompt_tokens` and the `hashes` of the prompt's full blocks instead.
    """

    id: str
    tokens: bytes
    #: The client's limit.
    max_tokens: int
    seed: int = 0
    lora: str = ""
    salt: str = ""
    #: The model stops by itself after so many tokens; 0 = never.
    stop_after: int = 0
    #: For the `request_params_n` histogram; 0 on all but one of the siblings of a request with n > 1.
    params_n: int = 1
    prompt_tokens: int = 0
    #: Hashes of the full blocks of prompt and output, as far as known; `None` until the engine has computed them.
    hashes: list[int] | None = None
    #: Prompt tokens whose KV another server computed and handed over. They take memory but no time.
    loaded: int = 0

    phase: Phase = Phase.WAITING
    #: The number of output tokens to generate, and the finish reason when they are generated.
    limit: int = 0
    limit_reason: str = "length"
    blocks: list[int] = []
    #: Prompt tokens found in the cache when the request was first scheduled; -1 before.
    cached_tokens: int = -1
    #: Tokens whose KV was computed up to the last finished step; exact only while not decoding.
    computed: int = 0
    #: Tokens to compute before the next output token can be sampled (prompt; after a preemption also output).
    target: int = 0
    #: Output tokens. While decoding, the number is `engine steps - base`, see `Engine.output_tokens`.
    output: int = 0
    base: int = 0
    #: Index in `DecodeBatch.ring`: which step out of every `block_size` needs a new block.
    ring: int = 0
    end_step: int = -1
    preemptions: int = 0

    #: Engine seconds; -1 = not yet.
    arrived: float = -1.0
    scheduled_at: float = -1.0
    first_token_at: float = -1.0
    last_token_at: float = -1.0
    finished_at: float = -1.0
    #: `stop`, `length`, `abort`, or empty.
    finish_reason: str = ""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens) // TOKEN_BYTES
        self.limit = min(self.max_tokens, self.stop_after or self.max_tokens)
        if 0 < self.stop_after < self.max_tokens:
            self.limit_reason = "stop"


class StepResult(Struct):
    """What the steps of one `Engine.step` call did. Decoding requests got a token per step (`output_tokens`)."""

    #: Steps that ended.
    steps: int = 0
    #: Requests that got their first token, in order. A request that also ended is in both lists.
    first: list[EngineRequest] = []
    #: Requests that are complete, in order, with `finish_reason` and `finished_at`.
    finished: list[EngineRequest] = []

    def add(self, part: "StepResult") -> None:
        """Add what the steps of another engine did."""
        self.steps += part.steps
        self.first += part.first
        self.finished += part.finished
