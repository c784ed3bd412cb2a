"""Envoy's routes: which requests are allowed, where they go, and the text of Envoy's own errors."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from fairlead.apis.errors import ANTHROPIC_TYPES, TYPES
from fairlead.core.apis import ANYWHERE, EXACT
from fairlead.core.headers import DESTINATION, FALLBACK, OWN_NAMESPACE, REWRITTEN, STEERING_HEADERS
from fairlead.gateway.access_log import GATEWAY_ID, REFUSED_UPLOAD
from fairlead.gateway.envoy.authentication import JWT, KEYS, NAMED
from fairlead.gateway.envoy.clusters import (
    ATTEMPT,
    DESTINATION_CLUSTER,
    EITHER,
    GRPC_DESTINATION,
    GRPC_EITHER,
    GRPC_POOL,
    OTHER_HOSTS,
    POOL,
    UPLOADS,
    seconds,
)
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.parts import Json, extension, typed
from fairlead.gateway.envoy.uploads import BOUND, DISCARD, DISCARDED, TOO_LARGE, WHY, bound
from fairlead.gateway.ext_proc import LB_NAMESPACE, LEASE_KEY

#: Headers removed before the model server: those that only the scheduler reads, and the destination, which this gateway
#: takes from metadata. Headers that name a machine were already removed at entry.
TOWARD_UPSTREAM: tuple[str, ...] = (DESTINATION, *sorted(STEERING_HEADERS))

# The allowed paths: those of inference, and those in the configuration. Model servers have others on the same port that
# put them to sleep or load adapters.

_HEALTH = "/health"
#: Allowed paths besides the APIs that Fairlead reads: stored responses and conversations, a single model, health.
_MORE = (r"(?:/.*)?/v1/(?:models/.+|(?:responses/resp|conversations/conv)_.+)", _HEALTH)


def let_in(paths: tuple[str, ...]) -> str:
    """The regular expression (RE2) of allowed paths. `paths`: further ones; `*` at the end stands for anything."""
    anywhere = "|".join(map(re.escape, ANYWHERE))
    elsewhere = [re.escape(path) for path in EXACT if path not in ANYWHERE]
    named = [re.escape(path.removesuffix("*")) + ".*" * path.endswith("*") for path in paths]
    return "|".join((f"(?:/.*)?(?:{anywhere})/?", *(f"{path}/?" for path in elsewhere), *_MORE, *named))


# While a request is received, deadlines apply that end when it is complete: a filter after the buffer then sets a mark
# and has the route chosen again. The routes before and after differ in their deadlines.
#
# Envoy ends the largest uploads when memory is short, but only those over HTTP/2 (measured, 1.40: it does not count
# what HTTP/1.1 sends). So bodies that may become large are passed on inside this Envoy, as HTTP/2, to a second listener
# with the same filters (`config.build`).

#: The mark set by that filter.
RECEIVED = "fairlead.received"
#: Bodies of at least this size, and those of unknown size, go to the second listener.
LARGE = 256 << 10
#: Header in which this Envoy records at entry that the size is unknown, because routes do not see `transfer-encoding`.
CHUNKED = "x-fairlead-chunked"
#: Request bodies up to (bytes) must be complete after (seconds). A large one needs at least 218 kB/s.
TOTAL = ((LARGE, 30.0), (8 << 20, 60.0))
TOTAL_REST = 300.0
#: Filters that wait for the body or pass it on.
RECEIVING = (
    "envoy.filters.http.buffer",
    "envoy.filters.http.set_filter_state",
    "envoy.filters.http.ext_proc",
    "envoy.filters.http.buffer.again",
)
#: A body over HTTP/2 need not be announced. If one arrives nevertheless, no more than a connection's buffer is kept.
_NO_BODY = typed("envoy.extensions.filters.http.buffer.v3.BufferPerRoute", buffer={"max_request_bytes": 1})
#: The name of the filter for browsers (CORS).
CORS = "envoy.filters.http.cors"
_FILTER = "envoy.config.route.v3.FilterConfig"
_OFF, _ON = typed(_FILTER, disabled=True), typed(_FILTER, config={})
#: A cluster that does not exist. Its routes refuse like a direct response, which the filter for browsers would ignore.
_NOWHERE = "none"
_NOT_FOUND = {"cluster": _NOWHERE, "cluster_not_found_response_code": "NOT_FOUND"}
#: Matches requests that ask for a WebSocket. With the next one, all others, also those without the header.
_SOCKET = {"name": "upgrade", "string_match": {"contains": "websocket", "ignore_case": True}}
_UNLESS = {"invert_match": True, "treat_missing_header_as_empty": True}
#: The name of the routes for bodies beyond the limit.
_TOO_LARGE = "too-large"
#: Only these routes ask the scheduler. A request that Envoy cannot parse has no route. Envoy would show the body of its
#: own answer to the scheduler, and end the connection before the scheduler passes it.
_SCHEDULED = {"envoy.filters.http.ext_proc": _ON}


def _before(options: Options, outside: bool) -> Iterator[Json]:
    """Routes of requests that are not complete yet. None is a direct response: see `_NOWHERE`."""
    allowed = {"safe_regex": {"regex": let_in(options.paths)}}
    unread = dict.fromkeys(RECEIVING, _OFF)
    limits = _limits(options)
    buffers, large = options.request_mode == "whole", options.body_limit + 1
    if outside and buffers:
        bit = {**allowed, "headers": [_length(large, large + DISCARDED)]}
        yield {"match": bit, "route": _receiving(options, TOTAL_REST), "typed_per_filter_config": {DISCARD: _ON}}
    too_large = {**allowed, "headers": [_length(large, 1 << 62)]}
    yield {"name": _TOO_LARGE, "match": too_large, "route": _NOT_FOUND, "typed_per_filter_config": unread}
    if outside and buffers:
        # A WebSocket cannot pass there: it would end the connection that all of these requests share.
        on, no_socket = {"cluster": UPLOADS, **limits}, {**_SOCKET, **_UNLESS}
        for what in (_length(LARGE, 1 << 62), {"name": CHUNKED, "present_match": True}):
            yield {"match": {**allowed, "headers": [what, no_socket]}, "route": on, "typed_per_filter_config": unread}
    if outside:
        # None of these has data that would start the longer time of the next route.
        no_post = {"name": ":method", "string_match": {"exact": "POST"}, "invert_match": True}
        none = [{"name": name, "present_match": False} for name in ("content-length", CHUNKED)]
        if options.asks_for_keys or options.jwt:
            get = {"name": ":method", "string_match": {"exact": "GET"}}
            unasked = {**_SCHEDULED, **dict.fromkeys((JWT, KEYS, NAMED), _OFF), RECEIVING[0]: _NO_BODY}
            probe = {"path": _HEALTH, "headers": [get, *none]}
            yield {"match": probe, "route": {"cluster": POOL, **limits}, "typed_per_filter_config": unasked}
        no_body = {**allowed, "headers": [no_post, *none]}
        yield {"match": no_body, "route": {"cluster": POOL, **limits}, "typed_per_filter_config": _SCHEDULED}
    least = 0
    for most, total in TOTAL:
        match = {**allowed, "headers": [_length(least, most)]}
        yield {"match": match, "route": _receiving(options, total), "typed_per_filter_config": _SCHEDULED}
        least = most
    filters = dict(_SCHEDULED)
    if outside:
        filters |= dict.fromkeys([BOUND] * bool(bound(options, outside)) + [DISCARD] * buffers, _ON)
    yield {"match": allowed, "route": _receiving(options, TOTAL_REST), "typed_per_filter_config": filters}
    yield {"match": {"prefix": "/"}, "route": _NOT_FOUND, "typed_per_filter_config": unread}


def _receiving(options: Options, total: float) -> Json:
    """The action of a route for requests being received. No request goes to its cluster."""
    deadline = {"max_stream_duration": seconds(total)}
    idle = seconds(options.receive_idle)
    return {"cluster": POOL, "timeout": "0s", "idle_timeout": idle, "max_stream_duration": deadline}


def _length(least: int, below: int) -> Json:
    return {"name": "content-length", "range_match": {"start": least, "end": below}}


def _limits(options: Options) -> Json:
    """The timeouts of complete requests."""
    idle = seconds(options.stream_idle_timeout)
    return {"timeout": "0s", "idle_timeout": idle, "max_stream_duration": {"max_stream_duration": "0s"}}


# Routes: to the chosen endpoint, otherwise to the whole pool; and the text of Envoy's own errors.

#: Retry only if the request has certainly not begun, because generating twice costs as much as twice the requests: if
#: no connection was made, nothing was written to it, or an HTTP/2 server says so (REFUSED_STREAM, RFC 9113 section
#: 8.7).
_NOT_BEGUN = "connect-failure,refused-stream"
#: Bodies up to this size are kept until the response has ended, in case they must be sent again. Requests with larger
#: bodies are not retried.
_REPEATABLE_BODY = 1 << 20
#: Refusals of the scheduler have response-code details with this prefix. They already have the right form.
_OURS = "fairlead"
#: The beginning of Envoy's reason -> status and text, in place of Envoy's, which is empty or says nothing. Requests
#: that `rbac_` denies passed the filters for keys and tokens.
_TEXTS = {
    "rbac_": (
        403,
        "the token names no tenant: its issuer has to add the claim that this gateway is configured to read",
    ),
    "cluster_not_found": (
        404,
        "this gateway does not forward this path; gateway.paths in its configuration can allow it",
    ),
    "missing_host_header": (400, "the request has no host header"),
    "path_normalization_failed": (400, "the path contains # or %00, or cannot be normalized"),
    # Beyond the limit only together with the headers that the gateway adds itself.
    "header_mutation_result_exceeds_limit": (431, "the request has too many headers"),
    "upgrade_failed": (403, "this gateway upgrades connections to WebSocket only"),
    # Of a scheduler that hangs, Envoy itself says 504, as if the model server had the request.
    "ext_proc_error": (503, "the gateway's scheduler does not answer, and nothing else may choose an endpoint"),
}
_RETRY_SOON: Json = {
    "headers_to_add": [{"header": {"key": "retry-after", "value": "1"}}],
}


def route_config(options: Options, outside: bool = True) -> Json:
    """`outside`: for the listener that clients connect to, not the one for large uploads."""
    host: Json = {"name": "all", "domains": ["*"], "routes": _routes(options, outside)}
    if outside and options.allowed_origins:
        host |= _cors(options.allowed_origins)
    if options.request_mode == "buffered":
        # Raises only the limit for bodies; the listener's buffers stay small.
        host["request_body_buffer_limit"] = options.body_limit
    made: Json = {"name": "gateway", "virtual_hosts": [host], "validate_clusters": False}
    if options.decision_header:
        # Added by the gateway from the metadata of the pick, so that the scheduler need not see the response.
        value = f"%DYNAMIC_METADATA({LB_NAMESPACE}:{LEASE_KEY})%"
        header = {"key": options.decision_header, "value": value}
        made["response_headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    return made


def _cors(origins: tuple[str, ...]) -> Json:
    """Which pages may use the gateway. What model servers say of that is removed: their default lets all pages in."""
    policy = {
        "allow_origin_string_match": [{"exact": origin} for origin in origins],
        "allow_methods": "GET, POST, DELETE",
        # `*` does not include this one (Fetch standard, 4.8).
        "allow_headers": "authorization, *",
        "expose_headers": "*",
        # Some browsers ask this before a public page may use a gateway in a private network.
        "allow_private_network_access": True,
        "max_age": "600",
        "forward_not_matching_preflights": False,
    }
    removed = ["access-control-allow-origin", "access-control-allow-credentials"]
    vary = {"header": {"key": "vary", "value": "origin"}}
    return {
        "typed_per_filter_config": {CORS: typed("envoy.extensions.filters.http.cors.v3.CorsPolicy", **policy)},
        "response_headers_to_remove": removed,
        "response_headers_to_add": [vary],
    }


def _routes(options: Options, outside: bool) -> list[Json]:
    """The routes. The scheduler's answer contains the destination as metadata and has the route chosen again."""
    chosen = [_present(DESTINATION)]
    limits = _limits(options)
    received = {"key": RECEIVED, "string_match": {"exact": "1"}}
    removed = [*TOWARD_UPSTREAM, CHUNKED]
    unscheduled: Json = {"match": {"prefix": "/", "filter_state": [received]}, "request_headers_to_remove": removed}
    if options.fail_open:
        retry = {"retry_on": _NOT_BEGUN, "num_retries": 2, "retry_host_predicate": OTHER_HOSTS}
        unscheduled["route"] = {"cluster": POOL, **limits, "retry_policy": retry}
    else:
        unscheduled["direct_response"] = {"status": 503, "body": {"inline_string": "this request was not scheduled"}}
    picked: Json = {
        "match": {"prefix": "/", "dynamic_metadata": chosen},
        "route": {"cluster": DESTINATION_CLUSTER, **limits},
        # Other routes keep it: the access log uses it to identify requests without a lease.
        "request_headers_to_remove": [*removed, GATEWAY_ID],
    }
    # The response will be changed, and ext_proc does not see its headers, so its length must be removed beforehand.
    rewritten = {
        **picked,
        "match": {"prefix": "/", "dynamic_metadata": [*chosen, _present(REWRITTEN)]},
        "response_headers_to_remove": ["content-length"],
    }
    text = {"inline_string": "this gateway is no proxy for CONNECT"}
    refused: Json = {"match": {"connect_matcher": {}}, "direct_response": {"status": 405, "body": text}}
    # "upgrade: CONNECT" takes the filter chain of CONNECT, which asks for no key, but is not CONNECT for the matcher.
    upgrade = {"name": "upgrade", "string_match": {"contains": "connect", "ignore_case": True}}
    disguised: Json = {**refused, "match": {"prefix": "/", "headers": [upgrade]}}
    disguised["typed_per_filter_config"] = {RECEIVING[2]: _OFF}
    repeated = partial(_repeated, hedge=options.retry == "hedge")
    # A gRPC message never contains a model server's name, so nothing is rewritten there.
    grpc = [
        repeated(_for_grpc(picked, GRPC_DESTINATION), GRPC_EITHER),
        _for_grpc(picked, GRPC_DESTINATION),
        _for_grpc(unscheduled, GRPC_POOL),
    ]
    picks = [repeated(rewritten, EITHER), rewritten, repeated(picked, EITHER), picked]
    discarded = {"prefix": "/", "dynamic_metadata": [_present(TOO_LARGE, OWN_NAMESPACE)]}
    too_large = {"name": _TOO_LARGE, "match": discarded, "route": _NOT_FOUND}
    foreign = _foreign_sockets(options.allowed_origins) if outside else ()
    made = [refused, disguised, *foreign, _too_much(), too_large, *grpc, *picks, unscheduled]
    return [*made, *_before(options, outside)]


def _foreign_sockets(origins: tuple[str, ...]) -> Iterator[Json]:
    """The route that refuses WebSockets to pages of other origins: browsers ask nothing before they open one."""
    if origins and "*" not in origins:
        page = {"name": "origin", "present_match": True}
        foreign = [{"name": "origin", "string_match": {"exact": origin}, "invert_match": True} for origin in origins]
        text = {"inline_string": "pages of this origin may not use the gateway; gateway.allowedOrigins can allow it"}
        yield {
            "match": {"prefix": "/", "headers": [_SOCKET, page, *foreign]},
            "direct_response": {"status": 403, "body": text},
            "typed_per_filter_config": {RECEIVING[2]: _OFF},
        }


def _too_much() -> Json:
    """The route of uploads whose rest was discarded (`uploads`)."""
    return {
        "match": {"prefix": "/", "dynamic_metadata": [_present(REFUSED_UPLOAD, OWN_NAMESPACE)]},
        "direct_response": {"status": 429, "body": {"inline_string": WHY}},
        "typed_per_filter_config": dict.fromkeys(RECEIVING, _OFF),
    }


def _repeated(route: Json, cluster: str, hedge: bool) -> Json:
    """The route with one immediate retry, if the scheduler named a fallback endpoint. Headers of the scheduler's answer
    say which requests may be retried after they have begun (`answers.Answers.retry_headers`)."""
    named = [*route["match"]["dynamic_metadata"], _present(FALLBACK, OWN_NAMESPACE)]
    at_once = {"base_interval": "0.001s", "max_interval": "0.001s"}
    retry_on = f"{_NOT_BEGUN},reset-before-request"
    policy: Json = {"retry_on": retry_on, "num_retries": 1, "retry_back_off": at_once}
    action = {**route["route"], "cluster": cluster, "retry_policy": policy}
    if hedge:
        action["hedge_policy"] = {"hedge_on_per_try_timeout": True}
        # There is no third attempt. But what would be retried does not win while the other attempt may be answered.
        policy["retry_on"] = f"{retry_on},retriable-headers"
        policy["retriable_headers"] = [{"name": ATTEMPT, "string_match": {"exact": "429 2"}}]
    return {
        **route,
        "response_headers_to_remove": [*route.get("response_headers_to_remove", ()), ATTEMPT],
        "match": {**route["match"], "dynamic_metadata": named},
        "route": action,
        "request_body_buffer_limit": _REPEATABLE_BODY,
    }


def _for_grpc(route: Json, cluster: str) -> Json:
    """The route for requests of content type `application/grpc`."""
    made = {**route, "match": {**route["match"], "grpc": {}}}
    if "route" in made:
        made["route"] = {**made["route"], "cluster": cluster}
    return made


def _present(key: str, namespace: str = LB_NAMESPACE) -> Json:
    """Matches if the request's metadata has this key; in the default namespace, from the scheduler's answer."""
    return {"filter": namespace, "path": [{"key": key}], "value": {"present_match": True}}


def local_replies(body_limit: int) -> Json:
    """Envoy's own errors in the format of the OpenAI APIs, or of the Anthropic API by its path; for gRPC the text
    alone, which Envoy sends as `grpc-message`."""
    replies = partial(_replies, body_limit)
    grpc = replies(_grpc_text, {}, "", _where("content-type", "application/grpc.*"))
    messages = _where(":path", "[^?]*/v1/messages([/?].*)?")
    anthropic = replies(_anthropic_body, ANTHROPIC_TYPES, "api_error", messages)
    return {"mappers": [*grpc, *anthropic, *replies(_body, TYPES, "GatewayError")]}


def _replies(
    body_limit: int, body: Callable[[str], Json], types: Mapping[int, str], fallback_type: str, *where: Json
) -> Iterator[Json]:
    """Errors in one format, for requests that pass these filters. `fallback_type`: for any other status."""
    too_large = (413, f"the request body is larger than {body_limit} bytes")
    tests = [
        (_details(f"startsWith('cluster_') && xds.route_name == '{_TOO_LARGE}'"), too_large),
        (_details("startsWith('request_payload_too_large')"), too_large),
        # The scheduler saw what was left of a discarded body, and may have refused that as broken.
        (noted(TOO_LARGE), too_large),
        *((_details(f"startsWith('{reason}')"), reply) for reason, reply in _TEXTS.items()),
    ]
    for test, (status, text) in tests:
        denied: Json = {"filter": _all_of(*where, test), "status_code": status}
        form = body(types.get(status, fallback_type))
        later = _RETRY_SOON if status == 503 else {}
        yield {**denied, "body": {"inline_string": text}, "body_format_override": form, **later}
    for status in (401, 403, 404, 408, 413, 429, 503, 504):
        mapper: Json = {"filter": _all_of(_status(status), *where, _not_ours())}
        mapper["body_format_override"] = body(types.get(status, fallback_type))
        yield {**mapper, **(_RETRY_SOON if status in (429, 503) else {})}
    yield {"filter": _all_of(*where, _not_ours()), "body_format_override": body(fallback_type)}


def _body(type_: str) -> Json:
    error = {"message": "%LOCAL_REPLY_BODY%", "type": type_, "param": None, "code": "%RESPONSE_CODE%"}
    return {"json_format": {"error": error}, "content_type": "application/json"}


def _anthropic_body(type_: str) -> Json:
    error = {"type": "error", "error": {"type": type_, "message": "%LOCAL_REPLY_BODY%"}}
    return {"json_format": error, "content_type": "application/json"}


def _grpc_text(_: str) -> Json:
    return {"text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"}}


def _where(header: str, pattern: str) -> Json:
    match = {"safe_regex": {"regex": pattern}}
    return {"header_filter": {"header": {"name": header, "string_match": match}}}


def _status(status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"fairlead.local_reply.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def noted(key: str) -> Json:
    """A filter of logs and local replies: our scripts noted this key of `OWN_NAMESPACE` for the request."""
    return {"metadata_filter": {"matcher": _present(key, OWN_NAMESPACE), "match_if_key_not_found": False}}


def _not_ours() -> Json:
    return _details(f"startsWith('{_OURS}')", "!")


def _details(test: str, negated: str = "") -> Json:
    """A CEL test of the reason why Envoy itself answers."""
    name, kind = "envoy.access_loggers.extension_filters.cel", "access_loggers.filters.cel.v3.ExpressionFilter"
    return {"extension_filter": extension(name, kind, expression=f"{negated}response.code_details.{test}")}


def _all_of(*filters: Json) -> Json:
    return {"and_filter": {"filters": list(filters)}} if len(filters) > 1 else filters[0]
