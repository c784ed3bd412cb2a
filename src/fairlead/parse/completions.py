"""`/v1/completions`."""

from msgspec import Raw

from fairlead.model.errors import ClientError
from fairlead.parse.api import COMPLETIONS
from fairlead.parse.body import ABSENT, Body, Reader, Scalar, StreamOptions, count, flag
from fairlead.parse.parsed import MAX_N, Parsed, ParsedRequest, Text, is_sent, named, short_text
from fairlead.parse.prompt import list_prefix, text_or_list


class CompletionBody(Body, gc=False):
    prompt: Raw = ABSENT
    max_tokens: Scalar = None
    n: Scalar = None
    stream_options: StreamOptions | None = None
    prompt_embeds: Raw = ABSENT
    user: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT


read_completion = Reader(CompletionBody).read


def parse_completion(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    read = read_completion(body)
    if read is None:
        return None
    text = _prompt(read)
    options = read.stream_options
    return ParsedRequest(
        COMPLETIONS,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_tokens, "max_tokens"),
        options is not None and flag(options.include_usage, "stream_options"),
        1 if read.n is None else min(max(count(read.n, "n"), 1), MAX_N),
        (text.view,),
        b"completions %b" % named(read.model, read.cache_salt),
        text.size,
        text.tokens,
        short_text(read.prompt_cache_key, read.user),
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
