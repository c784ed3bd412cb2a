"""`metrics.engines`: the built-in metric names of model servers with the configured ones on top."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fairlead.config.problems import Report
from fairlead.config.schema import EngineNames, Metrics
from fairlead.model.errors import ConfigError
from fairlead.wire.endpoint_entry import Listed
from fairlead.wire.engine_metrics import ENGINES, EngineMetrics, parse_spec, unknown_engine
from fairlead.wire.problem import Place, shorten

_LABELS = ("block_size_label", "num_blocks_label")


def engine_table(metrics: Metrics) -> dict[str, EngineMetrics]:
    """Names per engine. An engine that is built in keeps what the configuration does not mention."""
    table = dict(ENGINES)
    for name, names in metrics.engines.items():
        table[name] = msgspec.structs.replace(table.get(name, EngineMetrics()), **_changes(names))
    return table


def check_engines(metrics: Metrics, place: Place, report: Report) -> None:
    """Reports specs that cannot be parsed, and a default engine that does not exist."""
    for name, names in metrics.engines.items():
        for field in msgspec.structs.fields(EngineNames):
            value = getattr(names, field.name)
            if field.name not in _LABELS and value is not None:
                _check_specs(value, (*place, "engines", name, field.encode_name), report)
    known = engine_table(metrics)
    if metrics.default_engine not in known:
        report.unknown((*place, "defaultEngine"), "engine", metrics.default_engine, known)


def note_unknown_engines(
    entries: Sequence[Listed], metrics: Metrics, place: Place, report: Report, file: str = ""
) -> None:
    """Notes labels that name an engine which is in no table: such a page is read with the default engine's names.

    `entries` stand at `place`, or in `file`, which `place` names. One note for all endpoints of one engine.
    """
    known = engine_table(metrics)
    strange: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        engine = unknown_engine(entry.endpoint.labels, known)
        if engine:
            strange.setdefault(engine, []).append(i)
    for engine, (first, *more) in strange.items():
        who = f"endpoint {entries[first].endpoint.id}" + (f" and {len(more)} more" if more else "")
        report.note(
            place if file else (*place, first),
            f"{file + ': ' if file else ''}{who}: the label names the engine '{shorten(engine)}', which is not known; "
            f"metrics are read as those of {metrics.default_engine} "
            f"(known: {', '.join(sorted(known))}; describe others under metrics.engines)",
        )


def _check_specs(value: str | list[str] | Mapping[str, str], place: Place, report: Report) -> None:
    specs: list[tuple[Place, str]]
    if isinstance(value, str):
        specs = [(place, value)]
    elif isinstance(value, Mapping):
        specs = [((*place, key), spec) for key, spec in value.items()]
    else:
        specs = [((*place, i), spec) for i, spec in enumerate(value)]
    for where, spec in specs:
        try:
            parse_spec(spec, "")
        except ConfigError as error:
            report.add(where, str(error).removeprefix(": "))


def _changes(names: EngineNames) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for field in msgspec.structs.fields(EngineNames):
        value = getattr(names, field.name)
        if value is None or (field.name == "extra" and not value):
            continue
        if field.name in (*_LABELS, "extra"):
            changes[field.name] = value
        else:
            changes[field.name] = (value,) if isinstance(value, str) else tuple(value)
    return changes
