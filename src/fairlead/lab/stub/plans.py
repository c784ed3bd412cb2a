"""What a generation request asks for: its prompts as token ids, and its fields, checked as the real server does.

Chats have a fixed template, and the tokenizer makes a token of four bytes. Every part of a rendered conversation is
padded to whole tokens. So the tokens of a conversation are a prefix of the tokens of the same conversation with another
turn, and an answer has the same tokens in a later prompt as when it was generated.
"""

import json
from typing import Any

import xxhash
from msgspec import Struct

from fairlead.lab.engine import tokens as tk
from fairlead.lab.stub import fields
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.fields import ApiError, Body, bad_value, too_long, unknown_model
from fairlead.lab.stub.sampling import Sampling, StopStrings, chat_top, check_top, completion_top
from fairlead.lab.stub.shapes import ChatShape, CompletionShape, MessagesShape, ResponsesShape, Shape

_END = b"<|end|>\n"
_ANSWER = b"assistant"


def render_chat(messages: list[Any], tools: object = None) -> bytes:
    """The prompt of a conversation, ready for the assistant's answer. Raises `ApiError` for an invalid message."""
    if not messages:
        raise ApiError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = []
    if tools:
        parts += [_opening(b"tools"), _padded(_json(tools)), _END]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_value("Each message needs a role", "messages", index)
        parts += [_opening(_utf8(message["role"])), _padded(_utf8(_content(message))), _END]
    parts.append(_opening(_ANSWER))
    return b"".join(parts)


def _opening(role: bytes) -> bytes:
    return _padded(b"<|%b|>" % role)


def _padded(data: bytes) -> bytes:
    """Pad to whole tokens with spaces. Generated text also ends with spaces, so stripping it changes nothing."""
    return data + b" " * (-len(data) % tk.TOKEN_BYTES)


def _utf8(text: str) -> bytes:
    # A lone surrogate is valid in JSON but not in UTF-8.
    return text.encode("utf-8", "replace")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _content(message: Body) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        text = "".join(_part(part) for part in content)
    return text + _json(calls).decode() if calls else text


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        # The stub does not process images and audio. Their reference is used as text, so equal ones have equal tokens.
        return text if isinstance(text, str) else _json(part).decode()
    raise bad_value("Unknown part type", "messages", type(part).__name__)


def prompts_of(value: object, vocab: int) -> tuple[list[bytes], bool]:
    """Token ids of each prompt of a completion request, and whether the client sent ids (so their number is exact).

    A prompt is a string, a list of ids, or a list of either. Raises `ApiError`.
    """
    if isinstance(value, str):
        return [_text_tokens(value)], False
    if not isinstance(value, list) or not value:
        raise _no_prompt()
    if all(type(item) is int for item in value):
        return [id_tokens(value, vocab)], True
    if all(isinstance(item, str) for item in value):
        return [_text_tokens(item) for item in value], False
    if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in value):
        return [id_tokens(item, vocab) for item in value], True
    raise _no_prompt()


def _no_prompt() -> ApiError:
    return ApiError("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt")


def _text_tokens(text: str) -> bytes:
    if not text:
        raise _no_prompt()
    return tk.encode(_utf8(text))


def id_tokens(ids: list[int], vocab: int) -> bytes:
    """Convert ids to tokens. Raises `ApiError` for ids outside the vocabulary."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab:
        raise ApiError(f"Token id {high if high >= vocab else low} is out of vocabulary")
    return tk.from_ids(ids)


# The content of a generation request, checked in the order of the real server and refused with its messages.

#: The default of `max_tokens` for completions, as the API has always had it.
_COMPLETION_TOKENS = 16
_MAX_CHOICES = 1024


class Plan(Struct, kw_only=True):
    """A checked generation request: one or more prompts, with `n` choices each."""

    shape: type[Shape]
    #: The requested name; after `Models.resolve`, the name for the answer. Empty = the base model.
    model: str
    lora: str = ""
    prompts: list[bytes] = []
    n: int
    #: The limit of output tokens of each prompt, at most what the context length leaves.
    max_tokens: list[int] = []
    #: Whether the model stops by itself: False with a limit of output tokens, or with `ignore_eos`.
    stops: bool
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    stop_strings: StopStrings | None = None
    #: How many of the likeliest tokens to show for each token; `None` = no log-probabilities at all.
    logprobs: int | None = None
    salt: str = ""
    request_id: str = ""
    temperature: float = 1.0

    @property
    def chat(self) -> bool:
        return self.shape is not CompletionShape

    def seed(self, prompt: int, choice: int) -> int:
        """The seed of an output: equal prompts get equal output, choice by choice."""
        digest: int = xxhash.xxh3_64_intdigest(self.prompts[prompt], tk.root_hash(self.lora))
        return digest + 7919 * choice

    def answer(self, answer_id: str, created: int, fingerprint: str) -> Shape:
        """The `Shape` that makes the JSON of the answer."""
        tokens = sum(map(len, self.prompts)) // tk.TOKEN_BYTES
        limit, temperature = self.max_tokens[0], self.temperature
        return self.shape(answer_id, created, self.model, fingerprint, tokens, limit, temperature)


class Models:
    """The model names that requests can use: the base model and the loaded adapters."""

    def __init__(self, base: str, loras: tuple[str, ...], created: int, aliases: tuple[str, ...] = ()) -> None:
        self.base = base
        #: All names of the base model.
        self.names = base, *aliases
        #: Adapter name → (path, unix seconds when it was loaded).
        self.loras: dict[str, tuple[str, int]] = {name: (f"./{name}", created) for name in loras}
        self.created = created

    def resolve(self, name: str | None) -> tuple[str, str]:
        """(model name for the answer, adapter), the adapter empty for the base model. No name means the base model."""
        if not name or name in self.names:
            return self.base, ""
        if name in self.loras:
            return name, name
        raise unknown_model(name, ", ".join(self.names))


def plan_completion(body: Body, models: Models, config: StubConfig) -> Plan:
    """Plan a request to /v1/completions. Raises `ApiError`."""
    plan, sampling = _begun(body, CompletionShape)
    plan.logprobs = completion_top(body)
    limit = fields.integer(body, "max_tokens", _COMPLETION_TOKENS)
    plan.echo = fields.boolean(body, "echo")
    plan.prompts, counted = prompts_of(body.get("prompt"), config.vocab_size)
    plan.model, plan.lora = models.resolve(plan.model)
    return _completed(plan, sampling, config, counted, limit)


def plan_chat(body: Body, models: Models, config: StubConfig, shape: type[Shape] = ChatShape) -> Plan:
    """Plan a request to /v1/chat/completions. Raises `ApiError`."""
    messages = fields.array(body, "messages")
    plan, sampling = _begun(body, shape)
    plan.logprobs = chat_top(body)
    limit = fields.integer(body, "max_completion_tokens", fields.integer(body, "max_tokens"))
    plan.model, plan.lora = models.resolve(plan.model)
    plan.prompts = [render_chat(messages, body.get("tools"))]
    return _completed(plan, sampling, config, False, limit)


#: Fields that the Messages and Responses APIs share with chat.
_AS_IN_CHAT = ("model", "stream", "temperature", "top_p", "top_k", "tools", "seed", "ignore_eos", "cache_salt")


def plan_message(body: Body, models: Models, config: StubConfig) -> Plan:
    """Plan a request to /v1/messages. Raises `ApiError`."""
    if "max_tokens" not in body:
        raise fields.missing(body, "max_tokens")
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    messages = [*system, *fields.array(body, "messages")]
    chat = {"messages": messages, "max_tokens": body["max_tokens"], "stop": body.get("stop_sequences")}
    return _plan_in_events(body, chat, models, config, MessagesShape)


def plan_response(body: Body, models: Models, config: StubConfig) -> Plan:
    """Plan a request to /v1/responses. Raises `ApiError`."""
    if "input" not in body:
        raise fields.missing(body, "input")
    previous = fields.string(body, "previous_response_id")
    if previous:  # nothing is stored
        raise ApiError(f"Response with id '{previous}' not found.", 404)
    items = body["input"]
    turns = [{"role": "user", "content": items}] if isinstance(items, str) else fields.array(body, "input")
    if body.get("instructions"):
        turns = [{"role": "system", "content": body["instructions"]}, *turns]
    chat = {"messages": [_turn(item) for item in turns], "max_tokens": body.get("max_output_tokens")}
    return _plan_in_events(body, chat, models, config, ResponsesShape)


def _turn(item: object) -> object:
    """An input item as a message. Tool calls and their results have a `type` in place of a `role`."""
    if isinstance(item, dict) and "role" not in item and "type" in item:
        return {"role": item["type"], "content": [item]}
    return item


def _plan_in_events(body: Body, chat: Body, models: Models, config: StubConfig, shape: type[Shape]) -> Plan:
    """Plan the request like a chat. The last events of its stream, which have the usage, are those of `shape`."""
    shared = {name: body[name] for name in _AS_IN_CHAT if name in body}
    plan = plan_chat({**shared, **chat}, models, config, shape)
    plan.include_usage, plan.temperature = True, fields.number(body, "temperature", 1.0)
    return plan


def _begun(body: Body, shape: type[Shape]) -> tuple[Plan, Sampling]:
    """A plan with the fields that all APIs share, and the sampling fields. Types are checked, values are not."""
    plan = Plan(
        shape=shape,
        model=fields.string(body, "model") or "",
        n=fields.integer(body, "n", 1) or 0,
        stream=fields.boolean(body, "stream"),
        stops=not fields.boolean(body, "ignore_eos"),
        return_token_ids=fields.boolean(body, "return_token_ids"),
        salt=fields.string(body, "cache_salt") or "",
        request_id=fields.string(body, "request_id") or "",
    )
    fields.integer(body, "seed")
    sampling = Sampling(body)
    stream_options = fields.mapping(body, "stream_options")
    if stream_options is not None and not plan.stream:
        raise ApiError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", param="stream_options"
        )
    plan.include_usage = fields.boolean(stream_options or {}, "include_usage")
    plan.continuous_usage = plan.include_usage and fields.boolean(stream_options or {}, "continuous_usage_stats")
    return plan, sampling


def _completed(plan: Plan, sampling: Sampling, config: StubConfig, counted: bool, limit: int | None) -> Plan:
    """Check the values of a plan and complete it. `counted`: the client sent token ids, so their number is exact.
    `limit`: of output tokens; `None` = the client set none. Raises `ApiError`."""
    context = config.spec().max_model_len
    longest = max(map(len, plan.prompts)) // tk.TOKEN_BYTES
    if longest >= context:
        raise too_long(context, longest, counted)
    if plan.n < 1:
        raise bad_value(f"n must be at least 1, got {plan.n}.", "n", plan.n)
    if plan.n * len(plan.prompts) > _MAX_CHOICES:
        raise bad_value(f"n must be at most {_MAX_CHOICES} for all prompts together, got {plan.n}.", "n", plan.n)
    sampling.check()
    if limit is not None and limit < 1:
        raise bad_value(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    plan.max_tokens = [min(limit or context, context - len(prompt) // tk.TOKEN_BYTES) for prompt in plan.prompts]
    plan.stops = plan.stops and limit is None and config.natural_output > 0
    likely = sum(min(most, 2 * config.natural_output) if plan.stops else most for most in plan.max_tokens) * plan.n
    check_top(plan.logprobs, likely)
    plan.stop_strings = sampling.stop_strings()
    return plan
