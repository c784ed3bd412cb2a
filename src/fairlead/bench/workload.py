"""What is sent: endless, seeded sequences of requests, built one at a time when they are due.

`SharedPrefix` is the workload behind most published figures on prefix-aware routing: many users per system prompt, in
random order, so that a router either keeps a prompt's cache entry on few replicas or computes it everywhere.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Protocol

import msgspec

from fairlead.bench.words import BYTES_PER_TOKEN, text
from fairlead.model.errors import ConfigError

CHAT_PATH = "/v1/chat/completions"


class Call(msgspec.Struct, frozen=True):
    """One request to send."""

    body: bytes = b""
    path: str = CHAT_PATH
    method: str = "POST"
    headers: dict[str, str] = {}
    #: Which prefix group it belongs to; -1 = none.
    group: int = -1


class Workload(Protocol):
    """Anything that can be sent; `fairlead.bench.runner.run` takes any of these."""

    def calls(self) -> Iterator[Call]:
        """The requests in order. An iterator that ends ends the run."""
        ...


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="shared_prefix", forbid_unknown_fields=True):
    """`groups` system prompts with `prompts` questions each, in one shuffled order that repeats.

    Token counts are estimates at four bytes each. A question is asked again, word for word, in every repetition.
    """

    groups: int = 150
    prompts: int = 5
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    seed: int = 0
    model: str = "default"
    stream: bool = True
    #: Further top-level fields, e.g. `{"ignore_eos": true}` for a real vLLM.
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for name in ("groups", "prompts", "system_tokens", "question_tokens", "output_tokens"):
            _at_least_one(getattr(self, name), name)

    def calls(self) -> Iterator[Call]:
        ends = _chat_ends(self.model, self.output_tokens, self.stream, self.extra)
        order = [(group, prompt) for group in range(self.groups) for prompt in range(self.prompts)]
        Random(self.seed).shuffle(order)
        systems: dict[int, bytes] = {}
        while True:
            for group, prompt in order:
                system = systems.get(group)
                if system is None:
                    system = systems[group] = text(self.system_tokens, Random(f"{self.seed}/{group}"))
                question = text(self.question_tokens, Random(f"{self.seed}/{group}/{prompt}"))
                yield Call(body=_chat_body(ends, system, question), group=group)


class Chat(msgspec.Struct, frozen=True, kw_only=True, tag="chat", forbid_unknown_fields=True):
    """Independent chat requests of one size; no two prompts share a prefix."""

    body_bytes: int = 2048
    output_tokens: int = 100
    seed: int = 0
    model: str = "default"
    stream: bool = True
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _at_least_one(self.body_bytes, "body_bytes")
        _at_least_one(self.output_tokens, "output_tokens")

    def calls(self) -> Iterator[Call]:
        ends = _chat_ends(self.model, self.output_tokens, self.stream, self.extra, system=False)
        room = max(1, self.body_bytes - sum(map(len, ends)))
        chance = Random(self.seed)
        while True:
            question = text(room // BYTES_PER_TOKEN + 1, chance)[:room]
            yield Call(body=_chat_body(ends, b"", question))


class Fixed(msgspec.Struct, frozen=True, kw_only=True, tag="fixed", forbid_unknown_fields=True):
    """The same request again and again."""

    body: str = ""
    path: str = CHAT_PATH
    method: str = "POST"
    headers: dict[str, str] = {}

    def calls(self) -> Iterator[Call]:
        call = Call(body=self.body.encode(), path=self.path, method=self.method, headers=self.headers)
        while True:
            yield call


AnyWorkload = SharedPrefix | Chat | Fixed

_Ends = tuple[bytes, bytes, bytes]


def _chat_ends(model: str, output_tokens: int, stream: bool, extra: dict[str, Any], system: bool = True) -> _Ends:
    """The JSON before the system prompt, between it and the question, and after the question."""
    name = msgspec.json.encode(model)
    fields: dict[str, Any] = {"max_tokens": output_tokens}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    after = b'"}],' + msgspec.json.encode(fields | extra)[1:]
    if not system:
        return b'{"model":%b,"messages":[{"role":"user","content":"' % name, b"", after
    before = b'{"model":%b,"messages":[{"role":"system","content":"' % name
    return before, b'"},{"role":"user","content":"', after


def _chat_body(ends: _Ends, system: bytes, question: bytes) -> bytes:
    return b"".join((ends[0], system, ends[1], question, ends[2]))


def _at_least_one(value: int, name: str) -> None:
    if value < 1:
        raise ConfigError("must be at least 1", f"$.workload.{name}")
