import json
from collections import Counter
from itertools import islice
from random import Random
from typing import Any

import msgspec
import pytest

from fairlead.core.errors import ConfigError
from fairlead.lab.load import workload as words
from fairlead.lab.load.workload import AnyWorkload, Call, Chat, SharedPrefix, Workload


def take(workload: Workload, count: int) -> list[Call]:
    return list(islice(workload.calls(), count))


def body_of(call: Call) -> Any:
    return json.loads(call.body)


def test_text_is_four_bytes_per_token_of_common_words() -> None:
    text = words.text(500, Random(1))
    assert len(text) == 2000
    assert len(set(text.split())) > 150
    common = set(words.text(100_000, Random(2)).split())
    assert len(common) == 256 and {len(word) for word in common} == {3}
    assert set(text.split()) <= common


def test_shared_prefix_has_the_published_shape() -> None:
    call = take(SharedPrefix(), 1)[0]
    body = body_of(call)
    system, question = body["messages"]
    assert (system["role"], len(system["content"])) == ("system", 24000)
    assert (question["role"], len(question["content"])) == ("user", 4800)
    assert (body["max_tokens"], body["stream"], body["stream_options"]) == (1000, True, {"include_usage": True})


def test_every_prompt_once_in_random_order_then_again_in_the_same_order() -> None:
    workload = SharedPrefix(groups=6, prompts=4, system_tokens=20, question_tokens=5, seed=2)
    calls = take(workload, 48)
    assert calls[:24] == calls[24:]
    assert len({call.body for call in calls}) == 24
    assert Counter(call.group for call in calls[:24]) == dict.fromkeys(range(6), 4)
    groups = [call.group for call in calls[:24]]
    assert groups != sorted(groups)


def test_a_group_shares_its_system_prompt_and_only_a_group_does() -> None:
    systems: dict[int, set[str]] = {}
    for call in take(SharedPrefix(groups=5, prompts=3, system_tokens=50, question_tokens=5), 15):
        systems.setdefault(call.group, set()).add(body_of(call)["messages"][0]["content"])
    assert all(len(texts) == 1 for texts in systems.values())
    assert len(set.union(*systems.values())) == 5


def test_the_seed_decides_order_and_text() -> None:
    def bodies(seed: int) -> list[bytes]:
        return [call.body for call in take(SharedPrefix(groups=3, prompts=2, system_tokens=9, seed=seed), 6)]

    assert bodies(1) == bodies(1)
    assert not set(bodies(1)) & set(bodies(2))


def test_model_and_extra_fields_are_json() -> None:
    workload = SharedPrefix(groups=1, prompts=1, model='a"b', stream=False, extra={"ignore_eos": True})
    body = body_of(take(workload, 1)[0])
    assert body["model"] == 'a"b'
    assert body["ignore_eos"] is True
    assert "stream" not in body
    assert "stream_options" not in body


@pytest.mark.parametrize("size", [300, 2048, 2049, 2051, 100_000])
def test_chat_has_exactly_the_size_asked_for(size: int) -> None:
    calls = take(Chat(body_bytes=size, output_tokens=7), 3)
    assert [len(call.body) for call in calls] == [size] * 3
    assert len({call.body for call in calls}) == 3
    assert body_of(calls[0])["max_tokens"] == 7


@pytest.mark.parametrize("workload", [SharedPrefix(groups=2, extra={"a": 1}), Chat(seed=4)])
def test_workloads_survive_json(workload: AnyWorkload) -> None:
    assert msgspec.json.decode(msgspec.json.encode(workload), type=AnyWorkload) == workload


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        SharedPrefix(groups=0)
    assert caught.value.path == "$.workload.groups"
