"""The metrics of KV events."""

from fairlead.apis.tokens import PromptTokens
from fairlead.core.exact import ExactKnowledge, Predicted
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.request import Usage
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.kv_metrics import KvFeedStatus, KvMetrics


def feed(endpoint: str, slot: int) -> KvFeedStatus:
    return KvFeedStatus(endpoint, slot, 1, True, False, True, 42, 10, 20, 3, 4, 5, 6, 7, 8, 2)


def test_what_is_shown() -> None:
    registry, exact = Registry(), ExactKnowledge()
    endpoints = {0: "default/a", 1: "default/b"}
    for slot in endpoints:
        exact.add_slot(slot)
    cache = exact.index.rank(0, 0, ANY_MODEL)
    cache.heard = cache.linked = cache.provisional = True
    exact.refresh()
    feeds = [feed("default/a", 0)]
    KvMetrics(registry, exact, endpoints.items, lambda: feeds, lambda: 9, {"media": 2})
    awaited = exact.check.expect(0, PromptTokens(ids=bytes(400), total=100), "", 0, True)
    exact.ended(Predicted(None, awaited), Usage(prompt_tokens=100, cached_tokens=96), True, 0.0)
    page = registry.render().decode()
    for line in (
        'fairlead_kv_lost_batches_total{endpoint="default/a",rank="1"} 4',
        'fairlead_kv_bad_events_total{endpoint="default/a",rank="1"} 3',
        'fairlead_kv_feed_provisional{endpoint="default/a",rank="1"} 1',
        'fairlead_kv_feed_blocks{endpoint="default/a",rank="1"} 42',
        'fairlead_kv_source{endpoint="default/a",source="most"} 1',
        'fairlead_kv_source{endpoint="default/b",source="learned"} 1',
        'fairlead_kv_trust{endpoint="default/a"} 0',
        'fairlead_kv_checked_total{endpoint="default/a",verdict="off"} 1',
        'fairlead_kv_disagreements_total{cause="events-missing",endpoint="default/a"} 1',
        'fairlead_kv_checked_tokens_total{by="reported",endpoint="default/a"} 96',
        'fairlead_kv_prompts_without_tokens_total{reason="media"} 2',
        "fairlead_kv_rejected_batches_total 9",
        'llm_d_epp_kv_cache_events_subscriber_reconnections_total{pod_identifier="default/a"} 2',
    ):
        assert f"\n{line}\n" in page, line
    assert "llm_d_epp_kv_cache_index_lookup_hits_total 0" in page
    assert 'fairlead_kv_trust{endpoint="default/b"}' not in page, "no answer of it has been compared"
    # Who has left is shown no more.
    feeds.clear()
    del endpoints[0]
    exact.drop_slot(0)
    assert "default/a" not in registry.render().decode()
