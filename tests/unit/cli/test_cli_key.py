"""`fairlead key`, and what `validate` says of the file of keys."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from fairlead.cli import main as cli
from fairlead.compat.load import load
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import parse_keys


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return int(stopped.value.code or 0)


def test_the_line_is_for_the_file_and_the_key_for_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("key", "team-a", "--expires", "2030-01-31") == 0
    told = capsys.readouterr()
    (kept,) = parse_keys(told.out)
    key = told.err.split()[-1]
    assert (kept.tenant, kept.expires) == ("team-a", 1896048000)
    assert kept.digest == sha256(key.encode()).hexdigest() and key not in told.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("team a",),
        ("",),
        *(("team-a", "--expires", time) for time in ("tomorrow", "2020-01-31", "")),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("key", *arguments) == 2
    assert capsys.readouterr().out == ""


def test_validate_reads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, keys = tmp_path / "fairlead.yaml", tmp_path / "keys.txt"
    config.write_text("endpoints: [127.0.0.1:9]\ngateway: {keys: {file: keys.txt}}\n")
    keys.write_text("# nobody yet\nsecret-key team-a\n")
    assert run("validate", str(config)) == 2
    assert "keys.txt: line 2: " in (said := capsys.readouterr().out) and "secret-key" not in said
    assert run("validate", str(config), "--json") == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "keys.txt: line 2: " in problem["message"]
    keys.write_text("")
    assert run("validate", str(config)) == 0


def test_another_gateway_does_not_ask() -> None:
    with pytest.raises(ConfigError, match="only the embedded gateway"):
        load(json.dumps({"endpoints": ["127.0.0.1:9"], "gateway": {"mode": "none", "keys": {"file": "keys.txt"}}}))


@pytest.mark.parametrize(
    "jwt",
    [
        {"issuer": "i"},
        {"issuer": "i", "jwksFile": "a", "jwksUri": "https://b/c"},
        {"issuer": "i", "jwksUri": "http://example.com/keys"},
        {"issuer": "i", "jwksUri": "http://127.0.0.1.example.com/keys"},
        {"jwksFile": "a"},
    ],
)
def test_tokens_that_could_not_be_checked_are_refused(jwt: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.jwt"):
        load(json.dumps({"endpoints": ["127.0.0.1:9"], "gateway": {"jwt": jwt}}))
