"""Trace formats: every one comes back as it went, and what is wrong is named by file, line and field."""

from pathlib import Path

import pytest

from fairlead.lab.workload.formats import FORMATS, TraceError, guess
from fairlead.lab.workload.record import Outcome, Record, Workload, arranged

DATA = Path(__file__).parents[3] / "data" / "traces"

BURSTGPT = b"""\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,1.5,ChatGPT,472,18,490,API log
45,s1,9,GPT-4,1087,230,1317,Conversation log
50,,0.2,ChatGPT,100,0,100,API log
118.5,s1,,GPT-4,1417,276,1693,Conversation log
"""
BAILIAN = b"""\
{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 10, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 9, "parent_chat_id": 7, "timestamp": 3.25, "input_length": 70, "output_length": 5, "type": "text", "turn": 2, "hash_ids": [1, 2, 3, 4, 5]}
{"chat_id": 11, "parent_chat_id": 2, "timestamp": 4.0, "input_length": 16, "output_length": 0, "type": "search", "turn": 1, "hash_ids": [8]}
"""  # noqa: E501
VIDUR = b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.000000,374,44\n1.250000,1200,7\n"


def read(name: str, data: bytes) -> Workload:
    return FORMATS[name].read("w", data, "file.x")


def test_the_mooncake_trace_is_read_as_published():
    workload = read("mooncake", (DATA / "mooncake_head.jsonl").read_bytes())
    first = workload.records[0]
    assert len(workload) == 60
    assert (first.in_tokens, first.out_tokens, first.block_size) == (6758, 500, 512)
    assert first.hash_ids == tuple(range(14))
    assert all(len(r.hash_ids) == -(-r.in_tokens // 512) for r in workload.records)
    assert workload.dispatch == "timestamp"


def test_the_azure_trace_counts_time_from_its_first_row():
    workload = read("azure", (DATA / "azure_code_head.csv").read_bytes())
    first, second = workload.records[:2]
    assert len(workload) == 60
    assert (first.arrival_us, first.in_tokens, first.out_tokens) == (0, 4808, 10)
    assert second.arrival_us == 52_000
    assert not first.hash_ids


def test_azure_times_may_have_an_offset_or_no_fraction():
    times = (
        "2024-05-10 00:00:00.0099300+00:00", "2024-05-10 02:00:00.0099300+02:00", "2024-05-09 19:00:00.0099300-05:00",
        "2024-05-10T00:00:00.0099300Z", "2024-05-10 00:00:00.00993", "2024-05-10 00:00:03+00:00",
    )  # fmt: skip
    workload = read("azure", AZURE_HEAD + "".join(f"{time},1,1\n" for time in times).encode())
    assert [record.arrival_us for record in workload.records] == [0, 0, 0, 0, 0, 2_990_070]


def test_burstgpt_leaves_out_what_failed_and_links_sessions():
    workload = read("burstgpt", BURSTGPT)
    assert [(r.arrival_us, r.model, r.in_tokens, r.out_tokens) for r in workload.records] == [
        (5_000_000, "ChatGPT", 472, 18),
        (45_000_000, "GPT-4", 1087, 230),
        (118_500_000, "GPT-4", 1417, 276),
    ]
    assert [(r.session, r.parent) for r in workload.records] == [("", ""), ("s1", ""), ("s1", "1")]
    assert workload.records[0].outcome == Outcome(e2e_ms=1500.0)
    assert workload.records[2].outcome is None


def test_bailian_makes_sessions_of_parents():
    workload = read("bailian", BAILIAN)
    assert [(r.id, r.parent, r.session, r.out_tokens) for r in workload.records] == [
        ("7", "", "7", 10),
        ("9", "7", "7", 5),
        ("11", "", "11", 1),
    ]
    assert workload.records[1].hash_ids == (1, 2, 3, 4, 5)
    assert workload.records[1].block_size == 16


def test_a_replay_with_sessions_and_delays_is_read():
    data = b'{"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "timestamp": 1.5}\n'
    data += b'{"session_id": "a", "input_length": 900, "output_length": 5, "hash_ids": [1, 3], "delay": 250}\n'
    first, second = read("mooncake", data).records
    assert (first.arrival_us, first.parent) == (1500, "")
    assert (second.parent, second.think_ms, second.session) == (first.id, 250.0, "a")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (
            "mooncake",
            b'{"timestamp": 5000, "input_length": 900, "output_length": 5, "session_id": "a"}\n'
            b'{"timestamp": 1000, "input_length": 600, "output_length": 5, "session_id": "a"}\n',
        ),
        ("burstgpt", b"\n".join(BURSTGPT.splitlines()[i] for i in (0, 4, 2))),
        ("bailian", b"\n".join(BAILIAN.splitlines()[i] for i in (1, 0))),
    ],
)
def test_sessions_follow_the_times_of_a_trace_and_not_its_lines(name, data):
    workload = read(name, data)
    first, second = workload.records
    assert first.arrival_us < second.arrival_us
    assert (first.parent, second.parent, second.session) == ("", first.id, first.session)
    assert read("native", FORMATS["native"].write(workload)) == workload


FULL = arranged(
    "all",
    [
        Record(id="a", in_tokens=100, out_tokens=7, session="s", model="m", lora="l", tenant="t", priority=-1),
        Record(
            id="b", in_tokens=64, out_tokens=9, arrival_us=12_345, session="s", parent="a", think_ms=1.5,
            slo_ttft_ms=200.0, slo_tpot_ms=20.0, max_tokens=30, block_size=32, hash_ids=(5, 2**63), stream=False,
            cancel_after_ms=70.0, text="hello", outcome=Outcome(endpoint="e", ttft_ms=3.5, itl=(1.0, 2.0), status=200),
        ),
    ],
    "think",
)  # fmt: skip


def test_the_native_format_loses_nothing():
    data = FORMATS["native"].write(FULL)
    assert read("native", data) == FULL
    assert FORMATS["native"].write(read("native", data)) == data


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mooncake", (DATA / "mooncake_head.jsonl").read_bytes()),
        ("azure", (DATA / "azure_code_head.csv").read_bytes()),
        ("burstgpt", BURSTGPT),
        ("bailian", BAILIAN),
        ("vidur", VIDUR),
    ],
)
def test_what_a_format_holds_comes_back(name, data):
    workload = read(name, data)
    written = FORMATS[name].write(workload)
    assert read(name, written) == workload
    assert guess(data) == guess(written) == name


def test_vidur_is_written_as_it_was():
    assert FORMATS["vidur"].write(read("vidur", VIDUR)) == VIDUR


def test_formats_are_told_apart():
    assert guess(FORMATS["native"].write(FULL)) == "native"
    assert guess(b'{"id": "x", "in_tokens": 1, "out_tokens": 1}\n') == "native"
    assert guess(b"a,b,c\n1,2,3\n") == ""
    assert guess(b"") == ""


AZURE_HEAD = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
ONE = b'{"id": "a", "in_tokens": 1, "out_tokens": 1}\n'
UNTIMED = b'{"input_length": 5, "output_length": 5}'
NATIVE_HEAD = b'{"fairlead_workload": 1}\n'.replace(b" ", b"")


@pytest.mark.parametrize(
    ("name", "data", "line", "field"),
    [
        ("mooncake", b'{"input_length": 5, "output_length": 5}\n{"input_length": "x"}', 2, "input_length"),
        ("mooncake", b'{"input_length": 5}', 1, "output_length"),
        ("mooncake", b'\n\n{"input_length": 0, "output_length": 5}', 3, "input_length"),
        ("mooncake", b'{"input_length": 5, "output_length": 5, "hash_ids": [1, 2]}', 1, "hash_ids"),
        ("mooncake", b'{"input_length": 5, "output_length": 5, "hash_ids": [1, "a"]}', 1, "hash_ids[1]"),
        ("mooncake", b"{no json", 1, ""),
        ("mooncake", b'{"input_length": 5, "output_length": -2}', 1, "output_length"),
        ("bailian", b'{"chat_id": 1, "timestamp": -4, "input_length": 5, "output_length": 5}', 1, "timestamp"),
        ("mooncake", b'{"timestamp": 1e307, "input_length": 5, "output_length": 5}', 1, "timestamp"),
        ("mooncake", b'{"timestamp": -1e307, "input_length": 5, "output_length": 5}', 1, "timestamp"),
        ("bailian", b'{"chat_id": 1, "timestamp": 1e305, "input_length": 5, "output_length": 5}', 1, "timestamp"),
        ("vidur", b"arrived_at,num_prefill_tokens,num_decode_tokens\n1e305,1,1\n", 2, "arrived_at"),
        ("burstgpt", b"Timestamp,Model,Request tokens,Response tokens\n1e305,m,5,5\n", 2, "Timestamp"),
        ("native", b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "arrival_us": 10000000000000000}', 1, "arrival_us"),
        ("azure", AZURE_HEAD + b"2023-11-16 18:17:03.9,4808,10\nyesterday,1,1", 3, "TIMESTAMP"),
        ("azure", AZURE_HEAD + b"2023-11-16,1,1", 2, "TIMESTAMP"),
        ("azure", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4.5,10", 2, "ContextTokens"),
        ("azure", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,7", 2, "GeneratedTokens"),
        ("azure", b"TIMESTAMP,GeneratedTokens\n", 1, "ContextTokens"),
        ("azure", b"", 1, "TIMESTAMP"),
        ("azure", b"\xff\xfe\x00", 1, ""),
        ("vidur", b"arrived_at,num_prefill_tokens,num_decode_tokens\nnan,1,1\n", 2, "arrived_at"),
        ("vidur", b"arrived_at,num_prefill_tokens,num_decode_tokens\n-1,1,1\n", 2, "arrived_at"),
        ("burstgpt", BURSTGPT + b"7,,1,m,many,5,5,API log\n", 6, "Request tokens"),
        ("native", NATIVE_HEAD + b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "prompt": 3}', 2, "prompt"),
        ("native", NATIVE_HEAD + ONE + ONE, 3, "id"),
        ("native", b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "parent": "z"}', 1, "parent"),
        ("native", b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "hash_ids": [3]}', 1, "block_size"),
        ("native", b'{"fairlead_workload":2}\n', 1, "fairlead_workload"),
        ("native", b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "think_ms": -1}', 1, "think_ms"),
        ("native", b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "slo_ttft_ms": -1}', 1, "slo_ttft_ms"),
        ("native", b'{"id": "a", "in_tokens": 1, "out_tokens": 1, "n": 100000000}', 1, "n"),
        ("mooncake", b'{"timestamp": 1, "input_length": 5, "output_length": 5}\n' + UNTIMED, 2, "timestamp"),
    ],
)  # fmt: skip
def test_a_bad_line_names_file_line_and_field(name, data, line, field):
    with pytest.raises(TraceError) as caught:
        read(name, data)
    error = caught.value
    assert (error.source, error.path) == (f"file.x:{line}", field)
    assert str(error).startswith(f"file.x:{line}: ")


def test_random_bytes_give_an_error_and_nothing_else():
    import random

    rng = random.Random(7)
    good = [
        (DATA / "mooncake_head.jsonl").read_bytes()[:900],
        (DATA / "azure_code_head.csv").read_bytes()[:400],
        BURSTGPT,
    ]
    for _ in range(300):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for format in FORMATS.values():
            try:
                format.read("w", bytes(data), "f")
            except TraceError:
                continue
