import json
from typing import Any

import pytest

from fairlead.apis import prompt
from fairlead.apis.prompt import MEDIA_BYTES, media_items, text_size


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
    assert text_size(view, media_items(view)) == len(view) - 22_000 + 7 * MEDIA_BYTES
    assert text_size(view, 0) == len(view)


def test_talking_of_media_beside_media_is_text() -> None:
    view = messages({"type": "image_url"}, {"type": "text", "text": "a data URL has ;base64, in it " * 100})
    assert text_size(view, 1) == len(view) + MEDIA_BYTES


@pytest.mark.parametrize("unit", [b";base64,", b'"data":"', b'"data"   ', b'"type"  ', b'"type":"image_', b";base64,A"])
def test_hostile_messages_take_linear_time(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Quadratic work on these 2 MB would take minutes.
    view = memoryview(unit * (2_000_000 // len(unit)))
    assert media_items(view) == 0
    assert text_size(view, 1) <= len(view) + prompt.MEDIA_BYTES
