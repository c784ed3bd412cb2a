"""Asking an indexer, and being one, on the metrics page."""

from collections.abc import Mapping
from typing import Protocol

from fairlead.fleet.kv.index import KvIndex
from fairlead.observe.exposition import Registry
from fairlead.observe.instruments import counters, gauges, histograms

#: Seconds.
_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class _Counts(Protocol):
    ends: dict[str, int]
    states: int
    lost_states: int


class Asker(Protocol):
    """`fairlead.io.indexer.client.IndexClient` is one."""

    up: bool

    @property
    def counts(self) -> _Counts: ...


class AskingMetrics:
    """Of a scheduler that asks an indexer."""

    def __init__(self, registry: Registry) -> None:
        self._asker: Asker | None = None
        self._ends = counters("result")
        self._up = gauges()
        self._seconds = histograms(bounds=_BOUNDS)
        #: Observes how long an answer took, in seconds.
        self.took = self._seconds.child().observe
        registry.before(self._refresh)
        text = "Questions to the indexer by end; all but 'answered' leave the request to learned prefixes."
        registry.show("fairlead_indexer_questions_total", text, self._ends)
        registry.show("fairlead_indexer_up", "1 while the indexer answers.", self._up)
        registry.show("fairlead_indexer_answer_seconds", "How long answers of the indexer took.", self._seconds)

    def watch(self, asker: Asker) -> None:
        self._asker = asker

    def _refresh(self) -> None:
        if self._asker is None:
            return
        for result, count in self._asker.counts.ends.items():
            self._ends.child(result).value = count
        self._up.child().set(float(self._asker.up))


class Questions(Protocol):
    """`fairlead.io.indexer.service.Asked` is one."""

    questions: int
    looked_up: int
    hit: int

    @property
    def refused(self) -> Mapping[int, int]: ...


class IndexerMetrics:
    """Of an indexer. `index_size` and the two `kv_cache_` names are those of published alerts."""

    def __init__(self, registry: Registry, index: KvIndex) -> None:
        self._index = index
        self._questions: Questions | None = None
        self._size = gauges()
        self._asked, self._hit, self._looked_up = counters(), counters(), counters()
        self._refused = counters("status")
        self._seconds = histograms(bounds=_BOUNDS)
        #: Observes how long a question took, in seconds, without reading and writing it.
        self.took = self._seconds.child().observe
        registry.before(self._refresh)
        show = registry.show
        show("index_size", "Block copies in the index.", self._size)
        show("kv_cache_lookup_total", "Blocks of prompts that were looked up.", self._looked_up)
        show("kv_cache_hit_total", "Of these, blocks that the best endpoint holds.", self._hit)
        show("fairlead_indexer_queries_total", "Questions that were answered.", self._asked)
        show("fairlead_indexer_refused_total", "Questions that were refused, by status.", self._refused)
        show("fairlead_indexer_query_seconds", "How long the answers took to make.", self._seconds)

    def watch(self, questions: Questions) -> None:
        self._questions = questions

    def _refresh(self) -> None:
        self._size.child().set(self._index.entries)
        asked = self._questions
        if asked is None:
            return
        self._asked.child().value = asked.questions
        self._looked_up.child().value = asked.looked_up
        self._hit.child().value = asked.hit
        for status, count in asked.refused.items():
            self._refused.child(str(status)).value = count
