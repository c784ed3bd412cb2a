import json

import pytest

from fairlead.apis.body import SALVAGE_LIMIT
from fairlead.apis.multipart import read_form
from fairlead.apis.splice import splice_model

FORM = "multipart/form-data; boundary=BB"


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b'{"model":"old","n":12345678901234567890}', b'{"model":"new","n":12345678901234567890}'),
        (b'{"model" : null }', b'{"model" : "new" }'),
        (b'{"model":"a","model":"b"}', b'{"model":"a","model":"new"}'),
        (b'{"model":"a","model":null}', b'{"model":"a","model":"new"}'),
        (b"{}", b'{"model":"new"}'),
        (b" { } ", b' {"model":"new" } '),
        (b'{"x":{"model":"y"}}', b'{"model":"new","x":{"model":"y"}}'),
        (b'\xef\xbb\xbf{"model":"old"}', b'\xef\xbb\xbf{"model":"new"}'),
        (b'{"mod\\u0065l":"old"}', b'{"mod\\u0065l":"new"}'),
    ],
)
def test_json(body: bytes, spliced: bytes) -> None:
    assert splice_model(body, "new") == spliced


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"model"', b"\x1f\x8b\x08\x00", b'{"model":7}', b'{"model":["a"]}', b'{"model":"a"', b"{}}"]
)
def test_no_place(body: bytes) -> None:
    assert splice_model(body, "new") is None


def test_awkward_names() -> None:
    name = 'a"b\\c\n\u2028é🦊'
    spliced = splice_model(b'{"model":"old","x":1}', name)
    assert spliced is not None
    assert json.loads(spliced) == {"model": name, "x": 1}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_become_utf8(encoding: str) -> None:
    spliced = splice_model('{"model":"old","x":"é🦊"}'.encode(encoding), "new")
    assert spliced is not None
    assert json.loads(spliced) == {"model": "new", "x": "é🦊"}


def test_sglang_names_its_adapter() -> None:
    body = b'{"text":"x","lora_path":"old"}'
    assert splice_model(body, "new", api="sglang") == b'{"text":"x","lora_path":"new"}'
    body = b'{"model":"old","lora_path":"a"}'
    assert splice_model(body, "new", api="sglang") == b'{"model":"new","lora_path":"a"}'


def form(*parts: tuple[str, bytes], end: bytes = b"--BB--\r\n") -> bytes:
    return b"".join(b"--BB\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in parts) + end


def field(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"'


def test_form() -> None:
    file = 'Content-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav'
    sound = b'\x00\r\n--BBB\r\n\r\n"model"\r\n--X'
    body = form((file, sound), (field("model"), b"old"), (field("language"), b"en"))
    assert splice_model(body, "néw", FORM) == body.replace(b"\r\nold\r\n", "\r\nnéw\r\n".encode())
    quoted = FORM.replace("BB", '"BB"')
    assert splice_model(body, "new", quoted) == body.replace(b"\r\nold\r\n", b"\r\nnew\r\n")


def test_the_last_field_counts() -> None:
    body = form((field("model"), b"first"), (field("model"), b""), (field("x"), b"model"))
    assert splice_model(body, "new", FORM) == form(
        (field("model"), b"first"), (field("model"), b"new"), (field("x"), b"model")
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"a preamble\r\n", b""), (b"", b"an epilogue\r\n--BB\r\n")],
    ids=["plain", "preamble", "epilogue"],
)
def test_a_form_without_the_field_gets_it_first(before: bytes, after: bytes) -> None:
    rest = form(('Content-Disposition: form-data; name="file"; filename="x"', b"\x00\xff"), (field("other"), b"old"))
    spliced = splice_model(before + rest + after, "néw", FORM)
    assert spliced == before + form((field("model"), "néw".encode()), end=b"") + rest + after
    read = read_form(spliced, FORM)
    assert read is not None and (read.text("model"), read.text("other"), read.files) == ("néw", "old", [2])


@pytest.mark.parametrize(
    "body",
    [
        form(('Content-Disposition: form-data; name="model"; filename="x"', b"old")),
        form((field("model"), b"old"), end=b""),
        form(),
        b"",
        b"--BB",
        b"model=old",
    ],
)
def test_form_without_a_place(body: bytes) -> None:
    assert splice_model(body, "new", FORM) is None
    assert splice_model(body, "new", "multipart/form-data") is None


def test_no_name_breaks_out_of_its_field() -> None:
    assert splice_model(form((field("model"), b"old")), "a\r\n--BB", FORM) is None


@pytest.mark.parametrize(
    "unit", [b"\r\n--BB", b"--BB\r\n", b"\r\n\r\n", b'\r\n--BB\r\nContent-Disposition: form-data; name="']
)
def test_hostile_forms_take_linear_time(unit: bytes) -> None:
    # Quadratic work on these 2 MB would take hours.
    assert splice_model(unit * (2_000_000 // len(unit)), "new", FORM) is None


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b'{"x":NaN,"model":"old"}', b'{"x":NaN,"model":"new"}'),
        (b'{"x":"\xed\xa0\xbd","model" : "old" } ', b'{"x":"\xed\xa0\xbd","model" : "new" } '),
        (b'{"model":"a","x":[{"model":"b"},NaN]}', b'{"model":"new","x":[{"model":"b"},NaN]}'),
        (b'{"mod\\u0065l":"\\ud83d","x":1}', b'{"mod\\u0065l":"new","x":1}'),
        (b'{"x":NaN}', b'{"model":"new","x":NaN}'),
        (b'\xef\xbb\xbf { "x": Infinity , "model": null}', b'\xef\xbb\xbf { "x": Infinity , "model": "new"}'),
        (b'{"x":NaN}}', None),
        (b'{"x":NaN "model":"a"}', None),
        (b'{"x":NaN,}', None),
        (b'{"x":NaN,"model":5}', None),
        (b'{"x":' + b"[" * 100_000, None),
    ],
)
def test_what_only_python_reads(body: bytes, spliced: bytes | None) -> None:
    assert splice_model(body, "new") == spliced


def test_such_a_body_is_not_read_if_it_is_large() -> None:
    assert splice_model(b'{"x":NaN,"y":"%b","model":"old"}' % (b"y" * SALVAGE_LIMIT), "new") is None
    assert splice_model(b'{"x":0,"y":"%b","model":"old"}' % (b"y" * SALVAGE_LIMIT), "new") is not None
