"""Routes: to the chosen endpoint, else to the whole pool; and how Envoy words its own errors."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fairlead.io.envoy.clusters import (
    DESTINATION_CLUSTER,
    EITHER,
    GRPC_DESTINATION,
    GRPC_EITHER,
    GRPC_POOL,
    POOL,
    seconds,
)
from fairlead.io.envoy.headers import TOWARD_UPSTREAM
from fairlead.io.envoy.options import Options
from fairlead.parse.errors import ANTHROPIC_TYPES, TYPES
from fairlead.route.headers import OWN_NAMESPACE, REWRITTEN, SECOND
from fairlead.wire.access_log import GATEWAY_ID, LEASE_KEY
from fairlead.wire.ext_proc import DESTINATION, LB_NAMESPACE

Json = dict[str, Any]

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
    chosen = [_present(DESTINATION)]
    limits = {"timeout": "0s", "idle_timeout": seconds(options.stream_idle_timeout)}
    rest: Json = {"match": {"prefix": "/"}}
    if options.fail_open:
        rest["route"] = {
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
        rest["direct_response"] = {"status": 503, "body": {"inline_string": "nobody scheduled this request"}}
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
    # A model server's name never stands in a gRPC message, so nothing is rewritten there.
    grpc = [
        _repeated(_for_grpc(picked, GRPC_DESTINATION), GRPC_EITHER),
        _for_grpc(picked, GRPC_DESTINATION),
        _for_grpc(rest, GRPC_POOL),
    ]
    return [refused, *grpc, _repeated(rewritten, EITHER), rewritten, _repeated(picked, EITHER), picked, rest]


def _repeated(route: Json, cluster: str) -> Json:
    """The same where the scheduler named a second endpoint: once, and at once."""
    named = [*route["match"]["dynamic_metadata"], _present(SECOND, OWN_NAMESPACE)]
    at_once = {"base_interval": "0.001s", "max_interval": "0.001s"}
    policy = {"retry_on": f"{_NOT_BEGUN},reset-before-request", "num_retries": 1, "retry_back_off": at_once}
    return {
        **route,
        "match": {**route["match"], "dynamic_metadata": named},
        "route": {**route["route"], "cluster": cluster, "retry_policy": policy},
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


def _replies(body: Callable[[str], Json], types: Mapping[int, str], other: str, path: str = "") -> Iterator[Json]:
    """In one shape, for requests whose path begins so; `other`: the type of any other status."""
    for status in (413, 503, 504):
        mapper: Json = {"filter": _all_of(_status(status), *_under(path), _not_ours())}
        mapper["body_format_override"] = body(types[status])
        if status == 503:
            mapper["headers_to_add"] = [{"header": {"key": "retry-after", "value": "1"}}]
        yield mapper
    yield {"filter": _all_of(*_under(path), _not_ours()), "body_format_override": body(other)}


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
