"""Several pools behind one port: for which of them a stream is.

Gateways do not say it in a message. They open a stream to the Service that the pool's `endpointPickerRef` names, and
name that in the stream's authority: kgateway and Envoy AI Gateway as `SERVICE.NAMESPACE.svc:PORT`, others with the
cluster's domain behind it or without a port. Where none is set, Envoy takes the name of its cluster: Istio's is
`outbound|PORT||SERVICE.NAMESPACE.svc.cluster.local`. A gateway whose configuration is written by hand can send the
pool itself as initial metadata, `fairlead-pool: NAMESPACE/NAME`.
"""

import asyncio
import logging
import re
from collections.abc import Mapping

from msgspec import Struct

from fairlead.core.headers import POOL_METADATA
from fairlead.gateway.grpc_frames import Status
from fairlead.gateway.host import Host
from fairlead.gateway.session import Session
from fairlead.gateway.stream import ServerStream, StreamHandler

log = logging.getLogger(__name__)

#: Seconds between two lines about streams that were refused.
_LOG_GAP = 60.0
_NAME = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_AUTHORITY = re.compile(
    rf"(?:outbound(?:_\.(\d+)_\._\.|\|(\d+)\|\|))?({_NAME})\.({_NAME})(?:\.svc(?:\.[a-z0-9.-]{{1,253}})?)?(?::(\d+))?"
)
#: Authorities whose pool is remembered.
_MOST_KNOWN = 1024


class PickerService(Struct, frozen=True):
    """What `endpointPickerRef` names."""

    namespace: str
    name: str
    port: int


class _Refused:
    """A stream that was ended; what still comes of it is dropped."""

    def on_message(self, message: bytes) -> None: ...

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


class PoolHosts:
    """Opens the session of each stream at its pool. `begin` is the handler factory of ext_proc streams."""

    def __init__(self) -> None:
        #: Streams that were refused because their pool is not served here.
        self.refused = 0
        #: By authority, the pool's host, for some of those that were asked for.
        self.known: dict[str, Host | None] = {}
        self._logged_at = -_LOG_GAP
        self._hosts: dict[str, Host] = {}
        self._services: dict[str, PickerService] = {}

    def put(self, pool: str, host: Host, service: PickerService | None) -> None:
        """Serve this pool (`namespace/name`), or under another service from now on. `None` = it names none."""
        self._hosts[pool] = host
        self._services.pop(pool, None)
        if service is not None:
            self._services[pool] = service
        self.known.clear()

    def drop(self, pool: str) -> None:
        """Open no more streams for it; those that are open go on."""
        del self._hosts[pool]
        self._services.pop(pool, None)
        self.known.clear()

    def begin(self, stream: ServerStream, metadata: Mapping[str, str]) -> StreamHandler:
        name = metadata.get(POOL_METADATA, "")
        if name:
            host, asked = self._hosts.get(name), f"the pool {name!r}"
        else:
            authority = metadata.get(":authority", "")
            host, asked = self._by_authority(authority), f"a pool whose picker is {authority!r}"
        if host is not None:
            return Session(host, stream, metadata)
        self.refused += 1
        why = f"{asked[:200]} is not served here, or not it alone: give each pool a Service, or a port, of its own"
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _LOG_GAP:
            self._logged_at = now
            log.warning("%d streams were refused so far, the last because %s", self.refused, why)
        stream.finish(Status.UNAVAILABLE, why)
        return _Refused()

    def _by_authority(self, authority: str) -> Host | None:
        try:
            return self.known[authority]
        except KeyError:
            host = self._find(authority)
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known[authority] = host
        return host

    def _find(self, authority: str) -> Host | None:
        """`None` also where several pools would fit."""
        match = _AUTHORITY.fullmatch(authority.lower())
        if match is None:
            return None
        sni_port, outbound_port, name, namespace, port = match.groups()
        said = int(port or outbound_port or sni_port or 0)
        fitting = [
            pool
            for pool, service in self._services.items()
            if (service.namespace, service.name) == (namespace, name) and said in (0, service.port)
        ]
        return self._hosts[fitting[0]] if len(fitting) == 1 else None
