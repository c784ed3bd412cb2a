"""What an API server sends, taken apart no further than needed: lists, watch events, errors.

Items stay raw bytes until somebody asks for one, so that an object nobody can read costs only itself.
"""

from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

T = TypeVar("T")


class Meta(Struct, frozen=True, rename="camel", gc=False):
    """What is looked at of `metadata`."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


class Named(Struct, frozen=True, gc=False):
    """Any object, as far as its name."""

    metadata: Meta = Meta()


class ListMeta(Struct, frozen=True, rename="camel", gc=False):
    resource_version: str = ""
    #: Where the next page begins; empty = this was the last.
    continue_: str = msgspec.field(name="continue", default="")


class Page(Struct, frozen=True):
    """One page of a list. `items` is null in some servers' empty lists."""

    metadata: ListMeta = ListMeta()
    items: list[Raw] | None = None


class WatchEvent(Struct, frozen=True):
    """`type`: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: Raw = Raw(b"{}")


class Failure(Struct, frozen=True):
    """A `Status`: why a request failed."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Unreadable(Exception):
    """These bytes are not what they should be."""


_page = msgspec.json.Decoder(Page)
_event = msgspec.json.Decoder(WatchEvent)
_named = msgspec.json.Decoder(Named)
_failure = msgspec.json.Decoder(Failure)


def read_page(text: bytes) -> Page:
    """Raises `Unreadable`."""
    return _decoded(_page, text)


def read_event(line: bytes) -> WatchEvent:
    """One line of a watch. Raises `Unreadable`."""
    return _decoded(_event, line)


def read_meta(text: bytes | Raw) -> Meta:
    """Raises `Unreadable`."""
    return _decoded(_named, text).metadata


def read_failure(text: bytes | Raw) -> Failure:
    """Of anything: what is no `Status` says nothing."""
    try:
        return _decoded(_failure, text)
    except Unreadable:
        return Failure()


def read_plain(text: bytes | Raw) -> dict[str, Any]:
    """An object as plain values. Raises `Unreadable` for anything but a JSON object."""
    value = _decoded(_plain, text)
    if not isinstance(value, dict):
        raise Unreadable("expected an object")
    return value


_plain: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes | Raw) -> T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None


def key_of(meta: Meta) -> str:
    """`namespace/name`."""
    return f"{meta.namespace}/{meta.name}"
