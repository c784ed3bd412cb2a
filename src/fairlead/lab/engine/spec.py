"""The properties of a simulated model server: speed, memory and limits. Nothing here changes while it runs."""

from msgspec import Struct
from msgspec.structs import asdict


class LatencyModel(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Milliseconds of one engine step as a function of the work in it, linear unless `weights_ms` or `jumps` are given.

    `step_ms = c0 + c_pf·new + c_attn·Σ new·(past + new/2) + c_seq·decoding + c_kv·Σ kv_tokens of decoding`, where
    `new` are the tokens of the step's prefill chunks and `past` the tokens of the same request before the chunk.
    Coefficients are least-squares fits to measured kernel times; see `presets`.
    """

    #: Fixed cost of a step, ms.
    c0_ms: float
    #: Per prompt token computed, µs.
    c_pf_us: float = 0.0
    #: Attention of prefill, per token pair, ns.
    c_attn_ns: float = 0.0
    #: Per decoding sequence, µs.
    c_seq_us: float = 0.0
    #: Reading the cache, per token of every decoding sequence, ns.
    c_kv_ns: float = 0.0
    #: Reading the weights, ms. If set, a step takes the longer of computing and reading (weights and cache), as in a
    #: roofline model, instead of their sum.
    weights_ms: float = 0.0
    #: Pairs of (tokens in a step, ms): a step with at least this many tokens takes this much longer, because the
    #: weights of more experts are read, or the next larger graph runs.
    jumps: tuple[tuple[int, float], ...] = ()

    @property
    def linear(self) -> bool:
        return not self.weights_ms and not self.jumps

    def step_s(self, new: int, attention: float, decoding: int, kv_tokens: int) -> float:
        """Seconds of a step. `attention` is the sum of `new·(past + new/2)` over the prefill chunks, in token pairs.
        `decoding` counts the tokens that decoding requests compute: one each, or more if drafts are verified."""
        if not self.linear:
            return self._bent_s(new, attention, decoding, kv_tokens)
        return (
            self.c0_ms * 1e-3
            + self.c_pf_us * 1e-6 * new
            + self.c_attn_ns * 1e-9 * attention
            + self.c_seq_us * 1e-6 * decoding
            + self.c_kv_ns * 1e-9 * kv_tokens
        )

    def _bent_s(self, new: int, attention: float, decoding: int, kv_tokens: int) -> float:
        computing = self.c_pf_us * 1e-3 * new + self.c_attn_ns * 1e-6 * attention + self.c_seq_us * 1e-3 * decoding
        reading = self.weights_ms + self.c_kv_ns * 1e-6 * kv_tokens
        work = max(computing, reading) if self.weights_ms else computing + reading
        return (self.c0_ms + work + sum(more for tokens, more in self.jumps if new + decoding >= tokens)) * 1e-3

    def decode_s(self, decoding: int) -> tuple[float, float]:
        """(seconds, further seconds per token in the cache) of a step without prefill: `step_s(0, 0.0, decoding, kv)`
        equals first + second * kv, to the last bit. Linear models only."""
        fixed = self.c0_ms * 1e-3 + self.c_pf_us * 1e-6 * 0 + self.c_attn_ns * 1e-9 * 0.0
        return fixed + self.c_seq_us * 1e-6 * decoding, self.c_kv_ns * 1e-9


class EngineSpec(Struct, frozen=True, kw_only=True):
    """The properties of one replica. Defaults are those of vLLM 0.32 on a data-centre GPU.

    Raises `ValueError` on limits that no server could start with.
    """

    latency: LatencyModel
    #: KV blocks as the server reports them. One of them is the null block, which holds nothing (vLLM 0.32).
    num_blocks: int
    #: Tokens per KV block.
    block_size: int = 16
    #: Prompt plus output tokens of one request.
    max_model_len: int = 40_960
    #: Requests in one step.
    max_num_seqs: int = 256
    #: Tokens in one step. Decodes come first; the rest is for prefill chunks.
    max_batched_tokens: int = 8192
    #: Adapters that may be in one batch; 0 = no adapters at all.
    max_loras: int = 0
    #: Adapters kept in memory after use, at least `max_loras`; and the time to load an adapter that is not in memory,
    #: during which the engine takes no step.
    max_cpu_loras: int = 0
    lora_load_ms: float = 0.0
    prefix_caching: bool = True
    #: False: a step with prefill computes whole prompts, and no request decodes in it.
    chunked_prefill: bool = True
    #: The engine schedules a step while the previous step runs. A request that arrives during step n waits for n + 2.
    async_scheduling: bool = False
    #: Coefficient of variation of a step's time, log-normal, drawn for each step.
    noise: float = 0.0
    #: Tokens that are drafted and verified per decoding request and step, and the probability that a draft is accepted
    #: if all drafts before it were. One draw per step applies to all of its requests.
    draft_tokens: int = 0
    acceptance: float = 0.0
    #: How much longer a step takes per engine that computes on the same machine at the same time: 1 = twice as long.
    contention: float = 0.0

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_batched_tokens"):
            if values[name] < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("noise", "draft_tokens", "contention"):
            if not 0 <= values[name] <= 100:
                raise ValueError(f"{name} must be between 0 and 100")
        if not 0 <= self.lora_load_ms < 1e9:
            raise ValueError("lora_load_ms must be at least 0")
        if not 0 <= self.acceptance <= 1:
            raise ValueError("acceptance must be between 0 and 1")
        if self.max_batched_tokens < self.max_num_seqs * (1 + self.draft_tokens):
            times = " times (1 + draft_tokens)" if self.draft_tokens else ""
            raise ValueError(f"max_batched_tokens must be at least max_num_seqs{times}")
        if not self.chunked_prefill and self.max_batched_tokens < self.max_model_len:
            raise ValueError("without chunked prefill, max_batched_tokens must be at least max_model_len")
        if self.usable_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into a KV cache of {self.kv_tokens} tokens,"
                f" {self.usable_blocks} blocks of {self.block_size}"
            )

    @property
    def foreseeable(self) -> bool:
        """Whether a closed formula gives the duration of the next steps from the decoding requests."""
        return self.latency.linear and not (self.noise or self.draft_tokens or self.contention)

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.usable_blocks * self.block_size

    def check(self, prompt_tokens: int, max_tokens: int, lora: str) -> None:
        """Raise `ValueError` for a request that not even an empty engine could serve."""
        if prompt_tokens < 1 or max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if prompt_tokens + max_tokens > self.max_model_len:
            raise ValueError(f"prompt and output exceed the context length of {self.max_model_len} tokens")
        if lora and self.max_loras == 0:
            raise ValueError("the engine was started without adapters")
