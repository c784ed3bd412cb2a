"""Reads Envoy's gRPC access log (envoy.service.accesslog.v3, HTTP entries), which reports the end of every request.

An entry repeats all dynamic metadata. So the lease id that was set with the pick comes back, with the status, the
sizes, the upstream that served, and custom tags with the time to the first body byte.
Field numbers: envoy.data.accesslog.v3, read from the descriptors inside Envoy 1.40.

A gateway that we configure ourselves puts everything we read into one custom tag (`SUMMARY`). One search over a message
of many entries then replaces decoding some forty fields of each entry. No client can forge the tag: the bytes in front
of it contain control characters, which Envoy allows in no header and no path.

The log ends the leases of requests whose session has left, and reports requests that were served without a pick. An
entry names the lease, with two exceptions.

* The client left while the pick was being answered. The gateway then drops the answer, and its entry has no lease (and
  no upstream, or that of the fallback route). Therefore an embedded gateway gives each request an id of its own
  (`GATEWAY_ID`, made on arrival, never taken from a client). The scheduler sees it in the headers, and the log repeats
  it: an entry with this id and without a lease ends the lease that was given under the id.
* The gateway died. Then no entry comes, but all its connections end at once: that of the access log and those that
  carried the requests. A living gateway may lose the log's connection only; its next entries come on a new one.

Rules
* Entries and requests come on different connections, so the entry of a request may be read before the request itself.
  Therefore the last `REMEMBERED` gateway ids of entries without a lease are kept.
* An id that came twice among those kept here was not made by the gateway (something forwards a client's header). It
  ends no lease. Once it is swept out it may end a wrong one: to keep all such ids would take memory without bound.
* Ids are not removed when a lease ends normally, because that would cost time for every request. Instead, ids of ended
  requests are swept out when they may be the majority, so the living leases bound the memory.
"""

import re
from collections.abc import Callable, Collection
from itertools import starmap
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from fairlead.apis.errors import grpc_error
from fairlead.core.endpoint import host_port
from fairlead.core.errors import ProtocolError
from fairlead.core.events import Event, RequestMoved, ResponseEnded, StreamLost
from fairlead.core.headers import GRPC_STATUS, OWN_NAMESPACE
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver, Incidents
from fairlead.gateway.ext_proc import LB_NAMESPACE, LEASE_KEY
from fairlead.gateway.protobuf import fields, read_struct, walk
from fairlead.gateway.stream import HandlerFactory, ServerStream

#: Header with the embedded gateway's own id of a request. The gateway overwrites what a client sends under this name.
GATEWAY_ID = "x-fairlead-id"

#: From the request's first byte to the first byte of the response *body*, in µs. Envoy's built-in durations end at the
#: response headers, which vLLM sends before the first token.
TTFT = "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"

#: Name and format of the custom tag with everything we read: lease, status, µs to the first response body byte, ms to
#: the end, response bytes, upstream, response flags and gRPC status (in the headers of an answer without a body,
#: otherwise in the trailers), number of upstreams tried and why the last could not be connected, the gateway's own id.
#: The id's header is removed once the pick is applied (the lease then identifies the request), so it remains if the
#: pick came too late.
SUMMARY_TAG = "fairlead"
SUMMARY = (
    f"%DYNAMIC_METADATA({LB_NAMESPACE}:{LEASE_KEY})% %RESPONSE_CODE% "
    f"{TTFT} %DURATION% %BYTES_SENT% %UPSTREAM_HOST% "
    f"%RESPONSE_FLAGS%/%RESP({GRPC_STATUS}):2%%TRAILER({GRPC_STATUS}):2% "
    f"%UPSTREAM_REQUEST_ATTEMPT_COUNT%/%UPSTREAM_TRANSPORT_FAILURE_REASON% %REQ({GATEWAY_ID}):36%;"
)
#: Matches `SUMMARY` in the message decoded as Latin-1, where every byte is a character.
_SUMMARY = re.compile(
    r"\x0a\x08fairlead\x12(?:[\x00-\x7f]|[\x80-\xff][\x01-\x7f])"  # the tag's name, and the length of its value
    # For an unknown value Envoy writes `-` or nothing: without a response body the time to its first byte is empty.
    # Both give an empty group.
    r"(?:-|(\S*)) (?:-|(\d{0,3})) (?:-|(\d{0,18})) (?:-|(\d{0,18})) (?:-|(\d{0,18})) (?:-|(\S*)) "
    # Empty without flags and gRPC error. A model server may write any bytes as its gRPC status. Configurations written
    # by an older version have neither this status nor the next values.
    r"(?:-(?:/-{0,2}0?(?= ))?|([A-Za-z,\-]*(?:/(?:[!-~\x80-\xff]{0,4}|[\t -~\x80-\xff]{0,4}?))?))"
    r"(?: (?:-|(\d{1,3}))(?:/(?:-|([!-~\x80-\xff]*)))?(?=[ ;]))?"
    # A gateway that is not ours may let a client write the last value: any bytes that a header can have.
    r"(?: (?:-(?=;)|([ -~\x80-\xff]{0,36})))?;",
    re.ASCII,
)
#: A separate log with entries only for uploads that the gateway ended: client, bytes received, response flags, and the
#: size of an upload that was refused because of its client's address.
UPLOAD_TAG = "fairlead_upload"
REFUSED_UPLOAD = "refused_upload"
UPLOAD = (
    "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT% %BYTES_RECEIVED% %RESPONSE_FLAGS% "
    f"%DYNAMIC_METADATA({OWN_NAMESPACE}:{REFUSED_UPLOAD})%;"
)
_UPLOADS = b"\x0a\x0f" + UPLOAD_TAG.encode()
_UPLOAD = re.compile(
    _UPLOADS + rb"\x12[\x00-\x7f]([0-9a-fA-F.:]{0,45}) (\d{1,18}) ([A-Za-z,\-]*)(?: (?:-|(\d{0,18})))?;"
)
#: Envoy's response flags OverloadManager, StreamIdleTimeout and DurationTimeout → why it ended an upload.
UPLOAD_ENDS = {"OM": "memory", "SI": "paused", "DT": "slow"}
#: Prefix of an upstream that is the second listener inside this Envoy. That listener logs the same request again.
_WITHIN = "envoy://"
#: Flags for a client that left, and for a model server that broke off. The gateway's timeouts mean neither: SI also
#: comes from a client that stops reading, and UT is a route's limit. UPE includes a connection closed within a chunked
#: body.
_GONE_FLAGS, _RESET_FLAGS = frozenset(("DC", "DR")), frozenset(("UR", "UC", "UPE"))
#: These flags, and that of an upstream that could not be connected, as field numbers of ResponseFlags.
_FLAGS = {5: "UR", 6: "UF", 7: "UC", 15: "DC", 24: "UPE", 28: "DR"}
#: Beginning of why no connection was made, in Envoy's words: it has no file descriptor left for one.
_NO_SOCKET = "socket"
TTFT_TAG = b"ttft_us"
#: Duration.seconds at or above this is a negative number (a two's complement varint), hence invalid.
_MAX_SECONDS = 1 << 62
_NAMESPACE = LB_NAMESPACE.encode()
_LEASE_KEY = LEASE_KEY.encode()


class AccessLogEntry(Struct, frozen=True):
    """What we read of one HTTPAccessLogEntry. Times in milliseconds; -1 = unknown."""

    lease: str = ""
    status: int = 0
    upstream: str = ""
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    #: Only in the summary: whether more than one upstream was tried, and the gateway's own id.
    repeated: bool = False
    gateway_id: str = ""
    client_gone: bool = False
    #: Whether the model server broke off after a 2xx status.
    upstream_reset: bool = False
    #: Whether the gateway could not send it to any upstream, and answered by itself.
    unsent: bool = False


def read_uploads(message: bytes) -> list[tuple[str, int, str]]:
    """(client's address, bytes received, reason) of uploads that the gateway ended, in a StreamAccessLogsMessage."""
    uploads = []
    for client, received, flags, refused in _UPLOAD.findall(message):
        ended = (UPLOAD_ENDS[flag] for flag in flags.decode().split(",") if flag in UPLOAD_ENDS)
        reason = "address" if refused else next(ended, "")
        if reason:
            uploads.append((client.decode(), int(refused or received), reason))
    return uploads


def read_entries(message: bytes) -> list[AccessLogEntry]:
    """Decode a StreamAccessLogsMessage. TCP entries are skipped. Raises `ProtocolError` on malformed bytes."""
    summaries = _SUMMARY.findall(message.decode("latin-1"))
    if summaries:
        return list(starmap(_summarised, summaries))
    out: list[AccessLogEntry] = []
    for key, start, end in fields(message):
        if key == 2 and end >= 0:  # http_logs
            out.extend(_read_entry(message, a, b) for n, a, b in fields(message, start, end) if n == 1 and b >= 0)
    return out


def _summarised(
    lease: str,
    status: str,
    ttft_us: str,
    duration_ms: str,
    size: str,
    upstream: str,
    flags: str,
    attempts: str,
    unconnected: str,
    gateway_id: str,
) -> AccessLogEntry:
    """Make an entry of the groups of `_SUMMARY`."""
    entry = AccessLogEntry(
        lease,
        int(status or 0),
        upstream,
        int(ttft_us) / 1000.0 if ttft_us else -1.0,
        float(duration_ms) if duration_ms else -1.0,
        int(size) if size else -1,
        attempts > "1",  # digits without leading zeros: this saves the conversion
        gateway_id,
    )
    return _special(entry, flags, unconnected) if flags else entry


def _special(entry: AccessLogEntry, ending: str, unconnected: str) -> AccessLogEntry:
    """The entry of a request that did not end well. `ending`: flags and gRPC status, as in the summary."""
    flags, _, status = ending.partition("/")
    entry = _flagged(entry, flags.split(","), unconnected)
    failed = 0 if entry.client_gone or entry.upstream_reset else grpc_error(status.strip("-"))
    return replace(entry, status=failed) if failed and 200 <= entry.status < 300 else entry


def _flagged(entry: AccessLogEntry, flags: Collection[str], unconnected: str) -> AccessLogEntry:
    """The entry, with whether the client or the model server ended it early, or the gateway could not send it."""
    gone = not _GONE_FLAGS.isdisjoint(flags)
    reset = 200 <= entry.status < 300 and not gone and not _RESET_FLAGS.isdisjoint(flags)
    unsent = "UF" in flags and unconnected.startswith(_NO_SOCKET)
    return replace(entry, client_gone=gone, upstream_reset=reset, unsent=unsent)


def _read_entry(data: bytes, start: int, end: int) -> AccessLogEntry:
    lease = upstream = unconnected = ""
    ttft = duration = -1.0
    status, size = 0, -1
    flags: set[str] = set()
    for part, begin, stop in walk(data, start, end):
        if part == 1:  # common_properties
            for key, a, b in walk(data, begin, stop):
                if key == 13:
                    upstream = _read_address(data, a, b)
                elif key == 16:
                    flags = {_FLAGS.get(n, "") for n, x, y in fields(data, a, b) if y < 0 and x}
                elif key == 17:
                    lease = _read_lease(data, a, b) or lease
                elif key == 18:
                    unconnected = data[a:b].decode("latin-1")
                elif key == 22 and data.find(TTFT_TAG, a, b) >= 0:
                    ttft = _read_tag(data, a, b)
                elif key == 23:
                    duration = _duration_ms(data, a, b)
        elif part == 4:  # response
            status, size = _read_response(data, begin, stop)
    entry = AccessLogEntry(
        lease=lease,
        status=status,
        upstream=upstream,
        ttft_ms=ttft,
        duration_ms=duration,
        response_bytes=size,
    )
    return _flagged(entry, flags, unconnected) if flags else entry


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
            return host_port(host, port)
    return ""


def _read_response(data: bytes, start: int, end: int) -> tuple[int, int]:
    """(status, body bytes); status 0 and size -1 = unknown."""
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


PATH = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

#: Seconds to wait after a log's connection broke, so that the ends of its gateway's other connections are noticed too.
GRACE = 1.0
#: `FEW`: the number of gateway ids up to which nothing is swept. `REMEMBERED`: how many gateway ids of entries without
#: a lease are kept, in case their request has yet to be read.
FEW = REMEMBERED = 4096
_AMBIGUOUS = -1
_INVALID_ARGUMENT = 3


class AccessLogs:
    """The access logs of all gateways, one object per `Host`. Sessions may leave early while a log is `connected`."""

    def __init__(
        self,
        driver: Driver,
        answers: Answers,
        incidents: Incidents,
        few: int = FEW,
        remembered: int = REMEMBERED,
        feed: Callable[[Event], None] | None = None,
    ) -> None:
        """`few`, `remembered`: see `FEW` and `REMEMBERED`. `feed`: as for `Host`."""
        #: The number of open logs.
        self.connected = 0
        self._open: set[AccessLogStream] = set()
        self._driver = driver
        self._feed = feed or driver.feed
        self._answers = answers
        self._incidents = incidents
        #: Gateway id → request id, for requests whose sessions left at the pick. (If a session saw a response, the
        #: entry is certain to name the lease.)
        self._requests: dict[str, int] = {}
        self._over: dict[str, None] = {}
        self._few = self._sweep_at = few
        self._remembered = remembered

    def __len__(self) -> int:
        """How many gateway ids are stored."""
        return len(self._requests) + len(self._over)

    def left(self, gateway_id: str, request_id: int) -> None:
        """Note that the session of this request left at the pick."""
        requests = self._requests
        requests[gateway_id] = _AMBIGUOUS if gateway_id in requests else request_id
        if gateway_id in self._over:
            self.over(gateway_id)
        if len(requests) > self._sweep_at:
            self._sweep()

    def over(self, gateway_id: str) -> None:
        """Take an entry that has a gateway id but no lease: the gateway did not apply our pick, so end its lease."""
        request_id = self._requests.get(gateway_id)
        if request_id is not None:
            self._feed(StreamLost(request_id))
            return
        self._over[gateway_id] = None
        if len(self._over) > self._remembered:
            del self._over[next(iter(self._over))]

    def entry(self, entry: AccessLogEntry) -> None:
        request_id = self._answers.request_id(entry.lease)
        if request_id is not None:
            if entry.repeated and not entry.unsent:
                self._feed(RequestMoved(request_id, entry.upstream))
            self._feed(
                ResponseEnded(
                    request_id=request_id,
                    status=entry.status,
                    ttft_ms=entry.ttft_ms,
                    duration_ms=entry.duration_ms,
                    response_bytes=entry.response_bytes,
                    client_gone=entry.client_gone,
                    upstream_reset=entry.upstream_reset,
                    unsent=entry.unsent,
                )
            )
        elif not entry.lease:
            if entry.gateway_id:
                self.over(entry.gateway_id)
            if entry.upstream and not entry.upstream.startswith(_WITHIN):
                self._incidents.on_fallback(entry.upstream, entry.status)

    def upload_ended(self, client: str, received: int, reason: str) -> None:
        self._incidents.on_upload_ended(client, received, reason)

    def opened(self, log: "AccessLogStream") -> None:
        self._open.add(log)
        self.connected += 1

    def closed(self, log: "AccessLogStream") -> None:
        if log in self._open:
            self._open.discard(log)
            self.connected -= 1

    def lost(self) -> None:
        """A log's connection broke. If its gateway died, the connections of its requests have ended too."""
        self._driver.later(GRACE, self._end_disconnected)

    def end(self) -> None:
        """End all open logs at shutdown: gateways never end them."""
        for log in list(self._open):
            log.on_half_close()

    def _end_disconnected(self) -> None:
        routed = [entry for entry in self._driver.pipeline.requests if entry.lease is not None]
        for entry in routed:
            if entry.client is not None and not entry.client.connected():
                self._feed(StreamLost(entry.request.id))

    def _sweep(self) -> None:
        alive = self._driver.pipeline.requests.get
        self._requests = {key: number for key, number in self._requests.items() if alive(number) is not None}
        self._sweep_at = max(self._few, 2 * len(self._requests))


#: Seconds without a turn of the event loop after which gateways may have given up requests unnoticed: twice the period
#: of the loop's heartbeat, and no more than gateways wait for us. Also how long after a hang requests are in doubt.
HANG = 1.0


class HangDetector:
    """Tells whether this process hung a moment ago.

    After a hang, the sockets still hold requests that the gateway has given up, each followed by its reset. A session
    that leaves at the pick would not see the reset, and the gateway may have dropped the log entry of that request. So
    no session leaves at the pick for a moment after a hang.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: Requests that arrived between these times (clock seconds, inclusive) are not in doubt.
        self.sure_from, self.sure_until = -inf, inf

    def beat(self) -> None:
        """Call this at least twice a second while the event loop turns. If it is never called, no hang is detected."""
        now = self._now()
        if now > self.sure_until:  # a hang; timers may run before the data that waits in the sockets is read
            self.sure_from = now + HANG
        self.sure_until = now + HANG


class AccessLogStream:
    """One open access log of a gateway."""

    def __init__(self, stream: ServerStream, logs: AccessLogs) -> None:
        self._stream = stream
        self._logs = logs
        stream.watch_cancel(False)
        logs.opened(self)

    def on_message(self, message: bytes) -> None:
        try:
            entries = read_entries(message)
        except ProtocolError as error:
            self._logs.closed(self)
            self._stream.finish(_INVALID_ARGUMENT, str(error))
            return
        for entry in entries:
            self._logs.entry(entry)
        if _UPLOADS in message:
            self._logs.closed(self)  # this log reports uploads only, never the end of a request
            for upload in read_uploads(message):
                self._logs.upload_ended(*upload)

    def on_half_close(self) -> None:
        self._logs.closed(self)
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        self._logs.closed(self)
        self._logs.lost()


def factory(logs: AccessLogs) -> HandlerFactory:
    return lambda stream, metadata: AccessLogStream(stream, logs)
