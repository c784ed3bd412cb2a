"""A response in which the model's name is mapped back to the one that the client knows.

Rules
* Only for requests that were rewritten; the session stays on such a stream to the end of the response.
* Only what can be read: JSON and event streams, not compressed.
* Another name may have another length, which must not contradict the response's. Where the gateway shows the headers,
  the length is taken off in their answer. Where it does not, the gateway announces (`RESIZABLE_METADATA`) that it takes
  it off itself; without that the name is mapped only if both are equally long.
"""

from collections.abc import Mapping

from fairlead.parse.rename import ModelRenamer
from fairlead.parse.splice import json_string
from fairlead.wire.ext_proc import CONTINUE, BodyMode, Kind
from fairlead.wire.ext_proc_bodies import resizable_response, rewrite_chunk

_RESIZABLE = resizable_response()


class Renaming:
    """One response. `resizable`: the gateway announced it. `stream`: a stream was asked for."""

    __slots__ = ("_mode", "_renamer", "_shown", "_target")

    def __init__(self, target: str, shown: str, mode: BodyMode, stream: bool, resizable: bool) -> None:
        self._target = target
        self._shown = shown
        self._mode = mode
        self._renamer: ModelRenamer | None = None
        if resizable or len(json_string(target)) == len(json_string(shown)):
            self._renamer = ModelRenamer(target, shown, stream)

    def headers(self, headers: Mapping[str, str]) -> bytes:
        """The answer to the response headers."""
        kind = headers.get("content-type", "")
        stream = kind.startswith("text/event-stream")
        if "content-encoding" in headers or not (stream or "json" in kind):
            self._renamer = None
            return CONTINUE[Kind.RESPONSE_HEADERS]
        self._renamer = ModelRenamer(self._target, self._shown, stream)
        return _RESIZABLE

    def chunk(self, chunk: bytes, end_of_stream: bool) -> list[bytes]:
        """The answers to a body message."""
        if self._mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL):
            end_of_stream = True
        if self._renamer is not None:
            changed = self._renamer.feed(chunk, end_of_stream)
            if changed != chunk or self._mode is BodyMode.FULL_DUPLEX:
                return rewrite_chunk(self._mode, changed, end_of_stream)
        if self._mode is BodyMode.FULL_DUPLEX:
            return rewrite_chunk(self._mode, chunk, end_of_stream)
        return [CONTINUE[Kind.RESPONSE_BODY]]

    def rest(self) -> list[bytes]:
        """What must go before the answer to the trailers. A gateway that answers chunk by chunk has no place for it:
        there a response that breaks off inside of a name loses that piece."""
        held = self._renamer.feed(b"", end=True) if self._renamer is not None else b""
        return rewrite_chunk(self._mode, held, False) if held and self._mode is BodyMode.FULL_DUPLEX else []
