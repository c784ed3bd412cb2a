"""Anthropic's Messages API and OpenAI's Responses API → a chat, as vLLM translates them before it renders.

Only what its versions translate alike is taken over; the rest is left to the engine.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fairlead.tokens.bodies import ChatFields, Fields, decode
from fairlead.tokens.prompt_tokens import FIELDS, MEDIA, STORED, Absent

_BILLING = "x-anthropic-billing-header"


def from_messages(body: bytes) -> ChatFields:
    """Raises `Absent`."""
    fields = decode(Fields.messages, body)
    messages = [*_system(fields.system)]
    for message in fields.messages:
        messages += _turn(message)
    tools = None if fields.tools is None else [_tool(tool) for tool in fields.tools]
    return ChatFields(
        messages, tools=tools, cache_salt=fields.cache_salt, chat_template_kwargs=fields.chat_template_kwargs
    )


def from_responses(body: bytes) -> ChatFields:
    """Raises `Absent`."""
    fields = decode(Fields.responses, body)
    if fields.previous_response_id or fields.conversation or fields.prompt:
        raise Absent(STORED, "part of the prompt is stored on the server")
    if fields.tools or fields.reasoning:
        raise Absent(FIELDS, "tools and reasoning of the Responses API are translated by the engine")
    if fields.input is None:
        raise Absent(FIELDS, "there is no input")
    said = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    messages: list[Any] = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    for item in said:
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise Absent(FIELDS, "an input item that is no message")
        messages.append({"role": item.get("role"), "content": item.get("content")})
    return ChatFields(messages, cache_salt=fields.cache_salt)


def _system(system: str | list[Any] | None) -> Iterator[dict[str, Any]]:
    if not system:
        return
    if isinstance(system, str):
        yield {"role": "system", "content": system}
        return
    texts = [_block_text(block) for block in system]
    yield {"role": "system", "content": "".join(text for text in texts if not text.startswith(_BILLING))}


def _turn(message: Any) -> Iterator[dict[str, Any]]:
    """One message; results of tools go before it as messages of their own."""
    if not isinstance(message, dict):
        raise Absent(FIELDS, "a message that is no object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            yield _result(role, block)
        elif text := _block_text(block):
            texts.append({"type": "text", "text": text})
    if not texts and not calls and not thoughts:
        return
    turn: dict[str, Any] = {"role": role, "content": texts[0]["text"] if len(texts) == 1 else texts or None}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    yield turn


def _block_text(block: Any) -> str:
    if not isinstance(block, dict):
        raise Absent(FIELDS, "a block that is no object")
    if block.get("type") != "text":
        raise Absent(MEDIA, f"a block of type {block.get('type')!r}")
    text = block.get("text")
    return text if isinstance(text, str) else ""


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _result(role: Any, block: Mapping[str, Any]) -> dict[str, Any]:
    """A result that is one text; of others each version makes something else."""
    content = block.get("content")
    if isinstance(content, list) and len(content) == 1:
        content = _block_text(content[0])
    if role != "user" or not isinstance(content, str):
        raise Absent(FIELDS, "a tool's result that is not one text")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise Absent(FIELDS, "a tool of the server")
    named = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": named}
