"""Messages of a request → messages as the chat template gets them, as vLLM makes the one of the other.

Only text is translated. Whatever else a content part holds has tokens that only the engine knows.
"""

import json
from collections.abc import Mapping
from typing import Any

from fairlead.tokens.content_format import PARTS
from fairlead.tokens.prompt_tokens import FIELDS, MEDIA, TEMPLATE, Absent

#: Parts whose text is under a key of that name.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
#: What a part may have beside its text and not have it passed on to the template.
_PART_FIELDS = frozenset(("type", "text", "refusal", "thinking", "uuid"))
_BILLING = "x-anthropic-billing-header"

Message = dict[str, Any]


def for_template(messages: list[Any], form: str) -> list[Message]:
    """`form`: see `content_format`. Raises `Absent`."""
    return [_message(message, form) for message in messages]


def _message(message: Any, form: str) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise Absent(TEMPLATE, "a message is no object with a role")
    parts = _parts(message.get("content"), form)
    if role == "system":
        parts = [part for part in parts if not _text(part).startswith(_BILLING)]
    translated: Message = {"role": role, "content": parts if form == PARTS else "\n".join(map(_text, parts))}
    if role == "assistant":
        _assistant(message, translated)
    elif role == "tool":
        if "tool_call_id" in message:
            translated["tool_call_id"] = message["tool_call_id"]
        translated["content"] = "\n".join(map(_text, parts))
    elif role == "developer":
        translated["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        translated["name"] = message["name"]
    return translated


def _parts(content: Any, form: str) -> list[Any]:
    """Texts, or objects of type `text`; empty texts are left out."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise Absent(TEMPLATE, "the content of a message is neither a text nor a list")
    wrapped = form == PARTS
    parts: list[Any] = []
    for part in content:
        text, more = _part(part)
        if wrapped:
            parts.append({"type": "text", "text": text, **more})
        elif text:
            parts.append(text)
    return parts


def _part(part: Any) -> tuple[str, Mapping[str, Any]]:
    """Its text, and what else of it templates see."""
    if isinstance(part, str):
        return part, {}
    if not isinstance(part, dict):
        raise Absent(TEMPLATE, "a part of a message's content is no object")
    kind = part.get("type")
    key = _TEXTS.get(kind, "") if isinstance(kind, str) else ""
    if not key:
        raise Absent(MEDIA, f"a part of type {kind!r}")
    text = part.get(key)
    if not isinstance(text, str):
        raise Absent(TEMPLATE, f"a part of type {kind!r} without a text")
    return text, {name: value for name, value in part.items() if name not in _PART_FIELDS}


def _text(part: Any) -> str:
    return part if isinstance(part, str) else str(part["text"])


def _assistant(message: Mapping[str, Any], translated: Message) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Absent(TEMPLATE, "'tool_calls' is no list")
        translated["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        translated["reasoning"] = translated["reasoning_content"] = reasoning


def _call(call: Any) -> Any:
    """Templates expect the arguments as an object, where the API sends them as a text of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Absent(FIELDS, "a tool call that is no function call")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def tools_for_template(tools: Any) -> list[Any] | None:
    """Tools with every field that vLLM knows, in its order, for templates print them as JSON. Raises `Absent`."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Absent(FIELDS, "'tools' is no list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise Absent(FIELDS, "a tool that is no function")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    more = {name: value for name, value in function.items() if name not in known}
    return {"type": "function", "function": {**known, **more}}
