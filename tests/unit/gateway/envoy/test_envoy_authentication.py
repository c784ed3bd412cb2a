"""The file of API keys: what it may say, and what is said of its mistakes."""

from pathlib import Path

import pytest

from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import KEYS, Key, authentication, new_key, parse_keys, read_keys
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Jwt, Options

DIGEST = "0123456789abcdef" * 4
SECRET = "fl-a-key-that-somebody-wrote-here-himself"


def test_a_file() -> None:
    text = f"\n# all\n{DIGEST.upper()}  team-a   # the batch jobs\n"
    text += f"{DIGEST[::-1]} org/b:c@d expires=2030-01-31T12:00:00+01:00\r\n"
    assert parse_keys(text) == (Key(DIGEST, "team-a"), Key(DIGEST[::-1], "org/b:c@d", 1896087600))
    assert parse_keys("") == ()


def test_a_new_key_is_what_its_line_says() -> None:
    key, kept = new_key("team-a", "2030-01-31")
    assert kept.line.endswith(" team-a expires=2030-01-31T00:00:00Z")
    assert parse_keys(kept.line) == (kept,)
    assert len(key) > 40 and key not in kept.line and new_key("team-a")[0] != key


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (SECRET, "the SHA-256 of a key in hex"),
        (f"{SECRET} team-a", "the SHA-256 of a key in hex"),
        (f"{DIGEST}0 team-a", "the SHA-256 of a key in hex"),
        (DIGEST, "a tenant"),
        (f"{DIGEST} a b c", "a tenant"),
        (f"{DIGEST} team-a]]", "letters, digits"),
        (f"{DIGEST} {'a' * 129}", "letters, digits"),
        (f"{DIGEST} ü", "letters, digits"),
        (f"{DIGEST} a {SECRET}", "expires="),
        (f"{DIGEST} a expires={SECRET}", "expires="),
        (f"{DIGEST} a expires=0001-01-01", "expires="),
        (f"{DIGEST} a\n{DIGEST} b", "twice, first in line 2"),
    ],
)
def test_a_mistake_is_named_by_its_line_and_never_quoted(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_keys(str(file))
    number = 3 if "twice" in said else 2
    assert f"{file}: line {number}: " in str(raised.value) and said in str(raised.value)
    assert SECRET not in str(raised.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(str(file))
    for content, said in ((b"\xff\xfe", "is not text"), (b"#" * (2 << 20), "larger than")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            read_keys(str(file))


def test_nothing_is_asked_for_unless_it_is_configured() -> None:
    assert authentication(Options()) == []
    text = str(build(Options(upload_share=1.0)))
    assert not [one for one in ("fairlead.uploads", KEYS, "http.jwt_authn", "http.rbac") if one in text]
    assert [f["name"].rpartition(".")[2] for f in authentication(Options(keys_file="/k", jwt=Jwt(issuer="i")))] == [
        *("jwt_authn", "keys", "rbac")
    ]
