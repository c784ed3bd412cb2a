"""Answers that change a body, for every body mode of Envoy's ext_proc in which that is safe.

Theory (measured on Envoy 1.40; docs/gateway.md, "Changing bodies")
* A length that does not fit the body shifts every later message of an HTTP/1.1 connection: surplus bytes are read as
  the next request. Envoy checks the two only where it holds the whole body (BUFFERED), so length and body leave here
  in one answer, or the length is taken off before the first byte and the body goes out chunked.
* CONTINUE_AND_REPLACE in a headers answer replaces the whole message at once: Envoy drops the length, and what it has
  of the body, and sends nothing more of that message to us. One answer cannot be half applied, even if the scheduler
  dies while 5 MB of it are on the way. Where a gateway fails open that counts: a new length with an old body would be
  worse than no rewrite.
* Under full duplex the gateway keeps nothing, so there is nothing to be half applied to: length in the headers answer,
  then the new bytes in place of those that came.
"""

from fairlead.wire import ext_proc
from fairlead.wire.ext_proc import CONTINUE, BodyMode, Kind, Modes
from fairlead.wire.protobuf import field, number

_CONTENT_LENGTH = "content-length"
_CONTINUE_AND_REPLACE = number(1, 1)
_CLEAR_ROUTE_CACHE = number(5, 1)

#: HeaderMutation content for a headers answer: the body's length is not known yet. It goes out chunked.
UNKNOWN_LENGTH = ext_proc.remove_headers((_CONTENT_LENGTH,))


def content_length(size: int) -> bytes:
    """HeaderMutation content: the body has `size` bytes."""
    return ext_proc.set_header(_CONTENT_LENGTH, b"%d" % size)


def replace(kind: Kind, body: bytes, mutation: bytes = b"", metadata: bytes = b"", reroute: bool = False) -> bytes:
    """Answer a headers message (`kind`) with the whole new body of its message (CONTINUE_AND_REPLACE).

    `mutation`, `metadata`, `reroute`: as for `ext_proc.answer`. Whatever else comes of the message needs no answer.
    """
    common = _CONTINUE_AND_REPLACE
    if mutation:
        common += field(2, mutation)
    common += field(3, field(1, body))
    if reroute:
        common += _CLEAR_ROUTE_CACHE
    return field(CONTINUE[kind][0] >> 3, field(1, common)) + metadata


def can_rewrite_request(modes: Modes, end_of_stream: bool) -> bool:
    """Whether a request whose body was seen can leave with another one. `end_of_stream`: of its last body message.

    Not when the headers were answered without the body (NONE, and STREAMED that does not send ahead), and not when
    only its beginning was seen (a truncated BUFFERED_PARTIAL): Envoy would append the rest.
    """
    mode, _, eager = modes
    if mode is BodyMode.BUFFERED_PARTIAL:
        return end_of_stream
    return mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX) or (mode is BodyMode.STREAMED and eager)


def rewrite_request(
    modes: Modes, body: bytes, mutation: bytes = b"", metadata: bytes = b"", trailers: bool = False
) -> list[bytes]:
    """The pick, with another body: all answers to the request, to be sent in one write.

    `mutation`, `metadata`: of the pick; the route is chosen anew. `trailers`: request trailers came, and wait for
    their answer. Raises ValueError in modes that do not allow it (`can_rewrite_request`).
    """
    mode, _, eager = modes
    if mode is BodyMode.FULL_DUPLEX:
        head = ext_proc.answer(Kind.REQUEST_HEADERS, mutation + content_length(len(body)), metadata, reroute=True)
        tail = [CONTINUE[Kind.REQUEST_TRAILERS]] if trailers else []
        return [head, *ext_proc.streamed_body(Kind.REQUEST_BODY, body, end_of_stream=not trailers), *tail]
    if mode is BodyMode.BUFFERED or mode is BodyMode.BUFFERED_PARTIAL:
        mutation += content_length(len(body))
        return [ext_proc.answer(Kind.REQUEST_BODY, mutation, metadata, body, reroute=True)]
    if mode is BodyMode.STREAMED and eager:
        return [replace(Kind.REQUEST_HEADERS, body, mutation, metadata, reroute=True)]
    raise ValueError(f"the body of a request cannot be changed in mode {mode.name}")


def resizable_response(mutation: bytes = b"") -> bytes:
    """Answer to the response headers when chunks are going to be rewritten: the length is taken off.

    A response whose headers are not sent to us (`response_header_mode: SKIP`) keeps its length: its chunks may only be
    replaced by others of the same size.
    """
    return ext_proc.answer(Kind.RESPONSE_HEADERS, mutation + UNKNOWN_LENGTH)


def rewrite_chunk(mode: BodyMode, chunk: bytes, end_of_stream: bool) -> list[bytes]:
    """Answers to one response body message of a gateway in response body mode `mode`: these bytes instead.

    `chunk` may be empty or longer than what came; hold bytes back by answering with fewer and adding them to a later
    one. `end_of_stream`: of the message. In modes BUFFERED and BUFFERED_PARTIAL the message is the whole body (or its
    beginning), and `resizable_response` went before as well.
    """
    if mode is BodyMode.FULL_DUPLEX:
        return ext_proc.streamed_body(Kind.RESPONSE_BODY, chunk, end_of_stream)
    return [ext_proc.answer(Kind.RESPONSE_BODY, body=chunk)]
