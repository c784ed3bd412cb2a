"""Values of `fake_kube`: selectors, patches, lines of a watch."""

import json
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]


class Selector:
    """Namespace, `labelSelector` (equality only) and `fieldSelector` (name only)."""

    def __init__(self, namespace: str, labels: dict[str, str], name: str) -> None:
        self._namespace, self._labels, self._name = namespace, labels, name

    def __call__(self, value: Object) -> bool:
        meta = value["metadata"]
        own = meta.get("labels") or {}
        return (
            meta["namespace"] == self._namespace
            and all(own.get(key) == wanted for key, wanted in self._labels.items())
            and self._name in ("", meta["name"])
        )


def selector_of(namespace: str, query: Mapping[str, str]) -> Selector:
    pairs = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return Selector(namespace, dict(pairs), name)


def shown_as(kind: str, now: bool, before: bool) -> str:
    """As what a change shows through a selector."""
    if kind == "DELETED":
        return kind if now else ""
    if now:
        return "MODIFIED" if before else "ADDED"
    return "DELETED" if before else ""


def key_of(value: Object) -> str:
    meta = value["metadata"]
    return f"{meta.get('namespace', 'default')}/{meta['name']}"


def event_line(kind: str, value: Object) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode() + b"\n"


def merge(into: Object, patch: Object) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            inner = into.get(key)
            into[key] = inner if isinstance(inner, dict) else {}
            merge(into[key], value)
        else:
            into[key] = value


def apply(into: Object, patch: Object) -> None:
    """Server-side apply, as far as conditions go: a list that is a map by `type`."""
    for key, value in patch.items():
        if key == "conditions":
            merged = {one["type"]: one for one in into.get(key, [])}
            merged |= {one["type"]: one for one in value}
            into[key] = list(merged.values())
        elif isinstance(value, dict):
            apply(into.setdefault(key, {}), value)
        else:
            into[key] = value
