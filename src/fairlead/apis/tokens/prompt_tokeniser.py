"""The tokeniser and chat template of each model, from the files of the model, and the token ids of requests."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder

from fairlead.apis.parsed import ParsedRequest
from fairlead.apis.tokens.chats import (
    ChatFields,
    CompletionFields,
    Fields,
    decode,
    for_template,
    from_chat,
    from_messages,
    from_responses,
    is_true,
    refuse_sent,
    systems_joined,
    tools_for_template,
)
from fairlead.apis.tokens.harmony import MODEL_TYPE, Harmony
from fairlead.apis.tokens.pieces import (
    API,
    FIELDS,
    MEDIA,
    NO_TOKENISER,
    TEMPLATE,
    TOO_LONG,
    UNREAD,
    Absent,
    MediaItem,
    PieceCache,
    PromptTokens,
    absent,
    ids_of,
    packed,
)
from fairlead.apis.tokens.tokeniser import Tokeniser, load
from fairlead.core import apis

if TYPE_CHECKING:
    from fairlead.apis.tokens.template import ChatTemplate

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: If a model has several templates: the names of the template for requests with tools, and of the default.
_TOOL_USE, _DEFAULT = "tool_use", "default"


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Contents of the files of a model directory, as `fairlead.pool.model_files` reads them; empty = no such file."""

    #: `tokenizer.json`.
    tokenizer: bytes = b""
    #: `tokenizer_config.json`.
    config: bytes = b""
    #: `special_tokens_map.json`.
    special_tokens: bytes = b""
    #: `config.json`.
    model: bytes = b""
    #: `chat_template.json`, which belongs to a processor.
    processor_template: bytes = b""
    #: `chat_template.jinja`, or the configured template file.
    template: str = ""
    #: Why the tokenizer or the template file could not be read; empty = no problem.
    problem: str = ""
    template_problem: str = ""


class ModelTokens(Struct, frozen=True):
    """What tokenises the prompts of one model. If `tokeniser` or `templates` are missing, the states say why."""

    tokeniser: Tokeniser | None
    #: Templates by name: `default`, and possibly `tool_use`.
    templates: "Mapping[str, ChatTemplate]"
    state: str
    #: `ok`, or `none (…)`.
    template_state: str
    #: Renders the prompts of a model that needs no template.
    harmony: Harmony | None = None

    def template(self, tools: bool) -> "ChatTemplate | None":
        tool_template = self.templates.get(_TOOL_USE) if tools else None
        return tool_template or self.templates.get(_DEFAULT)


def build(
    files: ModelFiles, cache: PieceCache, now: Callable[[], datetime], variables: Mapping[str, Any] | None = None
) -> ModelTokens:
    """Load a model's tokeniser and templates. `variables`: passed to every rendering with the special tokens.
    Takes seconds: do not call it on an event loop."""
    if not files.tokenizer:
        state = f"none ({files.problem or 'there is no tokenizer.json'})"
        return ModelTokens(None, {}, state, "none (there is no tokeniser)")
    tokeniser, state = load(files.tokenizer, files.config, cache)
    if _object(files.model).get("model_type") == MODEL_TYPE:
        return ModelTokens(tokeniser, {}, state, "ok", Harmony(now))
    config = _object(files.config)
    given = {**_special_tokens(_object(files.special_tokens)), **_special_tokens(config), **(variables or {})}
    if files.template_problem:
        return ModelTokens(tokeniser, {}, state, f"none ({files.template_problem})")
    from fairlead.apis.tokens.template import ChatTemplate  # it imports jinja2

    try:
        sources = _sources(files, config)
        templates = {name: ChatTemplate(source, now, given) for name, source in sources.items()}
    except ValueError as exc:
        return ModelTokens(tokeniser, {}, state, f"none ({exc})")
    return ModelTokens(tokeniser, templates, state, "ok" if templates else "none (the model has no chat template)")


def _sources(files: ModelFiles, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. The first source counts: a file, the processor's file, the tokenizer's configuration."""
    if files.template:
        return {_DEFAULT: files.template}
    for holder in (_object(files.processor_template), config):
        sources = holder.get("chat_template")
        if isinstance(sources, str):
            return {_DEFAULT: sources}
        if isinstance(sources, list):
            named = {entry.get("name"): entry.get("template") for entry in sources if isinstance(entry, dict)}
            return {str(name): source for name, source in named.items() if isinstance(source, str)}
    return {}


def _special_tokens(holder: Mapping[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in _SPECIAL:
        token = holder.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return special


_decode = Decoder(dict[str, Any]).decode


def _object(content: bytes) -> dict[str, Any]:
    """Read a JSON object; empty if the content is not one."""
    try:
        return _decode(content) if content else {}
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError):
        return {}


# Gets the token ids of a request of any API.

#: The entry of all models that have no entry of their own.
ANY_MODEL = "*"
#: Longer bodies are not tokenised: a million tokens are about 4 MB.
MAX_BODY = 16 << 20
#: Encoding this many bytes of new text takes about 2 ms, see docs/tokens.md.
THREAD_BYTES = {"fastokens": 64 << 10, "tokenizers": 4 << 10}


class PromptTokeniser:
    """The tokenisers of all models, by name; `*` is for all other models. Several threads may use one instance."""

    def __init__(self, models: Mapping[str, ModelTokens] | None = None, cache: PieceCache | None = None) -> None:
        """`cache`: the cache that the models share, for metrics."""
        self._models = dict(models or {})
        self.cache = cache

    @property
    def state(self) -> str:
        """One line for people: `fastokens`, `none (…)`; with several models, the state of each by name."""
        if not self._models:
            return "none (no tokeniser is configured; prompts are matched by their bytes)"
        if len(self._models) == 1:
            return next(iter(self._models.values())).state
        return "; ".join(f"{name}: {model.state}" for name, model in self._models.items())

    def states(self) -> dict[str, ModelTokens]:
        """The models by their names in the configuration, for status pages and metrics."""
        return dict(self._models)

    def knows(self, model: str) -> bool:
        """Whether texts for `model` can be tokenised. If not, only requests that carry token ids get ids."""
        tokens = self._model(model)
        return tokens is not None and tokens.tokeniser is not None

    def in_thread(self, parsed: ParsedRequest, model: str) -> bool:
        """Whether `tokens_of` may block an event loop for too long and must be called in a thread."""
        tokens = self._model(model)
        if tokens is None or tokens.tokeniser is None or parsed.prompt_tokens:
            return False
        return parsed.prompt_bytes > THREAD_BYTES.get(tokens.tokeniser.library, 0)

    def tokens_of(self, parsed: ParsedRequest, body: bytes, model: str) -> PromptTokens:
        """The token ids of a request. `parsed`: the result of `parse_request`. `model`: the target, empty = `*`. Never
        raises."""
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
        return self._models.get(model) or self._models.get(ANY_MODEL)


def _encode(model: ModelTokens | None, text: str, special: bool) -> bytes:
    if model is None or model.tokeniser is None:
        raise Absent(NO_TOKENISER, model.state if model else "none is configured for this model")
    return model.tokeniser.encode(text, special)


def _conversation(read: Callable[[bytes], ChatFields]) -> Callable[[bytes, ModelTokens | None], PromptTokens]:
    """Make a reader of an API whose body is, or is translated to, a chat."""

    def reader(body: bytes, model: ModelTokens | None) -> PromptTokens:
        if model is None or model.tokeniser is None:
            return absent(NO_TOKENISER, model.state if model else "none is configured for this model")
        return _chat(read(body), model, model.tokeniser)

    return reader


def _chat(fields: ChatFields, model: ModelTokens, tokeniser: Tokeniser) -> PromptTokens:
    refuse_sent(chat_template=fields.chat_template, truncate_prompt_tokens=fields.truncate_prompt_tokens)
    if model.harmony is not None:
        return _of_one_prompt(tokeniser.encode(model.harmony.render(fields)), fields.cache_salt)
    text = _rendered(fields, model)
    return _of_one_prompt(tokeniser.encode(text, is_true(fields.add_special_tokens)), fields.cache_salt)


def _rendered(fields: ChatFields, model: ModelTokens) -> str:
    template = model.template(tools=fields.tools is not None)
    if template is None:
        raise Absent(TEMPLATE, model.template_state)
    given: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if given.keys() & {"chat_template", "tokenize", "messages"}:
        raise Absent(FIELDS, "chat_template_kwargs that the engine refuses")
    if fields.reasoning_effort is not None:
        given.setdefault("enable_thinking", fields.reasoning_effort != "none")
        given["reasoning_effort"] = fields.reasoning_effort
    if fields.documents is not None or "documents" not in given:
        given["documents"] = fields.documents
    given["tools"] = tools_for_template(fields.tools)
    given["add_generation_prompt"] = is_true(fields.add_generation_prompt)
    messages = fields.messages
    if fields.system_first and template.system_first:
        messages = systems_joined(messages, "")
    translated = for_template(messages, template.form, template.developers)
    return template.render(translated, given, continued=is_true(fields.continue_final_message))


def _completion(body: bytes, model: ModelTokens | None) -> PromptTokens:
    fields = decode(Fields.completion, body)
    refuse_sent(prompt_embeds=fields.prompt_embeds, truncate_prompt_tokens=fields.truncate_prompt_tokens)
    return _of_several(_prompts(fields, model), fields.cache_salt)


def _prompts(fields: CompletionFields, model: ModelTokens | None) -> list[bytes]:
    prompt, special = fields.prompt, is_true(fields.add_special_tokens)
    if prompt is None:
        raise Absent(FIELDS, "there is no prompt")
    if isinstance(prompt, str):
        return [_encode(model, prompt, special)]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [packed(prompt)]  # type: ignore[arg-type]
    encoded = []
    for item in prompt:
        if isinstance(item, int):
            raise Absent(FIELDS, "a list of prompts with a token id in it")
        encoded.append(_encode(model, item, special) if isinstance(item, str) else packed(item))
    return encoded


def _generate(body: bytes, model: ModelTokens | None) -> PromptTokens:
    fields = decode(Fields.generate, body)
    try:
        media = fields.media()
    except ValueError as error:
        raise Absent(MEDIA, str(error)) from None
    return _of_one_prompt(packed(fields.token_ids), fields.cache_salt, media)


def _sglang(body: bytes, model: ModelTokens | None) -> PromptTokens:
    fields = decode(Fields.sglang, body)
    refuse_sent(input_embeds=fields.input_embeds)
    if fields.image_data or fields.audio_data or fields.video_data:
        raise Absent(MEDIA, "images, sounds or videos")
    salt = fields.extra_key if isinstance(fields.extra_key, str) else None
    if fields.input_ids is not None:
        ids = fields.input_ids
        batch = [ids] if all(isinstance(item, int) for item in ids) else ids
        return _of_several([packed(item) for item in batch], salt)  # type: ignore[arg-type]
    if fields.text is None:
        raise Absent(FIELDS, "there is no prompt")
    texts = [fields.text] if isinstance(fields.text, str) else fields.text
    return _of_several([_encode(model, text, True) for text in texts], salt)


def _grpc(parsed: ParsedRequest, model: ModelTokens | None) -> PromptTokens:
    """The ids of a gRPC request. The parser has found its ids, as varints, or its text."""
    if parsed.media:
        raise Absent(MEDIA, "the request does not say where its media are in the prompt")
    if parsed.prompt_tokens:
        return _of_one_prompt(ids_of(parsed.prompt), None)
    return _of_one_prompt(_encode(model, b"".join(parsed.prompt).decode(), True), None)


def _of_one_prompt(ids: bytes, salt: str | None, media: tuple[MediaItem, ...] = ()) -> PromptTokens:
    return PromptTokens(ids, len(ids) // 4, salt=salt or "", media=media)


def _of_several(prompts: Sequence[bytes], salt: str | None) -> PromptTokens:
    if not prompts:
        raise Absent(FIELDS, "there is no prompt")
    return PromptTokens(prompts[0], sum(map(len, prompts)) // 4, salt=salt or "")


_READERS: Mapping[str, Callable[[bytes, ModelTokens | None], PromptTokens]] = {
    apis.CHAT: _conversation(from_chat),
    apis.MESSAGES: _conversation(from_messages),
    apis.RESPONSES: _conversation(from_responses),
    apis.RESPONSES_STORED: _conversation(from_responses),
    apis.COMPLETIONS: _completion,
    apis.GENERATE: _generate,
    apis.SGLANG: _sglang,
}
