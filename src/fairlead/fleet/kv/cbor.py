"""As much of canonical CBOR (RFC 8949 §4.2) as block hashes need: shortest lengths, definite lengths."""

from collections.abc import Mapping, Sequence

#: What can be encoded. Booleans and floats do not occur in block hashes.
Value = int | str | bytes | None | Sequence["Value"] | Mapping[str, "Value"]

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = 0x00, 0x20, 0x40, 0x60, 0x80, 0xA0
_NULL = b"\xf6"


def encode(value: Value) -> bytes:
    """Bytes of a value. Raises `ValueError` for integers beyond 64 bits, `TypeError` for other types."""
    parts: list[bytes] = []
    _add(parts, value)
    return b"".join(parts)


def _add(parts: list[bytes], value: Value) -> None:
    if value is None:
        parts.append(_NULL)
    elif isinstance(value, bool):
        raise TypeError("no booleans in block hashes")
    elif isinstance(value, int):
        parts.append(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value))
    elif isinstance(value, bytes):
        parts += (_head(_BYTES, len(value)), value)
    elif isinstance(value, str):
        text = value.encode()
        parts += (_head(_TEXT, len(text)), text)
    elif isinstance(value, Mapping):
        parts.append(_head(_MAP, len(value)))
        for name, item in sorted((encode(name), item) for name, item in value.items()):
            parts.append(name)
            _add(parts, item)
    elif isinstance(value, Sequence):
        parts.append(_head(_ARRAY, len(value)))
        for item in value:
            _add(parts, item)
    else:
        raise TypeError(f"{type(value).__name__} has no place in a block hash")


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major | argument,))
    for size, information in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if argument < 1 << 8 * size:
            return bytes((major | information,)) + argument.to_bytes(size, "big")
    raise ValueError(f"{argument} needs more than 64 bits")
