"""Search over decisions."""

import msgspec
import pytest

from fairlead.core.records import DecisionRecord, OutcomeRecord
from fairlead.core.request import Request
from fairlead.server.observe.snapshot import Search


def recorded(number, status=200, cause="natural", endpoint="default/a", ended=True, answered_by="", why="", **fields):
    request = Request(id=number, arrived=0.0, **fields)
    decision = DecisionRecord(request=request, at=1.0, policy="p", endpoint=endpoint, outcome=why or "routed")
    outcome = OutcomeRecord(request=request, at=2.0, endpoint=answered_by or endpoint, status=status, cause=cause)
    return decision, outcome if ended and endpoint else None


RECORDS = [
    recorded(10, model="Llama-8B", fairness_id="Team-A", external_id="abc-10"),
    recorded(11, model="chat", target="sql-adapter", fairness_id="team-b"),
    recorded(12, status=503, endpoint="default/b"),
    recorded(13, cause="endpoint-gone"),
    recorded(14, cause="client-disconnect"),
    recorded(15, endpoint=""),
    recorded(16, ended=False),
    recorded(17, cause="stream-lost"),
    recorded(18, endpoint="default/c", answered_by="default/b", model="chat", cause="client-disconnect"),
    recorded(19, endpoint="", why="rejected-context-cancelled", model="gone"),
]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]),
        ({"id": "12"}, [12]),
        ({"id": "run.d"}, [13]),
        ({"id": "ABC"}, [10]),
        ({"model": "llama"}, [10]),
        ({"model": "SQL"}, [11]),
        ({"requested": "chat"}, [11, 18]),
        ({"requested": "sql-adapter"}, []),
        ({"requested": "llama-8b"}, []),
        ({"requested": ""}, [12, 13, 14, 15, 16, 17]),
        ({"tenant": "team"}, [10, 11]),
        ({"endpoint": "default/b"}, [12, 18]),
        ({"endpoint": "default/c"}, [18]),
        ({"endpoint": "default"}, []),
        ({"outcome": "answered"}, [10, 11]),
        ({"outcome": "failed"}, [12, 13]),
        ({"outcome": "cancelled"}, [14, 17, 18, 19]),
        ({"outcome": "refused"}, [15]),
        ({"outcome": "running"}, [16]),
        ({"outcome": "answered", "tenant": "b"}, [11]),
    ],
)
def test_all_that_is_given_must_match(query, ids):
    assert [decision.request.id for decision, _ in msgspec.convert(query, Search).among(RECORDS)] == ids


def test_a_decision_id_of_another_run_is_none_of_ours() -> None:
    ids = "run.{:x}".format
    assert [decision.request.id for decision, _ in Search(id="run.d").among(RECORDS, ids)] == [13]
    assert Search(id="other.d").among(RECORDS, ids) == []


@pytest.mark.parametrize("query", [{"outcome": "good"}, {"colour": "red"}])
def test_what_there_is_not_cannot_be_searched_for(query):
    with pytest.raises(msgspec.ValidationError, match=r"good|colour"):
        msgspec.convert(query, Search)
