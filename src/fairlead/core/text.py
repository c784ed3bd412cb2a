"""Texts from outside for people's eyes: without what a terminal obeys, and without passwords."""

import re
from typing import Any

#: Of what is not ASCII: control characters and those that cannot be seen.
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_PASSWORD = re.compile(r"(?<=://)([^@/?#\s:]*):[^@/?#\s]*(?=@)")


def plain(value: Any) -> Any:
    """A text, or a JSON value with texts, without control characters, those that turn the direction of writing, and
    others that cannot be seen."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in value)
    if isinstance(value, dict):
        return {plain(name): plain(held) for name, held in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def escaped(document: bytes) -> str:
    """A JSON document with what a terminal might obey written as escapes."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", document.decode())


def masked(text: str) -> str:
    """The text with the passwords in its URLs masked."""
    return _PASSWORD.sub(r"\1:***", text) if "@" in text else text
