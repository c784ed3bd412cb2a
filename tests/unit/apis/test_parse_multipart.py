import contextlib
from typing import Any

import pytest

from fairlead.apis.multipart import MAX_PARTS, read_form
from fairlead.apis.prompt import MEDIA_BYTES
from fairlead.apis.request import parse_request
from fairlead.core.errors import ClientError

TYPE = "multipart/form-data; boundary=B"
PATH = "/v1/audio/transcriptions"


def part(name: str, content: bytes, extra: str = "") -> bytes:
    head = f'--B\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def sound(content: bytes = b"RIFF") -> bytes:
    return part("file", content, '; filename="a.wav"\r\nContent-Type: audio/wav')


END = b"--B--\r\n"


def fields(body: bytes, content_type: str = TYPE) -> dict[str, bytes]:
    form = read_form(body, content_type)
    assert form is not None
    return {name: bytes(value) for name, value in form.fields.items()}


def test_a_form() -> None:
    body = part("model", b"m") + sound(b"x" * 100) + part("prompt", "é\r\n--b".encode()) + part("n", b"") + END
    form = read_form(body, TYPE)
    assert form is not None
    assert fields(body) == {"model": b"m", "prompt": "é\r\n--b".encode(), "n": b""}
    assert form.files == [100]
    assert all(isinstance(value, memoryview) and value.obj is body for value in form.fields.values())


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="B"',
        "Multipart/Form-Data;charset=utf-8; Boundary=B",
        "multipart/form-data;boundary=B; x=y",
    ],
)
def test_content_types(content_type: str) -> None:
    assert fields(part("model", b"m") + END, content_type) == {"model": b"m"}


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/mixed; boundary=B", "text/plain"])
def test_what_is_no_form(content_type: str) -> None:
    assert read_form(part("model", b"m") + END, content_type) is None


@pytest.mark.parametrize(
    "headers",
    [
        b'content-disposition:form-data;name="model"',
        b"Content-Disposition: form-data; name=model",
        b'Content-Type: text/plain\r\nCONTENT-DISPOSITION: Form-Data ; NAME = "model"',
        b'Content-Disposition: form-data; x="a;name=b"; name="model"; y=z',
        b'Content-Disposition: form-data; name="model"\r\nX: y',
    ],
)
def test_ways_to_name_a_field(headers: bytes) -> None:
    assert fields(b"--B\r\n" + headers + b"\r\n\r\nm\r\n" + END) == {"model": b"m"}


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"X: y",
        b'Content-Disposition: attachment; name="model"',
        b"Content-Disposition: form-data",
        b'X: form-data; name="model"',
        b'Content-Disposition: form-data; filename="model"',
        b"X: " + b"y" * 9000 + b'\r\nContent-Disposition: form-data; name="model"',
    ],
)
def test_parts_that_are_no_fields(headers: bytes) -> None:
    assert fields(b"--B\r\n" + headers + b"\r\n\r\nm\r\n" + part("x", b"1") + END) == {"x": b"1"}


def test_of_two_fields_the_last_one_counts() -> None:
    assert fields(part("model", b"a") + part("model", b"b") + END) == {"model": b"b"}


def test_only_whole_lines_delimit() -> None:
    body = part("model", b"a--B\r\nb\n--B\nc\r\n--Bx\r\n--B-\r\nd") + END
    assert fields(body) == {"model": b"a--B\r\nb\n--B\nc\r\n--Bx\r\n--B-\r\nd"}


def test_preamble_epilogue_and_white_space() -> None:
    form = b"preamble\r\n" + part("model", b"m").replace(b"--B\r\n", b"--B \t\r\n") + END + b"--B\r\nepilogue"
    assert fields(form) == {"model": b"m"}


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b"", TYPE, "breaks off"),
        (b"{}", TYPE, "breaks off"),
        (part("model", b"m"), TYPE, "breaks off"),
        (part("model", b"m") + END, TYPE + "C", "breaks off"),
        (part("model", b"m") + END, "multipart/form-data", "no boundary"),
        (part("model", b"m") + END, 'multipart/form-data; boundary=""', "no boundary"),
    ],
)
def test_forms_that_cannot_be_read(body: bytes, content_type: str, says: str) -> None:
    with pytest.raises(ClientError, match=says) as error:
        read_form(body, content_type)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (part("model", b"m") + END, "file"),
        (sound() + part("model", b"\xff") + END, "model"),
        (sound() + part("model", b"x" * 1025) + END, "model"),
        (sound() + part("stream", b"perhaps") + END, "stream"),
        (sound() + part("n", b"many") + END, "n"),
    ],
)
def test_refusals_name_the_parameter(body: bytes, param: str) -> None:
    with pytest.raises(ClientError) as error:
        parse_request(PATH, body, TYPE)
    assert (error.value.status, error.value.param) == (400, param)
    assert "application/json" not in error.value.message


def test_a_sound_is_one_media_item() -> None:
    body = sound(b"\0" * 100_000) + part("model", b"m") + part("stream", b"true") + part("prompt", b"Hi.") + END
    parsed = parse_request(PATH, body, TYPE)
    assert (parsed.api, parsed.model, parsed.stream, parsed.media) == ("audio", "m", True, 1)
    assert parsed.prompt_bytes == MEDIA_BYTES + 3
    assert parsed.prompt == ()


def test_a_form_of_very_many_parts_is_read_up_to_a_limit() -> None:
    body = b"".join(part(f"x{i}", b"") for i in range(MAX_PARTS + 5)) + END
    with pytest.raises(ClientError, match="too many parts"):
        read_form(body, TYPE)
    body = b"".join(part(f"x{i}", b"") for i in range(MAX_PARTS)) + END
    assert len(fields(body)) == MAX_PARTS


@pytest.mark.parametrize("unit", [b"\r\n--B", b"\r\n--Bx", b"\r\n--B \t", b"\r\n", b"--B", b"\r\n--B\r"])
def test_hostile_forms_take_linear_time(unit: bytes) -> None:
    looked: list[int] = []

    class Watched(bytes):
        def find(self, sub: Any, start: Any = None, end: Any = None) -> int:
            if sub == b"\r\n--B":
                looked.append(start)
            return super().find(sub, start, end)

    body = Watched(b"--B\r\n" + unit * (2_000_000 // len(unit)))
    with contextlib.suppress(ClientError):
        read_form(body, TYPE)
    # Quadratic work on these 2 MB would take minutes; each look goes on where the one before ended.
    assert looked
    assert looked == sorted(set(looked))
