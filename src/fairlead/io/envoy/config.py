"""`build(options)`: Envoy's bootstrap as plain data. Envoy 1.40; the reasons are in docs/gateway.md.

A request's way: headers that name machines are taken off → (buffer) → ext_proc asks the scheduler → the route is
chosen by the metadata of its answer → that endpoint, or round robin over the pool when there was no answer.
"""

from typing import Any

import yaml

from fairlead.io.envoy.clusters import clusters, seconds
from fairlead.io.envoy.filters import http_filters, router, upgrade_filters
from fairlead.io.envoy.headers import AT_ENTRY
from fairlead.io.envoy.logs import access_logs
from fairlead.io.envoy.options import Options
from fairlead.io.envoy.routes import local_replies, route_config
from fairlead.wire.access_log import GATEWAY_ID

Json = dict[str, Any]

STAT_PREFIX = "gateway"

_HCM = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_EARLY = "type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
_CONNECTIONS = "type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3"
_HEAP = "type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig"

#: Buffers of one connection. Bodies have their own limit.
_CONNECTION_BUFFER = 32_768
#: Internal clients may set Envoy's own controls (x-envoy-upstream-rq-timeout-ms, x-envoy-retry-on, …), and while no
#: range is named, Envoy takes all private addresses for internal. No client has the broadcast address.
_NOBODY = {"unix_sockets": False, "cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]}
#: Share of the heap limit at which connections are no longer kept, and at which requests are refused.
_HEAP_TIGHT, _HEAP_FULL = 0.90, 0.95


def build(options: Options) -> Json:
    """The bootstrap. Raises `ConfigError` for options that contradict each other."""
    options.check()
    bootstrap: Json = {
        "node": {"id": "fairlead", "cluster": "fairlead"},
        "static_resources": {"listeners": [_listener(options)], "clusters": clusters(options)},
        "overload_manager": _overload(options),
    }
    admin = _admin(options)
    if admin is not None:
        bootstrap["admin"] = {"address": admin}
    return bootstrap


def render(options: Options) -> str:
    """The bootstrap as YAML."""
    return str(yaml.safe_dump(build(options), sort_keys=False, width=120))


def _admin(options: Options) -> Json | None:
    if options.admin_port:
        return {"socket_address": {"address": "127.0.0.1", "port_value": options.admin_port}}
    if options.admin_path:
        return {"pipe": {"path": options.admin_path, "mode": 0o600}}
    return None


def _listener(options: Options) -> Json:
    address: Json = {"address": options.host, "port_value": options.port}
    if options.host == "::":
        address["ipv4_compat"] = True
    return {
        "name": "gateway",
        "address": {"socket_address": address},
        # With one worker SO_REUSEPORT brings nothing, but lets a second gateway take half of the connections unseen.
        "enable_reuse_port": options.concurrency != 1,
        "per_connection_buffer_limit_bytes": _CONNECTION_BUFFER,
        "filter_chains": [{"filters": [_connection_manager(options)]}],
    }


def _connection_manager(options: Options) -> Json:
    idle = seconds(options.stream_idle_timeout)
    at_entry: list[Json] = [{"remove": name} for name in AT_ENTRY]
    own_id = {"key": GATEWAY_ID, "value": "%UNIQUE_ID%"}
    at_entry.append({"append": {"header": own_id, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}})
    config: Json = {
        "@type": _HCM,
        "stat_prefix": STAT_PREFIX,
        "codec_type": "AUTO",
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "server_header_transformation": "PASS_THROUGH",
        "use_remote_address": True,
        "internal_address_config": _NOBODY,
        "normalize_path": True,
        "merge_slashes": True,
        "http2_protocol_options": {
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": 65_536,
            "initial_connection_window_size": 1_048_576,
        },
        "request_headers_timeout": "30s",
        # From the first byte to the last one leaving for the model server, so the time in our queue counts too.
        "request_timeout": seconds(options.queue_timeout + 300),
        "stream_idle_timeout": idle,
        "early_header_mutation_extensions": [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {"@type": _EARLY, "mutations": at_entry},
            }
        ],
        "upgrade_configs": [
            {"upgrade_type": "websocket", "filters": upgrade_filters(options)},
            # A tunnel would wait in the buffer filter for a body without end. Its own chain refuses it at once.
            {"upgrade_type": "CONNECT", "filters": [router()]},
        ],
        "local_reply_config": local_replies(),
        "route_config": route_config(options),
        "http_filters": http_filters(options),
    }
    logs = access_logs(options)
    if logs:
        config["access_log"] = logs
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": config}


def _overload(options: Options) -> Json:
    limit = {"@type": f"{_CONNECTIONS}.DownstreamConnectionsConfig"}
    limit["max_active_downstream_connections"] = options.max_connections  # type: ignore[assignment]
    manager: Json = {
        "refresh_interval": "0.25s",
        "resource_monitors": [
            {"name": "envoy.resource_monitors.global_downstream_max_connections", "typed_config": limit}
        ],
    }
    if options.max_heap:
        heap = {"@type": _HEAP, "max_heap_size_bytes": options.max_heap}
        manager["resource_monitors"].append({"name": "envoy.resource_monitors.fixed_heap", "typed_config": heap})
        manager["actions"] = [
            _action("disable_http_keepalive", _HEAP_TIGHT),
            _action("shrink_heap", _HEAP_TIGHT),
            _action("stop_accepting_requests", _HEAP_FULL),
        ]
    return manager


def _action(name: str, share: float) -> Json:
    trigger = {"name": "envoy.resource_monitors.fixed_heap", "threshold": {"value": share}}
    return {"name": f"envoy.overload_actions.{name}", "triggers": [trigger]}
