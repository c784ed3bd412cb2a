"""Where `fairlead top` has its numbers from: the dashboard's stream, or one snapshot of it.

A connection that is lost is tried again, for as long as somebody watches.
"""

import time
import urllib.error
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any, cast
from urllib.request import urlopen

import msgspec

#: Seconds without a word after which a connection counts as lost; between two attempts.
_SILENCE, _AGAIN = 5.0, 1.0
_MAX_LINE = 64 << 20

Told = dict[str, Any]


def address(url: str) -> str:
    """`host:port` and a trailing slash are fine."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def snapshot(base: str) -> Told:
    """`about` and `now`. Raises `OSError` or `ValueError`."""
    with _open(f"{base}/dashboard/snapshot") as answer:
        found = msgspec.json.decode(answer.read(_MAX_LINE))
    if not isinstance(found, dict) or "now" not in found:
        raise ValueError("this is no admin port of Fairlead")
    begun = found["about"]
    return {"about": begun["about"], "now": found["now"]}


def follow(base: str, every: float) -> Iterator[tuple[Told, str]]:
    """What is told every so many seconds, and beside it the problem while there is one. Never ends."""
    told: Told = {}
    while True:
        try:
            for told in _stream(base, every):
                yield told, ""
            problem = "the scheduler ended the connection"
        except (OSError, ValueError) as error:
            problem = f"{base} does not answer: {error}"
        yield told, f"{problem}; trying again"
        time.sleep(_AGAIN)


def _stream(base: str, every: float) -> Iterator[Told]:
    about: Any = {}
    due = 0.0
    with _open(f"{base}/dashboard/stream") as answer:
        event = b""
        while line := answer.readline(_MAX_LINE):
            if line.startswith(b"event: "):
                event = line[7:].strip()
            elif line.startswith(b"data: ") and event == b"beginning":
                about = msgspec.json.decode(line[6:])["about"]
            elif line.startswith(b"data: ") and event == b"now" and time.monotonic() >= due:
                # A moment early is no harm: snapshots come at their own pace.
                due = time.monotonic() + every - 0.1
                yield {"about": about, "now": msgspec.json.decode(line[6:])}


def _open(url: str) -> HTTPResponse:
    """Raises `OSError` with what the server says."""
    try:
        return cast(HTTPResponse, urlopen(url, timeout=_SILENCE))
    except urllib.error.HTTPError as error:
        words = error.read(300).decode(errors="replace").strip()
        if error.code == 404:
            words = "it has no dashboard (is admin.debug off?)"
        raise OSError(words or f"status {error.code}") from None
    except urllib.error.URLError as error:
        raise OSError(getattr(error.reason, "strerror", None) or str(error.reason)) from None
