"""Bodies of questions to an indexer: what is read, and what is said of the rest."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.server.indexer.wire import (
    JSON,
    MOST_BLOCKS,
    MSGPACK,
    Answer,
    PodAnswer,
    QueryError,
    read_answer,
    read_query,
    read_state,
    write,
)


def test_the_documents_question_is_read() -> None:
    query = read_query(b'{"prompt_hash": [123, 456, 789], "pods": ["pod1", "pod2"]}')
    assert (query.prompt_hash, query.pods, query.strict) == ([123, 456, 789], ["pod1", "pod2"], False)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "the body is empty"),
        (b"{", 400, "cannot be read"),
        (b"\xff\xfe", 400, "cannot be read"),
        (b"[]", 400, "Expected `object`"),
        (b"null", 400, "Expected `object`"),
        (b'{"prompt_hash": [true]}', 400, "$.prompt_hash[0]"),
        (b'{"prompt_hash": [1.5]}', 400, "$.prompt_hash[0]"),
        (b'{"prompt_hash": 5}', 400, "$.prompt_hash"),
        (b'{"prompt_hashes": [1]}', 400, "unknown field `prompt_hashes`"),
        (b'{"pods": ["a"]}', 400, "give exactly one of prompt_hash"),
        (b'{"prompt_hash": [1], "prompt": "x"}', 400, "prompt_hash and prompt"),
        (b'{"prompt_hash": [1], "pods": [1]}', 400, "$.pods[0]"),
        (b'{"keys": "AAAA"}', 400, "not a whole number"),
        (b'{"keys": "AAAAAAAAAAA="}', 400, "block_size"),
        (b'{"keys": "!"}', 400, "base64"),
        (b'{"messages": "hello"}', 400, "$.messages"),
        (b'{"prompt": "\\ud800"}', 400, "cannot be read"),
        (json.dumps({"prompt_hash": [1] * (MOST_BLOCKS + 1)}).encode(), 413, "more than 65536"),
        (b'{"messages": ' + b'[{"a":' * 5000 + b"1" + b"}]" * 5000 + b"}", 400, "cannot be read"),
    ],
)
def test_errors_say_what_is_wrong(body: bytes, status: int, said: str) -> None:
    with pytest.raises(QueryError) as found:
        read_query(body)
    assert found.value.status == status
    assert said in str(found.value)


@given(st.binary(max_size=200), st.sampled_from([JSON, MSGPACK]))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_question_or_an_error(body: bytes, content_type: str) -> None:
    with contextlib.suppress(QueryError):
        assert msgspec.to_builtins(read_query(body, content_type))
    for read in (read_answer, read_state):
        with contextlib.suppress(ValueError):
            read(body)


def test_schedulers_ask_in_msgpack_and_are_answered_so() -> None:
    query = read_query(write({"keys": bytes(16), "block_size": 16, "hits_only": True}, MSGPACK), MSGPACK)
    assert (query.keys, query.block_size, query.hits_only) == (bytes(16), 16, True)
    answer = Answer(total=2, pods={"a": PodAnswer(matched=1, hit_rate=0.5, tiers={"gpu": 1})}, block_size=16)
    assert read_answer(write(answer, MSGPACK)) == answer
    assert json.loads(write(answer))["pods"] == {"a": {"matched": 1, "hit_rate": 0.5, "tiers": {"gpu": 1}}}
