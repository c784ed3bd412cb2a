"""`/v1/embeddings`, and vLLM's `/pooling` and `/classify`: a prompt goes in, numbers come out, nothing is generated."""

from msgspec import Raw

from fairlead.model.errors import ClientError
from fairlead.parse.api import EMBEDDINGS, POOLING
from fairlead.parse.body import ABSENT, Body, Reader
from fairlead.parse.chat import messages_of
from fairlead.parse.media import media_items, text_size
from fairlead.parse.parsed import Parsed, ParsedRequest, is_sent, named, short_text
from fairlead.parse.prompt import anything, text_or_list


class EmbeddingBody(Body, gc=False):
    input: Raw = ABSENT
    #: vLLM's other form of the same request: the input is a chat.
    messages: Raw = ABSENT
    user: Raw = ABSENT


_read = Reader(EmbeddingBody).read


def parse_embeddings(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    read = _read(body)
    if read is None:
        return None
    if not is_sent(read.input) and not is_sent(read.messages):
        raise ClientError("Missing required parameter: 'input'.", param="input")
    if is_sent(read.input) and text_or_list(read.input) is None:
        raise ClientError("Invalid type for 'input': expected a string or a list.", param="input")
    return _pooled(EMBEDDINGS, read)


def parse_pooling(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`. What goes in may also be `data`, in a form that only a plugin of the engine knows."""
    read = _read(body)
    return None if read is None else _pooled(POOLING, read)


def _pooled(api: str, read: EmbeddingBody) -> ParsedRequest:
    items = 0
    if not is_sent(read.input) and is_sent(read.messages):
        view = messages_of(read.messages)
        items = media_items(view)
        size, tokens = text_size(view, items), 0
    else:
        view, size, tokens = anything(read.input)
    return ParsedRequest(
        api,
        read.model or "",
        prompt=(view,) if view else (),
        root=b"%b %b" % (api.encode(), named(read.model, read.cache_salt)),
        prompt_bytes=size,
        prompt_tokens=tokens,
        user=short_text(read.user),
        media=items,
    )
