import json

import pytest
from body_spans import model_span


@pytest.mark.parametrize(
    ("body", "string"),
    [
        (b'{"model":"m","x":1}', b'"m"'),
        (b' {\n "model" :\t "m" }', b'"m"'),
        (b'{"x":{"model":"no"},"model":"yes"}', b'"yes"'),
        (b'{"model":"yes","x":[{"model":"no"}]}', b'"yes"'),
        (b'{"x":"\\"model\\":\\"no\\"","model":"yes"}', b'"yes"'),
        (b'{"x":"model","model":"yes"}', b'"yes"'),
        (b'{"x":["model",":"],"model":"yes"}', b'"yes"'),
        (b'{"model":"first","model":"last"}', b'"last"'),
        (b'{"mod\\u0065l":"m"}', b'"m"'),
        (b'{"model":"first","\\u006d\\u006f\\u0064\\u0065\\u006c":"last"}', b'"last"'),
        (b'{"model":"a\\"b\\\\"}', b'"a\\"b\\\\"'),
        (b'{"model":""}', b'""'),
        (b'\xef\xbb\xbf{"model":"m"}', b'"m"'),
        ('{"x":"é日🦊","model":"ü"}'.encode(), '"ü"'.encode()),
        (b'{"x":"}]","model":"m"}', b'"m"'),
    ],
)
def test_span(body: bytes, string: bytes) -> None:
    span = model_span(body)
    assert span is not None
    assert body[slice(*span)] == string


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"model":null}',
        b'{"model":["m"]}',
        b'{"model":"m","model":3}',
        b'["model","m"]',
        b'[{"model":"m"}]',
        b'"model"',
        b'{"model":"m"',
        b'{"model":"m',
        b'{"model',
        b'{"model":"m"}}',
        b'{"Model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        b"\xff\xfe\x00",
    ],
)
def test_no_span(body: bytes) -> None:
    assert model_span(body) is None


def test_replacing_it_changes_nothing_else() -> None:
    body = b'{"a":1e400,"model" : "old","b":"\\u00e9","big":123456789012345678901234567890}'
    start, end = model_span(body) or (0, 0)
    changed = body[:start] + b'"new"' + body[end:]
    assert changed == body.replace(b'"old"', b'"new"')
    assert json.loads(changed)["model"] == "new"


@pytest.mark.parametrize("unit", [b'\\"', b'"', b"[", b"{", b"\\", b'"model":', b'{"', b'"\\'])
def test_hostile_bytes_take_linear_time(unit: bytes) -> None:
    # Quadratic work on these 2 MB would take hours.
    body = b'{"' + unit * (2_000_000 // len(unit))
    assert model_span(body) is None
