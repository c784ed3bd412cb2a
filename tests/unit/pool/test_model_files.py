"""Model directories as they lie on a disk."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.config.schema import ModelTokens, Tokens
from fairlead.pool import model_files
from fairlead.pool.model_files import load_tokeniser, read_files


def chat(tokeniser: PromptTokeniser, model: str = "m") -> PromptTokens:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "a"}]}).encode()
    return tokeniser.tokens_of(parse_request("/v1/chat/completions", body), body, model)


def ids(found: PromptTokens) -> str:
    """The vocabulary is letters, so ids read as text."""
    assert found.reason == "", found
    return "".join(map(chr, memoryview(found.ids).cast("I")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE({chr(code): code for code in range(33, 127)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "B", "chat_template": "config"}))
    return tmp_path


def loaded(**settings: object) -> PromptTokeniser:
    return load_tokeniser(Tokens(models={"*": ModelTokens(**settings)}), lambda: datetime(2026, 3, 1, tzinfo=UTC))  # type: ignore[arg-type]


def test_where_templates_come_from(folder: Path) -> None:
    path = str(folder)
    assert ids(chat(loaded(model_path=path))) == "config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert ids(chat(loaded(model_path=path))) == "processor"
    (folder / "chat_template.jinja").write_text("file{{bos_token}}{{strftime_now('%Y')}}{{x}}")
    assert ids(chat(loaded(model_path=path, template_kwargs={"x": "X"}))) == "fileB2026X"
    (folder / "other.jinja").write_text("named")
    assert ids(chat(loaded(model_path=path, chat_template=str(folder / "other.jinja")))) == "named"


def test_a_tokenizer_file_brings_its_neighbours(folder: Path) -> None:
    assert ids(chat(loaded(tokenizer_file=str(folder / "tokenizer.json")))) == "config"
    elsewhere = folder / "sub"
    elsewhere.mkdir()
    (folder / "tokenizer.json").rename(elsewhere / "mine.json")
    found = loaded(model_path=str(folder), tokenizer_file=str(elsewhere / "mine.json"))
    assert ids(chat(found)) == "config"


def test_special_tokens_map(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "x", "eos_token": {"content": "E"}}))
    (folder / "chat_template.jinja").write_text("{{bos_token}}{{eos_token}}")
    assert ids(chat(loaded(model_path=str(folder)))) == "BE"


def test_nothing_there(tmp_path: Path) -> None:
    tokeniser = loaded(model_path=str(tmp_path / "no"))
    assert tokeniser.state == f"none (cannot read {tmp_path / 'no' / 'tokenizer.json'}: No such file or directory)"
    assert chat(tokeniser).reason == "no-tokeniser"
    (tmp_path / "tokenizer.json").mkdir()
    assert "cannot read" in loaded(model_path=str(tmp_path)).state
    assert load_tokeniser(Tokens()).state.startswith("none (no tokeniser is configured")


def test_a_template_that_cannot_be_read_leaves_the_tokenizer(folder: Path) -> None:
    for name, content in (("missing.jinja", None), ("binary.jinja", b"\xff\xfe"), ("bad.jinja", b"{% for %}")):
        if content is not None:
            (folder / name).write_bytes(content)
        tokeniser = loaded(model_path=str(folder), chat_template=str(folder / name))
        assert tokeniser.knows("m") and not tokeniser.state.startswith("none")
        assert tokeniser.states()["*"].template_state.startswith("none (")
        assert chat(tokeniser).reason == "template"


def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_FILE", 10)
    assert read_files(ModelTokens(model_path=str(folder))).problem.endswith("is larger than 10 bytes")


def test_models_that_the_engine_renders_have_no_tokeniser(folder: Path) -> None:
    settings = {"a": ModelTokens(render="engine"), "*": ModelTokens(model_path=str(folder))}
    tokeniser = load_tokeniser(Tokens(models=settings))
    assert not tokeniser.knows("a") and tokeniser.knows("b")
    assert chat(tokeniser, "a").reason == "no-tokeniser"
    assert tokeniser.state.startswith("a: engine (it is asked for the ids); *: ")
