"""Serve several pools on one port: find the pool of each stream.

Gateways do not name the pool in a message. They open a stream to the Service in the pool's `endpointPickerRef`, which
is the stream's authority. kgateway and Envoy AI Gateway write `SERVICE.NAMESPACE.svc:PORT`; others add the cluster's
domain or leave out the port. If no authority is set, Envoy uses the name of its cluster, which for Istio is
`outbound|PORT||SERVICE.NAMESPACE.svc.cluster.local`. If several pools name the same Service and port, the oldest has
them. A gateway with a hand-written configuration can send the pool as initial metadata,
`fairlead-pool: NAMESPACE/NAME`.
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

#: Seconds between log lines about refused streams.
_LOG_GAP = 60.0
_NAME = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_AUTHORITY = re.compile(
    rf"(?:outbound(?:_\.(\d+)_\._\.|\|(\d+)\|\|))?({_NAME})\.({_NAME})(?:\.svc(?:\.[a-z0-9.-]{{1,253}})?)?(?::(\d+))?"
)
#: The most authorities whose pool is cached.
_MOST_KNOWN = 1024


class PickerService(Struct, frozen=True):
    """The Service that an `endpointPickerRef` names."""

    namespace: str
    name: str
    port: int


class _Refused:
    """A refused stream, whose further messages are dropped."""

    def on_message(self, message: bytes) -> None: ...

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


class PoolHosts:
    """Opens a session in its pool for each stream. `begin` is the handler factory of ext_proc streams."""

    def __init__(self) -> None:
        #: Streams that were refused because their pool is not served here.
        self.refused = 0
        #: A cache of the pool's host by authority; `None` = no pool.
        self.known: dict[str, Host | None] = {}
        self._logged_at = -_LOG_GAP
        self._hosts: dict[str, Host] = {}
        #: By pool: its service, and when the pool was created.
        self._services: dict[str, tuple[PickerService, str]] = {}
        #: The pool that each service stands for; and by pool, which older pool has its service.
        self._owners: dict[PickerService, str] = {}
        self.shadowed: dict[str, str] = {}

    def put(self, pool: str, host: Host, service: PickerService | None, created: str = "") -> None:
        """Serve a pool (`namespace/name`), or change its service. `service`: `None` = the pool names none. `created`:
        when the pool was created, as Kubernetes writes it."""
        self._hosts[pool] = host
        self._services.pop(pool, None)
        if service is not None:
            self._services[pool] = service, created
        self._find_owners()

    def drop(self, pool: str) -> None:
        """Open no more streams for a pool. Its open streams continue."""
        del self._hosts[pool]
        self._services.pop(pool, None)
        self._find_owners()

    def _find_owners(self) -> None:
        self.known.clear()
        self._owners, self.shadowed = {}, {}
        for pool, (service, _) in sorted(self._services.items(), key=lambda item: (item[1][1], item[0])):
            owner = self._owners.setdefault(service, pool)
            if owner != pool:
                self.shadowed[pool] = owner

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
        why = f"{asked[:200]} is not served here, or has a Service of several pools and gives no port"
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
        """The host for an authority; `None` if no service matches, or several do."""
        match = _AUTHORITY.fullmatch(authority.lower())
        if match is None:
            return None
        sni_port, outbound_port, name, namespace, port = match.groups()
        said = int(port or outbound_port or sni_port or 0)
        fitting = [
            pool
            for service, pool in self._owners.items()
            if (service.namespace, service.name) == (namespace, name) and said in (0, service.port)
        ]
        return self._hosts[fitting[0]] if len(fitting) == 1 else None
