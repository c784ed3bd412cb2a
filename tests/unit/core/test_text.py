"""What people see of texts from outside."""

import json

import pytest

from fairlead.core.text import escaped, masked, plain

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J a\nb \x9b31m \u202eb \u2066 \u2028 \x7f \ud800"


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    assert plain("é 日本 🦊 a-b_c") == "é 日本 🦊 a-b_c"
    assert plain(HOSTILE) == "�]0;PWNED��[2J a�b �31m �b � � � �"
    assert plain({HOSTILE: [HOSTILE, 1, None], "x": 1.5}) == {plain(HOSTILE): [plain(HOSTILE), 1, None], "x": 1.5}


def test_json_stays_the_same_and_has_escapes() -> None:
    text = HOSTILE.removesuffix("\ud800") + "é日"
    document = escaped(json.dumps({"a": text}, ensure_ascii=False, indent=1).encode())
    assert json.loads(document) == {"a": text}
    assert plain(document.replace("\n", "")) == document.replace("\n", "") and "é日" in document


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:1/v1: cannot connect", "http://me:***@host:1/v1: cannot connect"),
        ("a valkeys://:s3cret@h, b http://u:s3cret@i", "a valkeys://:***@h, b http://u:***@i"),
        ("http://u:a@b@host, https://t0ken@host/x", "http://u:***@host, https://***@host/x"),
        ("valkey://me@host", "valkey://me@host"),
        (
            "http://h?Token=t0ken&x=1&api_key=k#f 'http://h/?a=1&key=k'",
            "http://h?Token=***&x=1&api_key=***#f 'http://h/?a=1&key=***'",
        ),
        ("me@host", "me@host"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
