"""What the scraper needs to know of the page it reads: where it is, and with which settings."""

from urllib.parse import quote, urlsplit

from msgspec import Struct

from fairlead import __version__
from fairlead.io.scrape_http import request_bytes

USER_AGENT = f"fairlead/{__version__}"


class ScrapeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and how carefully. Times in seconds."""

    #: Interval for an endpoint with work of ours, or that reports work.
    fast_s: float = 0.1
    #: Interval for all others. Traffic that does not pass through here shows after at most this and one scrape.
    idle_s: float = 0.2
    #: How long an endpoint stays fast after `wake`.
    hold_s: float = 1.0
    #: An idle endpoint's unchanged sample is repeated this often; in between it is not reported.
    repeat_s: float = 1.0
    timeout_s: float = 1.0
    #: Failures double the interval up to this.
    backoff_cap_s: float = 2.0
    #: Scrapes per second over all endpoints; above it every interval is stretched alike.
    max_rate: float = 1000.0
    #: Larger pages fail, bytes.
    max_page: int = 4 << 20
    #: Sent as `Authorization: Bearer`, read again when the file changes. Also used over plain http if that is the URL.
    token_file: str = ""
    #: PEM bundle for https; empty = the system's.
    ca_file: str = ""
    #: False = accept any certificate. An explicit opt-out, for test beds.
    verify: bool = True


class PageAddress(Struct, frozen=True):
    """A metrics URL taken apart."""

    url: str
    scheme: str
    host: str
    port: int
    request: bytes


def page_address(url: str) -> PageAddress:
    """Raises `ValueError` with a reason for anything but a plain http(s) URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"the metrics URL {url!r} is neither http nor https")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the metrics URL carries credentials; use a token file")
    host = parts.hostname or ""
    if not host.isascii() or not host or any(c <= " " for c in host):
        raise ValueError(f"the metrics URL {url!r} has no usable host")
    port = parts.port if parts.port is not None else (443 if parts.scheme == "https" else 80)
    if not port:
        raise ValueError(f"the metrics URL {url!r} has port 0")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    shown = f"[{host}]" if ":" in host else host
    return PageAddress(url, parts.scheme, host, port, request_bytes(f"{shown}:{port}", target, USER_AGENT))
