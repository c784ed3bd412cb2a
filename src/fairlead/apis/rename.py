"""Map the model's name in responses back to the name that the client asked for."""

import json
import re

from fairlead.apis.splice import json_string

# Finds the end of a JSON string. Every scan spends its time here, because most of a body is one long string.
#
# Theory. A quote closes the string unless an odd number of backslashes precedes it. Searching for quotes is a hundred
# times as fast as a regular expression over every byte, as long as few quotes are escaped. After `_ESCAPED` escaped
# quotes the regular expression takes over, so that the time stays linear with a small factor for any bytes.

#: The rest of a string, without its closing quote.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_ESCAPED = 200
_QUOTE, _BACKSLASH = 0x22, 0x5C


def string_end(data: bytes, position: int, stop: int) -> int:
    """The offset behind the closing quote of a string; -1 if the string does not end before `stop`. `position`:
    inside the string, not behind an escaping backslash."""
    begin = position
    for _ in range(_ESCAPED):
        quote = data.find(b'"', position, stop)
        if quote < 0:
            return -1
        before = quote
        while before > begin and data[before - 1] == _BACKSLASH:
            before -= 1
        if (quote - before) % 2 == 0:
            return quote + 1
        begin = position = quote + 1
    match = _INSIDE.match(data, position, stop)
    end = match.end() if match else stop
    return end + 1 if data.startswith(b'"', end, stop) else -1


def ends_escaping(data: bytes, position: int, stop: int) -> bool:
    """Whether a string that continues behind `stop` has an escaping backslash directly before `stop`."""
    before = stop
    while before > position and data[before - 1] == _BACKSLASH:
        before -= 1
    return (stop - before) % 2 == 1


# Maps the model's name back in a response that arrives in chunks, which may be cut anywhere.
#
# Rules
# * A client that asked for A reads A: the first `"model": "B"` of a document becomes `"model": "A"`, and no other byte
#   changes. B is any name, because engines answer with another than they are asked for: vLLM with its first
#   `--served-model-name`. The same text inside a string or at a greater depth is left alone.
# * The name is looked for at the top level of a JSON document, and in its member `response` (events of the Responses
#   API) or `message` (Anthropic's `message_start`). Behind it nothing is read: a megabyte of log-probabilities would
#   take 85 ms. Nor behind `_MOST_TOKENS` without a name.
# * A body that is no stream is one document. In a list (`/v1/completions/render`), each element is one.
# * All bytes are passed on immediately, except a name that is not complete, of up to `_LONGEST` bytes: what is longer
#   is no name. So a stream is never delayed, and memory is bounded.
# * In a stream (`text/event-stream`), each event has one document: its `data:` lines, joined by line ends. LF, CR and
#   CRLF end a line (HTML Living Standard §9.2.6). A bare line with an object is a document, as for `UsageScanner`.
# * What is neither a JSON object nor a list of these passes unread. The time is linear for any bytes.
#
# Theory. Two kinds of tokens show the depth: brackets, and strings, because brackets inside them do not count. Only the
# objects named above are read more closely: in them, a string before a colon is a key. The state between chunks is a
# mode, a depth and a short key.

_NEAR = re.compile(rb'["{}\[\],:]')
_FAR = re.compile(rb'["{}\[\]]')
_BEGIN = re.compile(rb"[^ ,\t\r\n\xef\xbb\xbf]")
_LINE_END = re.compile(rb"[\r\n]")
_EVENT_END = re.compile(rb"\n\r?\n")
#: Lines that are passed at once: before a document, those without data, and events too short for a name.
_NO_DOCUMENT = re.compile(
    rb"(?:[\r\n]++|(?!data:|\{)[^\r\n]++[\r\n]|data: *+[\r\n]|data:[^\r\n]{0,11}+(?:\n\n|\r\n\r\n))*+"
)

#: Members of the top level that are objects and name the model too.
_NESTED = (b'"response"', b'"message"')
_MODEL = b'"model"'
#: The longest name, as it is written. Names may be paths.
_LONGEST = 4096
#: The most tokens that are read of a document without a name: those of ten thousand embeddings. They take 0.2 s.
_MOST_TOKENS = 100_000
#: Longer keys are not compared: none of the keys above is that long, even with every character escaped.
_MAX_KEY = 64

#: Before a document; between tokens; in a string, a key, a possible name; in a document that is not read.
_START, _OUT, _STRING, _KEY, _NAME, _UNREAD = range(6)

_DATA = b"data:"
#: Longest beginning of an event that is remembered, in bytes.
_MAX_BEGINNING = 2048


class _Documents:
    """Scans documents. `begin` a chunk and `scan` its ranges; `finish` returns the bytes to pass on."""

    __slots__ = (
        "_chunk", "_depth", "_escaped", "_held", "_in_value", "_kept", "_key", "_left", "_mode",
        "_named", "_out", "_same_length", "_shown", "found_at", "listed", "matches", "written",
    )  # fmt: skip

    def __init__(self, shown: str, same_length: bool) -> None:
        self._shown = json_string(shown)
        self._same_length = same_length
        self._chunk = b""
        #: The number of names replaced in this chunk, the offset behind the last, and the last as it is written.
        self.matches = self.found_at = 0
        self.written = b""
        self._out: list[bytes] = []
        #: The offset up to which the chunk is in `_out` or held.
        self._kept = 0
        self._held = bytearray()
        self._key = bytearray()
        self.reset()

    def reset(self) -> None:
        """Expect a new document."""
        self.release()
        self._mode = _START
        self._depth = 0
        #: Whether it is a list, so that further names may follow.
        self.listed = False
        #: Keys are read in objects down to this depth: 1, or 2 inside a nested object.
        self._named = 1
        self._in_value = False
        self._escaped = False
        #: How many tokens may still be read.
        self._left = _MOST_TOKENS
        self._key.clear()

    def release(self) -> None:
        """Pass on the held string: it is not the name, or was already replaced."""
        if self._held:
            self._out.append(bytes(self._held))
            self._held.clear()

    @property
    def in_string(self) -> bool:
        return self._mode in (_STRING, _KEY, _NAME)

    def give_up(self) -> None:
        """Read nothing more until `reset`."""
        self.release()
        self._mode = _UNREAD

    def begin(self, chunk: bytes) -> None:
        self._chunk = chunk
        self._kept = self.matches = self.found_at = 0

    def finish(self) -> bytes:
        unsent = self._chunk[self._kept :] if self._kept else self._chunk
        if not self._out:
            return unsent
        self._out.append(unsent)
        done = b"".join(self._out)
        self._out.clear()
        return done

    @property
    def fresh(self) -> bool:
        """Whether a document may begin here."""
        return self._mode == _START

    def replace(self, start: int, stop: int) -> None:
        """Replace a range of the chunk that was not scanned: it is a name."""
        self._out += (self._chunk[self._kept : start], self._shown)
        self._kept = stop

    def scan(self, position: int, stop: int) -> None:
        """Scan a range of the chunk. Give the ranges of a document in order."""
        while position < stop and self._mode != _UNREAD:
            if self._mode == _OUT:
                position = self._token(position, stop)
            elif self._mode == _START:
                position = self._start(position, stop)
            else:
                position = self._in_string(position, stop)

    def _start(self, position: int, stop: int) -> int:
        match = _BEGIN.search(self._chunk, position, stop)
        if match is None:
            return stop
        if match.group() == b"[" and not self.listed:
            self.listed = True
            return match.end()
        self._mode = _OUT if match.group() == b"{" else _UNREAD
        self._depth = self._named = 1
        return match.end()

    def _token(self, position: int, stop: int) -> int:
        self._left -= 1
        if not self._left:
            self.give_up()
            return stop
        near = self._depth <= self._named
        match = (_NEAR if near else _FAR).search(self._chunk, position, stop)
        if match is None:
            return stop
        byte = self._chunk[match.start()]
        if byte == _QUOTE:
            self._mode = self._kind_of_string() if near else _STRING
            if self._mode == _NAME:
                self._out.append(self._chunk[self._kept : match.start()])
                self._held.append(_QUOTE)
                self._kept = match.end()
        elif byte in b"{[":
            self._depth += 1
            if self._depth == 2 and byte == 0x7B and self._in_value and self._key in _NESTED:
                self._named = 2
                self._in_value = False
                self._key.clear()
        elif byte in b"}]":
            self._depth -= 1
            if self._depth == 0:
                self._mode, self._in_value = _START if self.listed else _UNREAD, False
            elif self._depth <= self._named:
                self._named = min(self._named, self._depth)
                self._in_value = True
                self._key.clear()
        else:
            self._in_value = byte == 0x3A
            if not self._in_value:
                self._key.clear()
        return match.end()

    def _kind_of_string(self) -> int:
        if not self._in_value:
            self._key[:] = b'"'
            return _KEY
        return _NAME if self._key == _MODEL else _STRING

    def _in_string(self, position: int, stop: int) -> int:
        """Scan from inside a string to behind its closing quote, or to `stop`; return the offset reached."""
        chunk, begin = self._chunk, position
        position += self._escaped
        end = string_end(chunk, position, stop)
        closed = end >= 0
        self._escaped = not closed and ends_escaping(chunk, position, stop)
        position = end if closed else stop
        if self._mode == _KEY:
            self._end_of_key(chunk, begin, position, closed)
        elif self._mode == _NAME:
            self._end_of_name(chunk, begin, position, closed)
        elif closed:
            self._mode = _OUT
        return position

    def _end_of_key(self, chunk: bytes, begin: int, end: int, closed: bool) -> None:
        if len(self._key) <= _MAX_KEY:
            self._key += chunk[begin : min(end, begin + _MAX_KEY)]
        if closed:
            self._mode = _OUT
            if _BACKSLASH in self._key and len(self._key) <= _MAX_KEY:
                self._key[:] = _unescaped(bytes(self._key))

    def _end_of_name(self, chunk: bytes, begin: int, end: int, closed: bool) -> None:
        self._kept = end
        self._held += chunk[begin:end]
        if closed:
            if not self._same_length or len(self._held) == len(self._shown):
                self.matches += 1
                self.found_at, self.written = end, bytes(self._held)
                self._held[:] = self._shown
            self.release()
            # Of a list, further elements may follow.
            self._mode, self._named = _OUT if self.listed else _UNREAD, 0
        elif len(self._held) > _LONGEST:
            self._mode = _STRING
            self.release()


def _unescaped(key: bytes) -> bytes:
    try:
        return json_string(json.loads(key))
    except ValueError:
        return b""


class ModelRenamer:
    """Takes every chunk of one response body and renames the model to `shown`. `stream`: the body is
    `text/event-stream`. `same_length`: the body may not change its length, so names of other lengths stay."""

    __slots__ = ("_after_cr", "_beginning", "_documents", "_line", "_matched", "_name", "_stream")

    def __init__(self, shown: str, stream: bool, same_length: bool = False) -> None:
        self._documents = _Documents(shown, same_length)
        self._stream = stream
        #: For a stream: the rest of the line is data (True) or not (False); `None` = the line has just begun.
        self._line: bool | None = None
        self._matched = 0
        self._after_cr = False
        #: For a stream: the beginning of an earlier event, name included, and that name. Events of a response begin
        #: alike.
        self._beginning = self._name = b""

    def feed(self, chunk: bytes, end: bool = False) -> bytes:
        """Take a chunk and return the bytes to pass on. `end`: the last chunk, so nothing is held. Never raises."""
        documents = self._documents
        documents.begin(chunk)
        if self._stream:
            self._lines(chunk)
        else:
            documents.scan(0, len(chunk))
        if end:
            documents.release()
        return documents.finish()

    def _lines(self, chunk: bytes) -> None:
        position, stop = 0, len(chunk)
        documents = self._documents
        #: The offset where a document began on a line of this chunk, and the number of names found before it.
        begun, before = -1, 0
        while position < stop:
            if self._line is None:
                if self._matched == 0 and documents.fresh:
                    position = self._passed(chunk, position)
                    begun, before = position, documents.matches
                    if position == stop:
                        break
                position = self._line_start(chunk, position)
                continue
            line_end = _LINE_END.search(chunk, position)
            end = line_end.start() if line_end else stop
            if self._line:
                documents.scan(position, end)
                repeatable = begun >= 0 and documents.matches == before + 1 and not documents.listed
                if repeatable and documents.found_at - begun <= _MAX_BEGINNING:
                    self._beginning, self._name = chunk[begun : documents.found_at], documents.written
            begun = -1
            position = end
            if line_end:
                position = self._line_end(chunk, position)

    def _passed(self, chunk: bytes, position: int) -> int:
        """Pass lines without a document, and events that begin like an earlier one, because the scan would find the
        name at the same place. Return the offset behind them."""
        known, documents = self._beginning, self._documents
        while position < len(chunk):
            if lines := _NO_DOCUMENT.match(chunk, position):
                position = lines.end()
            start = position + len(known)
            end = _EVENT_END.search(chunk, start) if known and chunk.startswith(known, position) else None
            # Another line end may end the event before.
            if end is None or chunk.find(b"\r", start, end.start() - 1) >= 0:
                break
            documents.replace(start - len(self._name), start)
            position = end.end()
        return position

    def _line_start(self, chunk: bytes, position: int) -> int:
        byte = chunk[position]
        if self._matched == 0 and byte in b"\r\n":
            if not (self._after_cr and byte == 0x0A):  # else the LF belongs to the CR before it
                self._documents.reset()
            self._after_cr = byte == 0x0D
            return position + 1
        self._after_cr = False
        if byte == _DATA[self._matched]:
            self._matched += 1
            if self._matched == len(_DATA):
                self._line = True
            return position + 1
        self._line = self._matched == 0 and byte == 0x7B
        if self._line:
            self._documents.reset()
        return position

    def _line_end(self, chunk: bytes, position: int) -> int:
        if self._line and self._documents.in_string:
            self._documents.give_up()
        self._after_cr = chunk[position] == 0x0D
        self._line = None
        self._matched = 0
        return position + 1
