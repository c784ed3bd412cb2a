"""The committed page of metrics is what the code shows; selectors of alerts and dashboards use labels that exist."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from fairlead.server.observe.exposition import View

ROOT = Path(__file__).parents[4]
#: Added by Prometheus, by its operator, and where one process serves several pools.
SCRAPED = {"instance", "job", "namespace", "service", "inference_pool"}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fairlead_metrics_page", ROOT / "tools" / "write_metrics_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    groups = yaml.safe_load((ROOT / "deploy" / "alerts" / "fairlead.yaml").read_text())["groups"]
    panels = json.loads((ROOT / "deploy" / "grafana" / "fairlead.json").read_text())["panels"]
    found = [rule["expr"] for group in groups for rule in group["rules"]]
    return found + [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_committed_page_is_current(tool: ModuleType) -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == tool.page(), "run: make metrics-page"


def test_everything_is_explained(tool: ModuleType) -> None:
    for view in tool.scheduler_registry().views:
        assert len(view.help) > 10, view.name
        assert view.help.endswith("."), view.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", view.name), view.name


@pytest.fixture(scope="module")
def labels(tool: ModuleType) -> dict[str, set[str]]:
    """By sample name."""

    def samples(view: View) -> dict[str, set[str]]:
        own = {*view.shown_labels, *SCRAPED}
        if view.kind != "histogram":
            return {view.name: own}
        return {f"{view.name}_bucket": {*own, "le"}, f"{view.name}_sum": own, f"{view.name}_count": own}

    found: dict[str, Any] = {}
    for view in tool.scheduler_registry().views:
        found |= samples(view)
    return found


@pytest.mark.parametrize("expression", expressions())
def test_selectors_use_labels_that_exist(expression: str, labels: dict[str, set[str]]) -> None:
    """Of an expression over one metric, its groupings as well."""
    names = {name for name in re.findall(r"[a-z][a-z0-9_]+", expression) if name in labels}
    for name, selector in re.findall(r"([a-z][a-z0-9_]+)\{([^}]*)\}", expression):
        if name in labels:
            assert {*re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", selector)} <= labels[name], name
    grouped = {one.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for one in group.split(",")}
    grouped.difference_update(re.findall(r'label_replace\(.+?, "(\w+)"', expression, re.DOTALL))
    for name in names:
        wrong = {one for one in grouped - {""} if one not in labels[name]}
        assert not wrong or len(names) > 1, f"{name} has no {wrong}"
    if names:
        assert {one for one in grouped - {""} if not any(one in labels[name] for name in names)} == set()
