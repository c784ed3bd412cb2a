"""What a generation request asks for, checked in the real server's order and refused in its words."""

import xxhash
from msgspec import Struct

from fairlead.engine import tokens as tk
from fairlead.stub import fields
from fairlead.stub.api_errors import ApiError, bad_value, too_long, unknown_model
from fairlead.stub.config import StubConfig
from fairlead.stub.fields import Body
from fairlead.stub.prompts import prompts_of, render_chat
from fairlead.stub.sampling import Sampling, chat_top, check_top, completion_top
from fairlead.stub.stops import StopStrings

#: Completions without `max_tokens` get sixteen, as the API has it since its beginning.
_COMPLETION_TOKENS = 16
_MAX_CHOICES = 1024


class Plan(Struct, kw_only=True):
    """A checked request: one or more prompts, `n` choices each."""

    chat: bool
    model: str
    lora: str
    prompts: list[bytes]
    n: int
    #: Per prompt, clamped to what the context length leaves.
    max_tokens: list[int]
    #: The model stops by itself; only where the client set no limit.
    stops: bool
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    stop_strings: StopStrings | None = None
    #: How many likely tokens to show beside each one; `None` = no log-probabilities at all.
    logprobs: int | None = None
    salt: str = ""
    request_id: str = ""

    def seed(self, prompt: int, choice: int) -> int:
        """Equal prompts get equal output, choice by choice."""
        digest: int = xxhash.xxh3_64_intdigest(self.prompts[prompt], tk.root_hash(self.lora))
        return digest + 7919 * choice


class Models:
    """The names that can be asked for: the base model and the adapters that are loaded now."""

    def __init__(self, base: str, loras: tuple[str, ...], created: int) -> None:
        self.base = base
        #: Adapter to (path, when loaded).
        self.loras: dict[str, tuple[str, int]] = {name: (f"./{name}", created) for name in loras}
        self.created = created

    def resolve(self, name: str | None) -> tuple[str, str]:
        """Model name to answer with, and adapter (empty for the base model). No name means the base model."""
        if not name or name == self.base:
            return self.base, ""
        if name in self.loras:
            return name, name
        raise unknown_model(name, self.base)


def plan_completion(body: Body, models: Models, config: StubConfig) -> Plan:
    """/v1/completions. Raises `ApiError`."""
    options = _Options(body)
    options.logprobs = completion_top(body)
    limit = fields.integer(body, "max_tokens", _COMPLETION_TOKENS)
    echo = fields.boolean(body, "echo")
    prompts, counted = prompts_of(body.get("prompt"), config.vocab_size)
    model, lora = models.resolve(options.model)
    return options.plan(config, prompts, counted, limit, chat=False, model=model, lora=lora, echo=echo)


def plan_chat(body: Body, models: Models, config: StubConfig) -> Plan:
    """/v1/chat/completions. Raises `ApiError`."""
    messages = fields.array(body, "messages")
    options = _Options(body)
    options.logprobs = chat_top(body)
    limit = fields.integer(body, "max_completion_tokens", fields.integer(body, "max_tokens"))
    model, lora = models.resolve(options.model)
    prompts = [render_chat(messages, body.get("tools"))]
    return options.plan(config, prompts, False, limit, chat=True, model=model, lora=lora, echo=False)


class _Options:
    """The fields that both APIs share."""

    def __init__(self, body: Body) -> None:
        self.model = fields.string(body, "model")
        self.n = fields.integer(body, "n", 1) or 0
        self.stream = fields.boolean(body, "stream")
        self.ignore_eos = fields.boolean(body, "ignore_eos")
        self.return_token_ids = fields.boolean(body, "return_token_ids")
        self.salt = fields.string(body, "cache_salt") or ""
        self.request_id = fields.string(body, "request_id") or ""
        fields.integer(body, "seed")
        self.sampling = Sampling(body)
        self.logprobs: int | None = None
        stream_options = fields.mapping(body, "stream_options")
        if stream_options is not None and not self.stream:
            raise ApiError(
                "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
                param="stream_options",
            )
        self.include_usage = fields.boolean(stream_options or {}, "include_usage")
        self.continuous_usage = self.include_usage and fields.boolean(stream_options or {}, "continuous_usage_stats")

    def plan(
        self,
        config: StubConfig,
        prompts: list[bytes],
        counted: bool,
        limit: int | None,
        *,
        chat: bool,
        model: str,
        lora: str,
        echo: bool,
    ) -> Plan:
        context = config.spec().max_model_len
        longest = max(map(len, prompts)) // tk.TOKEN_BYTES
        if longest >= context:
            raise too_long(context, longest, counted)
        self._check(limit, len(prompts))
        room = [min(limit or context, context - len(prompt) // tk.TOKEN_BYTES) for prompt in prompts]
        stops = limit is None and not self.ignore_eos and config.natural_output > 0
        likely = sum(min(tokens, 2 * config.natural_output) if stops else tokens for tokens in room) * self.n
        check_top(self.logprobs, likely)
        return Plan(
            chat=chat,
            model=model,
            lora=lora,
            prompts=prompts,
            n=self.n,
            max_tokens=room,
            stops=stops,
            stream=self.stream,
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            echo=echo,
            return_token_ids=self.return_token_ids,
            stop_strings=self.sampling.stop_strings(),
            logprobs=self.logprobs,
            salt=self.salt,
            request_id=self.request_id,
        )

    def _check(self, limit: int | None, prompts: int) -> None:
        if self.n < 1:
            raise bad_value(f"n must be at least 1, got {self.n}.", "n", self.n)
        if self.n * prompts > _MAX_CHOICES:
            raise bad_value(f"n must be at most {_MAX_CHOICES} for all prompts together, got {self.n}.", "n", self.n)
        self.sampling.check()
        if limit is not None and limit < 1:
            raise bad_value(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
