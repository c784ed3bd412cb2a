"""OpenAI's Responses API (`/v1/responses`) and the conversations that it may store (`/v1/conversations`)."""

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from fairlead.model.errors import ClientError
from fairlead.parse.api import CONVERSATIONS, RESPONSES
from fairlead.parse.body import ABSENT, Body, Reader, Scalar, count, flag
from fairlead.parse.media import media_items, text_size
from fairlead.parse.parsed import Parsed, ParsedRequest, is_sent, model_bytes, named, scope, sent, short_text
from fairlead.parse.prompt import list_prefix, text_or_list


class ResponsesBody(Body, gc=False):
    input: Raw = ABSENT
    instructions: Raw = ABSENT
    max_output_tokens: Scalar = None
    tools: Raw = ABSENT
    reasoning: Raw = ABSENT
    #: A stored template, instead of `input` or beside it.
    prompt: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    conversation: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    user: Raw = ABSENT


class ConversationBody(Body, gc=False):
    items: Raw = ABSENT


class _Stored(Struct, gc=False):
    id: Raw = ABSENT


_read_responses = Reader(ResponsesBody).read
_read_conversation = Reader(ConversationBody).read
_decode_stored = Decoder(_Stored).decode


def parse_responses(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`.

    What the server has stored (`previous_response_id`, `conversation`, a template) comes before the input, so it
    scopes it.
    """
    read = _read_responses(body)
    if read is None:
        return None
    text = text_or_list(read.input)
    if text is None and is_sent(read.input):
        raise ClientError("Invalid type for 'input': expected a string or a list.", param="input")
    if text is None and not is_sent(read.prompt):
        raise ClientError("Missing required parameter: 'input'.", param="input")
    view = text.view if text is not None else memoryview(b"")
    items = media_items(view)
    instructions, tools = sent(read.instructions), sent(read.tools)
    root = scope(
        b"responses %b" % named(read.model, read.cache_salt),
        (b"tools", read.tools),
        (b"reasoning", read.reasoning),
        (b"template", read.prompt),
        (b"previous", read.previous_response_id),
        (b"conversation", read.conversation),
    )
    return ParsedRequest(
        RESPONSES,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_output_tokens, "max_output_tokens"),
        # Every stream of this API ends with an event that tells the usage.
        include_usage=True,
        prompt=(instructions, view) if instructions else (view,),
        root=root,
        prompt_bytes=text_size(view, items) + len(instructions) + len(tools),
        user=_conversation(read.conversation) or short_text(read.prompt_cache_key, read.user),
        media=items,
    )


def parse_conversation(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`. Items are stored, not run: there is no prompt."""
    read = _read_conversation(body)
    if read is None:
        return None
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
