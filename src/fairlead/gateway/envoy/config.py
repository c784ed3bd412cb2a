"""The embedded Envoy's configuration: listener, routes, filters, access log."""

import yaml
from msgspec.structs import replace

from fairlead.core.headers import (
    ACCESS_LOG_METADATA,
    ANSWERED_BY,
    ATTEMPTS,
    CONTROL_HEADERS,
    FAIRNESS_HEADERS,
    GRPC_STATUS,
    OWN_NAMESPACE,
    READ_HEADERS,
    RESIZABLE_METADATA,
    WHOLE_BODY_METADATA,
)
from fairlead.gateway.access_log import (
    GATEWAY_ID,
    REFUSED_UPLOAD,
    SUMMARY,
    SUMMARY_TAG,
    TTFT,
    UPLOAD,
    UPLOAD_ENDS,
    UPLOAD_TAG,
)
from fairlead.gateway.envoy.admin import LISTENER
from fairlead.gateway.envoy.authentication import authentication, static_secrets, upstream_token
from fairlead.gateway.envoy.clusters import EXT_PROC, OTHER_HOSTS, UPLOADS, als, clusters, seconds
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.parts import Json, extension, typed
from fairlead.gateway.envoy.process import STAT_PREFIX
from fairlead.gateway.envoy.routes import CHUNKED, CORS, LARGE, RECEIVED, local_replies, noted, route_config
from fairlead.gateway.envoy.uploads import bound, discard
from fairlead.gateway.ext_proc import LB_NAMESPACE

#: Request headers that are removed *at entry*, before routing and before the scheduler: headers that name a machine.
#: Only the scheduler may set them, and what it sets is added later.
AT_ENTRY: tuple[str, ...] = tuple(sorted(CONTROL_HEADERS))

# What Envoy reports about each request: to the scheduler (ALS), and to the operator (a JSON line).

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
    for cluster in als(options):
        logs += [_als(options, cluster, SUMMARY_TAG, SUMMARY), _uploads_log(options, cluster)]
    if options.access_log:
        kind, where = "access_loggers.file.v3.FileAccessLog", {"path": options.access_log}
        if options.access_log == "-":
            kind, where = "access_loggers.stream.v3.StdoutAccessLog", {}
        logs.append(extension("envoy.access_loggers.lines", kind, **where, log_format={"json_format": LINE}))
    return logs


def _als(options: Options, cluster: str, tag: str, value: str) -> Json:
    """The access log for the scheduler. The lease is read from dynamic metadata, so the model server need not get it in
    a header. A single tag contains all that the scheduler reads, because parsing an entry field by field would cost the
    scheduler more than the decision."""
    common = {
        "log_name": tag,
        "transport_api_version": "V3",
        "buffer_flush_interval": seconds(options.als_interval),
        "buffer_size_bytes": 65_536,
        "grpc_service": {"envoy_grpc": {"cluster_name": cluster}},
        "custom_tags": [{"tag": tag, "value": value}],
    }
    kind = "access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
    return extension("envoy.access_loggers.http_grpc", kind, common_config=common)


def _uploads_log(options: Options, cluster: str) -> Json:
    flags = {"response_flag_filter": {"flags": list(UPLOAD_ENDS)}}
    return {
        **_als(options, cluster, UPLOAD_TAG, UPLOAD),
        "filter": {"or_filter": {"filters": [flags, noted(REFUSED_UPLOAD)]}},
    }


# The HTTP filters of the gateway: how requests reach the scheduler, and what the scheduler sees of responses.
#
# Request mode `whole`. The buffer filter precedes ext_proc and passes nothing on until the request is complete.
# ext_proc then sends headers and body without waiting in between, so the scheduler gets both in one read and answers
# both in one write. ext_proc's own BUFFERED mode (`buffered`) sends the body only after the headers are answered: one
# more round trip. Both keep the request until it is answered, so both can fail open. Rules for the scheduler under
# `whole`:
#
# * The first body message is the whole body, even if it does not say end of stream (then trailers follow, which are not
#   sent). Waiting for the end of the stream would never end.
# * The answers to headers and body are sent in one write. No timeout of Envoy's applies between the two.
# * A body is replaced in the answer to the headers (CONTINUE_AND_REPLACE), because one message cannot be applied in
#   part.
# * A first message whose protocol_config has request body mode NONE is an upgrade: pick at the headers.
#
# Response: with a STREAMED body, Envoy keeps every chunk until it is answered, so the scheduler may leave, or die, at
# any moment. Without the headers message, the first chunk is the first message, and has the status in its attributes.

_FORWARDED = sorted({*READ_HEADERS, GATEWAY_ID, GRPC_STATUS, ":status"})

#: Response mode -> (headers, body).
_RESPONSE = {
    "first-chunk": ("SKIP", "STREAMED"),
    "headers": ("SEND", "NONE"),
    "none": ("SKIP", "NONE"),
    "full": ("SEND", "STREAMED"),
}


#: Bytes of large uploads that the scheduler reads in a second, at least.
_SLOWEST_BYTES_S = 8 << 20
#: With `fail_open` off, unscheduled requests fail. A scheduler that ends has a successor, or starts again, within two
#: seconds. Until then the request retries, with the other scheduler if there is one.
#: Thirty pauses of 0.125 s on average end before Envoy's timeout, which starts with the first attempt: the answer is
#: 503, not 504.
_ASK_AGAIN_S = 5.0
_ASK_AGAIN = {
    "retry_on": "connect-failure,refused-stream,reset,unavailable",
    "num_retries": 30,
    "retry_back_off": {"base_interval": "0.05s", "max_interval": "0.25s"},
    "retry_host_predicate": OTHER_HOSTS,
    "host_selection_retry_max_attempts": 3,
}


def http_filters(options: Options) -> list[Json]:
    """The filters for ordinary requests."""
    filters = [_received(), {**_ext_proc(options, "BUFFERED"), "disabled": True}, router()]
    if options.request_mode == "whole":
        kind = "filters.http.buffer.v3.Buffer"
        buffer = extension("envoy.filters.http.buffer", kind, max_request_bytes=options.body_limit)
        # The router keeps what it may have to send again in the same place where ext_proc keeps what it has to pass on.
        # With request trailers, ext_proc passes the body on twice, and the model server would get it twice (measured,
        # 1.40): the bytes after the first would be read as its next request. A second buffer makes the router see each
        # body once.
        buffer_again = {**buffer, "name": "envoy.filters.http.buffer.again"}
        scheduled = {**_ext_proc(options, "STREAMED"), "disabled": True}
        filters = [buffer, _received(), scheduled, buffer_again, router()]
    return filters


def _patient(options: Options) -> Options:
    """For large uploads. Envoy's time begins before a body is sent to the scheduler, which reads one after the other:
    eight of 20 MB at once took more than a second and bypassed it (measured, 1.40)."""
    patience = options.message_timeout + options.body_limit / _SLOWEST_BYTES_S
    return replace(options, message_timeout=min(patience, options.queue_timeout))


def upgrade_filters(options: Options) -> list[Json]:
    """The filters for upgrades (WebSocket): there is no body to wait for, and later data is not inspected."""
    filter_ = _ext_proc(options, "NONE")
    mode = filter_["typed_config"]["processing_mode"]
    mode["response_header_mode"], mode["response_body_mode"] = "SKIP", "NONE"
    return [_received(), filter_, router()]


def _cors(options: Options) -> list[Json]:
    """The filter that answers browsers' questions, and adds to all answers what lets pages read them (`routes`). It
    comes before the filters for keys: a browser never sends one with its question."""
    return [extension(CORS, "filters.http.cors.v3.Cors")] if options.allowed_origins else []


def _received() -> Json:
    """Marks the request as received: other deadlines apply from now on (`routes`)."""
    value = {"text_format_source": {"inline_string": "1"}}
    note = {"object_key": RECEIVED, "factory_key": "envoy.string", "format_string": value}
    kind = "filters.http.set_filter_state.v3.Config"
    name = "envoy.filters.http.set_filter_state"
    return extension(name, kind, on_request_headers=[note], clear_route_cache=True)


def router() -> Json:
    return extension("envoy.filters.http.router", "filters.http.router.v3.Router", suppress_envoy_headers=True)


def _ext_proc(options: Options, body_mode: str) -> Json:
    headers, body = _RESPONSE[options.response_mode]
    whole_body = body_mode == "STREAMED"
    announced = [RESIZABLE_METADATA] + [WHOLE_BODY_METADATA] * whole_body + [ACCESS_LOG_METADATA] * bool(options.als)
    grpc: Json = {"envoy_grpc": {"cluster_name": EXT_PROC, "authority": "fairlead"}}
    grpc["initial_metadata"] = [{"key": key, "value": "1"} for key in announced]
    if not options.fail_open:
        grpc["retry_policy"] = _ASK_AGAIN
    config: Json = {
        "grpc_service": grpc,
        "failure_mode_allow": options.fail_open,
        "status_on_error": {"code": "ServiceUnavailable"},
        "message_timeout": seconds(max(options.message_timeout, 0.0 if options.fail_open else _ASK_AGAIN_S)),
        # Without a maximum, Envoy ignores the scheduler's requests for more time.
        "max_message_timeout": seconds(options.queue_timeout),
        # A length that no longer fits the body would shift every later request of the upstream connection. So the
        # scheduler changes bodies only together with their length.
        "allow_content_length_header": True,
        # Other headers are not needed, and would have to be written, sent and read for every request.
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
        config["mutation_rules"] = {"allow_envoy": True}  # its headers say which request may be retried, and when
    if whole_body:
        config["send_body_without_waiting_for_header_response"] = True
    if headers == "SKIP" and body != "NONE":
        config["response_attributes"] = ["response.code", ATTEMPTS, ANSWERED_BY]
    return extension("envoy.filters.http.ext_proc", "filters.http.ext_proc.v3.ExternalProcessor", **config)


# `build(options)`: Envoy's bootstrap as plain data, for Envoy 1.40; reasons: tests/integration/pitfalls/README.md.
#
# The path of a request: headers that name machines are removed → (buffer) → ext_proc queries the scheduler → the route
# is chosen by the metadata of its answer → that endpoint, or round robin over the pool if there was no answer.

#: Size of one connection's buffers. Bodies have their own limit.
_CONNECTION_BUFFER = 32_768
#: Header lines of a request, at most, and more than the gateway adds to them before the second listener.
_HEADERS, _ADDED = 200, 20
#: Internal clients may set Envoy's own controls (x-envoy-upstream-rq-timeout-ms, x-envoy-retry-on, …), and if no range
#: is named, Envoy considers all private addresses internal. No client has the broadcast address.
_NO_INTERNAL_CLIENTS = {"unix_sockets": False, "cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]}
#: nginx and others speak HTTP/1.0 toward upstreams by default. It need not name a host. The last option: an answer with
#: 400 does not end the connection. A request whose end is not known does, whatever the option (measured, 1.40).
_HTTP_1 = {
    "accept_http_10": True,
    "default_host_for_http_10": "localhost",
    "override_stream_error_on_invalid_http_message": True,
}
#: Added by us because Envoy itself would name its own address in the network instead of a loopback address.
_CLIENT = {"key": "x-forwarded-for", "value": "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%"}
#: Shares of the heap limit: upload timeouts are shortened from the first share on, to a tenth at the second; the
#: largest uploads are ended from the third on, and all counted ones at the fourth; requests are refused from the last.
_HEAP_HURRY, _HEAP_RESET, _HEAP_FULL = (0.50, 0.80), (0.60, 0.85), 0.95
_HURRIED_PERCENT = 10
#: While Envoy's heap is larger than this, it returns free pages immediately. Otherwise it keeps pages of which a small
#: part is in use for minutes, whatever it is configured to release in the background (measured, 1.40).
_KEPT = 32 << 20
#: Envoy's allocator caches freed blocks per thread and, between threads, per size. It releases the second kind only in
#: a thread that runs if it is configured to release something in the background. 1 KiB a second is too little to
#: matter. Without it, 6 MiB were left in these caches a minute after large uploads (measured, 1.40).
_MEMORY = {"soft_memory_limit_bytes": _KEPT, "bytes_to_release": 1024, "memory_release_interval": "1s"}
#: The largest regular expressions, in RE2's own unit; that of paths takes about 400.
_RUNTIME = {"re2.max_program_size.error_level": 10_000, "re2.max_program_size.warn_level": 10_000}
#: Uploads are counted from 2 ** this number of bytes on.
_COUNTED_FROM = LARGE.bit_length() - 1


def build(options: Options) -> Json:
    """The bootstrap. Raises `ConfigError` for contradictory options."""
    options.check()
    listeners = [_listener(options)] + [_uploads(options)] * (options.request_mode == "whole")
    bootstrap: Json = {
        "node": {"id": "fairlead", "cluster": "fairlead"},
        "static_resources": {"listeners": listeners, "clusters": clusters(options)},
        "bootstrap_extensions": [
            extension("envoy.bootstrap.internal_listener", "bootstrap.internal_listener.v3.InternalListener")
        ],
        "layered_runtime": {"layers": [{"name": "fairlead", "static_layer": _RUNTIME}]},
        "overload_manager": _overload(options),
        "memory_allocator_manager": _MEMORY,
    }
    if secrets := static_secrets(options):
        bootstrap["static_resources"]["secrets"] = secrets
    admin = _admin(options)
    if admin is not None:
        bootstrap["admin"] = {"address": admin}
    return bootstrap


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def render(options: Options) -> str:
    """The bootstrap as YAML. It has no anchors, so that each part can be copied alone."""
    return str(yaml.dump(build(options), Dumper=_Dumper, sort_keys=False, width=120))


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
        "name": LISTENER,
        "address": {"socket_address": address},
        # With one worker, SO_REUSEPORT has no benefit, but would let a second gateway take half of the connections.
        "enable_reuse_port": options.concurrency != 1 or options.envoys > 1,
        "per_connection_buffer_limit_bytes": _CONNECTION_BUFFER,
        "filter_chains": [{"filters": [_connection_manager(options)]}],
    }


def _uploads(options: Options) -> Json:
    """The listener that receives large uploads from the other listener, see `routes`. Not reachable from outside."""
    return {
        "name": UPLOADS,
        "internal_listener": {},
        "per_connection_buffer_limit_bytes": _CONNECTION_BUFFER,
        "filter_chains": [{"filters": [_connection_manager(options, outside=False)]}],
    }


def _connection_manager(options: Options, outside: bool = True) -> Json:
    """`outside`: for the listener that clients connect to."""
    idle = seconds(options.stream_idle_timeout)
    # The other listener has already authenticated the requests that it passes on.
    own = (_cors(options), authentication(options), upstream_token(options))
    cors, asks, token = own if outside else ([], [], [])
    scheduled = http_filters(options if outside else _patient(options))
    at_entry: list[Json] = [{"remove": name} for name in (*AT_ENTRY, *(FAIRNESS_HEADERS if asks else ()))]
    own_id = {"key": GATEWAY_ID, "value": "%UNIQUE_ID%"}
    chunked = {"key": CHUNKED, "value": "%REQ(transfer-encoding)%"}
    set_it = {"append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    at_entry += ({"append": {"header": header, **set_it}} for header in (own_id, chunked))
    at_entry += [{"append": {"header": _CLIENT, "append_action": "APPEND_IF_EXISTS_OR_ADD"}}] * outside
    config: Json = {
        "stat_prefix": STAT_PREFIX if outside else UPLOADS,
        "codec_type": "AUTO" if outside else "HTTP2",
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "server_header_transformation": "PASS_THROUGH",
        # Inside, the client is the last address in x-forwarded-for, which the other listener added.
        "use_remote_address": outside,
        "skip_xff_append": outside,
        "internal_address_config": _NO_INTERNAL_CLIENTS,
        # The path that is routed, decided and sent on must be the one that a model server understands.
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "common_http_protocol_options": {"max_headers_count": _HEADERS if outside else _HEADERS + _ADDED},
        "http_protocol_options": _HTTP_1,
        "http2_protocol_options": {
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": 65_536,
            "initial_connection_window_size": 1_048_576,
        },
        "request_headers_timeout": "30s",
        # From the first byte until the last one is sent to the model server, so the time in our queue counts too.
        "request_timeout": seconds(options.queue_timeout + 300),
        "stream_idle_timeout": idle,
        "early_header_mutation_extensions": [
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                "http.early_header_mutation.header_mutation.v3.HeaderMutation",
                mutations=at_entry,
            )
        ],
        "upgrade_configs": [
            {"upgrade_type": "websocket", "filters": [*asks, *token, *upgrade_filters(options)]},
            # A tunnel would wait in the buffer filter for a body without end. Its own chain refuses it immediately.
            {"upgrade_type": "CONNECT", "filters": [router()]},
        ],
        "local_reply_config": local_replies(options.body_limit),
        "route_config": route_config(options, outside),
        "http_filters": [*cors, *asks, *token, *bound(options, outside), *discard(options, outside), *scheduled],
    }
    logs = access_logs(options)
    if logs:
        config["access_log"] = logs
    kind = "filters.network.http_connection_manager.v3.HttpConnectionManager"
    return extension("envoy.filters.network.http_connection_manager", kind, **config)


def _overload(options: Options) -> Json:
    connections = extension(
        "envoy.resource_monitors.global_downstream_max_connections",
        "resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=options.max_connections,
    )
    manager: Json = {"refresh_interval": "0.1s", "resource_monitors": [connections]}
    if options.max_heap:
        kind = "resource_monitors.fixed_heap.v3.FixedHeapConfig"
        heap = extension("envoy.resource_monitors.fixed_heap", kind, max_heap_size_bytes=options.max_heap)
        manager["resource_monitors"].append(heap)
        manager["buffer_factory_config"] = {"minimum_account_to_track_power_of_two": _COUNTED_FROM}
        # A share, so that an answer may still be silent for hours.
        upload = {"timer": "HTTP_DOWNSTREAM_STREAM_IDLE", "min_scale": {"value": _HURRIED_PERCENT}}
        hurry = typed("envoy.config.overload.v3.ScaleTimersOverloadActionConfig", timer_scale_factors=[upload])
        manager["actions"] = [
            {**_action("reduce_timeouts", *_HEAP_HURRY), "typed_config": hurry},
            _action("reset_high_memory_stream", *_HEAP_RESET),
            _action("shrink_heap", _HEAP_RESET[0]),
            _action("stop_accepting_requests", _HEAP_FULL),
        ]
    return manager


def _action(name: str, share: float, all_of_it: float = 0.0) -> Json:
    """An overload action from `share` of the heap limit on. With `all_of_it`, it increases up to that share."""
    scaled = {"scaled": {"scaling_threshold": share, "saturation_threshold": all_of_it}}
    when = scaled if all_of_it else {"threshold": {"value": share}}
    trigger = {"name": "envoy.resource_monitors.fixed_heap", **when}
    return {"name": f"envoy.overload_actions.{name}", "triggers": [trigger]}
