"""Images, sounds, videos and files among the parts of a message: how many, and how long the prompt is without them.

An inline item costs tokens by its resolution or duration, not by the length of its base64 text, and an item that is
only referred to costs as much. So each is taken as `MEDIA_BYTES` of text.
"""

import re

#: 1,000 tokens at 4.2 bytes.
MEDIA_BYTES = 4200

#: The type of a part, in the words of OpenAI's APIs, vLLM's and Anthropic's. Inside of text its quotes are escaped.
_PART = re.compile(
    rb'"type"[ \t\r\n]*:[ \t\r\n]*"(?:input_)?(?:image|audio|video|file|document)(?:_url|_pil|_embeds)?"'
)
#: Where inline data begins: a data URL, or the member `data` (`input_audio`, Anthropic's `source`).
_INLINE = re.compile(rb';base64,|"data"[ \t\r\n]*:[ \t\r\n]*"')
#: What it must begin with. Shorter data is not worth a thought.
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_\\-]{256}")


def media_items(messages: memoryview) -> int:
    """Media items in a list of messages. Costs 0.4 µs per kB."""
    return sum(1 for _ in _PART.finditer(messages))


def text_size(messages: memoryview, items: int) -> int:
    """Bytes of text that cost as many tokens as the messages with their `items` do."""
    size = len(messages)
    if not items:
        return size
    raw = bytes(messages)
    position = 0
    while found := _INLINE.search(raw, position):
        start = position = found.end()
        if _BASE64.match(raw, start):
            # Base64 has no quotes, so the next one ends the string, and it is found at the speed of memchr.
            end = raw.find(b'"', start)
            position = len(raw) if end < 0 else end
            size -= position - start
    return size + items * MEDIA_BYTES
