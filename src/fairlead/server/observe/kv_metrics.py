"""Metrics of KV events (feeds, index, trust) and of the indexer. Their values are read at each rendering."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from fairlead.core.exact import SOURCES, ExactKnowledge
from fairlead.core.kv.index import KvIndex
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.instruments import Readings, gauges, histograms

if TYPE_CHECKING:
    from fairlead.server.indexer.client import IndexClient
    from fairlead.server.indexer.service import Asked


class KvFeedStatus(Struct, frozen=True):
    """The feed of KV events of one rank of an endpoint. `bad`: unreadable events and batches. `lost`: missed batches
    that could not be fetched."""

    endpoint: str
    slot: int
    rank: int = 0
    linked: bool = False
    behind: bool = False
    provisional: bool = False
    blocks: int = 0
    batches: int = 0
    events: int = 0
    bad: int = 0
    lost: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    failed_replays: int = 0
    reconnections: int = 0


#: Metric, its help text, and the field of `KvFeedStatus` that it shows.
_COUNTERS = (
    ("batches", "Batches of KV events that were applied.", "batches"),
    ("events", "KV events that were applied.", "events"),
    ("bad_events", "KV events that could not be read.", "bad"),
    ("lost_batches", "Batches that were missed for good.", "lost"),
    ("gaps", "Times that batches were missed for good.", "gaps"),
    ("restarts", "Restarts of engines that were detected.", "restarts"),
    ("replays", "Replays that were started.", "replays"),
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
    """Metrics of KV events. `feeds` returns the present state of all feeds, `endpoints` the slot and id of each
    endpoint, `rejected` the number of unusable batches at the bound socket. `without`: prompts without token ids, by
    reason.
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
        self._counters = {field: Readings("counter", "endpoint", "rank") for _, _, field in _COUNTERS}
        self._gauges = {field: Readings("gauge", "endpoint", "rank") for _, _, field in _GAUGES}
        self._trust = Readings("gauge", "endpoint")
        self._source = Readings("gauge", "endpoint", "source")
        self._checked = Readings("counter", "endpoint", "verdict")
        self._tokens = Readings("counter", "endpoint", "by")
        self._causes = Readings("counter", "endpoint", "cause")
        self._publishers = Readings("counter", "pod_identifier")
        self._reconnections = Readings("counter", "pod_identifier")
        self._subscribers = gauges()
        registry.before(self._refresh)
        self._show(registry, rejected, without)

    def _refresh(self) -> None:
        """Replace all values, because endpoints come and go."""
        feeds = [(feed, (feed.endpoint, str(feed.rank))) for feed in self._feeds()]
        read = [(asdict(feed), labels) for feed, labels in feeds]
        for field, counter in self._counters.items():
            counter.values = {labels: values[field] for values, labels in read}
        for field, gauge in self._gauges.items():
            gauge.values = {labels: int(values[field]) for values, labels in read}
        batches: dict[tuple[str, ...], int] = {}
        reconnections: dict[tuple[str, ...], int] = {}
        for feed, (endpoint, _) in feeds:
            batches[(endpoint,)] = batches.get((endpoint,), 0) + feed.batches
            reconnections[(endpoint,)] = reconnections.get((endpoint,), 0) + feed.reconnections
        self._publishers.values, self._reconnections.values = batches, reconnections
        self._subscribers.child().set(sum(feed.linked for feed, _ in feeds))
        self._check()

    def _check(self) -> None:
        exact, check = self._exact, self._exact.check
        slots = list(self._endpoints())
        judged = [(endpoint, check.judged(slot)) for slot, endpoint in slots]
        levels = ((endpoint, check.trust(slot).level) for slot, endpoint in slots)
        self._trust.values = {(endpoint,): level for endpoint, level in levels if level is not None}
        sources = [(endpoint, exact.source(slot)) for slot, endpoint in slots]
        self._source.values = {(endpoint, label): int(label == now) for endpoint, now in sources for label in SOURCES}
        verdicts = [(endpoint, asdict(verdict)) for endpoint, verdict in judged]
        self._checked.values = {
            (endpoint, label): counts[label] for endpoint, counts in verdicts for label in _VERDICTS
        }
        tokens: dict[tuple[str, ...], float] = {}
        for endpoint, verdict in judged:
            tokens[endpoint, "predicted"] = verdict.predicted_tokens
            tokens[endpoint, "reported"] = verdict.reported_tokens
        self._tokens.values = tokens
        self._causes.values = {
            (endpoint, cause): count for endpoint, verdict in judged for cause, count in verdict.causes.items()
        }

    def _sizes(self) -> dict[str, int]:
        index = self._exact.index
        orphans, just_sent = len(index.orphans), len(index.speculation)
        return {"blocks": index.entries, "bytes": index.nbytes, "orphans": orphans, "just_sent": just_sent}

    def _show(self, registry: Registry, rejected: Callable[[], int], without: Mapping[str, int]) -> None:
        show, follow = registry.show, registry.follow
        for name, text, field in _COUNTERS:
            show(f"fairlead_kv_{name}_total", text, self._counters[field])
        for name, text, field in _GAUGES:
            show(f"fairlead_kv_feed_{name}", text, self._gauges[field])
        show("fairlead_kv_trust", "Share of the last compared answers whose prediction came true.", self._trust)
        text = "1 for how far an endpoint's events are trusted: learned = not at all, exact = fully."
        show("fairlead_kv_source", text, self._source)
        text = "Answers whose reported cached tokens were compared with the prediction from KV events."
        show("fairlead_kv_checked_total", text, self._checked)
        show("fairlead_kv_checked_tokens_total", "Cached tokens in compared answers, by who says so.", self._tokens)
        text = "Answers whose prediction was wrong, by likely cause."
        show("fairlead_kv_disagreements_total", text, self._causes)
        text = "The index of KV blocks: copies, bytes, blocks without a parent, leases."
        follow("gauge", "fairlead_kv_index", text, self._sizes, "what")
        text = "Prompts without token ids, scheduled by learned prefixes, by reason."
        follow("counter", "fairlead_kv_prompts_without_tokens_total", text, lambda: without, "reason")
        text = "[ALPHA] Publishers of KV events that are connected."
        show("llm_d_epp_kv_cache_events_active_subscribers", text, self._subscribers)
        text = "[ALPHA] Batches of KV events, by publisher."
        show("llm_d_epp_kv_cache_events_messages_received_total", text, self._publishers)
        text = "[ALPHA] Times that a publisher of KV events was connected again."
        show("llm_d_epp_kv_cache_events_subscriber_reconnections_total", text, self._reconnections)
        text = "At the bound socket: unreadable batches, and those of unknown publishers."
        follow("counter", "fairlead_kv_rejected_batches_total", text, rejected)
        index = self._exact.index
        for name, text, read in (
            ("admissions", "Copies of blocks that were entered into the index.", lambda: index.admitted),
            ("evictions", "Copies that the index dropped to stay within its bounds.", lambda: index.evicted),
            ("lookup_requests", "Prompts that were looked up.", lambda: index.matcher.lookups),
            ("lookup_hits", "Blocks of these that any endpoint has.", lambda: index.matcher.lookup_hits),
            ("max_pod_hit_count", "Blocks that the endpoint with most has.", lambda: index.matcher.slot_hits),
        ):
            for prefix in ("llm_d_epp_kv_cache", "kvcache"):
                follow("counter", f"{prefix}_index_{name}_total", "[ALPHA] " + text, read)


# Metrics of a scheduler that queries an indexer, and of an indexer.

#: Bounds of histograms of answer times, in seconds.
_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


def show_questions(registry: Registry, asker: "Callable[[], IndexClient]") -> Callable[[float], None]:
    """Show the metrics of a scheduler that asks an indexer. Returns the function that records the seconds that an
    answer took."""
    seconds = histograms(bounds=_BOUNDS)
    text = "Questions to the indexer by end; all but 'answered' leave the request to learned prefixes."
    registry.follow("counter", "fairlead_indexer_questions_total", text, lambda: asker().ends, "result")
    registry.follow("gauge", "fairlead_indexer_up", "1 while the indexer answers.", lambda: asker().up)
    registry.show("fairlead_indexer_answer_seconds", "Time until the indexer answered.", seconds)
    return seconds.child().observe


def show_indexer(registry: Registry, index: KvIndex, asked: "Callable[[], Asked]") -> Callable[[float], None]:
    """Show the metrics of an indexer. `index_size` and the two `kv_cache_` names are those of published alerts. Returns
    the function that records the seconds that making an answer took, without reading the question and sending."""
    seconds, follow = histograms(bounds=_BOUNDS), registry.follow
    follow("gauge", "index_size", "Block copies in the index.", lambda: index.entries)
    follow("counter", "kv_cache_lookup_total", "Blocks of prompts that were looked up.", lambda: asked().looked_up)
    follow("counter", "kv_cache_hit_total", "Of these, blocks that the best endpoint holds.", lambda: asked().hit)
    text = "Questions that were answered."
    follow("counter", "fairlead_indexer_queries_total", text, lambda: asked().questions)
    text, refused = "Questions that were refused, by status.", lambda: {str(k): n for k, n in asked().refused.items()}
    follow("counter", "fairlead_indexer_refused_total", text, refused, "status")
    registry.show("fairlead_indexer_query_seconds", "How long the answers took to make.", seconds)
    return seconds.child().observe
