"""Render the prompts of gpt-oss, which vLLM writes in OpenAI's "harmony" format without a chat template.

    <|start|>system<|message|>…<|end|><|start|>developer<|message|># Instructions…<|end|><|start|>user<|message|>…

Rules
* If the first message has the role `system` or `developer`, it is the instructions. Later messages of these roles are
  developer messages.
* An assistant's reasoning goes to the channel `analysis` and is dropped before the last final answer. Tool calls go to
  `commentary`, answers to `final`.
* Tool definitions, which become TypeScript, are left to the engine. So are texts with a special token in them, which
  the engine encodes as plain text.

Source: vLLM 0.32 (`entrypoints/openai/parser/harmony_utils.py`) and openai-harmony 0.0.10.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from fairlead.apis.tokens.chats import ChatFields
from fairlead.apis.tokens.pieces import FIELDS, MEDIA, TEMPLATE, Absent

#: The `model_type` in a model's `config.json`.
MODEL_TYPE = "gpt_oss"
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_SPECIAL = re.compile(
    r"<\|(?:startoftext|endoftext|reserved_\d+|return|constrain|channel|start|end|message|call|endofprompt)\|>"
).search
_EFFORTS = ("low", "medium", "high")
_JSON = "<|channel|>commentary json"
_ANALYSIS, _FINAL = "assistant<|channel|>analysis", "assistant<|channel|>final"


class Harmony:
    """Renders chats of gpt-oss. `now` gives the date of the system message."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now

    def render(self, fields: ChatFields) -> str:
        """The text of the prompt. Raises `Absent`."""
        if fields.tools or not fields.plain:
            raise Absent(FIELDS, "tools of gpt-oss are written out by the engine")
        effort = "medium" if fields.reasoning_effort is None else fields.reasoning_effort
        if effort not in _EFFORTS:
            raise Absent(FIELDS, "an effort that gpt-oss does not have")
        date = self._now().strftime("%Y-%m-%d")
        system = f"{_IDENTITY}\nCurrent date: {date}\n\nReasoning: {effort}\n\n{_CHANNELS}"
        said = [("system", system), *_instructions(fields.messages[:1])]
        names = _names_of_calls(fields.messages)
        for message in fields.messages[1 if _is_instruction(fields.messages[:1]) else 0 :]:
            said += _message(message, names)
        last = max((place for place, (header, _) in enumerate(said) if header == _FINAL), default=-1)
        kept = [(header, text) for place, (header, text) in enumerate(said) if place > last or header != _ANALYSIS]
        return "".join(map(_written, kept)) + "<|start|>assistant"


#: Header and text of a message.
Said = tuple[str, str]


def _written(said: Said) -> str:
    header, text = said
    return f"<|start|>{header}<|message|>{text}{'<|call|>' if header.endswith(_JSON) else '<|end|>'}"


def _is_instruction(first: list[Any]) -> bool:
    return bool(first) and isinstance(first[0], dict) and first[0].get("role") in ("system", "developer")


def _instructions(first: list[Any]) -> list[Said]:
    if not _is_instruction(first):
        return []
    text = _joined(first[0].get("content"))
    return [_developer(text)] if text else []


def _developer(text: str) -> Said:
    return "developer", f"# Instructions\n\n{text}"


def _names_of_calls(messages: list[Any]) -> dict[Any, str]:
    calls = [call for message in messages if isinstance(message, dict) for call in _calls(message)]
    return {str(call.get("id")): str(call["function"].get("name")) for call in calls}


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Absent(TEMPLATE, "'tool_calls' is not a list")
    return calls


def _message(message: Any, names: Mapping[Any, str]) -> list[Said]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise Absent(TEMPLATE, "a message is not an object with a role")
    content, thought = message.get("content"), message.get("reasoning") or message.get("reasoning_content")
    if role == "tool":
        name = names.get(str(message.get("tool_call_id")), "")
        return [(f"functions.{name}<|channel|>commentary to=assistant", _joined(content) or "")]
    if role in ("system", "developer"):
        text = _joined(content)
        return [] if text is None else [_developer(text)]
    if role != "assistant":
        return [(role, _joined(content) or "")]
    thoughts = [(_ANALYSIS, _plain(thought))] if thought else []
    text = _joined(content)
    calls = _calls(message)
    if calls:
        spoken = [("assistant<|channel|>commentary", text)] if text else []
        return [*spoken, *thoughts, *map(_call, calls)]
    return [*thoughts, *([(_FINAL, text)] if text else [])]


def _call(call: Mapping[str, Any]) -> Said:
    function = call["function"]
    header = f"assistant to=functions.{function.get('name', '')}{_JSON}"
    return header, _plain(function.get("arguments") or "")


def _joined(content: Any) -> str | None:
    """The joined texts of a message's content; `None` = it has none."""
    if not isinstance(content, list):
        return None if content is None else _plain(content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
            raise Absent(MEDIA, "a part that is not text")
        texts.append(_plain(part.get("text") or ""))
    return "".join(texts) if texts else None


def _plain(text: Any) -> str:
    if not isinstance(text, str):
        raise Absent(TEMPLATE, "a text was expected")
    if _SPECIAL(text):
        raise Absent(FIELDS, "a text with a special token in it")
    return text
