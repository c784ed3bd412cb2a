"""Prompts to token ids: a fixed chat template, and the tokeniser that takes four bytes for a token.

Every part of a rendered conversation is padded to whole tokens. So the tokens of a conversation are a prefix of the
tokens of the same conversation with a turn more, and an answer has the same tokens when it comes back as when it was
generated.
"""

import json
from typing import Any

from fairlead.engine import tokens as tk
from fairlead.stub.api_errors import ApiError, bad_value
from fairlead.stub.fields import Body

_END = b"<|end|>\n"
_ANSWER = b"assistant"


def render_chat(messages: list[Any], tools: object = None) -> bytes:
    """The prompt of a conversation, ready for the assistant's answer. Raises `ApiError` for what is no message."""
    if not messages:
        raise ApiError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = []
    if tools:
        parts += [_opening(b"tools"), _whole(_json(tools)), _END]
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_value("Each message needs a role", "messages", index)
        parts += [_opening(_utf8(message["role"])), _whole(_utf8(_content(message))), _END]
    parts.append(_opening(_ANSWER))
    return b"".join(parts)


def _opening(role: bytes) -> bytes:
    return _whole(b"<|%b|>" % role)


def _whole(data: bytes) -> bytes:
    """Padded to whole tokens with spaces, which is also how generated text ends: stripping it does no harm."""
    return data + b" " * (-len(data) % tk.TOKEN_BYTES)


def _utf8(text: str) -> bytes:
    # A lone surrogate is legal in JSON and not in UTF-8.
    return text.encode("utf-8", "replace")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _content(message: Body) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        text = "".join(_part(part) for part in content)
    return text + _json(calls).decode() if calls else text


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        # Images and audio are beyond the stub; their reference stands for them, so equal ones are equal tokens.
        return text if isinstance(text, str) else _json(part).decode()
    raise bad_value("Unknown part type", "messages", type(part).__name__)


def prompts_of(value: object, vocab: int) -> tuple[list[bytes], bool]:
    """Token ids of each prompt of a completion request, and whether the client sent ids (so their number is exact).

    A prompt is a string, a list of ids, or a list of either. Raises `ApiError`.
    """
    if isinstance(value, str):
        return [_text_tokens(value)], False
    if not isinstance(value, list) or not value:
        raise _no_prompt()
    if all(type(item) is int for item in value):
        return [id_tokens(value, vocab)], True
    if all(isinstance(item, str) for item in value):
        return [_text_tokens(item) for item in value], False
    if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in value):
        return [id_tokens(item, vocab) for item in value], True
    raise _no_prompt()


def _no_prompt() -> ApiError:
    return ApiError("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt")


def _text_tokens(text: str) -> bytes:
    if not text:
        raise _no_prompt()
    return tk.encode(_utf8(text))


def id_tokens(ids: list[int], vocab: int) -> bytes:
    """Raises `ApiError` for ids outside of the vocabulary."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab:
        raise ApiError(f"Token id {high if high >= vocab else low} is out of vocabulary")
    return tk.from_ids(ids)
