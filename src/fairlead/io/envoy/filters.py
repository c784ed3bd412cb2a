"""The HTTP filters of the gateway: how requests reach the scheduler, and what it sees of responses.

Request mode `whole`. The buffer filter stands in front of ext_proc and lets nothing pass until the request is complete.
ext_proc then sends headers and body without waiting in between, so the scheduler gets both in one read, and answers
both in one write. ext_proc's own BUFFERED mode (`buffered`) sends the body when the headers are answered: one round
trip more. Both keep the request until it is answered, so both fail open. Rules for the scheduler under `whole`:

* The first body message is the whole body, also when it does not say end of stream (then trailers follow, which are
  not sent). Waiting for the end of the stream would wait for ever.
* The answers to headers and body leave in one write. Between the two no timeout of Envoy's acts.
* A body is replaced in the headers answer (CONTINUE_AND_REPLACE): one message cannot be half applied.
* A first message whose protocol_config has request body mode NONE is an upgrade: pick at the headers.

Response: a STREAMED body keeps every chunk in Envoy until it is answered, so the scheduler may leave, or die, at any
moment. Without the headers message the first chunk is the first message, and tells the status in its attributes.
"""

from typing import Any

from fairlead.io.envoy.clusters import EXT_PROC, seconds
from fairlead.io.envoy.options import Options
from fairlead.route.headers import (
    ACCESS_LOG_METADATA,
    ATTEMPTS,
    OWN_NAMESPACE,
    READ_HEADERS,
    RESIZABLE_METADATA,
    WHOLE_BODY_METADATA,
)
from fairlead.wire.access_log import GATEWAY_ID
from fairlead.wire.ext_proc import LB_NAMESPACE

Json = dict[str, Any]

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
        again = {**buffer, "name": "envoy.filters.http.buffer.again"}
        filters = [buffer, _ext_proc(options, "STREAMED"), again, router()]
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
    whole = body_mode == "STREAMED"
    announced = [RESIZABLE_METADATA] + [WHOLE_BODY_METADATA] * whole + [ACCESS_LOG_METADATA] * bool(options.als)
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
    if whole:
        config["send_body_without_waiting_for_header_response"] = True
    if headers == "SKIP" and body != "NONE":
        config["response_attributes"] = ["response.code", ATTEMPTS]
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}
