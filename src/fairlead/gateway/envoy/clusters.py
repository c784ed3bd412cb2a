"""Envoy's clusters: the scheduler, its access log, the chosen endpoint, and the pool from a file that Envoy watches."""

import asyncio
import json
import logging
import os
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from fairlead.core.events import EndpointDown, EndpointUp
from fairlead.core.headers import DESTINATION, FALLBACK, OWN_NAMESPACE
from fairlead.gateway.envoy.authentication import JWKS, JWKS_CA, followed_secret
from fairlead.gateway.envoy.options import Address, Jwt, Options, Tls, parse_address, parse_endpoint, replace_watched
from fairlead.gateway.envoy.parts import Json, extension, from_file, typed
from fairlead.gateway.envoy.process import UNWATCHED
from fairlead.gateway.ext_proc import LB_NAMESPACE

# The pool as a file that Envoy watches (endpoint discovery from a file, EDS).
#
# Envoy reacts to a file that is *moved* over the old one. So every version is written to another file and renamed:
# Envoy never reads an incomplete file, and never restarts. If it cannot read a file, the old endpoints stay in force.

log = logging.getLogger("fairlead.gateway")

CLUSTER = "all_endpoints"
#: Seconds without a change after which changes are written, and seconds after the first one when they are in any case.
#: So a burst is written once.
_COALESCE, _AT_LATEST = 0.02, 0.25
#: Seconds until a file that could not be written is tried again, and one that was written is looked for.
CHECK_S = 1.0

_UNWATCHED = (
    "the gateway's directory was removed and made again: until fairlead serve is restarted, the gateway notices no"
    " change of endpoints and keys; keep cleaners of old files away"
)
_ASSIGNMENT = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def assignment(addresses: Iterable[str]) -> Json:
    """A ClusterLoadAssignment. Raises `ConfigError` for an address that is not `ip:port`."""
    return {"cluster_name": CLUSTER, "endpoints": [{"lb_endpoints": [_lb_endpoint(address) for address in addresses]}]}


def _lb_endpoint(address: str) -> Json:
    return {"endpoint": {"address": envoy_address(parse_endpoint(address))}}


def render(lb_endpoints: Iterable[str], version: int) -> str:
    """The content of the file. `lb_endpoints`: each as JSON."""
    begin = f'{{"version_info": "{version}", "resources": [{{"@type": "{_ASSIGNMENT}", "cluster_name": "{CLUSTER}"'
    return f'{begin}, "endpoints": [{{"lb_endpoints": [{", ".join(lb_endpoints)}]}}]}}]}}'


class EndpointsFile:
    """Writes versions of the pool to `path`. Nothing else may write to its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = 0
        self._written: tuple[tuple[str, ...], tuple[int, int] | None] | None = None
        #: The JSON of each address of the last version, and of those prepared since.
        self._lb_endpoints: dict[str, str] = {}

    def prepare(self, address: str) -> str:
        """The JSON of an address. For thousands, it is too slow to be made while writing. Raises `ConfigError`."""
        if address not in self._lb_endpoints:
            self._lb_endpoints[address] = json.dumps(_lb_endpoint(address))
        return self._lb_endpoints[address]

    def write(self, addresses: Iterable[str]) -> bool:
        """Make `addresses` the pool; order and repetitions do not matter. True if that changed anything. A file that
        somebody has removed or replaced is written again.

        Raises `ConfigError` for an address that is not `ip:port` (nothing is written), or `OSError` on disk errors.
        """
        wanted = tuple(sorted(set(addresses)))
        if (wanted, self._stamp()) == self._written:
            return False
        lb_endpoints = {address: self.prepare(address) for address in wanted}
        replace_watched(self.path, render(lb_endpoints.values(), self._version + 1))
        self._lb_endpoints = lb_endpoints
        self._version += 1
        self._written = wanted, self._stamp()
        return True

    def _stamp(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


class PoolWriter:
    """Keeps the file up to date while the pool changes or somebody removes the file. Belongs to one event loop."""

    def __init__(self, path: Path) -> None:
        self._file = EndpointsFile(path)
        self._by_id: dict[str, str] = {}
        self._due: asyncio.TimerHandle | None = None
        #: When the changes so far are written at the latest, in the loop's time; 0 = there are none.
        self._latest = 0.0
        self._unwatched = path.with_name(UNWATCHED)
        #: Why the gateway does not have the newest pool; empty = it has.
        self.problem = ""

    def changed(self, event: EndpointUp | EndpointDown) -> None:
        """Follow a change of one endpoint. Cheap, because a burst of changes is written once. Raises `ConfigError` for
        an address that is not a literal `ip:port`; the old pool then stays in force."""
        if isinstance(event, EndpointUp):
            self._file.prepare(event.endpoint.address)
            self._by_id[event.endpoint.id] = event.endpoint.address
        else:
            self._by_id.pop(event.endpoint_id, None)
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._latest = self._latest or now + _AT_LATEST
        self.close()
        self._due = loop.call_at(min(now + _COALESCE, max(self._latest, now)), self._write)

    def close(self) -> None:
        """Stop. Pending changes are not written."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _write(self) -> None:
        self._latest = 0.0
        self._due = asyncio.get_running_loop().call_later(CHECK_S, self._write)
        try:
            self._file.write(self._by_id.values())
            self.problem = _UNWATCHED if self._unwatched.exists() else ""
        except OSError as error:
            if not self.problem:
                log.error("the gateway's endpoints cannot be updated, it keeps the old ones: %s", error)
            self.problem = f"the gateway's endpoints could not be updated, it keeps the old ones: {error}"


# What Envoy connects to: the scheduler, its access log service, the chosen endpoint, and the whole pool.

EXT_PROC = "ext_proc"
ALS = "als"
DESTINATION_CLUSTER = "dst"
POOL = CLUSTER
#: The same endpoints over cleartext HTTP/2, for gRPC. Other requests use HTTP/1.1 unless the pool says otherwise,
#: because vLLM's HTTP server supports nothing else.
GRPC_DESTINATION = "dst_grpc"
GRPC_POOL = "all_endpoints_grpc"
#: The second listener, for bodies that may become large (`routes`).
UPLOADS = "uploads"
#: Each of these names stands for two clusters: the first attempt goes to the chosen endpoint, the one retry to the
#: fallback endpoint.
EITHER, GRPC_EITHER = "dst_or_second", "dst_or_second_grpc"
FALLBACK_DESTINATION, GRPC_FALLBACK = "dst_second", "dst_second_grpc"

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
#: Practically no limit, in both directions, because limiting the load on model servers is the scheduler's task.
_MANY = 40_000
#: Also no limit on concurrent retries, of which Envoy allows three by default.
_WIDE = {
    "thresholds": [
        {"max_connections": _MANY, "max_pending_requests": _MANY, "max_requests": _MANY, "max_retries": _MANY}
    ]
}
#: A header that answers have between these clusters and the router: the status, and how many attempts have begun.
ATTEMPT = "x-fairlead-attempt"
#: Of a retry policy: not the same host again.
OTHER_HOSTS = [
    extension("envoy.retry_host_predicates.previous_hosts", "retry.host.previous_hosts.v3.PreviousHostsPredicate")
]


def seconds(value: float) -> str:
    """A duration in protobuf's JSON format."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def clusters(options: Options) -> list[Json]:
    common = {"common_http_protocol_options": {"idle_timeout": seconds(options.upstream_idle_timeout)}}
    http2 = _protocol({"http2_protocol_options": {}}, common)
    usual = http2 if options.upstream_http2 else _protocol({"http_protocol_options": {}}, common)
    listed = [
        *_destinations(usual, DESTINATION_CLUSTER, FALLBACK_DESTINATION, EITHER, options.retry != "connect"),
        _pool(options, POOL, usual),
        *_destinations(http2, GRPC_DESTINATION, GRPC_FALLBACK, GRPC_EITHER),
        _pool(options, GRPC_POOL, http2),
        _ext_proc(options),
    ]
    if options.request_mode == "whole":
        listed.append(_uploads())
    listed += [_als(name, address, options.tls) for name, address in als(options).items()]
    if options.jwt is not None and options.jwt.jwks_uri:
        listed.append(_jwks(options.jwt, options.jwks_ca_file))
    return listed


def als(options: Options) -> dict[str, str]:
    """The receivers of the access log: address by cluster."""
    addresses = (options.als, *options.peers) if options.als else ()
    return {ALS if not i else f"{ALS}_{i}": address for i, address in enumerate(addresses)}


def _destinations(protocol: Json, chosen: str, fallback: str, either: str, hold: bool = False) -> list[Json]:
    """Clusters for the chosen endpoint, for the fallback endpoint, and for first one and then the other.

    A retry asks the same cluster for a host, and a cluster that connects to the address in metadata has only one. A
    composite cluster has one cluster per attempt, and no host for a third. `hold`: hold response headers until the
    first byte.
    """
    chosen_first = [{"name": chosen}, {"name": fallback}]
    composite: Json = {
        "name": either,
        "cluster_type": extension(
            "envoy.clusters.composite", "clusters.composite.v3.ClusterConfig", clusters=chosen_first
        ),
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _WIDE,
        "typed_extension_protocol_options": _held(protocol) if hold else protocol,
    }
    return [
        _destination(chosen, protocol, LB_NAMESPACE, DESTINATION),
        _destination(fallback, protocol, OWN_NAMESPACE, FALLBACK),
        composite,
    ]


# Makes an answer begin with its first byte.
#
# vLLM sends the headers of a stream immediately, and the first byte when it has computed the prompt. Envoy retries no
# request whose response headers it has seen. So a filter between the router and the connection holds the headers until
# there is a byte: a request whose server dies or hangs before that has no answer yet. None of Envoy's filters does
# that, but a WebAssembly module of 334 bytes with one function does:
#
#     proxy_on_response_headers(context, headers, end) → end == 0 and status[0] < "3"
#                                                        1 = stop here; the first byte resumes it
#
# Headers of errors are never held. If a hedged request gets one, Envoy drops that attempt and waits for the other, but
# bytes that come out of a filter with their headers go on nevertheless: to the client as an answer without a head, or
# to ext_proc, which crashes Envoy (measured, 1.40). So would those of an answer after a 1xx that Envoy does not know,
# such as 199, if only the second headers were held.
#
# The other functions are those that the interface (proxy-wasm 0.2.1) requires. V8 adds 16 MB to Envoy's memory.


def hold_module() -> bytes:
    """The WebAssembly module, assembled (WebAssembly core specification 1.0, chapter 5)."""

    def vector(*entries: bytes) -> bytes:
        return bytes([len(entries)]) + b"".join(entries)

    def text(name: str) -> bytes:
        return bytes([len(name)]) + name.encode()

    def section(number: int, content: bytes) -> bytes:
        size = len(content)
        return bytes([number]) + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + content

    i32, get_end, is_zero, below, both, constant = 0x7F, b"\x20\x02", b"\x45", b"\x49", b"\x71", b"\x41"
    # Envoy writes what it is asked for at 1024, where the module tells it to, and at 8 and 12 where it lies.
    answer, status = constant + b"\x80\x08", ":status"
    arguments = (2, 0, len(status), 8, 12)  # of response headers, the name at 0
    read_status = b"".join(constant + bytes([value]) for value in arguments) + b"\x10\x00\x1a"
    no_error = answer + b"\x2d\x00\x00" + constant + b"3" + below
    functions: tuple[tuple[tuple[str, ...], int, int, bytes], ...] = (  # names, parameters, results, instructions
        (("_initialize", "proxy_abi_version_0_2_1"), 0, 0, b""),
        (("proxy_on_memory_allocate",), 1, 1, answer),
        (("proxy_on_vm_start", "proxy_on_configure"), 2, 1, constant + b"\x01"),
        (("proxy_on_context_create",), 2, 0, b""),
        (("proxy_on_response_headers",), 3, 1, read_status + get_end + is_zero + no_error + both),
    )
    kinds = ((len(arguments), 1), *((taken, given) for _, taken, given, _ in functions))
    types = (b"\x60" + vector(*[bytes([i32])] * taken) + vector(*[bytes([i32])] * given) for taken, given in kinds)
    # The imported function is the first.
    exports = [(name, 0, number) for number, (names, *_) in enumerate(functions, 1) for name in names]
    named = (text(name) + bytes([kind, number]) for name, kind, number in [("memory", 2, 0), *exports])
    bodies = (bytes([len(code) + 2, 0]) + code + b"\x0b" for *_, code in functions)
    sections = (
        section(1, vector(*types)),
        section(2, vector(text("env") + text("proxy_get_header_map_value") + b"\x00\x00")),
        section(3, vector(*(bytes([number]) for number in range(1, len(kinds))))),
        section(5, vector(b"\x00\x01")),  # a page of memory
        section(7, vector(*named)),
        section(10, vector(*bodies)),
        section(11, vector(b"\x00" + constant + b"\x00\x0b" + text(status))),
    )
    return b"\x00asm\x01\x00\x00\x00" + b"".join(sections)


def _held(protocol: Json) -> Json:
    """The protocol options with that filter added."""
    code = {"local": {"inline_bytes": b64encode(hold_module()).decode()}}
    plugin = {
        "name": "hold",
        "root_id": "hold",
        "allow_on_headers_stop_iteration": True,
        "vm_config": {"vm_id": "hold", "runtime": "envoy.wasm.runtime.v8", "code": code},
    }
    hold = extension("envoy.filters.http.wasm", "filters.http.wasm.v3.Wasm", config=plugin)
    attempt = {"key": ATTEMPT, "value": "%RESPONSE_HEADER(:status)% %UPSTREAM_REQUEST_ATTEMPT_COUNT%"}
    added = {"append": {"header": attempt, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
    kind = "filters.http.header_mutation.v3.HeaderMutation"
    header = extension("envoy.filters.http.header_mutation", kind, mutations={"response_mutations": [added]})
    codec = extension("envoy.filters.http.upstream_codec", "filters.http.upstream_codec.v3.UpstreamCodec")
    return {_HTTP_OPTIONS: {**protocol[_HTTP_OPTIONS], "http_filters": [hold, header, codec]}}


def _destination(name: str, protocol: Json, namespace: str, key: str) -> Json:
    """A cluster that connects to the address named by the scheduler, in metadata because clients could set a header."""
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _WIDE,
        "original_dst_lb_config": {"metadata_key": {"key": namespace, "path": [{"key": key}]}},
        "typed_extension_protocol_options": protocol,
    }


def _pool(options: Options, name: str, protocol: Json) -> Json:
    """Serves unscheduled requests. No scheduler sees them, so dead endpoints are detected by failing connects."""
    cluster: Json = {
        "name": name,
        "connect_timeout": "5s",
        "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": _WIDE,
        "typed_extension_protocol_options": protocol,
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 2,
            # Only failing connects count: a 5xx of a model server may be caused by the client.
            "enforcing_consecutive_5xx": 0,
            "enforcing_consecutive_gateway_failure": 0,
            "enforcing_success_rate": 0,
            "enforcing_local_origin_success_rate": 0,
            "interval": "1s",
            "base_ejection_time": "5s",
            "max_ejection_time": "30s",
            "max_ejection_percent": 90,
        },
    }
    if options.endpoints_file:
        directory = {"path": os.path.dirname(options.endpoints_file) or "."}
        source = from_file(options.endpoints_file, watched_directory=directory)
        cluster["type"] = "EDS"
        cluster["eds_cluster_config"] = {"service_name": POOL, "eds_config": source}
    else:
        cluster["type"] = "STATIC"
        cluster["load_assignment"] = assignment(options.endpoints)
    return cluster


def _uploads() -> Json:
    there = {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": UPLOADS}}}}
    return {
        "name": UPLOADS,
        "connect_timeout": "1s",
        "circuit_breakers": _WIDE,
        "load_assignment": {"cluster_name": UPLOADS, "endpoints": [{"lb_endpoints": [there]}]},
        "typed_extension_protocol_options": _protocol(
            {
                "http2_protocol_options": {
                    "initial_stream_window_size": 65_536,
                    # Uploads share this connection: an invalid answer ends only its own request, not all of them.
                    "override_stream_error_on_invalid_http_message": True,
                }
            }
        ),
    }


def _protocol(explicit: Json, common: Json | None = None) -> Json:
    """The protocol that a cluster speaks. `common`: options of every protocol."""
    return {_HTTP_OPTIONS: typed(_HTTP_OPTIONS, **(common or {}), explicit_http_config=explicit)}


def _ext_proc(options: Options) -> Json:
    """The cluster of one or several schedulers. Each kind of failure has its own detector, because none detects them
    all (measured, 200 POST/s):

    refused connections: outlier detection, 10 ms; hung: message_timeout for each request, then the health check removes
    the host after 2 s; hung while requests queue with a longer timeout: the HTTP/2 ping closes the connection. Panic
    threshold 0: an unhealthy host is not used just because it is the only one. Without `fail_open`, nothing else would
    serve the request, so then unhealthy hosts are queried too, repeatedly.
    """
    cluster = _grpc(EXT_PROC, [options.ext_proc, *options.peers], options.tls, ping=True)
    cluster["circuit_breakers"] = {
        "thresholds": [
            {
                "max_connections": 1024,
                "max_pending_requests": options.max_streams,
                "max_requests": options.max_streams,
                "max_retries": options.max_streams,
            }
        ]
    }
    cluster["health_checks"] = _health_checks("envoy.service.ext_proc.v3.ExternalProcessor")
    cluster["outlier_detection"] = {
        "consecutive_5xx": 3,
        "consecutive_gateway_failure": 3,
        # The health check detects a hanging scheduler after 2 s. If there are others, one missed answer is enough.
        "consecutive_local_origin_failure": 1 if options.peers else 3,
        "split_external_local_origin_errors": True,
        "interval": "0.5s",
        "base_ejection_time": "2s",
        "max_ejection_time": "5s",
        "max_ejection_percent": 100 * len(options.peers) // (len(options.peers) + 1) if options.peers else 100,
    }
    # By default, workers learn of a change of health up to 1 s later if another change came within the second before.
    # That is long enough for a worker to know no healthy host although the main thread does (measured: 300 requests of
    # 960).
    panic = 0 if options.fail_open else 1
    cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": panic}, "update_merge_window": "0s"}
    return cluster


def _als(name: str, address: str, tls: Tls | None) -> Json:
    """The cluster of a receiver of the access log. Of several addresses of a name, only those that answer get entries:
    others lose them. If none answers the check, all are tried."""
    cluster = _grpc(name, [address], tls)
    if not parse_address(address).literal:
        cluster["health_checks"] = _health_checks("")
        cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": 1}}
    return cluster


def _health_checks(service: str) -> list[Json]:
    return [
        {
            "timeout": "0.5s",
            "interval": "1s",
            "no_traffic_interval": "0.1s",
            "no_traffic_healthy_interval": "1s",
            "unhealthy_interval": "0.1s",  # a scheduler that starts is queried immediately
            "unhealthy_threshold": 2,
            "healthy_threshold": 1,
            "grpc_health_check": {"service_name": service},
        }
    ]


def _grpc(name: str, texts: list[str], tls: Tls | None, ping: bool = False) -> Json:
    http2: Json = {"initial_stream_window_size": 65_536, "initial_connection_window_size": 1_048_576}
    if ping:
        http2["connection_keepalive"] = {"interval": "5s", "timeout": "3s"}
    return _dialled(name, [parse_address(text) for text in texts], tls, {"http2_protocol_options": http2})


def _jwks(jwt: Jwt, authorities: str) -> Json:
    """The cluster from which the issuer's keys are fetched. `authorities`: see `Options.jwks_ca_file`."""
    url = urlsplit(jwt.jwks_uri)
    secure = url.scheme == "https"
    address = Address(url.hostname or "", url.port or (443 if secure else 80))
    cluster = _dialled(JWKS, [address], Tls(ca_file=jwt.ca_file) if secure else None, {"http_protocol_options": {}})
    if secure and authorities:
        common = cluster["transport_socket"]["typed_config"]["common_tls_context"]
        fixed = common.pop("validation_context")
        del fixed["trusted_ca"]
        followed = followed_secret(JWKS_CA, authorities)
        common["combined_validation_context"] = {
            "default_validation_context": fixed,
            "validation_context_sds_secret_config": followed,
        }
    return cluster


def _dialled(name: str, addresses: list[Address], tls: Tls | None, explicit: Json) -> Json:
    """A cluster with the protocol `explicit`. All addresses are of one kind."""
    address = addresses[0]
    cluster: Json = {
        "name": name,
        "type": "STATIC" if address.literal else "STRICT_DNS",
        "connect_timeout": "1s",
        "lb_policy": "LEAST_REQUEST",
        "typed_extension_protocol_options": _protocol(explicit),
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": envoy_address(each)}} for each in addresses]}],
        },
    }
    if not address.literal:
        cluster["dns_lookup_family"] = "ALL"
    if tls is not None:
        cluster["transport_socket"] = _tls(tls, address, "h2" if "http2_protocol_options" in explicit else "http/1.1")
    return cluster


def envoy_address(address: Address) -> Json:
    if address.path:
        return {"pipe": {"path": address.path}}
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def _tls(tls: Tls, address: Address, protocol: str) -> Json:
    name = tls.server_name or address.host
    common: Json = {"alpn_protocols": [protocol], "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"}}
    if tls.cert_file:
        common["tls_certificates"] = [
            {"certificate_chain": {"filename": tls.cert_file}, "private_key": {"filename": tls.key_file}}
        ]
    if tls.verify:
        context: Json = {"trusted_ca": {"filename": tls.ca_file}}
        if name:
            kind = "IP_ADDRESS" if not tls.server_name and address.literal else "DNS"
            context["match_typed_subject_alt_names"] = [{"san_type": kind, "matcher": {"exact": name}}]
        common["validation_context"] = context
    named = name and not (address.literal and not tls.server_name)  # RFC 6066, section 3: no literal addresses
    sni = {"sni": name} if named else {}
    kind = "transport_sockets.tls.v3.UpstreamTlsContext"
    return extension("envoy.transport_sockets.tls", kind, common_tls_context=common, **sni)
