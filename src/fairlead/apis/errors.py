"""Error bodies in the shape that clients of each API expect.

* OpenAI and the APIs like it (vLLM's and SGLang's own included): `{"error": {"message", "type", "param", "code"}}`.
* Anthropic: `{"type": "error", "error": {"type", "message"}}`.
* gRPC has no error bodies. The status is sent as `grpc-status` (`grpc_status`), and the body is the bare message, which
  a gateway that answers a gRPC request itself (Envoy's local replies) sends as `grpc-message`.
"""

from msgspec.json import encode

from fairlead.core.apis import COUNT_TOKENS, GRPC, GRPC_EMBED, MESSAGES

#: `type` by status. The names are vLLM 0.32's for statuses that it sends (400, 404 and 500 measured, 503 from its
#: overload reply); the others follow the exception classes of the OpenAI client library.
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

#: gRPC status by HTTP status, from the official mapping (grpc/doc/http-grpc-status-mapping.md) where it has the HTTP
#: status. Exception: 400 is an invalid argument here, because a refused request is the client's error, not internal.
GRPC_STATUS = {400: 3, 401: 16, 403: 7, 404: 5, 408: 4, 409: 10, 412: 9, 413: 8, 422: 3, 429: 8, 500: 13, 501: 12}
_GRPC_UNAVAILABLE, _GRPC_UNKNOWN, _GRPC_DEADLINE = 14, 2, 4
#: HTTP status by gRPC status of an answer; all others are 500. The deadline is the client's. A method that a server
#: does not have is like a path that it does not have.
_HTTP_STATUS = {
    "1": 499, "3": 400, "4": 408, "5": 404, "6": 409, "7": 403, "8": 429, "9": 412, "10": 409, "11": 400, "12": 404,
    "14": 503, "16": 401,
}  # fmt: skip

_ANTHROPIC = frozenset((MESSAGES, COUNT_TOKENS))
_GRPC = frozenset((GRPC, GRPC_EMBED))

#: Limits the message: it may quote the client, and a long quote must not make the reply long.
MAX_MESSAGE_CHARS = 2000


def error_body(api: str, status: int, message: str, param: str | None = None, code: str | int | None = None) -> bytes:
    """The body of an error reply, UTF-8. `api` (see `core.apis`) decides the shape and the `content_type`.

    `code` defaults to the status as an integer, as in vLLM. Anthropic's shape has
    neither `param` nor `code`. Unpaired surrogates in the texts become `?`.
    """
    message = _clean(message)
    if api in _GRPC:
        return message.encode()
    if api in _ANTHROPIC:
        fallback = "api_error" if status >= 500 else "invalid_request_error"
        kind = ANTHROPIC_TYPES.get(status, fallback)
        return encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = TYPES.get(status) or ("InternalServerError" if status >= 500 else "BadRequestError")
    error = {
        "message": message,
        "type": kind,
        "param": None if param is None else _clean(param),
        "code": status if code is None else _clean(code) if isinstance(code, str) else code,
    }
    return encode({"error": error})


def content_type(api: str) -> str:
    """The content type of what `error_body` returns."""
    return "text/plain; charset=utf-8" if api in _GRPC else "application/json"


def grpc_status(api: str, status: int) -> int:
    """The gRPC status for an HTTP status; -1 if the API is not gRPC."""
    if api not in _GRPC:
        return -1
    if status == 504:
        return _GRPC_DEADLINE
    return GRPC_STATUS.get(status, _GRPC_UNAVAILABLE if status in (502, 503) else _GRPC_UNKNOWN)


def grpc_error(status: str) -> int:
    """The HTTP status for the `grpc-status` of an answer; 0 if it is no error, or not sent."""
    return _HTTP_STATUS.get(status, 500) if status.strip("0") else 0


def _clean(text: str) -> str:
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
