"""Error bodies in the shape that clients of the OpenAI APIs know."""

from msgspec.json import encode

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

#: A message may quote the client; what is quoted must not make the reply long.
MAX_MESSAGE_CHARS = 2000


def error_body(
    api: str, status: int, message: str, type_: str = "", param: str | None = None, code: str | int | None = None
) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` as UTF-8 JSON.

    `type_` defaults to the status's own (`TYPES`), `code` to the status as an integer, as vLLM sends it. Every API gets
    this shape at present; `api` says whose client it is. Unpaired surrogates in the texts become `?`.
    """
    if not type_:
        type_ = TYPES.get(status) or ("InternalServerError" if status >= 500 else "BadRequestError")
    error = {
        "message": _clean(message),
        "type": _clean(type_),
        "param": None if param is None else _clean(param),
        "code": status if code is None else _clean(code) if isinstance(code, str) else code,
    }
    return encode({"error": error})


def _clean(text: str) -> str:
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
