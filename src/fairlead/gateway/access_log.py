"""Envoy's gRPC access log (envoy.service.accesslog.v3, HTTP entries): the end of every request, told afterwards.

The entry returns all dynamic metadata, so a lease id put there at decision time comes back with status, sizes, the
upstream that served and the custom tags that hold the time to the first body byte.
Field numbers: envoy.data.accesslog.v3, read from the descriptors inside Envoy 1.40.

A gateway that we configure ourselves puts all we read into one custom tag (`SUMMARY`). One search over a message of
many entries then replaces the walk through some forty fields of each. No client can forge it: the bytes in front hold
control characters, which Envoy admits in no header and no path.

Logs end the leases whose session has left, and tell what was served without us. An entry names the lease, with two
exceptions.

* The client went away just when the pick was answered. The gateway has thrown the answer away, and its entry carries no
  lease (nor an upstream, or that of the fallback route). So a gateway of ours gives each request an id of its own
  (`GATEWAY_ID`, made at entry, never taken from a client) that the scheduler sees with the headers and the log repeats:
  an entry that has this id and no lease ends the lease that was given under it.
* The gateway died. Then nobody tells anything, but all its connections end at once: that of the access log, and those
  that carried the requests. A gateway that lives may lose one of them, and its next entries come on a new one.

Rules
* Entries come on another connection than requests, so one may be read before the request that it is about. What is
  over is remembered for that, `REMEMBERED` entries long.
* An id that came twice is not the gateway's work (somebody forwards the header of a client): it ends nothing.
* Nothing is removed when a lease ends in the common way, for that would cost every request. What is dead is swept out
  when it may be the greater part; so memory is bounded by the living leases.
"""

import re
from collections.abc import Callable, Collection
from itertools import starmap
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from fairlead.core.endpoint import host_port
from fairlead.core.errors import ProtocolError
from fairlead.core.events import Event, RequestMoved, ResponseEnded, StreamLost
from fairlead.core.headers import OWN_NAMESPACE
from fairlead.gateway.answers import Answers
from fairlead.gateway.driver import Driver, Incidents
from fairlead.gateway.ext_proc import LB_NAMESPACE, LEASE_KEY
from fairlead.gateway.protobuf import fields, read_struct, walk
from fairlead.gateway.stream import HandlerFactory, ServerStream

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
#: Over the message as Latin-1: every byte is a character.
_SUMMARY = re.compile(
    r"\x0a\x08fairlead\x12(?:[\x00-\x7f]|[\x80-\xff][\x01-\x7f])"  # the tag's name, and the length of its value
    # What Envoy does not know is `-` or nothing: without a response body the time to its first byte is empty. Both give
    # an empty group.
    r"(?:-|(\S*)) (?:-|(\d{0,3})) (?:-|(\d{0,18})) (?:-|(\d{0,18})) (?:-|(\d{0,18})) (?:-|(\S*)) (?:-|([A-Za-z,\-]*))"
    r"(?: (?:-|(\d{1,3}))(?=[ ;]))?"  # gateways that were told by an older version do not say it
    # Other gateways may let a client write the last one: any bytes that a header can have.
    r"(?: (?:-(?=;)|([ -~\x80-\xff]{0,36})))?;",
    re.ASCII,
)
#: Of a log of its own, which has but the uploads that the gateway ended: client, bytes received, response flags, and
#: the bytes of one that was refused because of its client's address.
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
#: Envoy's flags, by why it ended an upload: OverloadManager, StreamIdleTimeout, DurationTimeout.
UPLOAD_ENDS = {"OM": "memory", "SI": "paused", "DT": "slow"}
#: Before an address inside of Envoy: there its second listener logs the request again.
_WITHIN = "envoy://"
#: The client went away, or the model server broke off. Timeouts of the gateway say neither: a client that reads no more
#: leads to SI, and UT is the limit of a route. UPE is also a connection that closes within a chunked body.
_GONE_FLAGS, _RESET_FLAGS = frozenset(("DC", "DR")), frozenset(("UR", "UC", "UPE"))
#: The same as fields of ResponseFlags.
_FLAGS = {5: "UR", 7: "UC", 15: "DC", 24: "UPE", 28: "DR"}
TTFT_TAG = b"ttft_us"
#: A longer Duration is a negative one.
_MAX_SECONDS = 1 << 62
_NAMESPACE = LB_NAMESPACE.encode()
_LEASE_KEY = LEASE_KEY.encode()


class AccessLogEntry(Struct, frozen=True):
    """What we read of one HTTPAccessLogEntry. Times in milliseconds, -1 = not told."""

    lease: str = ""
    status: int = 0
    upstream: str = ""
    ttft_ms: float = -1.0
    duration_ms: float = -1.0
    response_bytes: int = -1
    #: Only of the summary: upstreams that were tried, and the gateway's own id.
    attempts: int = 0
    gateway_id: str = ""
    client_gone: bool = False
    #: After a 2xx: whether the model server broke off.
    upstream_reset: bool = False


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
    gateway_id: str,
) -> AccessLogEntry:
    """The groups of `_SUMMARY`."""
    entry = AccessLogEntry(
        lease,
        int(status or 0),
        upstream,
        int(ttft_us) / 1000.0 if ttft_us else -1.0,
        float(duration_ms) if duration_ms else -1.0,
        int(size) if size else -1,
        int(attempts or 0),
        gateway_id,
    )
    return _flagged(entry, flags.split(",")) if flags else entry


def _flagged(entry: AccessLogEntry, flags: Collection[str]) -> AccessLogEntry:
    """The same with who ended it early."""
    gone = not _GONE_FLAGS.isdisjoint(flags)
    reset = 200 <= entry.status < 300 and not gone and not _RESET_FLAGS.isdisjoint(flags)
    return replace(entry, client_gone=gone, upstream_reset=reset)


def _read_entry(data: bytes, start: int, end: int) -> AccessLogEntry:
    lease = upstream = ""
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
    return _flagged(entry, flags) if flags else entry


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


PATH = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

#: Seconds within which we notice the end of all connections of a process that died.
GRACE = 1.0
#: Ids of gateways up to which nothing is swept, and those of entries without a lease that are kept, in case their
#: request has yet to be read.
FEW = REMEMBERED = 4096
_AMBIGUOUS = -1
_INVALID_ARGUMENT = 3


class AccessLogs:
    """One per process. Sessions may leave early while a log is `connected`."""

    def __init__(
        self,
        driver: Driver,
        answers: Answers,
        incidents: Incidents,
        few: int = FEW,
        remembered: int = REMEMBERED,
        feed: Callable[[Event], None] | None = None,
    ) -> None:
        """`feed`: as for `Host`."""
        #: Logs that are open.
        self.connected = 0
        self._open: set[AccessLogStream] = set()
        self._driver = driver
        self._feed = feed or driver.feed
        self._answers = answers
        self._incidents = incidents
        #: The gateway's id to ours, of requests whose sessions left at the pick: with a response seen, the entry will
        #: name the lease for certain.
        self._requests: dict[str, int] = {}
        self._over: dict[str, None] = {}
        self._few = self._sweep_at = few
        self._remembered = remembered

    def __len__(self) -> int:
        """Ids of gateways that are known."""
        return len(self._requests) + len(self._over)

    def left(self, gateway_id: str, request_id: int) -> None:
        """A session has left at the pick."""
        requests = self._requests
        requests[gateway_id] = _AMBIGUOUS if gateway_id in requests else request_id
        if gateway_id in self._over:
            self.over(gateway_id)
        if len(requests) > self._sweep_at:
            self._sweep()

    def over(self, gateway_id: str) -> None:
        """The gateway's entry for a request has its id and no lease: whatever we chose for it, nobody uses."""
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
            if entry.attempts > 1:
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
        """A log broke off. If its gateway died, the connections of its requests have ended too."""
        self._driver.later(GRACE, self._bury)

    def end(self) -> None:
        """End those that are open: they have no end of their own."""
        for log in list(self._open):
            log.on_half_close()

    def _bury(self) -> None:
        routed = [entry for entry in self._driver.pipeline.requests if entry.lease is not None]
        for entry in routed:
            if entry.client is not None and not entry.client.connected():
                self._feed(StreamLost(entry.request.id))

    def _sweep(self) -> None:
        alive = self._driver.pipeline.requests.get
        self._requests = {key: number for key, number in self._requests.items() if alive(number) is not None}
        self._sweep_at = max(self._few, 2 * len(self._requests))


#: Seconds without a turn of the event loop after which requests may have been given up unseen: twice the period of its
#: heartbeat, and no more than gateways wait for us. For as long afterwards they are looked at with doubt.
HANG = 1.0


class Pulse:
    """Whether this process hung a moment ago.

    When it did, sockets hold requests that the gateway gave up meanwhile, each followed by its reset. A session that
    leaves at the pick would not see the reset, and what the gateway logged of that request it may have dropped. So for
    a moment after a hang no session leaves at the pick.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: Between these (clock seconds, both included) requests were read without doubt.
        self.sure_from, self.sure_until = -inf, inf

    def beat(self) -> None:
        """Called twice a second or more often while the event loop turns. Who never calls it never hangs."""
        now = self._now()
        if now > self.sure_until:  # timers may come before what the sockets hold
            self.sure_from = now + HANG
        self.sure_until = now + HANG


class AccessLogStream:
    """One gateway's access log."""

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
            self._logs.closed(self)  # no end of a request will come by this one
            for upload in read_uploads(message):
                self._logs.upload_ended(*upload)

    def on_half_close(self) -> None:
        self._logs.closed(self)
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        self._logs.closed(self)
        self._logs.lost()


def factory(logs: AccessLogs) -> HandlerFactory:
    """The handler factory for `PATH`."""
    return lambda stream, metadata: AccessLogStream(stream, logs)
