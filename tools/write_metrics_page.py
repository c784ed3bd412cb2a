"""Writes docs/metrics.md: every metric with its type, labels and meaning, from the code that shows it.

python tools/write_metrics_page.py > docs/metrics.md
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from msgspec import Struct

from fairlead.apis.tokens import PromptTokeniser
from fairlead.core.beginnings import Beginnings
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.index import KvIndex
from fairlead.gateway.h2_limits import ByteBudget
from fairlead.server.observe.component_metrics import (
    GatewayMetrics,
    TokenMetrics,
    WarmingCounts,
    show_budget,
    show_journal,
    show_replicas,
    show_spans,
    show_state,
    show_unheard,
    show_warming,
)
from fairlead.server.observe.exposition import Registry, View
from fairlead.server.observe.history import History
from fairlead.server.observe.kv_metrics import KvMetrics, show_indexer, show_questions
from fairlead.server.observe.watch import Watch
from fairlead.server.state import StateCounts

_HEAD = """\
<!-- Written by tools/write_metrics_page.py (make metrics-page); change the program, not this page. -->

# Metrics

The admin port serves `/metrics` in the Prometheus text format. A client that accepts OpenMetrics, as Prometheus does,
gets that format. Each bucket then carries the id of the last decision in it:

```
curl -s localhost:9090/metrics -H 'Accept: application/openmetrics-text' | grep decision_id
```

`GET /debug/decisions/ID` explains that decision. With [tracing](tracing.md) the bucket names its trace too. Prometheus
keeps both with `--enable-feature=exemplar-storage`. Series are the same in both formats.

## Labels that clients choose

A model, an adapter or a fairness id gets its own series when it is declared (defined in the configuration, or listed
by an endpoint in `/v1/models`), or when a request with it was answered 2xx. Everything else counts as `other`. At most
100 label sets that were only answered have their own series; each is removed after 15 minutes without a request. At
most 200 declared models have them, and 200 more sets of tenants and priorities, each of about 700 lines and 90 kB; at
either limit, sets idle for 15 minutes make room. Further requests count as `other` (`limits.models` of `fairlead
doctor`). `fairlead_metrics_folded_total` counts what was put under `other`. A request whose labels have no series yet
shows as running under `other` and is counted when it ends. The series of an endpoint are removed with it, its
counters up to a minute later, so that a scrape sees the last values. Requests without a fairness id have
`default-flow`.

See also the [alerts](runbook.md), the dashboard in `deploy/grafana`, and [what the page costs](benchmarks.md).
"""
_WORDS = {
    "Published": "Names of the Gateway API Inference Extension's picker. Existing dashboards and alerts use them.",
    "Required": "Names without a prefix, which the original dashboards and alerts use.",
    "Our own": "What the published names do not cover.",
    "Deprecated twins": "Older names of published metrics.",
    "Of an indexer": "On the page of `fairlead indexer` ([indexer.md](indexer.md)), not of a scheduler.",
}
_ABSENT = """
## Not shown

These published names have no counterpart here:

- `request_streaming_itl_seconds`: Fairlead leaves a stream after the first chunk and does not see the gaps between
  tokens. `fairlead bench` measures them.
- `extproc_stream_*`, `extproc_streams_*`, `plugin_data_scope_violations_total`, `request_processing_duration_seconds`,
  `response_processing_duration_seconds` and `request_{ttft,tpot}_prediction_duration_seconds`. Use
  `scheduler_e2e_duration_seconds`.
- `flow_control_dispatch_cycle_duration_seconds` and `flow_control_request_enqueue_duration_seconds`.
- `flow_control_revocations_total`, `flow_control_revocation_confirmation_seconds`, `flow_control_reclaim_target` and
  `flow_control_pending_reclaim`. `fairlead_request_end_total{cause="evicted"}` counts the ends of such requests.
- `datalayer_extract_errors_total`: a page that cannot be read is a failed scrape.
- `kv_cache_index_lookup_latency_seconds`, and of `kv_cache_events_*`: `pool_queue_depth`, `pool_capacity`,
  `stores_skipped_total`, `removals_skipped_total`, `zmq_errors_total` and `dedup_removed_hashes_*`. See
  `fairlead_kv_*`.
- `prefix_indexer_hit_bytes`, `encoder_cache_*`, `disaggregatedset_*`, `program_aware_*`, `pd_decision_total` and
  `inference_request_metric`.

`llm_d_epp_plugin_duration_seconds` has one series per policy, not per filter or scorer.
"""


class _NoJournal(Struct):
    dropped: int = 0
    unwritten: int = 0
    records: int = 0
    bytes: int = 0
    segments: int = 0
    size: int = 0
    errors: int = 0


def page() -> str:
    """The whole page."""
    sections: dict[str, list[View]] = {title: [] for title in _WORDS}
    for view in scheduler_registry().views:
        sections[_section(view.name)].append(view)
    sections["Of an indexer"] += _indexer().views
    tables = [f"\n## {title}\n\n{_WORDS[title]}\n\n{_table(views)}" for title, views in sections.items()]
    return "".join((_HEAD, *tables, _ABSENT))


def scheduler_registry() -> Registry:
    """Everything that a scheduler can show."""
    watch = Watch(Fleet(), lambda: 0.0)
    registry = watch.metrics.registry
    KvMetrics(registry, ExactKnowledge(), tuple, tuple, lambda: 0, {})
    TokenMetrics(registry, PromptTokeniser, dict, {})
    show_questions(registry, lambda: None)
    show_journal(registry, _NoJournal())
    show_state(registry, StateCounts())
    show_warming(registry, WarmingCounts(Beginnings()))
    History(watch, 0.0, lambda: 0.0)
    GatewayMetrics(registry, None, 1, lambda: 0.0)
    show_replicas(registry, None)
    show_spans(registry, lambda: 0)
    show_unheard(registry, dict)
    show_budget(registry, ByteBudget(1, lambda: 0.0))
    return registry


def _indexer() -> Registry:
    registry = Registry()
    show_indexer(registry, KvIndex(), lambda: None)
    return registry


def _section(name: str) -> str:
    if name.startswith("fairlead_"):
        return "Our own"
    if name.startswith("llm_d_epp_"):
        return "Published"
    if name.startswith(("inference_", "kvcache_", "llm_d_")):
        return "Deprecated twins"
    return "Required"


def _table(views: Iterable[View]) -> str:
    return "| metric | type | labels | meaning |\n|---|---|---|---|\n" + "".join(_rows(views))


def _rows(views: Iterable[View]) -> Iterator[str]:
    for view in sorted(views, key=attrgetter("name")):
        labels = ", ".join(f"`{label}`" for label in view.shown_labels)
        meaning = view.help.removeprefix("[ALPHA] ").replace("|", "\\|")
        yield f"| `{view.name}` | {view.kind} | {labels} | {meaning} |\n"


if __name__ == "__main__":
    print(page(), end="")
