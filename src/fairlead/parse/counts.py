"""Token counts and error statuses out of the JSON objects in which model servers report them."""

from typing import Any

from msgspec import DecodeError
from msgspec.json import decode as decode_json

from fairlead.model.request import Usage
from fairlead.parse.errors import ANTHROPIC_TYPES, TYPES

#: Counts above this are nonsense.
MAX_TOKENS = 2**31 - 1

#: Statuses by the name of an error's type, for errors that carry no status. vLLM puts its own names into Anthropic's
#: shape, and `internal_error` (0.32, `/v1/messages`).
_STATUS_OF_TYPE = {name: status for status, name in (*TYPES.items(), *ANTHROPIC_TYPES.items())} | {
    "overloaded_error": 503
}


def usage_of(value: Any) -> Usage | None:
    """Token counts from a usage object of OpenAI's APIs, of Anthropic's or SGLang's `meta_info`; `None` if it reports
    nothing usable.

    Anthropic's `input_tokens` are those that no cache had (vLLM 0.32 counts so too): the prompt is the sum.
    """
    if not isinstance(value, dict):
        return None
    prompt = _either(value, "prompt_tokens", "input_tokens")
    completion = _either(value, "completion_tokens", "output_tokens")
    total = tokens(value.get("total_tokens"))
    if completion < 0 and total >= prompt >= 0:
        completion = total - prompt
    if prompt < 0 and total >= completion >= 0:
        prompt = total - completion
    cached = _cached(value)
    read, created = tokens(value.get("cache_read_input_tokens")), tokens(value.get("cache_creation_input_tokens"))
    if read >= 0 or created >= 0:
        cached = max(read, 0)
        if prompt >= 0:
            prompt = min(prompt + cached + max(created, 0), MAX_TOKENS)
    if prompt < 0 and completion < 0:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def summed(values: list[Any]) -> Usage | None:
    """The usage of a batch: the sum of what its parts report."""
    parts = [usage for usage in map(usage_of, values) if usage is not None]
    if not parts:
        return None
    return Usage(
        prompt_tokens=_sum([part.prompt_tokens for part in parts]),
        completion_tokens=_sum([part.completion_tokens for part in parts]),
        cached_tokens=_sum([part.cached_tokens for part in parts]),
    )


def error_status_of(error: Any) -> int:
    """HTTP status that an error object names in `code`, `status` or by its `type`; 500 if it names none. 0 for an empty
    error."""
    if not error:
        return 0
    if isinstance(error, dict):
        for name in ("code", "status", "http_status_code"):
            status = tokens(error.get(name))
            if 400 <= status <= 599:
                return status
        kind = error.get("type")
        if isinstance(kind, str):
            return _STATUS_OF_TYPE.get(kind, 500)
    return 500


def tokens(value: Any) -> int:
    """A count from a number or a string of digits; -1 for anything else."""
    if isinstance(value, str):
        try:
            value = decode_json(value.strip(), type=int | float)
        except (DecodeError, UnicodeError):
            return -1
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        return -1
    return int(value)


def _cached(value: dict[str, Any]) -> int:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = value.get(name)
        if isinstance(details, dict):
            cached = tokens(details.get("cached_tokens"))
            if cached >= 0:
                return cached
    return tokens(value.get("cached_tokens"))


def _either(value: dict[str, Any], name: str, other: str) -> int:
    count = tokens(value.get(name))
    return count if count >= 0 else tokens(value.get(other))


def _sum(counts: list[int]) -> int:
    """-1 if nobody reports it."""
    known = [count for count in counts if count >= 0]
    return min(sum(known), MAX_TOKENS) if known else -1
