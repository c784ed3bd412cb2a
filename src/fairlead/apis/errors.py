"""Error bodies in the shape that clients of each API know.

* OpenAI and all who follow it (vLLM's and SGLang's own APIs too): `{"error": {"message", "type", "param", "code"}}`.
* Anthropic: `{"type": "error", "error": {"type", "message"}}`.
* gRPC has no error bodies. The status goes out as `grpc-status` (`grpc_status`), and the body is the bare message:
  a gateway that answers a gRPC request itself (Envoy's local replies) sends it as `grpc-message`.
"""

from msgspec.json import encode

from fairlead.core.apis import COUNT_TOKENS, GRPC, GRPC_EMBED, MESSAGES

#: `type` by status. As vLLM 0.32 names them where it answers that status itself (400, 404, 500 measured; 503 as its
#: overload reply does); the others follow the exception classes of the OpenAI client library.
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "APITimeoutError",
    409: "ConflictError",
    412: "PreconditionFailedError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

#: Anthropic's names, from its API's documentation; 529 is its status for overload.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

#: gRPC status by HTTP status. Those of the official mapping (grpc/doc/http-grpc-status-mapping.md) where it has the
#: status, but 400: what we refuse is the client's argument, not an internal error.
GRPC_STATUS = {400: 3, 401: 16, 403: 7, 404: 5, 408: 4, 409: 10, 412: 9, 413: 8, 422: 3, 429: 8, 500: 13, 501: 12}
_GRPC_UNAVAILABLE, _GRPC_UNKNOWN, _GRPC_DEADLINE = 14, 2, 4

_ANTHROPIC = frozenset((MESSAGES, COUNT_TOKENS))
_GRPC = frozenset((GRPC, GRPC_EMBED))

#: A message may quote the client; what is quoted must not make the reply long.
MAX_MESSAGE_CHARS = 2000


def error_body(
    api: str, status: int, message: str, type_: str = "", param: str | None = None, code: str | int | None = None
) -> bytes:
    """The body of an error reply, UTF-8. `api` (see `core.apis`) decides the shape; `content_type` goes with it.

    `type_` defaults to the status's own, `code` to the status as an integer, as vLLM sends it. Anthropic's shape has
    neither `param` nor `code`. Unpaired surrogates in the texts become `?`.
    """
    message = _clean(message)
    if api in _GRPC:
        return message.encode()
    if api in _ANTHROPIC:
        fallback = "api_error" if status >= 500 else "invalid_request_error"
        kind = _clean(type_) or ANTHROPIC_TYPES.get(status, fallback)
        return encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = _clean(type_) or TYPES.get(status) or ("InternalServerError" if status >= 500 else "BadRequestError")
    error = {
        "message": message,
        "type": kind,
        "param": None if param is None else _clean(param),
        "code": status if code is None else _clean(code) if isinstance(code, str) else code,
    }
    return encode({"error": error})


def content_type(api: str) -> str:
    """Of what `error_body` returns."""
    return "text/plain; charset=utf-8" if api in _GRPC else "application/json"


def grpc_status(api: str, status: int) -> int:
    """The gRPC status that goes with an HTTP status; -1 for an API that is not gRPC."""
    if api not in _GRPC:
        return -1
    if status == 504:
        return _GRPC_DEADLINE
    return GRPC_STATUS.get(status, _GRPC_UNAVAILABLE if status in (502, 503) else _GRPC_UNKNOWN)


def _clean(text: str) -> str:
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
