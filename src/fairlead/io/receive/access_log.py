"""Receives the gateway's access log: ends leases, and counts what the gateway served without us."""

from fairlead.io.receive.session import Host
from fairlead.io.receive.stream import HandlerFactory, ServerStream
from fairlead.model.errors import ProtocolError
from fairlead.model.events import RequestMoved, ResponseEnded
from fairlead.wire.access_log import AccessLogEntry, read_entries

PATH = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

_INVALID_ARGUMENT = 3


class AccessLogStream:
    """One gateway's access log. While it is open, sessions of that gateway may leave early."""

    def __init__(self, stream: ServerStream, host: Host) -> None:
        self._stream = stream
        self._host = host
        self._open = True
        stream.watch_cancel(False)
        host.access_logs += 1
        host.log_ends.add(self.on_half_close)

    def on_message(self, message: bytes) -> None:
        try:
            entries = read_entries(message)
        except ProtocolError as error:
            self._close()
            self._stream.finish(_INVALID_ARGUMENT, str(error))
            return
        for entry in entries:
            self._entry(entry)

    def _entry(self, entry: AccessLogEntry) -> None:
        request_id = self._host.answers.request_id(entry.lease) if entry.lease else None
        if request_id is not None:
            if entry.attempts > 1:
                self._host.driver.feed(RequestMoved(request_id, entry.upstream))
            self._host.driver.feed(
                ResponseEnded(
                    request_id=request_id,
                    status=entry.status,
                    ttft_ms=entry.ttft_ms,
                    duration_ms=entry.duration_ms,
                    response_bytes=entry.response_bytes,
                    client_gone=entry.client_gone,
                    served_by=entry.upstream,
                )
            )
        elif not entry.lease:
            if entry.gateway_id:
                self._host.departures.over(entry.gateway_id)
            if entry.upstream:
                self._host.incidents.on_fallback(entry.upstream, entry.status)

    def on_half_close(self) -> None:
        self._close()
        self._stream.finish()

    def on_lost(self, why: str) -> None:
        self._close()
        self._host.departures.log_lost()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._host.access_logs -= 1
            self._host.log_ends.discard(self.on_half_close)


def factory(host: Host) -> HandlerFactory:
    """The handler factory for `PATH`."""
    return lambda stream, metadata: AccessLogStream(stream, host)
