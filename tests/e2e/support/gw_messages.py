"""A request as the clients of these tests send it, and a response as they read it."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

Fields = Sequence[tuple[str, str]]

JSON = ("content-type", "application/json")


class Ask(NamedTuple):
    """A request. `pieces` are written one by one; with `chunked` each is a chunk of its own."""

    method: str = "POST"
    path: str = "/v1/chat/completions"
    fields: Fields = ()
    pieces: Sequence[bytes] = ()
    chunked: bool = False
    #: Wait for `100 Continue` before the body.
    expect: bool = False
    trailers: Fields = ()
    #: Read the response in small sips with pauses in between, so that it backs up through the gateway.
    slow: bool = False


class Got(NamedTuple):
    """A whole response."""

    status: int
    #: Names (and with HTTP/1.1 values too) in lower case, in order, repetitions included.
    fields: Fields
    body: bytes
    #: `100 Continue` came first.
    continued: bool = False

    def field(self, name: str) -> str:
        """The first value; empty when there is none."""
        return next((value for key, value in self.fields if key == name), "")

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


class Broken(Exception):
    """A response that did not come, or not whole."""
