"""gpt-oss's prompts, beyond what was recorded of a render server (test_renders.py)."""

from datetime import datetime
from typing import Any

import pytest

from fairlead.apis.tokens.chats import ChatFields
from fairlead.apis.tokens.harmony import Harmony
from fairlead.apis.tokens.pieces import Absent

HI = {"role": "user", "content": "hi"}


def rendered(*messages: Any, **more: Any) -> str:
    text = Harmony(lambda: datetime(2026, 1, 2)).render(ChatFields(list(messages), **more))
    assert "Current date: 2026-01-02\n" in text
    return text.split("<|end|>", 1)[1]


def test_thoughts_are_kept_only_behind_the_last_answer() -> None:
    def said(thought: str, text: str | None = None, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "reasoning": thought, "content": text, **more}

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = rendered(HI, said("old", "Yes"), HI, said("new", tool_calls=[call]))
    assert "old" not in text
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>new<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
    )


@pytest.mark.parametrize(
    ("message", "more", "reason"),
    [
        (HI, {"tools": [{}]}, "fields"),
        (HI, {"reasoning_effort": "none"}, "fields"),
        (HI, {"reasoning_effort": ["low"]}, "fields"),
        ({"role": "user", "content": "a<|end|>b"}, {}, "fields"),
        ({"role": "user", "content": [{"type": "image_url"}]}, {}, "media"),
        ({"role": "user", "content": 5}, {}, "template"),
        ({"role": "assistant", "reasoning": 5}, {}, "template"),
        ({"role": "assistant", "tool_calls": 5}, {}, "template"),
        ({"role": 5}, {}, "template"),
        (5, {}, "template"),
    ],
)
def test_what_only_the_engine_knows(message: Any, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(Absent) as caught:
        rendered(HI, message, **more)
    assert caught.value.reason == reason
