"""Load tokenisers from model directories on the local disk, from the files that the engine reads. Nothing is fetched.

If a model cannot be read or loaded, the start continues: the model's state says why, and its prompts are matched by
their bytes.
"""

import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelFiles, ModelTokens, PromptTokeniser, build
from fairlead.config.schema import ModelTokens as Settings
from fairlead.config.schema import Tokens

#: The largest tokenizers in use have 35 MB.
MAX_FILE = 256 << 20
TOKENIZER = "tokenizer.json"
#: The entry of a model whose engine makes the ids, so that the model does not get the ids of `*`.
BY_ENGINE = ModelTokens(None, {}, "engine (it is asked for the ids)", "engine (it renders)")


def load_tokeniser(settings: Tokens, now: Callable[[], datetime] = datetime.now) -> PromptTokeniser:
    """Load all models. Takes seconds per large vocabulary: call it in a thread. Never raises because of file contents.

    `now` is the time that templates may print, in the time zone of the engines.
    """
    cache = PieceCache(settings.cache_bytes, threading.Lock())
    models: dict[str, ModelTokens] = {}
    for name, model in settings.models.items():
        local = model.render == "local"
        models[name] = build(read_files(model), cache, now, model.template_kwargs) if local else BY_ENGINE
    return PromptTokeniser(models, cache)


def read_files(settings: Settings) -> ModelFiles:
    """Read a model's files. Never raises: a missing file is empty, and a `problem` says what could not be read."""
    folder = Path(settings.model_path) if settings.model_path else None
    named = Path(settings.tokenizer_file) if settings.tokenizer_file else (folder or Path()) / TOKENIZER
    # The other files of a tokenizer are in its folder.
    beside = folder or named.parent
    try:
        tokenizer = _read(named)
        names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "config.json")
        config, special, processor, model = (_maybe(beside / name) for name in names)
    except OSError as error:
        return ModelFiles(problem=_unreadable(error, named))
    template, problem = _template(settings, beside)
    return ModelFiles(
        tokenizer=tokenizer,
        config=config,
        special_tokens=special,
        processor_template=processor,
        model=model,
        template=template,
        template_problem=problem,
    )


def _template(settings: Settings, beside: Path) -> tuple[str, str]:
    """The template from a separate file, and what is wrong with that file; both may be empty."""
    named = Path(settings.chat_template) if settings.chat_template else None
    path = named or beside / "chat_template.jinja"
    try:
        return (_read(path) if named else _maybe(path)).decode(), ""
    except OSError as error:
        return "", _unreadable(error, path)
    except UnicodeDecodeError as error:
        return "", f"{path} is not UTF-8: {error.reason}"


def _unreadable(error: OSError, path: Path) -> str:
    return f"cannot read {error.filename or path}: {error.strerror or error}"


def _maybe(path: Path) -> bytes:
    """The content of a file; empty if there is no such file."""
    return _read(path) if path.is_file() else b""


def _read(path: Path) -> bytes:
    """The content of a file. Raises `OSError` if it cannot be read or is larger than `MAX_FILE`."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise OSError(27, f"is larger than {MAX_FILE} bytes", str(path))
    return content
