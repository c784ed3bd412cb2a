"""What is known from KV events and how far it is relied on, on the metrics page. Set anew whenever somebody looks."""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from fairlead.fleet.exact import SOURCES, ExactKnowledge
from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import Readings, counters, gauges


class KvFeedStatus(Struct, frozen=True):
    """One rank's feed. Counts are batches, unless they say otherwise."""

    endpoint: str
    slot: int
    rank: int
    linked: bool
    behind: bool
    provisional: bool
    blocks: int
    batches: int
    events: int
    bad: int
    lost: int
    gaps: int
    restarts: int
    replays: int
    failed_replays: int


#: Metric, its text, and the field that it shows.
_COUNTERS = (
    ("batches", "Batches of KV events that were applied.", "batches"),
    ("events", "KV events that were applied.", "events"),
    ("bad_events", "KV events that could not be read.", "bad"),
    ("lost_batches", "Batches that were missed for good.", "lost"),
    ("gaps", "Times that batches were missing.", "gaps"),
    ("restarts", "Times that an engine was found to be another one.", "restarts"),
    ("replays", "Replays that were begun.", "replays"),
    ("failed_replays", "Replays that brought nothing, or not all.", "failed_replays"),
)
_GAUGES = (
    ("connected", "1 while the publisher is connected.", "linked"),
    ("behind", "1 while missed batches are being fetched.", "behind"),
    ("provisional", "1 while part of the history is missing.", "provisional"),
    ("blocks", "Blocks that the rank is known to hold, over groups and tiers.", "blocks"),
)
_VERDICTS = ("equal", "close", "off", "idle")


class KvMetrics:
    """`feeds` tells all feeds as they are now, `endpoints` the slot and id of each endpoint.

    `rejected` counts batches of strangers, `without` prompts without token ids by reason.
    """

    def __init__(
        self,
        registry: Registry,
        exact: ExactKnowledge,
        endpoints: Callable[[], Iterable[tuple[int, str]]],
        feeds: Callable[[], Iterable[KvFeedStatus]],
        rejected: Callable[[], int],
        without: Mapping[str, int],
    ) -> None:
        self._exact = exact
        self._endpoints = endpoints
        self._feeds = feeds
        self._rejected = rejected
        self._without = without
        self._counters = {field: Readings("counter", "endpoint", "rank") for _, _, field in _COUNTERS}
        self._gauges = {field: Readings("gauge", "endpoint", "rank") for _, _, field in _GAUGES}
        self._trust = Readings("gauge", "endpoint")
        self._source = Readings("gauge", "endpoint", "source")
        self._checked = Readings("counter", "endpoint", "verdict")
        self._tokens = Readings("counter", "endpoint", "by")
        self._causes = Readings("counter", "endpoint", "cause")
        self._publishers = Readings("counter", "pod_identifier")
        self._subscribers = gauges()
        self._index = gauges("what")
        self._refused = counters()
        self._unread = counters("reason")
        registry.before(self._refresh)
        self._show(registry)

    def _refresh(self) -> None:
        """Anew each time: endpoints come and go."""
        feeds = [(feed, (feed.endpoint, str(feed.rank))) for feed in self._feeds()]
        for field, counter in self._counters.items():
            counter.values = {labels: getattr(feed, field) for feed, labels in feeds}
        for field, gauge in self._gauges.items():
            gauge.values = {labels: int(getattr(feed, field)) for feed, labels in feeds}
        batches: dict[tuple[str, ...], int] = {}
        for feed, (endpoint, _) in feeds:
            batches[(endpoint,)] = batches.get((endpoint,), 0) + feed.batches
        self._publishers.values = batches
        self._subscribers.child().set(sum(feed.linked for feed, _ in feeds))
        self._check()
        index = self._exact.index
        self._index.child("blocks").set(index.entries)
        self._index.child("bytes").set(index.nbytes)
        self._index.child("orphans").set(len(index.orphans))
        self._index.child("just_sent").set(len(index.speculation))
        self._refused.child().value = self._rejected()
        for reason, count in self._without.items():
            self._unread.child(reason).value = count

    def _check(self) -> None:
        exact, check = self._exact, self._exact.check
        slots = list(self._endpoints())
        judged = [(endpoint, check.judged(slot)) for slot, endpoint in slots]
        self._trust.values = {(endpoint,): check.trust(slot).level for slot, endpoint in slots}
        sources = [(endpoint, exact.source(slot)) for slot, endpoint in slots]
        self._source.values = {(endpoint, one): int(one == now) for endpoint, now in sources for one in SOURCES}
        self._checked.values = {(endpoint, one): getattr(found, one) for endpoint, found in judged for one in _VERDICTS}
        told: dict[tuple[str, ...], float] = {}
        for endpoint, found in judged:
            told[endpoint, "predicted"] = found.predicted_tokens
            told[endpoint, "reported"] = found.reported_tokens
        self._tokens.values = told
        self._causes.values = {
            (endpoint, cause): count for endpoint, found in judged for cause, count in found.causes.items()
        }

    def _show(self, registry: Registry) -> None:
        show = registry.show
        for name, text, field in _COUNTERS:
            show(f"fairlead_kv_{name}_total", text, self._counters[field])
        for name, text, field in _GAUGES:
            show(f"fairlead_kv_feed_{name}", text, self._gauges[field])
        show("fairlead_kv_trust", "Share of the last compared answers whose prediction came true.", self._trust)
        text = "1 for how far an endpoint's events are relied on: learned = not at all, exact = in everything."
        show("fairlead_kv_source", text, self._source)
        text = "Answers whose reported cached tokens were compared with the prediction from KV events."
        show("fairlead_kv_checked_total", text, self._checked)
        show("fairlead_kv_checked_tokens_total", "Their cached tokens, predicted and reported.", self._tokens)
        text = "Answers whose prediction was wrong, by likely cause."
        show("fairlead_kv_disagreements_total", text, self._causes)
        show(
            "fairlead_kv_index", "The index of KV blocks: copies, bytes, blocks without a parent, leases.", self._index
        )
        text = "Prompts whose token ids are not known, so that learned knowledge served them, by reason."
        show("fairlead_kv_prompts_without_tokens_total", text, self._unread)
        text = "[ALPHA] Publishers of KV events that are connected."
        show("llm_d_epp_kv_cache_events_active_subscribers", text, self._subscribers)
        text = "[ALPHA] Batches of KV events, by publisher."
        show("llm_d_epp_kv_cache_events_messages_received_total", text, self._publishers)
        show("fairlead_kv_rejected_batches_total", "Batches of publishers that are not of the pool.", self._refused)
