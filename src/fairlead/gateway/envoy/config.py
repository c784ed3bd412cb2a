"""The embedded Envoy's configuration: listener, routes, filters, access log."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import yaml

from fairlead.apis.errors import ANTHROPIC_TYPES, TYPES
from fairlead.core.headers import (
    ACCESS_LOG_METADATA,
    ANSWERED_BY,
    ATTEMPTS,
    CONTROL_HEADERS,
    DESTINATION,
    FALLBACK,
    OWN_NAMESPACE,
    READ_HEADERS,
    RESIZABLE_METADATA,
    REWRITTEN,
    STEERING_HEADERS,
    WHOLE_BODY_METADATA,
)
from fairlead.gateway.access_log import GATEWAY_ID, SUMMARY, SUMMARY_TAG, TTFT
from fairlead.gateway.envoy.clusters import (
    ALS,
    DESTINATION_CLUSTER,
    EITHER,
    EXT_PROC,
    GRPC_DESTINATION,
    GRPC_EITHER,
    GRPC_POOL,
    POOL,
    clusters,
    seconds,
)
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.process import STAT_PREFIX
from fairlead.gateway.ext_proc import DESTINATION as EXT_PROC_DESTINATION
from fairlead.gateway.ext_proc import LB_NAMESPACE, LEASE_KEY

# Which request headers the gateway takes away, and when.
#
# Two moments. *At entry*, before routing and before the scheduler: headers that name a machine. Nobody but the
# scheduler may set them; what it sets itself comes later and passes. *Toward the model server*: headers that only the
# scheduler reads, and the destination, which this gateway takes from metadata.

AT_ENTRY: tuple[str, ...] = tuple(sorted(CONTROL_HEADERS))

TOWARD_UPSTREAM: tuple[str, ...] = (DESTINATION, *sorted(STEERING_HEADERS))

# What Envoy reports of each request: to the scheduler (ALS), and to the operator (a JSON line).

Json = dict[str, Any]

_ALS = "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_FILE = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
_STDOUT = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"

LINE = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "endpoint": "%UPSTREAM_HOST%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "request_bytes": "%BYTES_RECEIVED%",
    "response_bytes": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "ttft_us": TTFT,
    "request_id": "%REQ(X-REQUEST-ID)%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
}


def access_logs(options: Options) -> list[Json]:
    logs = []
    if options.als:
        logs.append(_als(options))
    if options.access_log:
        typed: Json = {"@type": _STDOUT if options.access_log == "-" else _FILE}
        if options.access_log != "-":
            typed["path"] = options.access_log
        typed["log_format"] = {"json_format": LINE}
        logs.append({"name": "envoy.access_loggers.lines", "typed_config": typed})
    return logs


def _als(options: Options) -> Json:
    """The lease comes back out of dynamic metadata, so no header has to reach the model server. One tag says all that
    the scheduler reads: taking an entry apart field by field would cost it more than the decision."""
    common = {
        "log_name": "fairlead",
        "transport_api_version": "V3",
        "buffer_flush_interval": seconds(options.als_interval),
        "buffer_size_bytes": 65_536,
        "grpc_service": {"envoy_grpc": {"cluster_name": ALS}},
        "custom_tags": [{"tag": SUMMARY_TAG, "value": SUMMARY}],
    }
    return {
        "name": "envoy.access_loggers.http_grpc",
        "typed_config": {"@type": _ALS, "common_config": common},
    }


# The HTTP filters of the gateway: how requests reach the scheduler, and what it sees of responses.
#
# Request mode `whole`. The buffer filter stands in front of ext_proc and lets nothing pass until the request is
# complete. ext_proc then sends headers and body without waiting in between, so the scheduler gets both in one read,
# and answers both in one write. ext_proc's own BUFFERED mode (`buffered`) sends the body when the headers are
# answered: one round trip more. Both keep the request until it is answered, so both fail open. Rules for the
# scheduler under `whole`:
#
# * The first body message is the whole body, also when it does not say end of stream (then trailers follow, which are
#   not sent). Waiting for the end of the stream would wait for ever.
# * The answers to headers and body leave in one write. Between the two no timeout of Envoy's acts.
# * A body is replaced in the headers answer (CONTINUE_AND_REPLACE): one message cannot be half applied.
# * A first message whose protocol_config has request body mode NONE is an upgrade: pick at the headers.
#
# Response: a STREAMED body keeps every chunk in Envoy until it is answered, so the scheduler may leave, or die, at any
# moment. Without the headers message the first chunk is the first message, and tells the status in its attributes.

_FORWARDED = sorted({*READ_HEADERS, GATEWAY_ID, ":status"})

_EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_BUFFER = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer"
_ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"

#: Response mode -> (headers, body).
_RESPONSE = {
    "first-chunk": ("SKIP", "STREAMED"),
    "headers": ("SEND", "NONE"),
    "none": ("SKIP", "NONE"),
    "full": ("SEND", "STREAMED"),
}


def http_filters(options: Options) -> list[Json]:
    """For ordinary requests."""
    filters = [_ext_proc(options, "BUFFERED"), router()]
    if options.request_mode == "whole":
        buffer = {
            "name": "envoy.filters.http.buffer",
            "typed_config": {"@type": _BUFFER, "max_request_bytes": options.body_limit},
        }
        # The router keeps what it may have to send again where ext_proc keeps what it has to pass on. With request
        # trailers ext_proc passes on twice, and the model server would get the body twice (measured, 1.40): the bytes
        # behind the first would be its next request. A second buffer lets the router see each body once.
        buffer_again = {**buffer, "name": "envoy.filters.http.buffer.again"}
        filters = [buffer, _ext_proc(options, "STREAMED"), buffer_again, router()]
    return filters


def upgrade_filters(options: Options) -> list[Json]:
    """For upgrades (WebSocket): there is no body to wait for, and what flows later is nobody's business."""
    filter_ = _ext_proc(options, "NONE")
    mode = filter_["typed_config"]["processing_mode"]
    mode["response_header_mode"], mode["response_body_mode"] = "SKIP", "NONE"
    return [filter_, router()]


def router() -> Json:
    return {"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER, "suppress_envoy_headers": True}}


def _ext_proc(options: Options, body_mode: str) -> Json:
    headers, body = _RESPONSE[options.response_mode]
    whole_body = body_mode == "STREAMED"
    announced = [RESIZABLE_METADATA] + [WHOLE_BODY_METADATA] * whole_body + [ACCESS_LOG_METADATA] * bool(options.als)
    grpc: Json = {"envoy_grpc": {"cluster_name": EXT_PROC, "authority": "fairlead"}}
    grpc["initial_metadata"] = [{"key": key, "value": "1"} for key in announced]
    config: Json = {
        "@type": _EXT_PROC,
        "grpc_service": grpc,
        "failure_mode_allow": options.fail_open,
        "status_on_error": {"code": "ServiceUnavailable"},
        "message_timeout": seconds(options.message_timeout),
        # Without a maximum Envoy ignores what the scheduler asks for.
        "max_message_timeout": seconds(options.queue_timeout),
        # A length that no longer fits the body would shift every later request of the upstream connection, so the
        # scheduler changes bodies only together with their length.
        "allow_content_length_header": True,
        # The rest is nobody's business here, and would have to be written, sent and read for every request.
        "forward_rules": {"allowed_headers": {"patterns": [{"exact": name} for name in _FORWARDED]}},
        "metadata_options": {"receiving_namespaces": {"untyped": [LB_NAMESPACE, OWN_NAMESPACE]}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": body_mode,
            "request_trailer_mode": "SKIP",
            "response_header_mode": headers,
            "response_body_mode": body,
            "response_trailer_mode": "SKIP",
        },
    }
    if options.retry != "connect":
        config["mutation_rules"] = {"allow_envoy": True}  # its headers say which request may be repeated, and when
    if whole_body:
        config["send_body_without_waiting_for_header_response"] = True
    if headers == "SKIP" and body != "NONE":
        config["response_attributes"] = ["response.code", ATTEMPTS, ANSWERED_BY]
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


# Routes: to the chosen endpoint, else to the whole pool; and how Envoy words its own errors.

_CEL_FILTER = "type.googleapis.com/envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
#: Only where the request certainly has not begun: generating twice costs as much as twice the requests. No connection
#: came about, or nothing was written to it, or an HTTP/2 server says so (REFUSED_STREAM, RFC 9113 section 8.7).
_NOT_BEGUN = "connect-failure,refused-stream"
#: Bodies up to this size are kept until the response has ended, in case they must be sent again; requests with larger
#: ones are not repeated.
_REPEATABLE_BODY = 1 << 20
#: Refusals of the scheduler carry response-code details that start like this; they are in the right form already.
_OURS = "fairlead"


def route_config(options: Options) -> Json:
    host: Json = {"name": "all", "domains": ["*"], "routes": _routes(options)}
    if options.request_mode == "buffered":
        # Raises the limit for bodies alone: the listener's buffers stay small.
        host["request_body_buffer_limit"] = options.body_limit
    made: Json = {
        "name": "gateway",
        "virtual_hosts": [host],
        "request_headers_to_remove": list(TOWARD_UPSTREAM),
    }
    if options.decision_header:
        # Told by the gateway from the metadata of the pick: the scheduler need not see the response for it.
        value = f"%DYNAMIC_METADATA({LB_NAMESPACE}:{LEASE_KEY})%"
        header = {"key": options.decision_header, "value": value}
        made["response_headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    return made


def _routes(options: Options) -> list[Json]:
    """The scheduler's answer carries the destination as metadata and has the route chosen anew."""
    chosen = [_present(EXT_PROC_DESTINATION)]
    limits = {"timeout": "0s", "idle_timeout": seconds(options.stream_idle_timeout)}
    unscheduled: Json = {"match": {"prefix": "/"}}
    if options.fail_open:
        unscheduled["route"] = {
            "cluster": POOL,
            **limits,
            "retry_policy": {
                "retry_on": _NOT_BEGUN,
                "num_retries": 2,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {
                            "@type": "type.googleapis.com/"
                            "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
            },
        }
    else:
        unscheduled["direct_response"] = {"status": 503, "body": {"inline_string": "nobody scheduled this request"}}
    picked: Json = {
        "match": {"prefix": "/", "dynamic_metadata": chosen},
        "route": {"cluster": DESTINATION_CLUSTER, **limits},
        # Elsewhere it stays: it is what the access log tells requests by that have no lease.
        "request_headers_to_remove": [GATEWAY_ID],
    }
    # The response will be changed, and ext_proc is not shown its headers: its length must go before it is too late.
    rewritten = {
        **picked,
        "match": {"prefix": "/", "dynamic_metadata": [*chosen, _present(REWRITTEN)]},
        "response_headers_to_remove": ["content-length"],
    }
    refused: Json = {"match": {"connect_matcher": {}}, "direct_response": {"status": 405}}
    repeated = partial(_repeated, hedge=options.retry == "hedge")
    # A model server's name never stands in a gRPC message, so nothing is rewritten there.
    grpc = [
        repeated(_for_grpc(picked, GRPC_DESTINATION), GRPC_EITHER),
        _for_grpc(picked, GRPC_DESTINATION),
        _for_grpc(unscheduled, GRPC_POOL),
    ]
    return [refused, *grpc, repeated(rewritten, EITHER), rewritten, repeated(picked, EITHER), picked, unscheduled]


def _repeated(route: Json, cluster: str, hedge: bool) -> Json:
    """The same where the scheduler named a fallback endpoint: once, and at once. Headers of the scheduler's answer say
    of which requests that is true after they have begun (`answers.Answers.retry_headers`)."""
    named = [*route["match"]["dynamic_metadata"], _present(FALLBACK, OWN_NAMESPACE)]
    at_once = {"base_interval": "0.001s", "max_interval": "0.001s"}
    policy = {"retry_on": f"{_NOT_BEGUN},reset-before-request", "num_retries": 1, "retry_back_off": at_once}
    action = {**route["route"], "cluster": cluster, "retry_policy": policy}
    if hedge:
        action["hedge_policy"] = {"hedge_on_per_try_timeout": True}
    return {
        **route,
        "match": {**route["match"], "dynamic_metadata": named},
        "route": action,
        "request_body_buffer_limit": _REPEATABLE_BODY,
    }


def _for_grpc(route: Json, cluster: str) -> Json:
    """The same for requests of content type `application/grpc`."""
    made = {**route, "match": {**route["match"], "grpc": {}}}
    if "route" in made:
        made["route"] = {**made["route"], "cluster": cluster}
    return made


def _present(key: str, namespace: str = LB_NAMESPACE) -> Json:
    """The scheduler's answer has this key in its metadata."""
    return {"filter": namespace, "path": [{"key": key}], "value": {"present_match": True}}


def local_replies() -> Json:
    """Envoy's own errors as the clients of the OpenAI APIs know errors, or of the Anthropic API by its path."""
    anthropic = _replies(_anthropic_body, ANTHROPIC_TYPES, "api_error", "/v1/messages")
    return {"mappers": [*anthropic, *_replies(_body, TYPES, "GatewayError")]}


def _replies(
    body: Callable[[str], Json], types: Mapping[int, str], fallback_type: str, path: str = ""
) -> Iterator[Json]:
    """In one shape, for requests whose path begins so; `fallback_type`: the type of any other status."""
    for status in (413, 503, 504):
        mapper: Json = {"filter": _all_of(_status(status), *_under(path), _not_ours())}
        mapper["body_format_override"] = body(types[status])
        if status == 503:
            mapper["headers_to_add"] = [{"header": {"key": "retry-after", "value": "1"}}]
        yield mapper
    yield {"filter": _all_of(*_under(path), _not_ours()), "body_format_override": body(fallback_type)}


def _body(type_: str) -> Json:
    error = {"message": "%LOCAL_REPLY_BODY%", "type": type_, "param": None, "code": "%RESPONSE_CODE%"}
    return {"json_format": {"error": error}, "content_type": "application/json"}


def _anthropic_body(type_: str) -> Json:
    error = {"type": "error", "error": {"type": type_, "message": "%LOCAL_REPLY_BODY%"}}
    return {"json_format": error, "content_type": "application/json"}


def _under(path: str) -> list[Json]:
    return [{"header_filter": {"header": {"name": ":path", "string_match": {"prefix": path}}}}] if path else []


def _status(status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"fairlead.local_reply.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def _not_ours() -> Json:
    expression = f"!response.code_details.startsWith('{_OURS}')"
    typed = {"@type": _CEL_FILTER, "expression": expression}
    return {"extension_filter": {"name": "envoy.access_loggers.extension_filters.cel", "typed_config": typed}}


def _all_of(*filters: Json) -> Json:
    return {"and_filter": {"filters": list(filters)}} if len(filters) > 1 else filters[0]


# `build(options)`: Envoy's bootstrap as plain data. Envoy 1.40; the reasons are in docs/gateway.md.
#
# A request's way: headers that name machines are taken off → (buffer) → ext_proc asks the scheduler → the route is
# chosen by the metadata of its answer → that endpoint, or round robin over the pool when there was no answer.

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
