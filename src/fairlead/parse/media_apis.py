"""Sounds and images: `/v1/audio/…` and `/v1/images/…`. Bodies are forms (`multipart/form-data`) or JSON.

What they cost is not a matter of prompt tokens, and what they send is not kept in a prefix cache: each file is taken
as one media item, and nothing is hashed.
"""

from msgspec import Raw

from fairlead.model.errors import ClientError
from fairlead.parse.api import AUDIO, IMAGES
from fairlead.parse.body import ABSENT, Body, Reader, Scalar, count, flag
from fairlead.parse.media import MEDIA_BYTES, media_items
from fairlead.parse.multipart import Form, read_form
from fairlead.parse.parsed import MAX_N, Parsed, ParsedRequest, is_sent, model_bytes, short_text, unread
from fairlead.parse.prompt import anything


class MediaBody(Body, gc=False):
    #: What an image is made of.
    prompt: Raw = ABSENT
    #: What is spoken (`/v1/audio/speech`).
    input: Raw = ABSENT
    max_completion_tokens: Scalar = None
    n: Scalar = None
    user: Raw = ABSENT


_read = Reader(MediaBody).read


def parse_audio(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    form = read_form(body, content_type)
    if form is None:
        return _from_json(AUDIO, body, content_type)
    if not form.files:
        raise ClientError("Missing required parameter: 'file'.", param="file")
    return _from_form(AUDIO, form)


def parse_images(body: bytes, content_type: str = "") -> Parsed:
    """Raises `ClientError`."""
    form = read_form(body, content_type)
    return _from_json(IMAGES, body, content_type) if form is None else _from_form(IMAGES, form)


def _from_form(api: str, form: Form) -> ParsedRequest:
    model = form.text("model") or ""
    model_bytes(model)
    prompt = form.fields.get("prompt", b"")
    return ParsedRequest(
        api,
        model,
        flag(form.text("stream") or None, "stream"),
        count(form.text("max_completion_tokens") or None, "max_completion_tokens"),
        n=_choices(form.text("n") or None),
        prompt_bytes=len(prompt) + len(form.files) * MEDIA_BYTES,
        user=_short(form),
        media=len(form.files),
    )


def _from_json(api: str, body: bytes, content_type: str) -> Parsed:
    if content_type and "json" not in content_type.lower():
        # Neither a form nor JSON (a bare sound file, a form of another type): the model server's to refuse.
        return unread(api, "content-type", MEDIA_BYTES)
    read = _read(body)
    if read is None:
        return None
    model_bytes(read.model)
    text = anything(read.prompt if is_sent(read.prompt) else read.input)
    return ParsedRequest(
        api,
        read.model or "",
        flag(read.stream, "stream"),
        count(read.max_completion_tokens, "max_completion_tokens"),
        n=_choices(read.n),
        prompt_bytes=text.size,
        user=short_text(read.user),
        media=media_items(text.view),
    )


def _choices(n: Scalar) -> int:
    return 1 if n is None else min(max(count(n, "n"), 1), MAX_N)


def _short(form: Form) -> str:
    user = form.text("user") or ""
    return user if len(user) <= 1024 else ""
