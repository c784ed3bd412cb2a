import json
import tracemalloc
from typing import Any

import pytest
from msgspec import Raw
from msgspec.json import Decoder

from fairlead.apis.parsed import MAX_N
from fairlead.apis.prompt import MEDIA_BYTES, items, measured, media_items
from fairlead.apis.request import parse_request


def messages(*parts: Any) -> memoryview:
    return memoryview(json.dumps([{"role": "user", "content": list(parts)}]).encode()[:-1])


@pytest.mark.parametrize(
    "kind",
    [
        "image_url", "video_url", "audio_url", "input_audio", "input_image", "input_file", "image", "document", "file",
        "image_pil", "image_embeds", "audio_embeds", "video", "computer_screenshot",
    ],
)  # fmt: skip
def test_parts_that_are_media(kind: str) -> None:
    assert media_items(messages({"type": "text", "text": "x"}, {"type": kind}, {"x": 1, "type": kind})) == 2
    assert media_items(memoryview(b'[{"type"\n:\t"%b"}' % kind.encode())) == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": '{"type": "image_url"}'},
        {"type": "tool_use"},
        {"type": "refusal"},
        {"type": "input_text"},
        {"kind": "image"},
        {"type": ["image"]},
        '"type": "image"',
    ],
)
def test_parts_that_are_not(part: Any) -> None:
    assert media_items(messages(part)) == 0


def test_inline_data_do_not_count_by_length() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    sound = {"type": "input_audio", "input_audio": {"data": "B" * 7000, "format": "wav"}}
    link = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    embeds = {"type": "image_embeds", "image_embeds": {"image_embeds": "C" * 4000}}
    voice = {"type": "audio_embeds", "audio_embeds": "D" * 3000}
    file = {"type": "input_file", "file_data": "E" * 2000}
    screen = {"type": "computer_screenshot", "image_url": "data:image/png;base64," + "F" * 1000}
    bare = {"type": "text", "text": "t" * 5000}
    view = messages(url, sound, link, embeds, voice, file, screen, bare)
    assert measured(view) == (7, len(view) - 22_000 + 7 * MEDIA_BYTES)


def test_parts_without_a_type_are_known_by_their_data_url() -> None:
    url = "data:image/png;base64," + "A" * 5000
    view = messages({"image_url": {"url": url}}, {"text": "t" * 500}, url)
    assert measured(view) == (2, len(view) - 10_000 + 2 * MEDIA_BYTES)
    text = messages({"text": f"<img src='{url}'>"}, {"type": "text", "text": f"{url[5:]}"})
    assert measured(text) == (0, len(text)), "a text that quotes one costs what it is long"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("form", ["parts", "URL"])
def test_media_in_an_input_do_not_count_by_length(path: str, form: str) -> None:
    url = "data:image/png;base64," + "A" * 5000
    given: Any = url if form == "URL" else [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]
    parsed = parse_request(path, json.dumps({"input": given}).encode())
    assert parsed.media == 1
    assert MEDIA_BYTES < parsed.prompt_bytes < MEDIA_BYTES + 100


def test_talking_of_media_beside_media_is_text() -> None:
    view = messages({"type": "image_url"}, {"type": "text", "text": "a data URL has ;base64, in it " * 100})
    assert measured(view) == (1, len(view) + MEDIA_BYTES)


@pytest.mark.parametrize(
    "unit", [b";base64,", b'"data":"', b'"data"   ', b'"type"  ', b'"type":"image_', b";base64,A", b'"data:;base64,']
)
def test_hostile_messages_take_linear_time(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Quadratic work on these 2 MB would take minutes.
    view = memoryview(unit * (2_000_000 // len(unit)))
    assert media_items(view) == 0
    assert measured(view) == (0, len(view))
    with_item = memoryview(bytes(view) + b'"type":"image"')
    assert measured(with_item) == (1, len(with_item) + MEDIA_BYTES)


@pytest.mark.parametrize("size", [0, 1, MAX_N - 1, MAX_N, MAX_N + 1, 4 * MAX_N, 4 * MAX_N + 1, 80_000])
@pytest.mark.parametrize("item", ["1", '"a,b"', "[1,2]", '{"a":[1]}', "null"])
def test_items_are_counted_up_to_a_limit(size: int, item: str) -> None:
    raw = Raw(f"[{','.join([item] * size)}]".encode())
    assert items(raw) == min(len(Decoder(list[Raw]).decode(raw)), MAX_N)


def test_commas_elsewhere_are_no_items() -> None:
    commas = "," * 5 * MAX_N
    assert items(Raw(f'["{commas}",1]'.encode())) == 2
    assert items(Raw(f'"{commas}"'.encode())) == 1
    assert items(Raw(b"{" + b",".join([b'"a":1'] * 5 * MAX_N) + b"}")) == 1


HOSTILE = [
    ("/v1/completions", b'{"prompt":["",%b]}', b"1"),
    ("/v1/completions", b'{"prompt":[%b]}', b"[]"),
    ("/v1/embeddings", b'{"input":["",%b]}', b"1"),
    ("/generate", b'{"text":"a","image_data":[%b]}', b"[]"),
    ("/generate", b'{"text":"a","sampling_params":[%b]}', b"{}"),
    ("/inference/v1/generate", b'{"token_ids":[1],"features":{"mm_hashes":{"image":[%b]}}}', b"[]"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[%b]}]}', b'{"type":"image"}'),
]


@pytest.mark.parametrize(("path", "body", "item"), HOSTILE)
def test_hostile_lists_take_no_more_memory_than_they_have_bytes(path: str, body: bytes, item: bytes) -> None:
    sent = body % b",".join([item] * 2_000_000)
    tracemalloc.start()
    try:
        parsed = parse_request(path, sent)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * len(sent) + 16_000_000
    assert parsed.prompt_bytes <= len(sent) + MAX_N * MEDIA_BYTES
