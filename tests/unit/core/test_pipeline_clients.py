"""Who sent a request is handed back in what is to be done about it, and is in no journal."""

from tests.unit.core.test_pipeline_models import pipeline

from fairlead.core.events import RequestArrived
from fairlead.core.instructions import Route
from fairlead.core.request import PrefixChain, Request
from fairlead.server.journal.records import decode, encode, joined


def test_the_answer_carries_the_client() -> None:
    sender, made = object(), pipeline()
    route = made.handle(RequestArrived(Request(id=1, arrived=0.0), sender))[0]
    assert isinstance(route, Route) and route.client is sender
    route = made.handle(RequestArrived(Request(id=2, arrived=0.0)))[0]
    assert isinstance(route, Route) and route.client is None


def test_a_journal_keeps_neither_the_client_nor_the_blocks() -> None:
    request = Request(id=1, arrived=0.0, prefix=PrefixChain((1,), (256,)))
    written = encode(("RequestArrived", 1.0, RequestArrived(request, object())))
    assert b"client" not in written
    with_blocks = Request(id=1, arrived=0.0, prefix=request.prefix, blocks=object(), trace=object())
    assert encode(("RequestArrived", 1.0, RequestArrived(with_blocks))) == written
    ((_, _, read),) = decode(bytes(joined([written], 1)))
    assert read == RequestArrived(request)
