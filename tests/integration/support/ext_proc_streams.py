"""ext_proc streams as a gateway sends them: recorded from the real Envoy, and generated, some of them broken."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

from fairlead.core.errors import ProtocolError
from fairlead.core.headers import ACCESS_LOG_METADATA, DESTINATION, RESIZABLE_METADATA, WHOLE_BODY_METADATA
from fairlead.gateway.ext_proc import SUBSET_KEY, SUBSET_NAMESPACE, Incoming

NONE, STREAMED, BUFFERED, PARTIAL, FULL_DUPLEX = MODES = range(5)
#: Windows: for everything, and too small for any pick.
WIDE, TINY = 1 << 24, 64


class Stream(NamedTuple):
    """What a gateway sends over one ext_proc stream."""

    metadata: tuple[tuple[str, str], ...]
    messages: list[bytes]
    #: The client's window before the first answer.
    window: int = WIDE
    #: It ends with a reset, sent when so many bytes of answers were read; `None` = with a half-close.
    reset_after: int | None = None


CHATS = [
    b'{"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}',
    b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}',
    b'{"model": "alias", "messages": [{"role": "user", "content": "under another name"}]}',
    b'{"model": "alias", "stream": true, "prompt": "under another name"}',
    b'{"model": "m", "prompt": "' + b"z" * 100_000 + b'"}',
]
ODD = [
    b"",
    b"{bad",
    b'{"model": 5, "prompt": "a"}',
    b"\xff" * 9,
    b'{"model": "m", "prompt": "' + b"z" * 200_000 + b'"}',
]
CHUNKS = [
    b'data: {"model": "m", "choices": []}\n\n',
    b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n',
    b'{"model": "m", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}',
    b"",
    b"q" * 70_000,
]
PATHS = ["/v1/chat/completions"] * 4 + ["/v1/completions"] * 2 + ["/v1/models", "/other"]


class Generator:
    """Conversations as a gateway may have them; some are broken."""

    def __init__(self, pb: ModuleType, seed: int) -> None:
        self._pb, self._rng = pb, Random(seed)

    def stream(self) -> Stream:
        rng = self._rng
        modes = rng.choice(MODES), rng.choice(MODES), rng.random() < 0.5
        known = {ACCESS_LOG_METADATA: 0.5, RESIZABLE_METADATA: 0.5, WHOLE_BODY_METADATA: 0.3}
        metadata = tuple((name, "1") for name, share in known.items() if rng.random() < share)
        messages = [*self._request(modes), *self._response(modes)]
        self._break(messages)
        return Stream(metadata, messages, TINY if rng.random() < 0.2 else window(messages))

    def refused(self, modes: tuple[int, int, bool], seen: bool) -> Stream:
        """The gateway answers by itself. `seen`: it has shown the headers of the request."""
        messages = [self._message("response_headers", [(":status", "408")])]
        if seen:
            messages.insert(0, self._message("request_headers", [(":method", "POST"), (":path", PATHS[0])]))
        config = messages[0].protocol_config
        config.request_body_mode, config.response_body_mode = modes[:2]
        config.send_body_without_waiting_for_header_response = modes[2]
        body = [self._body("response_body", b"request timeout", True)] if modes[1] else []
        return Stream((), [*(message.SerializeToString() for message in messages), *body], WIDE)

    def _message(self, kind: str, fields: list[tuple[str, str]], end: bool = False) -> Any:
        message = self._pb.ProcessingRequest()
        part = getattr(message, kind)
        part.SetInParent()
        for name, value in fields:
            (part.trailers if kind.endswith("trailers") else part.headers).headers.add(
                key=name, raw_value=value.encode()
            )
        if kind.endswith("headers"):
            part.end_of_stream = end
        return message

    def _body(self, kind: str, chunk: bytes, end: bool) -> bytes:
        message = self._pb.ProcessingRequest()
        part = getattr(message, kind)
        part.body, part.end_of_stream = chunk, end
        return bytes(message.SerializeToString())

    def _request(self, modes: tuple[int, int, bool]) -> Iterator[bytes]:
        rng = self._rng
        body = rng.choice(CHATS if rng.random() < 0.75 else ODD)
        fields = [(":method", "POST"), (":path", rng.choice(PATHS)), ("content-type", "application/json")]
        if rng.random() < 0.3:
            fields += [(DESTINATION, "1.2.3.4:5"), ("x-session-id", "s")]
        head = self._message("request_headers", fields, not body)
        if rng.random() < 0.95:  # else an older gateway, which does not tell
            config = head.protocol_config
            config.request_body_mode, config.response_body_mode = modes[:2]
            config.send_body_without_waiting_for_header_response = modes[2] and modes[0] == STREAMED
        if rng.random() < 0.15:
            hint = {SUBSET_KEY: rng.choice([["10.0.0.1:80"], ["10.9.9.9:1"], []])}
            head.metadata_context.filter_metadata[SUBSET_NAMESPACE].update(hint)
        yield head.SerializeToString()
        if not body or modes[0] == NONE:
            return
        pieces = rng.choice([1, 1, 2, 3]) if modes[0] in (STREAMED, FULL_DUPLEX) else 1
        cuts = [0, *sorted(rng.randrange(len(body)) for _ in range(pieces - 1)), len(body)]
        trailers = rng.random() < 0.2
        for index in range(pieces):
            last = index == pieces - 1 and not trailers and (modes[0] != PARTIAL or rng.random() < 0.7)
            yield self._body("request_body", body[cuts[index] : cuts[index + 1]], last)
        if trailers:
            yield self._message("request_trailers", [("x-checksum", "1")]).SerializeToString()

    def _response(self, modes: tuple[int, int, bool]) -> Iterator[bytes]:
        rng = self._rng
        if rng.random() < 0.85:
            kind = rng.choice(["text/event-stream", "application/json"])
            fields = [(":status", rng.choice(["200", "200", "404"])), ("content-type", kind)]
            yield self._message("response_headers", fields, rng.random() < 0.1).SerializeToString()
        for _ in range(rng.randrange(4) if modes[1] != NONE else 0):
            yield self._body("response_body", rng.choice(CHUNKS), rng.random() < 0.25)
        if rng.random() < 0.2:
            yield self._message("response_trailers", [("grpc-status", "0")]).SerializeToString()

    def _break(self, messages: list[bytes]) -> None:
        rng, drawn = self._rng, self._rng.random()
        at = rng.randrange(len(messages))
        if drawn < 0.08:
            other = rng.randrange(len(messages))
            messages[at], messages[other] = messages[other], messages[at]
        elif drawn < 0.13:
            messages.insert(at, rng.randbytes(rng.randrange(12)))
        elif drawn < 0.18:
            del messages[at]
        elif drawn < 0.25:
            messages[at] = messages[at][: rng.randrange(len(messages[at]) + 1)]
        elif drawn < 0.4:
            del messages[at + 1 :]


def window(messages: list[bytes]) -> int:
    """With which no session could leave a full-duplex response at the pick."""
    try:
        modes = Incoming(messages[0]).modes()
    except ProtocolError:
        modes = None
    return TINY if modes is None or modes[1] == FULL_DUPLEX else WIDE  # who tells nothing is taken for full duplex


def recorded(file: Path) -> Stream:
    told = json.loads(file.read_text())
    assert told["origin"].startswith("captured from Envoy ")
    messages = [base64.b64decode(message) for message in told["messages"]]
    return Stream(tuple(told["metadata"].items()), messages, window(messages))
