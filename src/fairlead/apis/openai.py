"""OpenAI's APIs (chat, completions, embeddings, responses), and related ones (pooling, tokens, ranking)."""

from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Literal

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import asdict

from fairlead.apis.body import ABSENT, MAX_COUNT, Body, Reader, Scalar, StreamOptions, count, flag, is_utf8
from fairlead.apis.parsed import (
    Parsed,
    ParsedRequest,
    Text,
    choices,
    is_sent,
    members_of,
    model_bytes,
    named,
    reading,
    scope,
    sent,
    short_text,
)
from fairlead.apis.prompt import anything, billed, list_prefix, measured, prompts_in, text_or_list, truncated, unbilled
from fairlead.core.apis import (
    CHAT,
    COMPLETIONS,
    CONVERSATIONS,
    EMBEDDINGS,
    POOLING,
    RENDER,
    RERANK,
    RESPONSES,
    RESPONSES_STORED,
    SCORE,
    TOKENIZE,
)
from fairlead.core.errors import ClientError
from fairlead.core.tokens import DEFAULT_BYTES_PER_TOKEN


class GenerationBody(Body, gc=False):
    """The fields that chats and completions share."""

    max_tokens: Scalar = None
    n: Scalar = None
    prompt_logprobs: Scalar = None
    echo: Scalar = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Scalar = None
    truncation_side: Scalar = None
    user: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT


# `/v1/chat/completions`.


class ChatBody(GenerationBody, gc=False):
    messages: Raw = ABSENT
    max_completion_tokens: Scalar = None
    tools: Raw = ABSENT
    documents: Raw = ABSENT
    chat_template: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    reasoning_effort: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    media_io_kwargs: Raw = ABSENT


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class _UsualChat(ChatBody, gc=False):
    """A chat as most clients write it. If a body decodes to this, these fields need no further checks."""

    stream: bool = False
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Literal[1] = 1
    prompt_logprobs: None = None
    echo: None = None


read_chat = Reader(ChatBody).read
_decode_usual = Decoder(_UsualChat).decode
#: The fields that scope a prompt in addition to the model, and their values if none of them was sent.
_scoping = attrgetter(
    "tools",
    "documents",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "truncate_prompt_tokens",
)
_UNSCOPED = (*[ABSENT] * 8, None)


def parse_chat(body: bytes, content_type: str = "") -> Parsed:
    """Parse a body of `/v1/chat/completions`. Raises `ClientError`. Written inline for speed."""
    read: _UsualChat | None
    try:
        read = _decode_usual(body) if body.isascii() or is_utf8(body) else _unusual(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        read = _unusual(body)
    if read is None:
        return None
    messages = memoryview(read.messages)
    if messages[-2:].tobytes() == b"}]":  # only a JSON list ends like this
        messages = messages[:-1]
    else:
        messages = messages_of(read.messages)
    if billed(messages) is not None:
        messages = unbilled(messages)
    if _scoping(read) == _UNSCOPED:
        root, size = _named_root(read.model), len(messages)
    else:
        root, size, messages = _scoped(read, messages)
    items = 0
    # A single bracket in the body means that every content is a string. This costs 0.3 µs at 24 kB, the search for
    # parts 20 µs.
    if body.find(b"[") != body.rfind(b"["):
        items, text = measured(messages)
        size += text - len(messages)
    return ParsedRequest(
        CHAT,
        read.model or "",
        read.stream,
        (read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens) or 0,
        read.stream_options is not None and flag(read.stream_options.include_usage, "stream_options"),
        read.n,
        (messages,),
        root,
        size,
        0,
        # They are the same object only if both are absent.
        "" if read.user is read.prompt_cache_key else short_text(read.prompt_cache_key, read.user),
        "",
        items,
        read.prompt_logprobs is not None,
    )


def _unusual(body: bytes) -> _UsualChat | None:
    """Read a body that `_UsualChat` does not fit, and convert it to that form. `None` = too large for a second reading.
    Raises `ClientError`: first for the messages, then for the model."""
    read = read_chat(body)
    if read is None:
        return None
    messages_of(read.messages)
    model_bytes(read.model)
    limit = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    usual = {
        "stream": flag(read.stream, "stream"),
        "max_tokens": count(limit, "max_tokens"),
        "max_completion_tokens": None,
        "n": choices(read.n),
        "prompt_logprobs": 1 if read.prompt_logprobs is not None or read.echo in _TRUE else None,
    }
    return _UsualChat(**asdict(read) | usual)


#: The values that switch `echo` on. Where the answer's log-probabilities are asked for, it adds those of the prompt.
_TRUE = (True, "true")


def messages_of(raw: Raw) -> memoryview:
    """A list of at least one message, without its closing bracket. Raises `ClientError`."""
    messages = list_prefix(raw)
    if messages is None:
        raise ClientError("Missing required parameter: 'messages' must be a list.", param="messages")
    if len(messages) == 1:
        raise ClientError("'messages' is empty. Provide at least one message.", param="messages")
    return messages


@lru_cache(maxsize=256)  # clients choose the names
def _named_root(model: str | None) -> bytes:
    """The root of a request in which only the model scopes the prompt. Raises `ClientError`."""
    return b"chat %b" % named(model, ABSENT)


def _scoped(read: ChatBody, messages: memoryview) -> tuple[bytes, int, memoryview]:
    """The root of a request, the number of bytes that the chat template renders into the prompt, and the messages that
    the engine keeps. Raises `ClientError`.

    `add_generation_prompt`, `continue_final_message` and `tool_choice` are left out: they change only the prompt's end.
    """
    root = b"chat %b" % named(read.model, read.cache_salt)
    root = scope(root, (b"tools", read.tools), (b"documents", read.documents))
    rendered = len(sent(read.tools)) + len(sent(read.documents))
    template, kwargs = (b"template", read.chat_template), (b"kwargs", read.chat_template_kwargs)
    effort, media = (b"effort", read.reasoning_effort), (b"media", read.mm_processor_kwargs)
    root = scope(root, template, kwargs, effort, media, (b"reading", read.media_io_kwargs))
    if limit := count(read.truncate_prompt_tokens, "truncate_prompt_tokens"):
        full = Text(messages, measured(messages)[1] + rendered, 0)
        root, text = truncated(root, full, limit, read.truncation_side)
        if text is not full:
            return root, text.size, text.view
    return root, len(messages) + rendered, messages


# `/v1/completions`.


class CompletionBody(GenerationBody, gc=False):
    prompt: Raw = ABSENT
    logprobs: Scalar = None
    prompt_embeds: Raw = ABSENT


read_completion = Reader(CompletionBody).read


@reading(read_completion)
def parse_completion(read: CompletionBody) -> ParsedRequest:
    prompts, options = prompts_in(read.prompt), read.stream_options
    limit = count(read.truncate_prompt_tokens, "truncate_prompt_tokens")
    root = b"completions %b" % named(read.model, read.cache_salt)
    root, text = truncated(root, _prompt(read), limit * prompts, read.truncation_side)
    return ParsedRequest(
        COMPLETIONS,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_tokens, "max_tokens"),
        options is not None and flag(options.include_usage, "stream_options"),
        choices(read.n, prompts),
        (text.view,),
        root,
        text.size,
        text.tokens,
        short_text(read.prompt_cache_key, read.user),
        recomputed=read.prompt_logprobs is not None or (read.logprobs is not None and read.echo in _TRUE),
    )


def _prompt(read: CompletionBody) -> Text:
    text = text_or_list(read.prompt)
    if text is not None:
        return text
    if is_sent(read.prompt):
        raise ClientError("Invalid type for 'prompt': expected a string or a list.", param="prompt")
    if not is_sent(read.prompt_embeds):
        raise ClientError("Missing required parameter: 'prompt'.", param="prompt")
    # Embeddings are hashed like text, but their size says nothing about tokens.
    embeds = list_prefix(read.prompt_embeds)
    return Text(memoryview(read.prompt_embeds) if embeds is None else embeds, 0, 0)


# `/v1/embeddings`, and vLLM's `/pooling` and `/classify`: a prompt goes in, numbers come out, nothing is generated.


class EmbeddingBody(Body, gc=False):
    input: Raw = ABSENT
    #: In vLLM's other form of this request, the input is a chat.
    messages: Raw = ABSENT
    truncate_prompt_tokens: Scalar = None
    truncation_side: Scalar = None
    user: Raw = ABSENT


_read = Reader(EmbeddingBody).read


@reading(_read)
def parse_embeddings(read: EmbeddingBody) -> ParsedRequest:
    if not is_sent(read.input) and not is_sent(read.messages):
        raise ClientError("Missing required parameter: 'input'.", param="input")
    if is_sent(read.input) and text_or_list(read.input) is None:
        raise ClientError("Invalid type for 'input': expected a string or a list.", param="input")
    return _pooled(EMBEDDINGS, read)


@reading(_read)
def parse_pooling(read: EmbeddingBody) -> ParsedRequest:
    """Parse a body of `/pooling` or `/classify`. It may have `data` instead of `input`, which only a plugin of the
    engine can read."""
    return _pooled(POOLING, read)


def _pooled(api: str, read: EmbeddingBody) -> ParsedRequest:
    items = 0
    if not is_sent(read.input) and is_sent(read.messages):
        view, tokens = messages_of(read.messages), 0
    else:
        view, size, tokens = anything(read.input)
    if not tokens:
        items, size = measured(view)
    prompts = prompts_in(read.input)
    limit = count(read.truncate_prompt_tokens, "truncate_prompt_tokens") * max(prompts, 1)
    root = b"%b %b" % (api.encode(), named(read.model, read.cache_salt))
    root, (view, size, tokens) = truncated(root, Text(view, size, tokens), limit, read.truncation_side)
    return ParsedRequest(
        api,
        read.model or "",
        prompt=(view,) if view else (),
        root=root,
        prompt_bytes=size,
        prompt_tokens=tokens,
        n=choices(None, prompts),
        user=short_text(read.user),
        media=items,
    )


# OpenAI's Responses API (`/v1/responses`) and the conversations that it may store (`/v1/conversations`).


class ResponsesBody(Body, gc=False):
    input: Raw = ABSENT
    instructions: Raw = ABSENT
    max_output_tokens: Scalar = None
    tools: Raw = ABSENT
    reasoning: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    #: A stored template, instead of `input` or beside it.
    prompt: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    conversation: Raw = ABSENT
    store: Scalar = None
    background: Scalar = None
    prompt_cache_key: Raw = ABSENT
    user: Raw = ABSENT


class ConversationBody(Body, gc=False):
    items: Raw = ABSENT


class _Stored(Struct, gc=False):
    id: Raw = ABSENT


_read_responses = Reader(ResponsesBody).read
_read_conversation = Reader(ConversationBody).read
_decode_stored = Decoder(_Stored).decode


@reading(_read_responses)
def parse_responses(read: ResponsesBody) -> ParsedRequest:
    """Parse a body of `/v1/responses`. What the server has stored (`previous_response_id`, `conversation`, a template)
    comes before the input, so it belongs to the prompt's scope."""
    text = text_or_list(read.input)
    if text is None and is_sent(read.input):
        raise ClientError("Invalid type for 'input': expected a string or a list.", param="input")
    if text is None and not is_sent(read.prompt):
        raise ClientError("Missing required parameter: 'input'.", param="input")
    view = unbilled(text.view) if text is not None else memoryview(b"")
    items, size = measured(view)
    instructions, tools = unbilled(sent(read.instructions)), sent(read.tools)
    root = scope(
        b"responses %b" % named(read.model, read.cache_salt),
        (b"tools", read.tools),
        (b"reasoning", members_of(read.reasoning).effort),
        (b"kwargs", read.chat_template_kwargs),
        (b"template", read.prompt),
        (b"previous", read.previous_response_id),
        (b"conversation", read.conversation),
    )
    stored = any(map(is_sent, (read.prompt, read.previous_response_id, read.conversation)))
    return ParsedRequest(
        RESPONSES_STORED if stored or True in (read.store, read.background) else RESPONSES,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_output_tokens, "max_output_tokens"),
        # Every stream of this API ends with an event that reports the usage.
        include_usage=True,
        prompt=(instructions, view) if instructions else (view,),
        root=root,
        prompt_bytes=size + len(instructions) + len(tools),
        user=_conversation(read.conversation) or short_text(read.prompt_cache_key, read.user),
        media=items,
    )


@reading(_read_conversation)
def parse_conversation(read: ConversationBody) -> ParsedRequest:
    """Parse a body of `/v1/conversations`. Its items are stored, not run, so there is no prompt."""
    if is_sent(read.items) and list_prefix(read.items) is None:
        raise ClientError("Invalid type for 'items': expected a list.", param="items")
    model_bytes(read.model)
    return ParsedRequest(CONVERSATIONS, read.model or "")


def _conversation(raw: Raw) -> str:
    """The id of a conversation, which is sent as a string or as an object."""
    if raw is ABSENT:
        return ""
    try:
        return short_text(_decode_stored(raw).id)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return short_text(raw)


# `/tokenize`, `/detokenize` and `…/render`: these query the model's tokenizer and template, not the model.
#
# Nothing in these bodies goes through the engine's cache, so there is no prompt to hash or to charge for.

_token_apis_read = Reader(Body).read


@reading(_token_apis_read)
def parse_tokenize(read: Body) -> ParsedRequest:
    model_bytes(read.model)
    return ParsedRequest(TOKENIZE, read.model or "")


@reading(_token_apis_read)
def parse_render(read: Body) -> ParsedRequest:
    model_bytes(read.model)
    return ParsedRequest(RENDER, read.model or "")


# Texts compared with texts: `/score` (vLLM and SGLang) and `/rerank` (the form of Jina and Cohere).


class RankingBody(Body, gc=False):
    query: Raw = ABSENT
    documents: Raw = ABSENT
    #: SGLang's name for the documents of `/v1/score`.
    items: Raw = ABSENT
    #: vLLM's names for the two sides of `/score`, newest first.
    queries: Raw = ABSENT
    data_1: Raw = ABSENT
    data_2: Raw = ABSENT
    text_1: Raw = ABSENT
    text_2: Raw = ABSENT
    #: At most so many tokens of each pair count.
    truncate_prompt_tokens: Scalar = None
    user: Raw = ABSENT


_ranking_read = Reader(RankingBody).read


@reading(_ranking_read)
def parse_rerank(read: RankingBody) -> ParsedRequest:
    for name, side in (("query", read.query), ("documents", read.documents)):
        if not is_sent(side):
            raise ClientError(f"Missing required parameter: '{name}'.", param=name)
    return _compared(RERANK, read, read.query, read.documents)


@reading(_ranking_read)
def parse_score(read: RankingBody) -> ParsedRequest:
    for query, documents in (
        (read.queries, read.documents),
        (read.data_1, read.data_2),
        (read.text_1, read.text_2),
        (read.query, read.items),
    ):
        if is_sent(query) and is_sent(documents):
            return _compared(SCORE, read, query, documents)
    raise ClientError("Missing required parameters: 'queries' and 'documents' (or 'text_1' and 'text_2').")


def _compared(api: str, read: RankingBody, query: Raw, documents: Raw) -> ParsedRequest:
    """Each pair is a sequence. A single query counts once in the size: the others find it in the engine's cache, and
    the ratio that is learned for the label has the rest."""
    views = (anything(query).view, anything(documents).view)
    (query_items, query_size), (items, size) = map(measured, views)
    pairs, size = max(prompts_in(query), prompts_in(documents)), query_size + size
    if limit := count(read.truncate_prompt_tokens, "truncate_prompt_tokens"):
        size = min(size, int(limit * max(pairs, 1) * DEFAULT_BYTES_PER_TOKEN))
    return ParsedRequest(
        api,
        read.model or "",
        prompt=views,
        root=b"%b %b" % (api.encode(), named(read.model, read.cache_salt)),
        prompt_bytes=size,
        n=choices(None, pairs),
        user=short_text(read.user),
        media=query_items + items,
    )
