"""Request bodies to the messages that a chat template takes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType, ValidationError
from msgspec.json import Decoder

from fairlead.apis.tokens.pieces import FIELDS, MEDIA, STORED, TEMPLATE, UNREAD, Absent, MediaItem
from fairlead.apis.tokens.template import PARTS

# The fields of request bodies that make the prompt. Everything else of a body is skipped, not built.

Flag = bool | int | str | None


class ChatFields(Struct, gc=False):
    messages: list[Any]
    tools: Any = None
    documents: Any = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    cache_salt: str | None = None
    # Change the prompt, and how only the engine knows.
    chat_template: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET


class CompletionFields(Struct, gc=False):
    prompt: str | list[str | int | list[int]] | None = None
    add_special_tokens: Flag = True
    cache_salt: str | None = None
    prompt_embeds: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET


class _Place(Struct, gc=False):
    offset: int
    length: int


class _Features(Struct, gc=False):
    mm_hashes: dict[str, list[str]] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None


class GenerateFields(Struct, gc=False):
    """A request of `/inference/v1/generate`, which is also what an engine's `/render` answers."""

    token_ids: list[int]
    features: _Features | None = None
    cache_salt: str | None = None

    def media(self) -> tuple[MediaItem, ...]:
        """In the order of their places. Raises `ValueError` when hashes and places do not go together."""
        if self.features is None:
            return ()
        places = self.features.mm_placeholders or {}
        items: list[MediaItem] = []
        for kind, digests in (self.features.mm_hashes or {}).items():
            if len(places.get(kind, ())) != len(digests):
                raise ValueError(f"not as many places as hashes of '{kind}'")
            items += [
                MediaItem(digest, span.offset, span.length) for digest, span in zip(digests, places[kind], strict=True)
            ]
        return tuple(sorted(items, key=lambda item: item.offset))


class SglangFields(Struct, gc=False):
    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    extra_key: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Raw | UnsetType = UNSET


class MessagesFields(Struct, gc=False):
    """Anthropic's."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesFields(Struct, gc=False):
    """OpenAI's Responses API."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    cache_salt: str | None = None
    # Stored on the server.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    # Translated by the engine.
    tools: list[Any] | None = None
    reasoning: Any = None


class Fields:
    """Decoders, one per shape."""

    chat = Decoder(ChatFields)
    completion = Decoder(CompletionFields)
    generate = Decoder(GenerateFields)
    sglang = Decoder(SglangFields)
    messages = Decoder(MessagesFields)
    responses = Decoder(ResponsesFields)


T = TypeVar("T")


def decode(decoder: Decoder[T], body: bytes) -> T:
    """Raises `Absent`."""
    try:
        return decoder.decode(body)
    except ValidationError as exc:
        raise Absent(FIELDS, str(exc)) from None
    except (DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Absent(UNREAD, str(exc)) from None


_FALSE = frozenset(("false", "f", "no", "n", "off", "0"))


def is_true(value: Flag) -> bool:
    """As pydantic reads it; what is no boolean the engine refuses anyway."""
    return value.lower() not in _FALSE if isinstance(value, str) else bool(value)


def refuse_sent(**fields: Raw | UnsetType) -> None:
    """Raises `Absent` if one of these was sent, other than null."""
    for name, raw in fields.items():
        if raw is not UNSET and bytes(raw) != b"null":
            raise Absent(FIELDS, f"'{name}' changes the prompt in a way that only the engine knows")


# Messages of a request → messages as the chat template gets them, as vLLM makes the one of the other.
#
# Only text is translated. Whatever else a content part holds has tokens that only the engine knows.

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


# Anthropic's Messages API and OpenAI's Responses API → a chat, as vLLM translates them before it renders.
#
# Only what its versions translate alike is taken over; the rest is left to the engine.


def from_messages(body: bytes) -> ChatFields:
    """Raises `Absent`."""
    fields = decode(Fields.messages, body)
    messages = [*_system(fields.system)]
    for message in fields.messages:
        messages += _turn(message)
    tools = None if fields.tools is None else [_other_chats_tool(tool) for tool in fields.tools]
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
            calls.append(_other_chats_call(block))
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


def _other_chats_call(block: Mapping[str, Any]) -> dict[str, Any]:
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


def _other_chats_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise Absent(FIELDS, "a tool of the server")
    named = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": named}
