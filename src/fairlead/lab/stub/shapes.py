"""The JSON of generation answers, in vLLM 0.32's field order. Assembled by hand, because an event is sent per token.

Generated text needs no escaping (see `engine.tokens`); everything that a client chose is escaped once per request.
"""

import json

from msgspec import Struct

from fairlead.lab.engine import tokens as tk

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def quoted(text: str) -> bytes:
    """A JSON string. Lone surrogates become '?', because bytes must be UTF-8."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")


def id_list(tokens: bytes) -> bytes:
    return json.dumps(tk.ids(tokens), separators=(",", ":")).encode()


class Counts(Struct):
    """Token counts of an answer. `created`: tokens that the prompt added to the cache; `None` except for chat."""

    prompt: int
    completion: int
    cached: int
    created: int | None

    def bare(self) -> bytes:
        return b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (
            self.prompt,
            self.prompt + self.completion,
            self.completion,
        )

    def in_full(self, details: bool) -> bytes:
        """The usage of a non-streamed answer: nulls are shown."""
        created = b"null" if self.created is None else b"%d" % self.created
        inner = b'{"cached_tokens":%d,"created_cache_tokens":%b,"multimodal_tokens":null}' % (self.cached, created)
        return b'"usage":{%b,"prompt_tokens_details":%b,"completion_tokens_details":null}' % (
            self.bare(),
            inner if details else b"null",
        )

    def streamed(self, details: bool) -> bytes:
        """The usage in the last event of a stream: nulls are left out."""
        if not details:
            return b'"usage":{%b}' % self.bare()
        created = b"" if self.created is None else b',"created_cache_tokens":%d' % self.created
        return b'"usage":{%b,"prompt_tokens_details":{"cached_tokens":%d%b}}' % (self.bare(), self.cached, created)


class Parts(Struct, frozen=True):
    """The fields of a choice, or of one of its events, beside the text: JSON, `null` unless requested."""

    #: Why the choice ended; empty = it continues.
    reason: str = ""
    stop_reason: bytes = b"null"
    logprobs: bytes = b"null"
    ids: bytes = b"null"
    prompt_ids: bytes = b"null"

    def finish(self) -> bytes:
        return quoted(self.reason) if self.reason else b"null"


_NOTHING = Parts()


class Shape:
    """The answer to one request, choice by choice."""

    #: JSON of `object` in non-streamed answers and in events.
    whole_object = b""
    event_object = b""
    #: The JSON before the text in an event.
    before_text = b""

    def __init__(self, answer_id: str, created: int, model: str, fingerprint: str) -> None:
        self._id = quoted(answer_id)
        self._created = created
        self._model = quoted(model)
        self._fingerprint = b'"system_fingerprint":%b' % quoted(fingerprint)

    def _opening(self, kind: bytes) -> bytes:
        return b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":' % (self._id, kind, self._created, self._model)

    def event_head(self, index: int) -> bytes:
        """The part of a token event before its text."""
        return b'data: %b[{"index":%d,%b' % (self._opening(self.event_object), index, self.before_text)

    def event_tail(self, parts: Parts = _NOTHING, usage: bytes = b"", last: bool = False) -> bytes:
        """The part of a token event after its text. `last`: the last event of the stream except for usage."""
        return b"%b]%b%b}\n\n" % (
            self.end_of_choice(parts),
            b',"usage":{%b}' % usage if usage else b"",
            b"," + self._fingerprint if last else b"",
        )

    def end_of_choice(self, parts: Parts) -> bytes:
        raise NotImplementedError

    def role_event(self, index: int, usage: bytes, prompt_ids: bytes) -> bytes:
        """The event before a choice's first token; empty if the API has none."""
        return b""

    def usage_event(self, counts: Counts, details: bool) -> bytes:
        opening = self._opening(self.event_object)
        return b"data: %b[],%b,%b}\n\n" % (opening, counts.streamed(details), self._fingerprint)

    def body(
        self, choices: list[bytes], counts: Counts, details: bool, prompt_ids: bytes, metrics: bytes = b"null"
    ) -> bytes:
        """The non-streamed answer, made from results of `choice`."""
        return b'%b[%b],"service_tier":null,%b,%b,%b,"metrics":%b}' % (
            self._opening(self.whole_object),
            b",".join(choices),
            self._fingerprint,
            counts.in_full(details),
            self.end_of_body(prompt_ids),
            metrics,
        )

    def end_of_body(self, prompt_ids: bytes) -> bytes:
        raise NotImplementedError

    def choice(self, index: int, text: bytes, parts: Parts) -> bytes:
        """One choice of a non-streamed answer. `text` is the inside of a JSON string."""
        raise NotImplementedError


class CompletionShape(Shape):
    whole_object = event_object = b'"text_completion"'
    before_text = b'"text":"'

    def end_of_choice(self, parts: Parts) -> bytes:
        return b'","logprobs":%b,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":%b,"token_ids":%b}' % (
            parts.logprobs,
            parts.finish(),
            parts.stop_reason,
            parts.prompt_ids,
            parts.ids,
        )

    def choice(self, index: int, text: bytes, parts: Parts) -> bytes:
        return (
            b'{"index":%d,"text":"%b","logprobs":%b,"finish_reason":%b,"stop_reason":%b,"token_ids":%b,'
            b'"prompt_logprobs":null,"prompt_token_ids":%b,"routed_experts":null}'
            % (index, text, parts.logprobs, parts.finish(), parts.stop_reason, parts.ids, parts.prompt_ids)
        )

    def end_of_body(self, prompt_ids: bytes) -> bytes:
        return b'"kv_transfer_params":null,"ec_transfer_params":null'


class ChatShape(Shape):
    whole_object = b'"chat.completion"'
    event_object = b'"chat.completion.chunk"'
    before_text = b'"delta":{"content":"'

    def end_of_choice(self, parts: Parts) -> bytes:
        stop = b',"stop_reason":%b' % parts.stop_reason if parts.reason else b""
        return b'"},"logprobs":%b,"finish_reason":%b%b,"token_ids":%b}' % (
            parts.logprobs,
            parts.finish(),
            stop,
            parts.ids,
        )

    def role_event(self, index: int, usage: bytes, prompt_ids: bytes) -> bytes:
        return (
            b'data: %b[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b,'
            b'"prompt_token_ids":%b,"prompt_text":null}\n\n'
            % (self._opening(self.event_object), index, b',"usage":{%b}' % usage if usage else b"", prompt_ids)
        )

    def choice(self, index: int, text: bytes, parts: Parts) -> bytes:
        return (
            b'{"index":%d,"message":{"role":"assistant","content":"%b","refusal":null,"annotations":null,"audio":null,'
            b'"function_call":null,"reasoning":null},"logprobs":%b,"finish_reason":%b,"stop_reason":%b,'
            b'"token_ids":%b,"routed_experts":null}'
            % (index, text, parts.logprobs, parts.finish(), parts.stop_reason, parts.ids)
        )

    def end_of_body(self, prompt_ids: bytes) -> bytes:
        return (
            b'"prompt_logprobs":null,"prompt_token_ids":%b,"prompt_text":null,"kv_transfer_params":null,'
            b'"ec_transfer_params":null' % prompt_ids
        )
