"""Fields of a JSON body with the checks of the real server, and its error answers, in the form of vLLM 0.32."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

BAD_REQUEST = "BadRequestError"
#: Error types of request validation (pydantic) and of the queue limit.
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


def encoded(value: object) -> bytes:
    """Compact JSON. Lone surrogates become '?', because bytes must be UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


class ApiError(Exception):
    """An error answer to a request."""

    def __init__(self, message: str, status: int = 400, kind: str = "", param: str | None = None) -> None:
        self.message = message
        self.status = status
        self.kind = kind or _TYPES.get(status, "InternalServerError")
        self.param = param
        super().__init__(message)

    def body(self) -> bytes:
        return encoded(self._fields())

    def event(self) -> bytes:
        """The error as a server-sent event. Inside a stream, the real server serializes with spaces."""
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
    """The error for a value that has the right type but an invalid value."""
    return ApiError(f"{message} (parameter={param}, value={value})", param=param)


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(f"The model `{name}` does not exist. Valid aliases: {served}.", 404, param="model")


def too_long(limit: int, tokens: int, counted: bool) -> ApiError:
    """The error for too long a prompt. `counted`: `tokens` is the exact number; otherwise the server stopped tokenizing
    at the limit and reports a lower bound."""
    shown = tokens if counted else limit + 1
    least = "" if counted else "at least "
    return ApiError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {least}{shown} input"
        " tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input"
        f" prompt. (parameter=input_tokens, value={shown})",
        param="input_tokens",
    )


# Fields of a JSON body, with the checks, coercions and messages of the real server's validation (pydantic).

Body = Mapping[str, Any]


def parse_body(body: bytes, content_type: str) -> Body:
    """The JSON object of a request. Raises `ApiError` with the real server's message."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", 400, VALIDATION
        )
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _parse_slowly(body)
    if not isinstance(value, dict):
        raise Invalid(_problem("model_attributes_type", "body", "Input should be a valid dictionary", value))
    return value


def _parse_slowly(body: bytes) -> Any:
    """Parse with the standard library, whose message and position the real server quotes, and which accepts NaN."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        msg, position = error.msg, error.pos
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        msg, position = str(error), 0
    raise Invalid(
        {
            "type": "json_invalid",
            "loc": f"body.{position}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": msg},
        }
    )


def integer(body: Body, name: str, default: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise _wrong("int_parsing", name, "integer, unable to parse string as an integer", value) from None
    if isinstance(value, float):
        raise _wrong("int_from_float", name, "integer, got a number with a fractional part", value)
    raise _wrong("int_type", name, "integer", value)


def number(body: Body, name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    try:
        if isinstance(value, (int, float, str)):
            return float(value)
    except ValueError:
        raise _wrong("float_parsing", name, "number, unable to parse string as a number", value) from None
    except OverflowError:
        pass
    raise _wrong("float_type", name, "number", value)


def boolean(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if value in (0, 1):
        return bool(value)
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise _wrong("bool_type", name, "boolean", value)


def string(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise _wrong("string_type", name, "string", value)


def mapping(body: Body, name: str) -> Body | None:
    value = body.get(name)
    if value is None or isinstance(value, dict):
        return value
    raise _wrong("model_attributes_type", name, "dictionary or object to extract fields from", value)


def array(body: Body, name: str) -> list[Any]:
    """A required list."""
    if name not in body:
        raise missing(body, name)
    value = body[name]
    if not isinstance(value, list):
        raise _wrong("list_type", name, "list", value)
    return value


def strings(body: Body, name: str) -> list[str]:
    """An optional string or list of strings."""
    value = body.get(name)
    if value is None:
        return []
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _wrong("string_type", name, "string or list of strings", value)
    return items


def missing(body: Body, name: str) -> ApiError:
    return Invalid(
        {"type": "missing", "loc": f"body.{name}", "msg": "Field required", "input": f"<dict of {len(body)} items>"}
    )


def _wrong(kind: str, name: str, expected: str, value: object) -> ApiError:
    return Invalid(_problem(kind, f"body.{name}", f"Input should be a valid {expected}", value))


def _problem(kind: str, loc: str, msg: str, value: object) -> dict[str, object]:
    if isinstance(value, (dict, list)):
        value = f"<{type(value).__name__} of {len(value)} items>"
    return {"type": kind, "loc": loc, "msg": msg, "input": value}
