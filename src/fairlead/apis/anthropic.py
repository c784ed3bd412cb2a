"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

import re
from itertools import islice
from typing import TypeVar

from msgspec import Raw

from fairlead.apis.body import ABSENT, Body, Reader, Scalar, count, flag
from fairlead.apis.openai import messages_of
from fairlead.apis.parsed import ParsedRequest, members_of, model_bytes, named, reading, scope, sent, short_text
from fairlead.apis.prompt import measured, unbilled
from fairlead.core.apis import COUNT_TOKENS, MESSAGES


class MessagesBody(Body, gc=False):
    messages: Raw = ABSENT
    system: Raw = ABSENT
    max_tokens: Scalar = None
    tools: Raw = ABSENT
    thinking: Raw = ABSENT
    output_config: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    metadata: Raw = ABSENT


_read = Reader(MessagesBody).read
#: The effort that a template gets if thinking is disabled.
_NO_EFFORT = Raw(b'"none"')

#: The cache mark, with which a client says how much of the prompt its provider shall cache. It is not part of the
#: prompt, and it moves with every turn, so it would change the bytes of a message from turn to turn. Clients that sort
#: the members of an object send it first.
_MARK = re.compile(rb'"cache_control":\s?\{[^{}]{0,160}+\}')
_COMMA = re.compile(rb"\s{0,99}+,\s{0,99}+")
#: More marks than that stay; Anthropic allows four.
_MOST_MARKS = 10_000


@reading(_read)
def parse_messages(read: MessagesBody) -> ParsedRequest:
    """Parse a body of `/v1/messages`. The system prompt is hashed before the messages, so requests that have only the
    system prompt in common share it."""
    messages = messages_of(read.messages)
    items, size = measured(messages)
    system, tools = unbilled(bytes(_unmarked(sent(read.system)))), _unmarked(sent(read.tools))
    effort = members_of(read.output_config).effort
    root = scope(
        b"messages %b" % named(read.model, read.cache_salt),
        # How thinking is switched on, and its budget, do not change the prompt.
        (b"effort", _NO_EFFORT if short_text(members_of(read.thinking).type) == "disabled" else effort),
        (b"kwargs", read.chat_template_kwargs),
    )
    if tools:
        root += b" tools %d:%b" % (len(tools), tools)
    prompt = _unmarked(messages)
    return ParsedRequest(
        MESSAGES,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_tokens, "max_tokens"),
        # Every stream of this API reports the usage.
        include_usage=True,
        prompt=(system, prompt) if system else (prompt,),
        root=root,
        prompt_bytes=size - len(messages) + len(prompt) + len(system) + len(tools),
        user=short_text(members_of(read.metadata).user_id),
        media=items,
    )


@reading(_read)
def parse_count(read: MessagesBody) -> ParsedRequest:
    """Parse a body of `count_tokens`, which has the shape of `/v1/messages`. Nothing goes through the model."""
    messages_of(read.messages)
    model_bytes(read.model)
    return ParsedRequest(COUNT_TOKENS, read.model or "", user=short_text(members_of(read.metadata).user_id))


T = TypeVar("T", bytes, memoryview)


def _unmarked(text: T) -> T | bytes:
    """The text without cache marks; copied only if it has any. A mark goes with the comma before it, or, if it is the
    first member, behind it."""
    kept: list[bytes | memoryview] = []
    position = 0
    for mark in islice(_MARK.finditer(text), _MOST_MARKS):
        start, end = mark.span()
        space = bytes(text[max(start - 100, position) : start])
        before = space.rstrip()
        if before.endswith(b","):
            start -= len(space) - len(before) + 1
        elif before.endswith(b"{") and (comma := _COMMA.match(text, end)):
            end = comma.end()
        else:
            continue
        kept.append(text[position:start])
        position = end
    return b"".join((*kept, text[position:])) if kept else text
