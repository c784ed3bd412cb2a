"""What a request says about sampling. The stub samples nothing, and refuses what vLLM refuses, in its words."""

from math import isfinite

from fairlead.stub import fields
from fairlead.stub.api_errors import ApiError, bad_value
from fairlead.stub.fields import Body
from fairlead.stub.logprobs import MAX_TOP
from fairlead.stub.stops import StopStrings

#: More are refused, which vLLM does not do: each costs a search of the text.
_MAX_STOPS = 32
#: In one answer, which is made while nobody else is served: about a second's work, and 60 MB.
_MAX_VALUES = 1_000_000


class Sampling:
    """Types are checked when it is made, values by `check`, as the real server does it."""

    def __init__(self, body: Body) -> None:
        self._temperature = fields.number(body, "temperature", 1.0)
        self._top_p = fields.number(body, "top_p", 1.0)
        self._top_k = fields.integer(body, "top_k", 0) or 0
        self._min_p = fields.number(body, "min_p", 0.0)
        self._presence = fields.number(body, "presence_penalty", 0.0)
        self._frequency = fields.number(body, "frequency_penalty", 0.0)
        self._repetition = fields.number(body, "repetition_penalty", 1.0)
        self._stops = fields.strings(body, "stop")
        self._include_stop = fields.boolean(body, "include_stop_str_in_output")

    def check(self) -> None:
        """Raises `ApiError`."""
        for name, penalty in (("presence_penalty", self._presence), ("frequency_penalty", self._frequency)):
            if not -2 <= penalty <= 2:
                raise ApiError(f"{name} must be in [-2, 2], got {penalty}.")
        if not isfinite(self._repetition):
            raise ApiError(f"repetition_penalty must be a finite number, got {self._repetition}.")
        if self._repetition <= 0:
            raise ApiError(f"repetition_penalty must be greater than zero, got {self._repetition}.")
        if not self._temperature >= 0:
            value = self._temperature
            raise bad_value(f"temperature must be non-negative, got {value}.", "temperature", value)
        if not 0 < self._top_p <= 1:
            raise bad_value(f"top_p must be in (0, 1], got {self._top_p}.", "top_p", self._top_p)
        if self._top_k < -1:
            raise ApiError(f"top_k must be 0 (disable), or at least 1, got {self._top_k}.")
        if not 0 <= self._min_p <= 1:
            raise ApiError(f"min_p must be in [0, 1], got {self._min_p}.")
        if not all(self._stops):
            raise ApiError("stop cannot contain an empty string.")
        if len(self._stops) > _MAX_STOPS:
            raise ApiError(f"stop can have at most {_MAX_STOPS} strings, got {len(self._stops)}.", param="stop")

    def stop_strings(self) -> StopStrings | None:
        return StopStrings(self._stops, self._include_stop) if self._stops else None


def completion_top(body: Body) -> int | None:
    """`logprobs` of /v1/completions: how many likely tokens to show; `None` = no log-probabilities."""
    top = fields.integer(body, "logprobs")
    if top is not None and top < 0:
        raise bad_value("`logprobs` must be a positive value.", "logprobs", top)
    return top


def chat_top(body: Body) -> int | None:
    """The same of /v1/chat/completions, where `logprobs` is a switch and `top_logprobs` the number."""
    wanted = fields.boolean(body, "logprobs")
    top = fields.integer(body, "top_logprobs", 0) or 0
    if top < 0:
        raise bad_value("`top_logprobs` must be a positive value.", "top_logprobs", top)
    if top and not wanted:
        message = "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)"
        raise ApiError(message, param="top_logprobs")
    return top if wanted else None


def check_top(top: int | None, tokens: int) -> None:
    """Raises `ApiError` for more likely tokens beside each of an answer's `tokens` than can be had."""
    if top is None:
        return
    if top > MAX_TOP:
        message = f"Requested sample logprobs of {top}, which is greater than max allowed: {MAX_TOP}"
        raise bad_value(message, "logprobs", top)
    if tokens * (top + 1) > _MAX_VALUES:
        raise ApiError(
            f"An answer can have at most {_MAX_VALUES:,} log-probabilities, this one could have {tokens * (top + 1):,};"
            " ask for fewer choices, output tokens or logprobs.",
            param="logprobs",
        )
