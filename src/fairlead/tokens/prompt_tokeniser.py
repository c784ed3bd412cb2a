"""From a request to its token ids, whatever API it speaks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairlead.parse import api as apis
from fairlead.parse.parsed import ParsedRequest
from fairlead.tokens.bodies import ChatFields, CompletionFields, Fields, decode, is_true, refuse_sent
from fairlead.tokens.messages import for_template, tools_for_template
from fairlead.tokens.model_tokens import ModelTokens
from fairlead.tokens.other_chats import from_messages, from_responses
from fairlead.tokens.pieces import PieceCache
from fairlead.tokens.prompt_tokens import (
    API,
    FIELDS,
    MEDIA,
    NO_TOKENISER,
    TEMPLATE,
    TOO_LONG,
    UNREAD,
    Absent,
    MediaItem,
    PromptTokens,
    absent,
    packed,
)
from fairlead.tokens.tokeniser import Tokeniser
from fairlead.tokens.varints import ids_of

#: The entry of all models that have none of their own.
OTHERS = "*"
#: Longer bodies are not tokenised: a million tokens are about 4 MB.
MAX_BODY = 16 << 20
#: New text of this size takes about 2 ms, see docs/tokens.md.
THREAD_BYTES = {"fastokens": 64 << 10, "tokenizers": 4 << 10}


class PromptTokeniser:
    """Tokenisers of all models, by name; `*` is that of all others. Several threads may use one."""

    def __init__(self, models: Mapping[str, ModelTokens] | None = None, cache: PieceCache | None = None) -> None:
        """`cache`: that of the models, for metrics."""
        self._models = dict(models or {})
        self.cache = cache

    @property
    def state(self) -> str:
        """One line for people: of each model by name, or of the only one."""
        if not self._models:
            return "none (no tokeniser is configured; prompts are matched by their bytes)"
        if len(self._models) == 1:
            return next(iter(self._models.values())).state
        return "; ".join(f"{name}: {model.state}" for name, model in self._models.items())

    def states(self) -> dict[str, ModelTokens]:
        """By the names of the configuration, for status pages and metrics."""
        return dict(self._models)

    def knows(self, model: str) -> bool:
        """Whether texts for `model` can be tokenised."""
        found = self._model(model)
        return found is not None and found.tokeniser is not None

    def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
        """Whether `tokens_of` may take longer than an event loop should be held up: call it in a thread then."""
        found = self._model(model)
        if found is None or found.tokeniser is None or parsed.prompt_tokens:
            return False
        return parsed.prompt_bytes > THREAD_BYTES.get(found.tokeniser.library, 0)

    def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        """`parsed` is what `parse_request` made of `body`; `model` the target, empty = as `*`. Never raises."""
        read = _READERS.get(parsed.api)
        if read is None and parsed.api != apis.GRPC:
            return absent(API, f"'{parsed.api}' is not tokenised")
        if parsed.unread:
            return absent(UNREAD, parsed.unread)
        if len(body) > MAX_BODY:
            return absent(TOO_LONG, f"a body of more than {MAX_BODY} bytes")
        try:
            return read(body, self._model(model)) if read else _grpc(parsed, self._model(model))
        except Absent as exc:
            return absent(exc.reason, exc.detail)
        except (ValueError, OverflowError, MemoryError) as exc:
            return absent(FIELDS, f"{type(exc).__name__}: {exc}")

    def _model(self, model: str) -> ModelTokens | None:
        return self._models.get(model) or self._models.get(OTHERS)


def _encode(model: ModelTokens | None, text: str, special: bool) -> bytes:
    if model is None or model.tokeniser is None:
        raise Absent(NO_TOKENISER, model.state if model else "none is configured for this model")
    return model.tokeniser.encode(text, special)


def _conversation(read: Callable[[bytes], ChatFields]) -> Callable[[bytes, ModelTokens | None], PromptTokens]:
    """A reader of an API whose body is, or becomes, a chat."""

    def reader(body: bytes, model: ModelTokens | None) -> PromptTokens:
        if model is None or model.tokeniser is None:
            return absent(NO_TOKENISER, model.state if model else "none is configured for this model")
        return _chat(read(body), model, model.tokeniser)

    return reader


def _chat(fields: ChatFields, model: ModelTokens, tokeniser: Tokeniser) -> PromptTokens:
    refuse_sent(chat_template=fields.chat_template, truncate_prompt_tokens=fields.truncate_prompt_tokens)
    text = _rendered(fields, model)
    return _found(tokeniser.encode(text, is_true(fields.add_special_tokens)), fields.cache_salt)


def _rendered(fields: ChatFields, model: ModelTokens) -> str:
    template = model.template(tools=fields.tools is not None)
    if template is None:
        raise Absent(TEMPLATE, model.template_state)
    if fields.reasoning_effort == "none":
        raise Absent(FIELDS, "reasoning_effort 'none' is translated by the engine's reasoning parser")
    given: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if given.keys() & {"chat_template", "tokenize", "messages"}:
        raise Absent(FIELDS, "chat_template_kwargs that the engine refuses")
    if fields.reasoning_effort is not None:
        given["reasoning_effort"] = fields.reasoning_effort
    if fields.documents is not None or "documents" not in given:
        given["documents"] = fields.documents
    given["tools"] = tools_for_template(fields.tools)
    given["add_generation_prompt"] = is_true(fields.add_generation_prompt)
    return template.render(
        for_template(fields.messages, template.form), given, continued=is_true(fields.continue_final_message)
    )


def _completion(body: bytes, model: ModelTokens | None) -> PromptTokens:
    fields = decode(Fields.completion, body)
    refuse_sent(prompt_embeds=fields.prompt_embeds, truncate_prompt_tokens=fields.truncate_prompt_tokens)
    return _found_all(_prompts(fields, model), fields.cache_salt)


def _prompts(fields: CompletionFields, model: ModelTokens | None) -> list[bytes]:
    prompt, special = fields.prompt, is_true(fields.add_special_tokens)
    if prompt is None:
        raise Absent(FIELDS, "there is no prompt")
    if isinstance(prompt, str):
        return [_encode(model, prompt, special)]
    if prompt and all(isinstance(one, int) for one in prompt):
        return [packed(prompt)]  # type: ignore[arg-type]
    found = []
    for one in prompt:
        if isinstance(one, int):
            raise Absent(FIELDS, "a list of prompts with a token id in it")
        found.append(_encode(model, one, special) if isinstance(one, str) else packed(one))
    return found


def _generate(body: bytes, model: ModelTokens | None) -> PromptTokens:
    fields = decode(Fields.generate, body)
    try:
        media = fields.media()
    except ValueError as error:
        raise Absent(MEDIA, str(error)) from None
    return _found(packed(fields.token_ids), fields.cache_salt, media)


def _sglang(body: bytes, model: ModelTokens | None) -> PromptTokens:
    fields = decode(Fields.sglang, body)
    refuse_sent(input_embeds=fields.input_embeds)
    if fields.image_data or fields.audio_data or fields.video_data:
        raise Absent(MEDIA, "images, sounds or videos")
    salt = fields.extra_key if isinstance(fields.extra_key, str) else None
    if fields.input_ids is not None:
        ids = fields.input_ids
        batch = [ids] if all(isinstance(one, int) for one in ids) else ids
        return _found_all([packed(one) for one in batch], salt)  # type: ignore[arg-type]
    if fields.text is None:
        raise Absent(FIELDS, "there is no prompt")
    texts = [fields.text] if isinstance(fields.text, str) else fields.text
    return _found_all([_encode(model, text, True) for text in texts], salt)


def _grpc(parsed: ParsedRequest, model: ModelTokens | None) -> PromptTokens:
    """The parser has found the ids, as varints, or the text."""
    if parsed.media:
        raise Absent(MEDIA, "where media stand in the prompt is not told")
    if parsed.prompt_tokens:
        return _found(ids_of(parsed.prompt), None)
    return _found(_encode(model, b"".join(parsed.prompt).decode(), True), None)


def _found(ids: bytes, salt: str | None, media: tuple[MediaItem, ...] = ()) -> PromptTokens:
    return PromptTokens(ids, len(ids) // 4, salt=salt or "", media=media)


def _found_all(prompts: Sequence[bytes], salt: str | None) -> PromptTokens:
    if not prompts:
        raise Absent(FIELDS, "there is no prompt")
    return PromptTokens(prompts[0], sum(map(len, prompts)) // 4, salt=salt or "")


_READERS: Mapping[str, Callable[[bytes, ModelTokens | None], PromptTokens]] = {
    apis.CHAT: _conversation(lambda body: decode(Fields.chat, body)),
    apis.MESSAGES: _conversation(from_messages),
    apis.RESPONSES: _conversation(from_responses),
    apis.COMPLETIONS: _completion,
    apis.GENERATE: _generate,
    apis.SGLANG: _sglang,
}
