"""Writes docs/metrics.md: every metric with its type, labels and meaning, from the code that shows it.

python tools/write_metrics_page.py > docs/metrics.md
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from msgspec import Struct

from fairlead.apis.tokens import PromptTokeniser
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.index import KvIndex
from fairlead.gateway.h2_limits import ByteBudget
from fairlead.server.observe.component_metrics import (
    GatewayMetrics,
    TokenMetrics,
    show_budget,
    show_journal,
    show_state,
)
from fairlead.server.observe.exposition import Registry, View
from fairlead.server.observe.kv_metrics import IndexerMetrics, KvMetrics, QueryMetrics
from fairlead.server.observe.watch import Watch
from fairlead.server.state import StateCounts

_HEAD = """\
# Metrics

`/metrics` on the admin port, in the Prometheus text format; as OpenMetrics for who asks for it (`Accept`, which
Prometheus does), with the decision that was the last one in a bucket beside it:

```
curl -s localhost:9090/metrics -H 'Accept: application/openmetrics-text' | grep decision_id
```

`GET /debug/decisions/ID` tells why that one went where it went; with [tracing](tracing.md) its trace is named too.
Prometheus keeps these with `--enable-feature=exemplar-storage`. Series are the same in both formats.

A model, an adapter or a fairness id has series of its own once it is declared (defined, or listed by an endpoint in
`/v1/models`) or once a request with it was answered 2xx; anything else clients send counts as `other`. 100 label sets
that were only answered are told apart at once, and each goes after 15 minutes without a request.
`fairlead_metrics_folded_total` tells how often something was folded. Requests whose labels have earned no place yet
are counted when they end; until then they show as running, under `other`. Series of endpoints
go with them. [runbook.md](runbook.md) has the alerts, `deploy/grafana` a dashboard, [benchmarks.md](benchmarks.md) what
a page costs.

This page is made by `make metrics-page`.
"""
_WORDS = {
    "Published": "Names of the Gateway API Inference Extension's picker, for which there are dashboards and alerts.",
    "Required": "Names without a prefix, as the original dashboards and alerts ask for them.",
    "Our own": "What the published names do not cover.",
    "Deprecated twins": "Older names of published metrics. They cost nothing but room on the page.",
    "Of an indexer": "On the page of `fairlead indexer` ([indexer.md](indexer.md)), not of a scheduler.",
}
_ABSENT = """
## Not shown

Published names without a counterpart here: `request_streaming_itl_seconds` (streams are left after the first chunk, so
gaps between tokens are not seen; `fairlead bench` measures them), `extproc_streams_*`,
`flow_control_dispatch_cycle_duration_seconds`, `flow_control_request_enqueue_duration_seconds`,
`plugin_data_scope_violations_total`. `llm_d_epp_plugin_duration_seconds` has policies, not the filters and scorers in
them.
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
    QueryMetrics(registry)
    show_journal(registry, _NoJournal())
    show_state(registry, StateCounts())
    GatewayMetrics(registry, None)
    show_budget(registry, ByteBudget(1, lambda: 0.0))
    return registry


def _indexer() -> Registry:
    registry = Registry()
    IndexerMetrics(registry, KvIndex())
    return registry


def _section(name: str) -> str:
    if name.startswith("fairlead_"):
        return "Our own"
    if name.startswith("llm_d_epp_"):
        return "Published"
    if name.startswith(("inference_", "llm_d_")):
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
