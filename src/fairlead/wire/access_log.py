"""Envoy's gRPC access log (envoy.service.accesslog.v3, HTTP entries): the end of every request, told afterwards.

The entry returns all dynamic metadata, so a lease id put there at decision time comes back with status, sizes, the
upstream that served and the custom tags that hold the time to the first body byte.
Field numbers: envoy.data.accesslog.v3, read from the descriptors inside Envoy 1.40.

A gateway that we configure ourselves puts all we read into one custom tag (`SUMMARY`). One search over a message of
many entries then replaces the walk through some forty fields of each. No client can forge it: the bytes in front hold
control characters, which Envoy admits in no header and no path.
"""

import re

from msgspec import Struct

from fairlead.model.errors import ProtocolError
from fairlead.wire.ext_proc import LB_NAMESPACE
from fairlead.wire.protobuf import fields, read_struct, walk

LEASE_KEY = "fairlead-lease"
#: Header with the embedded gateway's own id of a request: new for each, whatever a client sends under this name.
GATEWAY_ID = "x-fairlead-id"

#: From the request's first byte to the first byte of the response *body*; the built-in durations end at its headers,
#: which vLLM sends before the first token.
TTFT = "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"

#: Name and format of the custom tag that says everything: lease, status, µs to the first response body byte, ms to the
#: end, response bytes, upstream, response flags, upstreams tried, the gateway's own id. That header is gone once a
#: request was sent where we chose, for then the lease says it; it is there when the answer with it came too late.
SUMMARY_TAG = "fairlead"
SUMMARY = (
    f"%DYNAMIC_METADATA({LB_NAMESPACE}:{LEASE_KEY})% %RESPONSE_CODE% "
    f"{TTFT} %DURATION% %BYTES_SENT% %UPSTREAM_HOST% %RESPONSE_FLAGS% "
    f"%UPSTREAM_REQUEST_ATTEMPT_COUNT% %REQ({GATEWAY_ID}):36%;"
)
_SUMMARY = re.compile(
    rb"\x0a\x08fairlead\x12(?:[\x00-\x7f]|[\x80-\xff][\x01-\x7f])"  # the tag's name, and the length of its value
    # What Envoy does not know is `-` or nothing: without a response body the time to its first byte is empty.
    rb"(\S*) (-|\d{0,3}) (-|\d{0,18}) (-|\d{0,18}) (-|\d{0,18}) (\S*) ([A-Za-z,\-]*)"
    rb"(?: (-|\d{1,3})(?=[ ;]))?"  # gateways that were told by an older version do not say it
    rb"(?: ([ -~\x80-\xff]{0,36}))?;"  # other gateways may let a client write it: any bytes that a header can have
)
_NOTHING = (b"", b"-")
#: Short names of the flags in `_CLIENT_GONE`.
_GONE_FLAGS = (b"DC", b"DR")
TTFT_TAG = b"ttft_us"
#: ResponseFlags downstream_connection_termination and downstream_remote_reset.
_CLIENT_GONE = (15, 28)
#: A longer Duration is a negative one.
_MAX_SECONDS = 1 << 62
_NAMESPACE = LB_NAMESPACE.encode()
_LEASE_KEY = LEASE_KEY.encode()


class AccessLogEntry(Struct, frozen=True, kw_only=True):
    """What we read of one HTTPAccessLogEntry. Times in milliseconds, -1 = not told."""

    lease: str = ""
    status: int = 0
    upstream: str = ""
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    client_gone: bool = False
    #: Only of the summary: upstreams that were tried, and the gateway's own id.
    attempts: int = 0
    gateway_id: str = ""


def read_entries(message: bytes) -> list[AccessLogEntry]:
    """Decode a StreamAccessLogsMessage. TCP entries are skipped. Raises `ProtocolError` on malformed bytes."""
    summaries = _SUMMARY.findall(message)
    if summaries:
        return [_read_summary(*summary) for summary in summaries]
    out: list[AccessLogEntry] = []
    for key, start, end in fields(message):
        if key == 2 and end >= 0:  # http_logs
            out.extend(_read_entry(message, a, b) for n, a, b in fields(message, start, end) if n == 1 and b >= 0)
    return out


def _read_summary(
    lease: bytes,
    status: bytes,
    ttft_us: bytes,
    duration_ms: bytes,
    size: bytes,
    upstream: bytes,
    flags: bytes,
    attempts: bytes,
    gateway_id: bytes,
) -> AccessLogEntry:
    return AccessLogEntry(
        lease="" if lease == b"-" else lease.decode("latin-1"),
        status=0 if status in _NOTHING else int(status),
        upstream="" if upstream == b"-" else upstream.decode("latin-1"),
        ttft_ms=-1.0 if ttft_us in _NOTHING else int(ttft_us) / 1000.0,
        duration_ms=-1.0 if duration_ms in _NOTHING else float(duration_ms),
        response_bytes=-1 if size in _NOTHING else int(size),
        client_gone=flags != b"-" and any(flag in flags.split(b",") for flag in _GONE_FLAGS),
        attempts=0 if attempts in _NOTHING else int(attempts),
        gateway_id="" if gateway_id == b"-" else gateway_id.decode("latin-1"),
    )


def _read_entry(data: bytes, start: int, end: int) -> AccessLogEntry:
    lease = upstream = ""
    ttft = duration = -1.0
    status, size = 0, -1
    gone = False
    for part, begin, stop in walk(data, start, end):
        if part == 1:  # common_properties
            for key, a, b in walk(data, begin, stop):
                if key == 13:
                    upstream = _read_address(data, a, b)
                elif key == 16:
                    gone = any(n in _CLIENT_GONE and x for n, x, y in fields(data, a, b) if y < 0)
                elif key == 17:
                    lease = _read_lease(data, a, b) or lease
                elif key == 22 and data.find(TTFT_TAG, a, b) >= 0:
                    ttft = _read_tag(data, a, b)
                elif key == 23:
                    duration = _duration_ms(data, a, b)
        elif part == 4:  # response
            status, size = _read_response(data, begin, stop)
    return AccessLogEntry(
        lease=lease,
        status=status,
        upstream=upstream,
        ttft_ms=ttft,
        duration_ms=duration,
        response_bytes=size,
        client_gone=gone,
    )


def _read_lease(data: bytes, start: int, end: int) -> str:
    """The lease in dynamic metadata; empty when there is none."""
    if data.find(_LEASE_KEY, start, end) < 0:
        return ""
    for _, a, b in walk(data, start, end):
        parts = walk(data, a, b)
        if len(parts) == 2 and data[parts[0][1] : parts[0][2]] == _NAMESPACE:
            lease = read_struct(data, parts[1][1], parts[1][2]).get(LEASE_KEY)
            return lease if isinstance(lease, str) else ""
    return ""


def _read_tag(data: bytes, start: int, end: int) -> float:
    """Milliseconds of the tag `ttft_us`; -1 when it is another tag or has no value (`-`)."""
    parts = walk(data, start, end)
    if len(parts) != 2 or data[parts[0][1] : parts[0][2]] != TTFT_TAG:
        return -1.0
    value = data[parts[1][1] : parts[1][2]]
    return int(value) / 1000.0 if value.isdigit() and len(value) < 19 else -1.0


def _read_address(data: bytes, start: int, end: int) -> str:
    """Address.socket_address → `host:port`; anything else → empty."""
    for key, a, b in walk(data, start, end):
        if key == 1:
            host, port = "", 0
            for n, x, y in fields(data, a, b):
                if n == 2 and y >= 0:
                    host = data[x:y].decode("latin-1")
                elif n == 3 and y < 0:
                    port = x
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ""


def _read_response(data: bytes, start: int, end: int) -> tuple[int, int]:
    """(status, body bytes)."""
    status, size = 0, -1
    for key, a, b in fields(data, start, end):
        if key == 1 and b >= 0:
            status = next((x for n, x, y in fields(data, a, b) if n == 1 and y < 0 and x < 1000), 0)
        elif key == 3 and b < 0:
            size = a
    return status, size


def _duration_ms(data: bytes, start: int, end: int) -> float:
    seconds = nanos = 0
    for n, x, y in fields(data, start, end):
        if y >= 0:
            raise ProtocolError("malformed Duration")
        if n == 1:
            seconds = x
        elif n == 2:
            nanos = x
    return seconds * 1e3 + nanos / 1e6 if seconds < _MAX_SECONDS and nanos < 1_000_000_000 else -1.0
