import sys

import pytest

from fairlead.apis.body import MAX_COUNT, SALVAGE_LIMIT, Scalar, count, flag, is_utf8
from fairlead.apis.openai import read_chat, read_completion
from fairlead.core.errors import ClientError


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "TRUE", "yes", "on", "1", "t", "y"])
def test_true_as_pydantic_reads_it(value: Scalar) -> None:
    assert flag(value, "stream") is True


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "false", "No", "off", "0", "f", "n"])
def test_false_as_pydantic_reads_it(value: Scalar) -> None:
    assert flag(value, "stream") is False


@pytest.mark.parametrize("value", [2, -1, 0.5, "", "maybe", "2", float("nan")])
def test_no_boolean(value: Scalar) -> None:
    with pytest.raises(ClientError) as error:
        flag(value, "stream")
    assert error.value.param == "stream"
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, 0),
        (7, 7),
        (7.0, 7),
        ("7", 7),
        (" 7 ", 7),
        ("7.0", 7),
        (True, 1),
        (False, 0),
        (-3, 0),
        ("-3", 0),
        (10**40, MAX_COUNT),
        ("9" * 100, MAX_COUNT),
        (1e300, MAX_COUNT),
    ],
)
def test_counts(value: Scalar, number: int) -> None:
    assert count(value, "max_tokens") == number


@pytest.mark.parametrize("value", ["many", "", 1.5, "1.5", float("nan"), float("inf"), "nan", "inf", "9" * 5000, "+-5"])
def test_no_count(value: Scalar) -> None:
    with pytest.raises(ClientError) as error:
        count(value, "max_tokens")
    assert error.value.param == "max_tokens"


@pytest.mark.parametrize("pad", [0, 1, 2, 3, 16380, 16381, 16382, 16383, 16384, 16385, 40000])
@pytest.mark.parametrize("text", ["", "é", "日本", "🦊🦊", "é日🦊" * 9000])
def test_utf8_is_recognised_across_steps(pad: int, text: str) -> None:
    data = b"x" * pad + text.encode()
    assert is_utf8(data)
    assert not is_utf8(data + b"\xff")
    assert not is_utf8(data + "日".encode()[:2])
    assert not is_utf8(b"\xc3" + data + b"\x00")


def test_engines_read_more_than_strict_json() -> None:
    read = read_completion(b'\xef\xbb\xbf{"model":"m","prompt":"cut \\ud83d","temperature":NaN,"max_tokens":"5"}')
    assert read is not None
    assert (read.model, bytes(read.prompt), read.max_tokens) == ("m", rb'"cut \ud83d"', "5")
    raw = read_completion(b'{"prompt":"cut \xed\xa0\xbd"}')
    assert raw is not None
    assert bytes(raw.prompt) == rb'"cut \ud83d"'
    wide = read_chat('{"model":"é","messages":[{"role":"user"}],"stream":true}'.encode("utf-16"))
    assert wide is not None
    assert (wide.model, wide.stream, bytes(wide.messages)) == ("é", True, b'[{"role": "user"}]')


@pytest.mark.parametrize(
    ("sent", "read_as"),
    [
        (rb"\ud83d", rb"\ufffd"),
        (rb"\uDE00", rb"\ufffd"),
        (rb"\ud83d\ude00 \ud83d", rb"\ud83d\ude00 \ufffd"),
        (rb"\ud83d\ud83d\ude00", rb"\ufffd\ud83d\ude00"),
        (rb"\ud83d\n", rb"\ufffd\n"),
        (rb"\\ud83d \udbff", rb"\\ud83d \ufffd"),
        (rb"\\\ud83d\u0041", rb"\\\ufffd\u0041"),
    ],
)
def test_unpaired_surrogates_are_replaced_in_place(sent: bytes, read_as: bytes) -> None:
    earlier = b'{"messages":[ {"role":"user"},\t"\xc3\xa9%b" ' % sent
    read = read_chat(earlier + b"]}")
    grown = read_chat(earlier + b',"\\ud800"]}')
    assert read is not None
    assert grown is not None
    assert bytes(read.messages) == b'[ {"role":"user"},\t"\xc3\xa9%b" ]' % read_as
    assert bytes(grown.messages).startswith(bytes(read.messages)[:-2])


def test_a_large_body_with_an_unpaired_surrogate_is_read() -> None:
    read = read_completion(b'{"prompt":"' + b"x" * SALVAGE_LIMIT + b'\\ud83d"}')
    assert read is not None
    assert len(bytes(read.prompt)) == SALVAGE_LIMIT + 8


def test_bodies_made_of_escapes_are_not_mended() -> None:
    prompt = b"\\n" * (1 << 20) + b"\\ud83d"
    assert read_completion(b'{"prompt":"' + prompt + b'"}') is None
    assert read_completion(b'{"prompt":"' + prompt[2:] + b'"}') is not None


def test_the_last_of_equal_keys_wins_however_it_is_read() -> None:
    strict = b'{"model":"a","prompt":"x","mod\\u0065l":"b","prompt":"y"}'
    for body in (strict, strict.replace(b"}", b',"temperature":Infinity}')):
        read = read_completion(body)
        assert read is not None
        assert (read.model, bytes(read.prompt)) == ("b", b'"y"')


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"nonsense", "character 0"),
        (b'{"prompt":"x"} {}', "Extra data"),
        (b'{"prompt":"a\nb"}', "not valid JSON"),
        (b'{"prompt":"x",}', "not valid JSON"),
        (b'{"prompt":"\xff"}', "not valid utf-8"),
        (b'{"x\xff":1}', "not valid utf-8"),
        (b'{"model":"\xc3"}', "not valid utf-8"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"NaN", "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"max_tokens":' + b"1" * 10_000 + b"}", "too many digits"),
        (b'{"model":["m"]}', "'model': expected a string"),
        (b'{"stream":{}}', "'stream': expected a boolean"),
        (b'{"max_tokens":[1]}', "'max_tokens': expected an integer"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not valid utf-8"),
    ],
)
def test_what_cannot_be_read(body: bytes, says: str) -> None:
    for read in (read_completion, read_chat):
        with pytest.raises(ClientError, match=says) as error:
            read(body)
        assert error.value.status == 400


def test_deep_but_legal_nesting_passes() -> None:
    depth = sys.getrecursionlimit() // 4
    read = read_completion(b'{"prompt":"x","extra":' + b"[" * depth + b"]" * depth + b"}")
    assert read is not None


def test_a_large_body_is_not_read_twice() -> None:
    filler = b'"' + b"x" * SALVAGE_LIMIT + b'"'
    assert read_completion(b'{"prompt":' + filler + b',"temperature":NaN}') is None
    assert read_completion(b'{"prompt":' + filler + b',"temperature":1}') is not None


@pytest.mark.parametrize("size", [70_000, 200_000])
def test_a_body_full_of_unpaired_surrogates(size: int) -> None:
    """As many as a second reading takes are read; more make a body that is not read."""
    body = b'{"prompt":"' + rb"\ud83d" * size + b'"}'
    read = read_completion(body)
    assert (read is None) == (len(body) > SALVAGE_LIMIT)
    if read is not None:
        assert bytes(read.prompt) == body[10:-1]
