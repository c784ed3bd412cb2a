"""Read the bytes of a request body into a typed struct, in one pass and without decoding the prompt.

Theory. A body is nearly all prompt, and a router needs a few small fields of it. msgspec checks that the whole body is
JSON but keeps `messages`, `prompt` and the like as raw slices, so the cost is a scan at memory speed.

Rules
* The strict parser (RFC 8259) is tried first. Model servers accept more (vLLM 0.32 reads with Python's `json`), and
  every body that they would serve must pass:
  - Unpaired surrogates such as `"\\ud83d"`. Browsers send them when text was cut inside an emoji, and they then stay
    in the conversation. They are replaced by an escape of equal length, and the body is read strictly again.
  - NaN, UTF-16, surrogates as raw bytes: such a body is read with Python's `json`. Its prompt is the decoded value,
    encoded again, so it shares no prefix with a body that was read strictly.
* msgspec does not check UTF-8 inside slices, so non-ASCII bodies are checked here.
* If a key occurs twice, the last occurrence counts, as in Python's `json`.
* The second reading builds objects, so it is limited to `SALVAGE_LIMIT` bytes. A larger body that the strict parser
  refuses is left to the model server: it is scheduled unread.
* Fields that name hosts to the engine (`TRANSFERS`) are refused. In a body that is left unread they are searched for.
* Scalars are read as leniently as pydantic reads them for vLLM: `"5"`, `5.0` and `true` are integers, `"yes"` and `1`
  are true. A value that pydantic refuses is a `ClientError`.
"""

import json
import re
from codecs import BOM_UTF8, utf_8_decode
from typing import Any, Generic, TypeVar

from msgspec import DecodeError, Raw, Struct, ValidationError, convert
from msgspec.json import Decoder, encode
from msgspec.structs import fields

from fairlead.core.errors import ClientError

#: Measured at 1 MiB of `{},`, the worst shape: 30 to 60 ms and 27 MB.
SALVAGE_LIMIT = 1 << 20

#: Larger counts are reduced to this. No context window is that long, and sums stay within 64 bits.
MAX_COUNT = 2**31 - 1

ABSENT = Raw(b"")
Scalar = bool | int | float | str | None
B = TypeVar("B", bound="Body")


#: What a proxy that computes prompts elsewhere tells the engine: hosts to connect to, and blocks to read or to keep.
#: vLLM's first two, and SGLang's.
TRANSFERS = ("kv_transfer_params", "ec_transfer_params", "bootstrap_host")
#: Find them as keys, also with escaped characters, which no encoder writes. `in` is asked first: all take 2.5 ms per
#: MB, where one expression for all takes 20.
_TRANSFER = {name.encode(): re.compile(rb'%b"\s*:' % name.encode()) for name in TRANSFERS}
_ESCAPED = re.compile(rb"\\u00(?:5[fF]|6|7[0-9aA])")


class TransferError(ClientError):
    """A client sent one of `TRANSFERS`. The engine would connect to a host of the client's choice, or read other
    requests' blocks. Only what the pool itself puts between gateway and engine may set them."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is set by the model servers' own proxies; clients may not send it.", param=name)


class StreamOptions(Struct, gc=False):
    include_usage: Scalar = None


class ExtraArguments(Struct, gc=False):
    """vLLM puts the members of `vllm_xargs` where it looks for the first two of `TRANSFERS`."""

    kv_transfer_params: None = None
    ec_transfer_params: None = None


class Body(Struct, gc=False):
    """The fields that most APIs share. `Raw` fields are slices of the body, `ABSENT` (compare by identity) if not sent.

    A field whose value is an object or a list is declared `Raw`, so that a value of another type is not refused here.
    """

    model: str | None = None
    stream: Scalar = False
    cache_salt: Raw = ABSENT
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    bootstrap_host: None = None
    vllm_xargs: ExtraArguments | None = None


_SURROGATE = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
#: Matches everything up to the next unpaired surrogate.
_SOUND = re.compile(rb"(?:[^\\]++|%b|(?!%b)\\.)*+" % (_PAIR, _SURROGATE), re.DOTALL)
#: How many surrogates are mended at most (0.5 µs each), and in how many escapes they are searched (25 ns each). Only a
#: body made to be slow has more.
_MAX_MENDED, _MAX_ESCAPES = 65536, 1 << 20
_UTF8_STEP = 16384
_decode_members = Decoder(dict[str, Raw]).decode


class Reader(Generic[B]):
    """Reads bodies of one shape."""

    __slots__ = ("_raws", "_shape", "decode")

    def __init__(self, shape: type[B]) -> None:
        self._shape = shape
        #: Reads strictly, but does not check that slices are UTF-8.
        self.decode = Decoder(shape).decode
        self._raws = [field.name for field in fields(shape) if field.type is Raw]

    def read(self, body: bytes) -> B | None:
        """Read a body; `None` = too large for a second reading. Raises only `ClientError`."""
        try:
            read = self.decode(body)
            if body.isascii() or is_utf8(body):
                return read
        except (DecodeError, UnicodeDecodeError, RecursionError):
            pass
        return self._mended(body) or self._salvaged(body)

    def _mended(self, body: bytes) -> B | None:
        """Read the body without its unpaired surrogates and byte order mark; `None` if that does not help."""
        mended = _mend(body.removeprefix(BOM_UTF8))
        if mended == body or not is_utf8(mended):
            return None
        try:
            read = self.decode(mended)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if read.model and "\ufffd" in read.model:
            raise ClientError("'model' is not valid Unicode text.", param="model")
        return read

    def _salvaged(self, body: bytes) -> B | None:
        """Read the body as Python's `json` does. Raise a `ClientError` that says what is wrong if that fails too."""
        if len(body) > SALVAGE_LIMIT:
            refuse_transfers(body)
            return None
        try:
            members = _load(body)
            if not isinstance(members, dict):
                raise ClientError("The request body must be a JSON object.")
            raws = {name: members.pop(name) for name in self._raws if name in members}
            read = convert(_encodable(members), self._shape)
            for name, value in raws.items():
                setattr(read, name, Raw(json.dumps(value).encode()))
        except RecursionError:
            raise ClientError("The request body is nested too deeply.") from None
        except UnicodeEncodeError:  # an unpaired surrogate, as raw bytes, where no text is expected
            raise ClientError("A field of the request body is not valid Unicode text.") from None
        except ValidationError as exc:
            raise _wrong_type(str(exc)) from None
        return read


def refuse_transfers(raw: bytes | Raw) -> None:
    """Raise a `TransferError` if JSON that is not decoded seems to have one of `TRANSFERS` as a key, at any depth.
    UTF-16 and UTF-32, which Python's `json` reads, are ASCII letters with zeros."""
    text = bytes(raw).translate(None, b"\0")
    for name, key in _TRANSFER.items():
        if name in text and key.search(text):
            raise TransferError(name.decode())
    if b"\\u00" in text and _ESCAPED.search(text.replace(rb"\\", b"")):  # `\\u0061` is text: a backslash, and no `a`
        raise TransferError(TRANSFERS[0])


def without_transfers(body: bytes) -> bytes:
    """The body without `TRANSFERS`; the other members as they are. An unreadable body is returned unchanged."""
    try:
        members = _decode_members(body)
    except (DecodeError, RecursionError):
        return body
    return encode({name: value for name, value in members.items() if name not in TRANSFERS})


def is_utf8(data: bytes) -> bool:
    """Whether `data` is UTF-8. Steps that fit the CPU cache make it 3 to 6 times as fast as one `decode` at 500 kB."""
    view = memoryview(data)
    start, size = 0, len(data)
    try:
        while size - start > _UTF8_STEP:
            start += utf_8_decode(view[start : start + _UTF8_STEP], "strict", False)[1]
        utf_8_decode(view[start:], "strict", True)
    except UnicodeDecodeError:
        return False
    return True


def _mend(body: bytes) -> bytes:
    """Replace unpaired surrogates by `\\ufffd`, up to a limit."""
    if body.count(b"\\") > _MAX_ESCAPES:
        return body
    pieces: list[bytes] = []
    start = 0
    while len(pieces) < _MAX_MENDED:
        match = _SOUND.match(body, start)
        end = match.end() if match else start
        if end + 6 > len(body) or body[end] != 0x5C:
            break
        pieces.append(body[start:end])
        start = end + 6
    return rb"\ufffd".join([*pieces, body[start:]]) if pieces else body


def _encodable(members: dict[str, Any]) -> dict[str, Any]:
    """Drop keys with unpaired surrogates, which `convert` cannot take, on two levels. No key that is read has any."""
    return {
        name: {key: held for key, held in value.items() if _is_text(key)} if isinstance(value, dict) else value
        for name, value in members.items()
        if _is_text(name)
    }


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _load(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as exc:
        raise ClientError(f"The request body is not valid JSON: {exc.msg} (character {exc.pos}).") from None
    except UnicodeDecodeError as exc:
        raise ClientError(
            f"The request body is not valid {exc.encoding} text: {exc.reason} (byte {exc.start})."
        ) from None
    except ValueError:
        # int() refuses more than sys.int_max_str_digits digits, and so does the model server.
        raise ClientError("The request body contains a number with too many digits.") from None


_WANTED = {"model": "a string", "stream": "a boolean", "stream_options": "an object", "vllm_xargs": "an object"}


def _wrong_type(reason: str) -> ClientError:
    match = re.search(r"\$\.(?:vllm_xargs\.)?(\w+)", reason)
    name = match.group(1) if match else ""
    if name in TRANSFERS:
        return TransferError(name)
    return ClientError(f"Invalid type for '{name}': expected {_WANTED.get(name, 'an integer')}.", param=name or None)


#: What pydantic reads as a boolean.
TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))
FALSE = frozenset(("false", "f", "no", "n", "off", "0"))


def flag(value: Scalar, name: str) -> bool:
    """Read a boolean as pydantic does; absent is false. Raises `ClientError`."""
    if value is None or value == 0:
        return False
    if value == 1:
        return True
    if isinstance(value, str):
        word = value.lower()
        if word in TRUE or word in FALSE:
            return word in TRUE
    raise ClientError(f"Invalid type for '{name}': expected a boolean.", param=name)


def count(value: Scalar, name: str) -> int:
    """Read a count as pydantic reads integers, clamped to 0..`MAX_COUNT`; absent is 0. Raises `ClientError`."""
    if value is None:
        return 0
    if type(value) is int:
        return min(max(value, 0), MAX_COUNT)
    try:
        number = float(value) if isinstance(value, float | str) and not _is_digits(value) else int(value)
        if number == int(number):
            return min(max(int(number), 0), MAX_COUNT)
    except (ValueError, OverflowError):
        pass
    raise ClientError(f"Invalid type for '{name}': expected an integer.", param=name)


def _is_digits(value: float | str) -> bool:
    return isinstance(value, str) and value.strip().lstrip("+-").isdecimal()
