"""The fields of bodies that make up the prompt, and their translation to the messages that a chat template takes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType, ValidationError
from msgspec.json import Decoder

from fairlead.apis.body import FALSE
from fairlead.apis.tokens.pieces import FIELDS, MEDIA, PARTS, STORED, TEMPLATE, UNREAD, Absent, MediaItem

# The fields of request bodies that make up the prompt. All other fields are skipped and build no objects.

Flag = bool | int | str | None


class ChatFields(Struct, gc=False):
    """A chat request, or another API's request translated to one."""

    messages: list[Any]
    tools: Any = None
    documents: Any = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    cache_salt: str | None = None
    # These change the prompt in ways that only the engine knows.
    chat_template: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    #: Messages of the role `system` move to the front if the template accepts them only there.
    system_first: bool = False
    #: The messages are as they were sent, not joined from several items.
    plain: bool = True


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
    """A request of `/inference/v1/generate`, which is also the format of the answer of an engine's `/render`."""

    token_ids: list[int]
    features: _Features | None = None
    cache_salt: str | None = None

    def media(self) -> tuple[MediaItem, ...]:
        """The media items by position. Raises `ValueError` if a kind has not as many positions as hashes."""
        if self.features is None:
            return ()
        places = self.features.mm_placeholders or {}
        items: list[MediaItem] = []
        for kind, digests in (self.features.mm_hashes or {}).items():
            if len(places.get(kind, ())) != len(digests):
                raise ValueError(f"'{kind}' has {len(digests)} hashes but not as many positions")
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
    """A request of Anthropic's Messages API."""

    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class ResponsesFields(Struct, gc=False):
    """A request of OpenAI's Responses API."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    reasoning: dict[str, Any] | None = None
    # Refer to parts of the prompt that are stored on the server.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


class Fields:
    """One decoder per shape of body."""

    chat = Decoder(ChatFields)
    completion = Decoder(CompletionFields)
    generate = Decoder(GenerateFields)
    sglang = Decoder(SglangFields)
    messages = Decoder(MessagesFields)
    responses = Decoder(ResponsesFields)


T = TypeVar("T")


def decode(decoder: Decoder[T], body: bytes) -> T:
    """Decode a body. Raises `Absent`."""
    try:
        return decoder.decode(body)
    except ValidationError as exc:
        raise Absent(FIELDS, str(exc)) from None
    except (DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Absent(UNREAD, str(exc)) from None


def is_true(value: Flag) -> bool:
    """Read a flag as pydantic does. Other values count as true: the engine refuses them anyway."""
    return value.lower() not in FALSE if isinstance(value, str) else bool(value)


def refuse_sent(**fields: Raw | UnsetType) -> None:
    """Raise `Absent` if one of the fields was sent and is not null."""
    for name, raw in fields.items():
        if raw is not UNSET and bytes(raw) != b"null":
            raise Absent(FIELDS, f"'{name}' changes the prompt in a way that only the engine knows")


# Translates the messages of a request to those that the chat template gets, as vLLM does.
#
# Only text is translated. The tokens of all other content parts are known only to the engine.

#: The key of the text in each type of part.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
#: The fields of a part that are not passed on to the template.
_PART_FIELDS = frozenset(("type", "text", "refusal", "thinking", "uuid"))
_BILLING = "x-anthropic-billing-header"

Message = dict[str, Any]


def for_template(messages: list[Any], form: str, developers: bool = True) -> list[Message]:
    """Translate messages. `form`: see `content_format`. `developers`: the template knows the role `developer`. Raises
    `Absent`."""
    translated = [_message(message, form) for message in messages]
    if developers or all(message["role"] != "developer" for message in translated):
        return translated
    return systems_joined([_as_system(message) for message in translated])


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}


def systems_joined(messages: list[Message], between: str = "\n\n") -> list[Message]:
    """Join all messages of the role `system` into one at the front."""
    systems = [message["content"] for message in messages if message["role"] == "system"]
    if not systems or (len(systems) == 1 and messages[0]["role"] == "system"):
        return messages
    texts = [content if isinstance(content, str) else "\n".join(map(_text, content)) for content in systems]
    spoken = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": between.join(filter(None, texts))}, *spoken]


def _message(message: Any, form: str) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise Absent(TEMPLATE, "a message is not an object with a role")
    content = message.get("content")
    parts = _parts(_unbilled(content) if role == "system" else content, form)
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


def _unbilled(content: Any) -> Any:
    """Drop the first line of texts that begin with Claude Code's header, which differs in each request."""
    kept: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        typed = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if typed else part
        if not isinstance(text, str) or not text.startswith(_BILLING):
            kept.append(part)
        elif remainder := text.partition("\n")[2]:
            kept.append({**part, "text": remainder} if typed else remainder)
    return None if kept == [None] else kept


def _parts(content: Any, form: str) -> list[Any]:
    """The parts of a message as objects of type `text`, or as texts without the empty ones."""
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
        if text is None:
            continue
        if wrapped:
            parts.append({"type": "text", "text": text, **more})
        elif text:
            parts.append(text)
    return parts


def _part(part: Any) -> tuple[str | None, Mapping[str, Any]]:
    """The text of a part (`None` = leave the part out), and its other fields that templates see."""
    if isinstance(part, str):
        return part, {}
    if not isinstance(part, dict):
        raise Absent(TEMPLATE, "a part of a message's content is not an object")
    kind = part.get("type")
    key = _TEXTS.get(kind, "") if isinstance(kind, str) else ""
    if not key:
        raise Absent(MEDIA, f"a part of type {kind!r}")
    text = part.get(key)
    if text is None and kind in ("text", "refusal"):
        return None, {}
    if not isinstance(text, str):
        raise Absent(TEMPLATE, f"a part of type {kind!r} without a text")
    return text, {name: value for name, value in part.items() if name not in _PART_FIELDS}


def _text(part: Any) -> str:
    return part if isinstance(part, str) else str(part["text"])


def _assistant(message: Mapping[str, Any], translated: Message) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Absent(TEMPLATE, "'tool_calls' is not a list")
        translated["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        translated["reasoning"] = translated["reasoning_content"] = reasoning


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates expect. The API sends them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Absent(FIELDS, "a tool call that is not a function call")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def tools_for_template(tools: Any) -> list[Any] | None:
    """Tools with every field that vLLM knows, in its order, because templates print them as JSON. Raises `Absent`."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Absent(FIELDS, "'tools' is not a list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise Absent(FIELDS, "a tool that is not a function")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    more = {name: value for name, value in function.items() if name not in known}
    return {"type": "function", "function": {**known, **more}}


# Translates requests of Anthropic's Messages API and OpenAI's Responses API to a chat, as vLLM does before it renders.
#
# Only what all vLLM versions translate alike is translated; the rest is left to the engine.


def from_chat(body: bytes) -> ChatFields:
    """Read a chat request. Raises `Absent`."""
    fields = decode(Fields.chat, body)
    for message in fields.messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if isinstance(calls, list):
            message["tool_calls"] = [_checked_call(call) for call in calls]
    return fields


def _checked_call(call: Any) -> Any:
    """A tool call with its members in the order of vLLM's request model, because templates print it as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Absent(FIELDS, "a tool call that is not a function call")
    ordered = {name: function[name] for name in ("arguments", "name") if name in function}
    return {name: ordered if name == "function" else call[name] for name in ("id", "function", "type") if name in call}


def from_messages(body: bytes) -> ChatFields:
    """Translate a request of Anthropic's Messages API. Raises `Absent`."""
    fields = decode(Fields.messages, body)
    system, messages = fields.system, list[Message]()
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    else:
        messages += _system(system)
    for message in fields.messages:
        messages += _turn(message)
    effort = (fields.output_config or {}).get("effort")
    if (fields.thinking or {}).get("type") == "disabled":
        effort = "none"
    return ChatFields(
        messages,
        tools=None if fields.tools is None else [_other_chats_tool(tool) for tool in fields.tools],
        cache_salt=fields.cache_salt,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=effort,
        system_first=True,
    )


def from_responses(body: bytes) -> ChatFields:
    """Translate a request of OpenAI's Responses API. Raises `Absent`."""
    fields = decode(Fields.responses, body)
    if fields.previous_response_id or fields.conversation or fields.prompt:
        raise Absent(STORED, "part of the prompt is stored on the server")
    if fields.input is None:
        raise Absent(FIELDS, "there is no input")
    said = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    messages: list[Message] = []
    for item in said:
        _take(item, messages)
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    last = said[-1] if said else {}
    continued = last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED
    return ChatFields(
        messages,
        tools=[_responses_tool(tool) for tool in fields.tools] if fields.tools else None,
        cache_salt=fields.cache_salt,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=(fields.reasoning or {}).get("effort"),
        # Unlike in a chat, the tokenizer's own special tokens are added to the template's output.
        add_special_tokens=True,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        plain=all(_is_plain(item) for item in said),
    )


def _is_plain(item: Mapping[str, Any]) -> bool:
    parts = item.get("content")
    several = item.get("role") == "assistant" and isinstance(parts, list) and len(parts) > 1
    return item.get("type", "message") == "message" and not several


_UNFINISHED = ("in_progress", "incomplete")


def _take(item: Any, messages: list[Message]) -> None:
    """Take an input item. An assistant's reasoning, tool calls and texts are separate items and join one message."""
    if not isinstance(item, dict):
        raise Absent(FIELDS, "an input item that is not an object")
    kind, role = item.get("type"), item.get("role")
    assistant = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        if item.get("namespace"):
            raise Absent(FIELDS, "a call of a tool in a namespace")
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "function": function, "type": "function"}
        if assistant is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            assistant.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output" and item.get("output") is not None:
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning" or role == "assistant":
        name, text = ("reasoning", _thought(item)) if kind == "reasoning" else ("content", _first_text(item))
        if assistant is not None and assistant.get(name) is None:
            assistant[name] = text
        else:
            messages.append({"role": "assistant", name: text})
    elif isinstance(role, str) and kind in (None, "message"):
        messages.append(item)
    else:
        raise Absent(FIELDS, f"an input item of type {kind!r}")


def _first_text(item: Mapping[str, Any]) -> str:
    """The text of an assistant's message. vLLM takes only its first part."""
    content = item.get("content")
    first = content[0] if isinstance(content, list) and content else content
    text = first.get("text") if isinstance(first, dict) else first
    if not isinstance(text, str):
        raise Absent(FIELDS, "an assistant's message that does not begin with a text")
    return text


def _thought(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    first = parts[0] if isinstance(parts, list) and parts else {"text": ""}
    text = first.get("text") if isinstance(first, dict) else None
    if item.get("encrypted_content") or not isinstance(text, str):
        raise Absent(FIELDS, "reasoning that is not text")
    return text


def _responses_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Absent(FIELDS, "a tool that is not a function")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _system(system: str | list[Any] | None) -> Iterator[dict[str, Any]]:
    if not system:
        return
    texts = [system] if isinstance(system, str) else [_block_text(block) for block in system]
    if text := "".join(text for text in texts if not text.startswith(_BILLING)):
        yield {"role": "system", "content": text}


def _turn(message: Any) -> Iterator[dict[str, Any]]:
    """Translate a message. Its tool results become separate messages before it."""
    if not isinstance(message, dict):
        raise Absent(FIELDS, "a message that is not an object")
    role, content = message.get("role"), message.get("content")
    if role == "system":
        yield from _system(content)
        return
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
    if role == "user" and not texts:
        return
    turn: dict[str, Any] = {"role": role, "content": texts[0]["text"] if len(texts) == 1 else texts or None}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    yield turn


def _block_text(block: Any) -> str:
    if not isinstance(block, dict):
        raise Absent(FIELDS, "a block that is not an object")
    if block.get("type") != "text":
        raise Absent(MEDIA, f"a block of type {block.get('type')!r}")
    text = block.get("text")
    return text if isinstance(text, str) else ""


def _other_chats_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"arguments": json.dumps(block.get("input") or {}), "name": block.get("name") or ""}
    return {"id": block.get("id") or "", "function": function, "type": "function"}


def _result(role: Any, block: Mapping[str, Any]) -> dict[str, Any]:
    """A tool result that is one text. vLLM versions differ in how they translate any other result."""
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
