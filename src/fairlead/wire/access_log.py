"""Envoy's gRPC access log (envoy.service.accesslog.v3, HTTP entries): the end of every request, told afterwards.

The entry returns all dynamic metadata, so a lease id put there at decision time comes back with status, sizes, the
upstream that served and the custom tags that hold the time to the first body byte.
Field numbers: envoy.data.accesslog.v3, read from the descriptors inside Envoy 1.40.
"""

from msgspec import Struct

from fairlead.model.errors import ProtocolError
from fairlead.wire.ext_proc import LB_NAMESPACE
from fairlead.wire.protobuf import fields, read_struct

LEASE_KEY = "fairlead-lease"
TTFT_TAG = b"ttft_us"
#: ResponseFlags downstream_connection_termination and downstream_remote_reset.
_CLIENT_GONE = (15, 28)


class AccessLogEntry(Struct, frozen=True, kw_only=True):
    """What we read of one HTTPAccessLogEntry. Times in milliseconds, -1 = not told."""

    lease: str = ""
    status: int = 0
    upstream: str = ""
    cluster: str = ""
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    request_bytes: int = -1
    response_bytes: int = -1
    client_gone: bool = False


def read_entries(message: bytes) -> list[AccessLogEntry]:
    """Decode a StreamAccessLogsMessage. TCP entries are skipped. Raises `ProtocolError` on malformed bytes."""
    out = []
    for key, start, end in fields(message):
        if key == 2 and end >= 0:  # http_logs
            out.extend(_read_entry(message, a, b) for n, a, b in fields(message, start, end) if n == 1 and b >= 0)
    return out


def _read_entry(data: bytes, start: int, end: int) -> AccessLogEntry:
    values: dict[str, object] = {}
    for key, a, b in fields(data, start, end):
        if b < 0:
            continue
        if key == 1:
            _read_common(data, a, b, values)
        elif key == 3:
            _read_request(data, a, b, values)
        elif key == 4:
            _read_response(data, a, b, values)
    return AccessLogEntry(**values)  # type: ignore[arg-type]


def _read_common(data: bytes, start: int, end: int, values: dict[str, object]) -> None:
    for key, a, b in fields(data, start, end):
        if b < 0:
            continue
        if key == 13:
            values["upstream"] = _read_address(data, a, b)
        elif key == 15:
            values["cluster"] = data[a:b].decode("utf-8", "replace")
        elif key == 16:
            values["client_gone"] = any(n in _CLIENT_GONE and x for n, x, y in fields(data, a, b) if y < 0)
        elif key == 17:
            _read_metadata(data, a, b, values)
        elif key == 22:
            _read_tag(data, a, b, values)
        elif key == 23:
            values["duration_ms"] = _duration_ms(data, a, b)


def _read_metadata(data: bytes, start: int, end: int, values: dict[str, object]) -> None:
    wanted = LB_NAMESPACE.encode()
    for key, a, b in fields(data, start, end):
        if key != 1 or b < 0 or data.find(wanted, a, b) < 0:
            continue
        name = b""
        for n, x, y in fields(data, a, b):
            if n == 1 and y >= 0:
                name = data[x:y]
            elif n == 2 and y >= 0 and name == wanted:
                lease = read_struct(data, x, y).get(LEASE_KEY)
                if isinstance(lease, str):
                    values["lease"] = lease


def _read_tag(data: bytes, start: int, end: int, values: dict[str, object]) -> None:
    name = value = b""
    for n, x, y in fields(data, start, end):
        if n == 1 and y >= 0:
            name = data[x:y]
        elif n == 2 and y >= 0:
            value = data[x:y]
    if name == TTFT_TAG and value.isdigit():
        values["ttft_ms"] = int(value) / 1000.0


def _read_address(data: bytes, start: int, end: int) -> str:
    """Address.socket_address → `host:port`; anything else → empty."""
    for key, a, b in fields(data, start, end):
        if key == 1 and b >= 0:
            host, port = "", 0
            for n, x, y in fields(data, a, b):
                if n == 2 and y >= 0:
                    host = data[x:y].decode("latin-1")
                elif n == 3 and y < 0:
                    port = x
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ""


def _read_request(data: bytes, start: int, end: int, values: dict[str, object]) -> None:
    for key, a, b in fields(data, start, end):
        if key == 12 and b < 0:
            values["request_bytes"] = a


def _read_response(data: bytes, start: int, end: int, values: dict[str, object]) -> None:
    for key, a, b in fields(data, start, end):
        if key == 1 and b >= 0:
            values["status"] = next((x for n, x, y in fields(data, a, b) if n == 1 and y < 0), 0)
        elif key == 3 and b < 0:
            values["response_bytes"] = a


def _duration_ms(data: bytes, start: int, end: int) -> float:
    seconds = nanos = 0
    for n, x, y in fields(data, start, end):
        if y >= 0:
            raise ProtocolError("malformed Duration")
        if n == 1:
            seconds = x
        elif n == 2:
            nanos = x
    return seconds * 1e3 + nanos / 1e6
