"""An indexer on the metrics page, of both sides."""

from msgspec import Struct

from fairlead.core.kv.index import KvIndex
from fairlead.core.kv.tiers import Tier
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.kv_metrics import show_indexer, show_questions


class Asker(Struct):
    up: bool
    ends: dict[str, int]


class Asked(Struct):
    questions: int = 7
    looked_up: int = 100
    hit: int = 40
    refused: dict[int, int] = {}


def test_a_scheduler_that_asks() -> None:
    registry = Registry()
    asker = Asker(True, {"answered": 5, "late": 2})
    took = show_questions(registry, lambda: asker)
    took(0.002)
    page = registry.render().decode()
    assert "fairlead_indexer_up 1" in page
    assert 'fairlead_indexer_questions_total{result="late"} 2' in page
    assert 'fairlead_indexer_answer_seconds_bucket{le="0.0025"} 1' in page
    asker.up = False
    assert "fairlead_indexer_up 0" in registry.render().decode()


def test_an_indexer() -> None:
    registry, index = Registry(), KvIndex()
    took = show_indexer(registry, index, lambda: Asked(refused={400: 2, 413: 1}))
    assert "index_size 0" in registry.render().decode()
    index.add_slot(0)
    index.store(index.shelf(index.rank(0, 0, "*"), 0, Tier.GPU), [1, 2, 3], [11, 12, 13], 0)
    took(0.0004)
    page = registry.render().decode()
    for line in (
        "index_size 3",
        "kv_cache_lookup_total 100",
        "kv_cache_hit_total 40",
        "fairlead_indexer_queries_total 7",
        'fairlead_indexer_refused_total{status="413"} 1',
        'fairlead_indexer_query_seconds_bucket{le="0.0005"} 1',
    ):
        assert f"\n{line}\n" in page
