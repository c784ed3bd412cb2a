"""What is known from KV events and how far it is relied on, on the metrics page. Set anew whenever somebody looks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from fairlead.fleet.exact import SOURCES, ExactKnowledge
from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import counters, gauges


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
        self._counters = {field: counters("endpoint", "rank") for _, _, field in _COUNTERS}
        self._gauges = {field: gauges("endpoint", "rank") for _, _, field in _GAUGES}
        self._trust = gauges("endpoint")
        self._source = gauges("endpoint", "source")
        self._checked = counters("endpoint", "verdict")
        self._tokens = counters("endpoint", "by")
        self._causes = counters("endpoint", "cause")
        self._index = gauges("what")
        self._refused = counters()
        self._unread = counters("reason")
        registry.before(self._refresh)
        self._show(registry)

    def _refresh(self) -> None:
        for children in self._all_children():
            children.clear()
        for feed in self._feeds():
            labels = feed.endpoint, str(feed.rank)
            for field, counter in self._counters.items():
                counter.child(*labels).value = getattr(feed, field)
            for field, gauge in self._gauges.items():
                gauge.child(*labels).set(float(getattr(feed, field)))
        for slot, endpoint in self._endpoints():
            self._endpoint(slot, endpoint)
        index = self._exact.index
        self._index.child("blocks").set(index.entries)
        self._index.child("bytes").set(index.nbytes)
        self._index.child("orphans").set(len(index.orphans))
        self._index.child("just_sent").set(len(index.speculation))
        self._refused.child().value = self._rejected()
        for reason, count in self._without.items():
            self._unread.child(reason).value = count

    def _all_children(self) -> Iterator[dict[tuple[str, ...], Any]]:
        """Endpoints come and go."""
        for counter in (*self._counters.values(), self._checked, self._tokens, self._causes):
            yield counter.children
        for gauge in (*self._gauges.values(), self._trust, self._source):
            yield gauge.children

    def _endpoint(self, slot: int, endpoint: str) -> None:
        check = self._exact.check
        self._trust.child(endpoint).set(check.trust(slot).level)
        now = self._exact.source(slot)
        for source in SOURCES:
            self._source.child(endpoint, source).set(float(source == now))
        judged = check.judged(slot)
        for verdict in ("equal", "close", "off", "idle"):
            self._checked.child(endpoint, verdict).value = getattr(judged, verdict)
        self._tokens.child(endpoint, "predicted").value = judged.predicted_tokens
        self._tokens.child(endpoint, "reported").value = judged.reported_tokens
        for cause, count in judged.causes.items():
            self._causes.child(endpoint, cause).value = count

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
        show("fairlead_kv_rejected_batches_total", "Batches of publishers that are not of the pool.", self._refused)
