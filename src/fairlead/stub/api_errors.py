"""Error answers in the two shapes that vLLM 0.32 has: its own `{"error": …}` and the router's `{"detail": …}`."""

import json

BAD_REQUEST = "BadRequestError"
#: What request validation (pydantic) and the queue limit call themselves.
VALIDATION = "Bad Request"
UNAVAILABLE = "Service Unavailable"

_TYPES = {
    400: BAD_REQUEST,
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: UNAVAILABLE,
}

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
SCALE_OUT = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class ApiError(Exception):
    """The request gets this answer instead."""

    def __init__(self, message: str, status: int = 400, kind: str = "", param: str | None = None) -> None:
        self.message = message
        self.status = status
        self.kind = kind or _TYPES.get(status, "InternalServerError")
        self.param = param
        super().__init__(message)

    def body(self) -> bytes:
        return json.dumps(self._fields(), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")

    def event(self) -> bytes:
        """The same as a server-sent event; inside a stream the real server serialises with spaces."""
        return b"data: %b\n\n" % json.dumps(self._fields()).encode()

    def _fields(self) -> dict[str, dict[str, str | int | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


class Invalid(ApiError):
    """Request validation failed, field by field."""

    def __init__(self, *problems: dict[str, object]) -> None:
        count = len(problems)
        lines = "".join(f"\n  {problem}" for problem in problems)
        message = f"{count} validation error{'s' if count > 1 else ''}:{lines}"
        super().__init__(message, 400, VALIDATION, str(problems[0]["loc"]))


def bad_value(message: str, param: str, value: object) -> ApiError:
    """A value that has the right type and makes no sense."""
    return ApiError(f"{message} (parameter={param}, value={value})", param=param)


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(f"The model `{name}` does not exist. Valid aliases: {served}.", 404, param="model")


def too_long(limit: int, tokens: int, counted: bool) -> ApiError:
    """A prompt beyond the context length. Text is tokenised only as far as needed, so its length is a lower bound."""
    shown = tokens if counted else limit + 1
    least = "" if counted else "at least "
    return ApiError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {least}{shown} input"
        " tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input"
        f" prompt. (parameter=input_tokens, value={shown})",
        param="input_tokens",
    )
