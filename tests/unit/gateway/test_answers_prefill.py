"""A pair's prefill endpoint goes to the decoder's sidecar; a client's own word for it never does."""

from fairlead.core.endpoint import Endpoint
from fairlead.core.headers import PREFILLER
from fairlead.gateway.answers import Answers
from fairlead.gateway.ext_proc import Kind

DECODER = Endpoint(id="d", address="10.0.0.1:8000")


def answer(removed: frozenset[str] = frozenset(), prefill: str = "") -> bytes:
    return Answers("fl").pick(Kind.REQUEST_BODY, DECODER.address, 7, removed, prefill)


def test_the_prefill_endpoint_is_set_once_and_not_removed() -> None:
    for spoofed in (frozenset(), frozenset({PREFILLER})):
        found = answer(spoofed, "10.0.0.9:8000")
        assert found.count(PREFILLER.encode()) == 1
        assert b"10.0.0.9:8000" in found


def test_without_one_the_clients_header_goes() -> None:
    assert PREFILLER.encode() not in answer()
    assert answer(frozenset({PREFILLER})).count(PREFILLER.encode()) == 1


def test_answers_are_kept_apart_by_pair() -> None:
    answers = Answers("fl")
    first, second, alone = (
        answers.pick(Kind.REQUEST_BODY, DECODER.address, 7, frozenset(), prefill)
        for prefill in ("10.0.0.8:1", "10.0.0.9:1", "")
    )
    assert b"10.0.0.8:1" in first and b"10.0.0.9:1" in second
    assert b":1" not in alone.replace(b"10.0.0.1:8000", b"")
