"""Makes texts from outside safe to show: without terminal control characters, and without passwords. And takes the
token out of a URL."""

import re
from typing import Any
from urllib.parse import unquote, urlsplit

#: DEL, C1 control characters, and invisible Unicode characters.
_UNSEEN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
#: A password before the @ of a URL, or with HTTP a token in place of the user's name; and a secret in a query.
_PASSWORD = re.compile(r"(?<=://)([^@/?#\s:]*:)[^/?#\s]*(?=@)|(?:(?<=http://)|(?<=https://))[^@/?#\s:]+(?=@)")
_QUERY = re.compile(r"([?&][\w-]*(?:key|password|secret|token)=)[^&#\s'\"]+", re.IGNORECASE)


def plain(value: Any) -> Any:
    """Return a text, or a JSON value with texts, in which control characters, characters that change the direction of
    writing and other invisible ones are replaced by U+FFFD."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in value)
    if isinstance(value, dict):
        return {plain(name): plain(held) for name, held in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def escaped(document: bytes) -> str:
    """Return a JSON document in which characters that a terminal may interpret are written as escapes."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", document.decode())


def masked(text: str) -> str:
    """Return the text with the passwords and tokens in its URLs masked."""
    text = _QUERY.sub(r"\1***", text) if "?" in text else text
    return _PASSWORD.sub(r"\1***", text) if "@" in text else text


def token_apart(url: str) -> tuple[str, dict[str, str]]:
    """Return `http://:TOKEN@HOST` as the URL without what comes before the @, and the headers that send the token.
    Raises `ValueError` if it is no URL."""
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {unquote(parts.password)}"} if parts.password else {}
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), headers
