"""The section `tokens`: where the tokenisers and chat templates of models come from."""

from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from fairlead.config.problems import Report
from fairlead.config.section import Section
from fairlead.config.units import Bytes, PositiveSeconds

KEY = "tokens"
_NOTHING = "name a modelPath or a tokenizerFile, or set render: engine"


class ModelTokens(Section, frozen=True, kw_only=True):
    """Of one model name."""

    #: Directory with `tokenizer.json` and what belongs to it, as the engine loads it.
    model_path: str = ""
    #: A `tokenizer.json`, instead of the directory's.
    tokenizer_file: str = ""
    #: A Jinja template, instead of the model's own: what the engine was started with as `--chat-template`.
    chat_template: str = ""
    #: Variables for every rendering: what the engine was started with as `--default-chat-template-kwargs`.
    template_kwargs: dict[str, Any] = {}
    #: `local`: in this process. `engine`: an endpoint is asked for the ids.
    render: Literal["local", "engine"] = "local"


class Tokens(Section, frozen=True, kw_only=True):
    """Off without `models`: prompts are then matched by their bytes."""

    #: By model name; `*` = every other one.
    models: dict[str, ModelTokens] = {}
    #: For pieces of prompts that were encoded before, over all models.
    cache_bytes: Bytes = 256 << 20
    #: With `render: engine`: a request goes on without ids after this.
    engine_timeout: PositiveSeconds = 0.2


def check_tokens(section: Tokens, report: Report) -> None:
    """What must fit together."""
    for name, model in section.models.items():
        place = (KEY, "models", name)
        if model.render == "local" and not model.model_path and not model.tokenizer_file:
            report.add(place, "there is nothing to make tokens with", _NOTHING)
        if model.render == "engine":
            for field in ("modelPath", "tokenizerFile", "chatTemplate", "templateKwargs"):
                if getattr(model, _snake(field)):
                    report.add(
                        (*place, field), "the engine renders with its own", "leave it out, or take render: local"
                    )


def located(section: Tokens, base: Path | None) -> Tokens:
    """With paths as seen from the configuration's directory."""
    if base is None:
        return section
    return structs.replace(section, models={name: _located(model, base) for name, model in section.models.items()})


def _located(model: ModelTokens, base: Path) -> ModelTokens:
    paths = {
        "model_path": model.model_path,
        "tokenizer_file": model.tokenizer_file,
        "chat_template": model.chat_template,
    }
    return structs.replace(model, **{field: str(base / path) for field, path in paths.items() if path})


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
