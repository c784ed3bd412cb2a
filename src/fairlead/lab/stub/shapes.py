"""The JSON of generation answers, whole and streamed, in the field order of vLLM 0.32, for each of its four APIs.

The code assembles the bytes itself for speed, because an event is sent per token. Generated text needs no escaping (see
`engine.tokens`); everything that a client chose is escaped once per request.
"""

from collections.abc import Callable

from msgspec import Struct

from fairlead.lab.stub.fields import encoded

DONE = b"data: [DONE]\n\n"


class Counts(Struct):
    """Token counts of an answer. `created`: tokens that the prompt added to the cache; `None` except for chat."""

    prompt: int
    completion: int
    cached: int
    created: int | None

    def bare(self) -> bytes:
        total = self.prompt + self.completion
        return b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (self.prompt, total, self.completion)

    def in_full(self, details: bool) -> bytes:
        """The usage of a non-streamed answer: nulls are shown."""
        created = b"null" if self.created is None else b"%d" % self.created
        inner = b'{"cached_tokens":%d,"created_cache_tokens":%b,"multimodal_tokens":null}' % (self.cached, created)
        shown = inner if details else b"null"
        return b'"usage":{%b,"prompt_tokens_details":%b,"completion_tokens_details":null}' % (self.bare(), shown)

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
        return encoded(self.reason) if self.reason else b"null"


_NOTHING = Parts()


class Shape:
    """Makes the JSON of the answer to one request, choice by choice."""

    #: JSON of `object` in non-streamed answers and in events.
    whole_object = b""
    event_object = b""
    #: The JSON before the text in an event.
    before_text = b""
    #: Whether each event has a number.
    numbered = False
    #: The bytes after the last event.
    done = DONE

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        prompt_tokens: int = 0,
        limit: int = 0,
        temperature: float = 1.0,
    ) -> None:
        """`limit`: the most tokens that the answer may have."""
        self._prompt_tokens = prompt_tokens
        self._limit = limit
        self._temperature = encoded(temperature)
        self._id = encoded(answer_id)
        self._created = created
        self._model = encoded(model)
        self._fingerprint = b'"system_fingerprint":%b' % encoded(fingerprint)

    def _opening(self, kind: bytes) -> bytes:
        return b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":' % (self._id, kind, self._created, self._model)

    def event_head(self, index: int) -> bytes:
        """The part of a token event before its text."""
        return b'data: %b[{"index":%d,%b' % (self._opening(self.event_object), index, self.before_text)

    def event_tail(self, parts: Parts = _NOTHING, usage: bytes = b"", last: bool = False) -> bytes:
        """The part of a token event after its text. `last`: this is the last event of the stream, except for usage."""
        counts = b',"usage":{%b}' % usage if usage else b""
        return b"%b]%b%b}\n\n" % (self.end_of_choice(parts), counts, b"," + self._fingerprint if last else b"")

    def end_of_choice(self, parts: Parts) -> bytes:
        raise NotImplementedError

    def role_event(self, index: int, usage: bytes, prompt_ids: bytes) -> bytes:
        """The event before a choice's first token; empty if the API has none."""
        return b""

    def usage_event(self, counts: Counts, details: bool, text: Callable[[], bytes]) -> bytes:
        """The events after the last token. `text()` is the whole text of the first choice."""
        opening = self._opening(self.event_object)
        return b"data: %b[],%b,%b}\n\n" % (opening, counts.streamed(details), self._fingerprint)

    def body(self, choices: list[bytes], counts: Counts, details: bool, prompt_ids: bytes) -> bytes:
        """The non-streamed answer, made from results of `choice`."""
        return b'%b[%b],"service_tier":null,%b,%b,%b,"metrics":null}' % (
            self._opening(self.whole_object),
            b",".join(choices),
            self._fingerprint,
            counts.in_full(details),
            self.end_of_body(prompt_ids),
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
        reason = parts.finish() + stop
        return b'"},"logprobs":%b,"finish_reason":%b,"token_ids":%b}' % (parts.logprobs, reason, parts.ids)

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


# vLLM's Messages and Responses APIs: one choice, and events with names.


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, data)


class MessagesShape(Shape):
    """Anthropic's Messages API."""

    _reason = ""

    def _message(self, content: bytes, stop_reason: bytes, usage: bytes) -> bytes:
        return (
            b'{"id":%b,"type":"message","role":"assistant","content":[%b],"model":%b,"stop_reason":%b,"usage":%b}'
            % (self._id, content, self._model, stop_reason, usage)
        )

    def _stop_reason(self) -> bytes:
        return b'"max_tokens"' if self._reason == "length" else b'"end_turn"'

    def choice(self, index: int, text: bytes, parts: Parts) -> bytes:
        self._reason = parts.reason
        return b'{"type":"text","text":"%b"}' % text

    def body(self, choices: list[bytes], counts: Counts, details: bool, prompt_ids: bytes) -> bytes:
        return self._message(b",".join(choices), self._stop_reason(), self._usage(counts, details))

    def _usage(self, counts: Counts, details: bool) -> bytes:
        cached = counts.cached if details else 0
        cache = b',"cache_creation_input_tokens":0,"cache_read_input_tokens":%d' % cached if details else b""
        return b'{"input_tokens":%d,"output_tokens":%d%b}' % (counts.prompt - cached, counts.completion, cache)

    def role_event(self, index: int, usage: bytes, prompt_ids: bytes) -> bytes:
        usage = b'{"input_tokens":%d,"output_tokens":0}' % self._prompt_tokens
        message = self._message(b"", b"null", usage)
        block = b'{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}'
        return _event(b"message_start", b'{"type":"message_start","message":%b}' % message) + _event(
            b"content_block_start", block
        )

    def event_head(self, index: int) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"'

    def event_tail(self, parts: Parts = _NOTHING, usage: bytes = b"", last: bool = False) -> bytes:
        self._reason = parts.reason
        return b'"},"index":0}\n\n'

    def usage_event(self, counts: Counts, details: bool, text: Callable[[], bytes]) -> bytes:
        usage = self._usage(counts, details)
        delta = b'{"type":"message_delta","delta":{"stop_reason":%b},"usage":%b}' % (self._stop_reason(), usage)
        return (
            _event(b"content_block_stop", b'{"type":"content_block_stop","index":0}')
            + _event(b"message_delta", delta)
            + _event(b"message_stop", b'{"type":"message_stop"}')
        )


class ResponsesShape(Shape):
    """OpenAI's Responses API."""

    numbered = True
    done = b""
    _reason = ""
    _number = 0

    @property
    def _item_id(self) -> bytes:
        return b"msg_" + self._id[1:-1].removeprefix(b"resp_")

    def _response(self, status: bytes, output: bytes, usage: bytes = b"null") -> bytes:
        incomplete = b'{"reason":"max_output_tokens"}' if status == b"incomplete" else b"null"
        return (
            b'{"id":%b,"created_at":%d,"incomplete_details":%b,"instructions":null,"metadata":null,"model":%b,'
            b'"object":"response","output":[%b],"parallel_tool_calls":true,"temperature":%b,"tool_choice":"none",'
            b'"tools":[],"top_p":1.0,"background":false,"max_output_tokens":%d,"max_tool_calls":null,'
            b'"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"%b",'
            b'"text":null,"top_logprobs":null,"truncation":"disabled","usage":%b,"user":null,"presence_penalty":0.0,'
            b'"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,'
            b'"output_messages":null}'
            % (self._id, self._created, incomplete, self._model, output, self._temperature, self._limit, status, usage)
        )

    def _item(self, content: bytes, status: bytes = b"completed") -> bytes:
        return b'{"id":"%b","content":[%b],"role":"assistant","status":"%b","type":"message","phase":null}' % (
            self._item_id,
            content,
            status,
        )

    def _final(self, output: bytes, counts: Counts) -> bytes:
        status = b"incomplete" if self._reason == "length" else b"completed"
        usage = (
            b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0,'
            b'"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":%d,"output_tokens_details":'
            b'{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],'
            b'"tool_output_tokens_per_turn":[]},"total_tokens":%d}'
            % (counts.prompt, counts.cached, counts.completion, counts.prompt + counts.completion)
        )
        return self._response(status, output, usage)

    def choice(self, index: int, text: bytes, parts: Parts) -> bytes:
        self._reason = parts.reason
        return self._item(_text_part(text))

    def body(self, choices: list[bytes], counts: Counts, details: bool, prompt_ids: bytes) -> bytes:
        return self._final(b",".join(choices), counts)

    def _next(self, kind: bytes, fields: bytes) -> bytes:
        self._number += 1
        name = b"response." + kind
        return _event(name, b'{%b,"sequence_number":%d,"type":"%b"}' % (fields, self._number - 1, name))

    def _part(self, kind: bytes, fields: bytes) -> bytes:
        place = b',"item_id":"%b","output_index":0' % self._item_id
        return self._next(kind, b'"content_index":0' + place + b"," + fields)

    def role_event(self, index: int, usage: bytes, prompt_ids: bytes) -> bytes:
        self._number = 0
        response = b'"response":' + self._response(b"in_progress", b"")
        item = b'"item":%b,"output_index":0' % self._item(b"", b"in_progress")
        return (
            self._next(b"created", response)
            + self._next(b"in_progress", response)
            + self._next(b"output_item.added", item)
            + self._part(b"content_part.added", b'"part":' + _text_part(b""))
        )

    def event_head(self, index: int) -> bytes:
        return b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"'

    def event_tail(self, parts: Parts = _NOTHING, usage: bytes = b"", last: bool = False) -> bytes:
        self._reason = parts.reason
        self._number += 1
        return (
            b'","item_id":"%b","logprobs":[],"output_index":0,"sequence_number":%d,'
            b'"type":"response.output_text.delta"}\n\n' % (self._item_id, self._number - 1)
        )

    def usage_event(self, counts: Counts, details: bool, text: Callable[[], bytes]) -> bytes:
        part = _text_part(content := text())
        item = self._item(part)
        return (
            self._part(b"output_text.done", b'"logprobs":[],"text":"%b"' % content)
            + self._part(b"content_part.done", b'"part":' + part)
            + self._next(b"output_item.done", b'"item":%b,"output_index":0' % item)
            # vLLM names the event `completed` even if the response is incomplete.
            + self._next(b"completed", b'"response":' + self._final(item, counts))
        )


def _text_part(text: bytes) -> bytes:
    return b'{"annotations":[],"text":"%b","type":"output_text","logprobs":null}' % text
