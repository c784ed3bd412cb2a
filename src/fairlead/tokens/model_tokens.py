"""What is known of one model's tokens: its tokeniser and its chat template, from the files that came with the model."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder

from fairlead.tokens.pieces import PieceCache
from fairlead.tokens.template import ChatTemplate
from fairlead.tokens.tokeniser import Tokeniser, load

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Of a model that has several templates, the one for requests with tools.
_TOOL_USE, _DEFAULT = "tool_use", "default"


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Contents of the files of a model directory, as `fairlead.io.model_files` reads them; empty = there is none."""

    #: `tokenizer.json`.
    tokenizer: bytes = b""
    #: `tokenizer_config.json`.
    config: bytes = b""
    #: `special_tokens_map.json`.
    special_tokens: bytes = b""
    #: `chat_template.json`, of processors.
    processor_template: bytes = b""
    #: `chat_template.jinja`, or a file that was named.
    template: str = ""
    #: Why the tokenizer, and why the file of the template could not be read; empty = nothing went wrong.
    problem: str = ""
    template_problem: str = ""


class ModelTokens(Struct, frozen=True):
    """`tokeniser` and `templates` may be missing; `state` and `template_state` say why."""

    tokeniser: Tokeniser | None
    #: By name: `default`, and maybe `tool_use`.
    templates: Mapping[str, ChatTemplate]
    state: str
    #: `ok`, or `none (…)`.
    template_state: str

    def template(self, tools: bool) -> ChatTemplate | None:
        found = self.templates.get(_TOOL_USE) if tools else None
        return found or self.templates.get(_DEFAULT)


def build(
    files: ModelFiles, cache: PieceCache, now: Callable[[], datetime], variables: Mapping[str, Any] | None = None
) -> ModelTokens:
    """`variables`: for every rendering, besides the special tokens. Takes seconds: not for an event loop."""
    if not files.tokenizer:
        state = f"none ({files.problem or 'there is no tokenizer.json'})"
        return ModelTokens(None, {}, state, "none (there is no tokeniser)")
    tokeniser, state = load(files.tokenizer, files.config, cache)
    config = _object(files.config)
    given = {**_special_tokens(_object(files.special_tokens)), **_special_tokens(config), **(variables or {})}
    if files.template_problem:
        return ModelTokens(tokeniser, {}, state, f"none ({files.template_problem})")
    try:
        sources = _sources(files, config)
        templates = {name: ChatTemplate(source, now, given) for name, source in sources.items()}
    except ValueError as exc:
        return ModelTokens(tokeniser, {}, state, f"none ({exc})")
    return ModelTokens(tokeniser, templates, state, "ok" if templates else "none (the model has no chat template)")


def _sources(files: ModelFiles, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Of several places the first counts: a file, the processor's, the tokenizer's configuration."""
    if files.template:
        return {_DEFAULT: files.template}
    for holder in (_object(files.processor_template), config):
        found = holder.get("chat_template")
        if isinstance(found, str):
            return {_DEFAULT: found}
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            return {str(name): source for name, source in named.items() if isinstance(source, str)}
    return {}


def _special_tokens(holder: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL:
        token = holder.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


_decode = Decoder(dict[str, Any]).decode


def _object(content: bytes) -> dict[str, Any]:
    """A JSON object, empty if it is none."""
    try:
        return _decode(content) if content else {}
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError):
        return {}
