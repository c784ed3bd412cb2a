"""The fields of request bodies that make the prompt. Everything else of a body is skipped, not built."""

from typing import Any, TypeVar

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType, ValidationError
from msgspec.json import Decoder

from fairlead.tokens.prompt_tokens import FIELDS, UNREAD, Absent, MediaItem

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
        found: list[MediaItem] = []
        for kind, digests in (self.features.mm_hashes or {}).items():
            if len(places.get(kind, ())) != len(digests):
                raise ValueError(f"not as many places as hashes of '{kind}'")
            found += [MediaItem(one, at.offset, at.length) for one, at in zip(digests, places[kind], strict=True)]
        return tuple(sorted(found, key=lambda item: item.offset))


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
