"""Records become requests: equal ids give equal text, everything else differs; times are those of the records."""

import json
from itertools import islice, pairwise
from typing import Any

import pytest

from fairlead.lab.load.workload import Paced, Recorded, Replay, Turns
from fairlead.lab.workload.arrivals import bursty
from fairlead.lab.workload.record import Record


def record(name: str, tokens: int = 40, **fields: Any) -> Record:
    return Record(id=name, in_tokens=tokens, out_tokens=7, **fields)


def bodies(*records: Record, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(call.body) for call in Replay(records, **options).calls()]


def prompts(*records: Record, **options: Any) -> list[str]:
    return [body["messages"][0]["content"] for body in bodies(*records, **options)]


def test_equal_ids_give_equal_text_up_to_where_they_differ() -> None:
    one, two = prompts(
        record("a", block_size=10, hash_ids=(1, 2, 3, 4)), record("b", block_size=10, hash_ids=(1, 2, 9, 4))
    )
    assert len(one) == len(two) == 40 * 4
    assert one[:80] == two[:80]
    assert one[80:120] != two[80:120]
    assert one[:40] != one[40:80]


def test_the_next_turn_continues_a_block_that_was_cut_short() -> None:
    first, second = prompts(
        record("a", 25, block_size=10, hash_ids=(1, 2, 3)), record("b", 38, block_size=10, hash_ids=(1, 2, 3, 4))
    )
    assert (len(first), len(second)) == (100, 152)
    assert second.startswith(first)


def test_what_no_id_names_is_shared_with_nobody() -> None:
    one, two, bare, other = prompts(
        record("a", 25, block_size=10, hash_ids=(1,)),
        record("b", 25, block_size=10, hash_ids=(1,)),
        record("c"),
        record("d"),
    )
    assert one[:40] == two[:40]
    assert one[40:] != two[40:]
    assert len(one) == 100
    assert bare[:16] != other[:16]


def test_texts_depend_on_the_seed_alone() -> None:
    blocks = record("a", block_size=10, hash_ids=(1, 2, 3, 4))
    assert prompts(blocks) == prompts(blocks)
    assert prompts(blocks, seed=1)[0][:40] != prompts(blocks)[0][:40]


def test_any_id_and_name_can_be_sent() -> None:
    huge, negative = prompts(
        record("ä\ud800", 10, block_size=10, hash_ids=(10**5000,)), record("b", 10, block_size=10, hash_ids=(-3,))
    )
    assert len(huge) == len(negative) == 40


def test_fields_of_a_record_and_what_replaces_them() -> None:
    plain = bodies(record("a", lora="sql"), record("b", model="m"), record("c", text="hé", stream=False))
    assert [body["model"] for body in plain] == ["sql", "m", "default"]
    assert [body["max_tokens"] for body in plain] == [7, 7, 7]
    assert plain[0]["stream_options"] == {"include_usage": True}
    assert "stream" not in plain[2]
    assert plain[2]["messages"] == [{"role": "user", "content": "hé"}]
    (changed,) = bodies(record("a", model="m"), model="x", output_tokens=3, extra={"ignore_eos": True})
    assert (changed["model"], changed["max_tokens"], changed["ignore_eos"]) == ("x", 3, True)
    (fallback,) = bodies(record("a"), fallback_model="served")
    assert fallback["model"] == "served"
    (rewritten,) = bodies(record("a", model="asked", target="sql", lora="sql"))
    assert rewritten["model"] == "asked"


def test_several_answers_are_asked_for_and_known_to_be() -> None:
    (call,) = Replay([record("a", n=4)]).calls()
    assert (call.n, json.loads(call.body)["n"]) == (4, 4)


def test_what_clients_say_in_headers_is_said_there() -> None:
    full = record("a", session="s1", tenant="Zoë", priority=-1, slo_ttft_ms=1500.0, slo_tpot_ms=37.5)
    (call,) = Replay([full]).calls()
    assert call.headers == {
        "x-session-id": "s1",
        "x-llm-d-inference-fairness-id": "Zoë".encode().decode("latin-1"),
        "x-llm-d-inference-objective": "priority--1",
        "x-llm-d-slo-ttft-ms": "1500",
        "x-llm-d-slo-tpot-ms": "37.5",
    }
    (other,) = Replay([full], seed=3).calls()
    assert other.headers["x-session-id"] == "s1.3", "its prompts are other ones, too"
    (broken,) = Replay([record("a", session="s\r\nx: 1", tenant="\n")]).calls()
    assert broken.headers == {"x-session-id": "s x: 1"}, "no line break, with which no request could be sent"
    (bare,) = Replay([record("a")]).calls()
    assert bare.headers == {}


def test_a_turn_comes_when_the_answer_before_has_ended() -> None:
    turns = Turns(
        [
            record("a", arrival_us=1_000_000),
            record("b", arrival_us=2_000_000, parent="a", think_ms=3000),
            record("c", arrival_us=9_000_000),
            record("d", arrival_us=9_500_000, parent="gone", think_ms=1),
        ],
        2.0,
    )
    sent = Replay(turns.begun).calls()

    def begin() -> tuple[float | None, str]:
        at = turns.next
        turns.begin()
        return at, json.loads(next(sent).body)["messages"][0]["content"]

    alone = prompts(record("a"), record("b"), record("c"), record("d"))
    assert begin() == (0.0, alone[0])
    assert turns.next == 4.0
    turns.ended(0, 1.0)
    assert begin() == (2.5, alone[1])
    turns.ended(1, 3.0)
    assert [begin(), begin()] == [(4.0, alone[2]), (4.25, alone[3])]
    assert turns.next is None


def test_recorded_times_count_from_the_first_and_are_sped_up() -> None:
    records = [record(str(at), arrival_us=at) for at in (3_000_000, 3_500_000, 7_000_000)]
    assert list(Recorded(records, 2.0).offsets()) == pytest.approx([0.0, 0.25, 2.0])
    assert list(Recorded([]).offsets()) == []


def test_paced_arrivals_are_seeded_and_ascend() -> None:
    first = list(islice(Paced(bursty(10.0), seed=4).offsets(), 50))
    assert first == list(islice(Paced(bursty(10.0), seed=4).offsets(), 50))
    assert first != list(islice(Paced(bursty(10.0), seed=5).offsets(), 50))
    assert all(before <= after for before, after in pairwise(first))
