"""What `fairlead doctor` can find is documented, and what it reads exists."""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.doctor import checks
from fairlead.doctor.checks import CHECKS
from fairlead.doctor.run import Kind
from fairlead.server.observe.component_metrics import GatewayMetrics, show_replicas
from fairlead.server.observe.history import History
from fairlead.server.observe.kv_metrics import KvMetrics, show_questions
from fairlead.server.observe.watch import Watch

ROOT = Path(__file__).parents[3]
KINDS = [kind for check in CHECKS for kind in check.kinds]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def test_codes_are_unique_and_say_which_check_found_it() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    modules = [import_module(module.name) for module in iter_modules(checks.__path__, f"{checks.__name__}.")]
    defined = {kind.code for module in modules for kind in vars(module).values() if isinstance(kind, Kind)}
    assert defined == {kind.code for kind in KINDS}, "each stands before its check, whose name its code begins with"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_finding_leads_to_a_page(kind: Kind) -> None:
    path, _, anchor = kind.docs.partition("#")
    assert (ROOT / path).is_file()
    assert not anchor or anchor in anchors(ROOT / path)


def test_sections_of_the_runbook_are_about_the_findings_that_lead_there() -> None:
    """A section that names findings names each that leads to it; and what one names leads to it or to more."""
    sections = {anchor(part.partition("\n")[0]): part for part in re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)}
    naming = {name for name, text in sections.items() if any(kind.code in text for kind in KINDS)}
    assert {"fairleaderrorshigh", "lowcachehitrate", "load-is-uneven", "epphighlatency"} <= naming
    for kind in KINDS:
        page, _, section = kind.docs.partition("#")
        if page == "docs/runbook.md" and section in naming:
            assert kind.code in sections[section], kind.code
        assert page != "docs/doctor.md" or not any(kind.code in text for text in sections.values()), kind.code


def test_every_finding_that_the_runbook_names_exists() -> None:
    names = "|".join(check.name for check in CHECKS)
    trees = "".join(re.findall(r"^```\n(.*?)^```", RUNBOOK, re.MULTILINE | re.DOTALL))
    named = set(re.findall(rf"(?<![-\w])((?:{names})\.[a-z-]+)", trees))
    assert len(named) > 30
    assert named <= {kind.code for kind in KINDS}


def test_every_metric_that_is_read_exists() -> None:
    texts = "".join(file.read_text() for file in (ROOT / "src" / "fairlead" / "doctor" / "checks").glob("*.py"))
    read = set(re.findall(r'"((?:fairlead|llm_d_epp|kv_cache)_\w+)"', texts))
    watch = Watch(Fleet(), lambda: 0.0)
    KvMetrics(watch.metrics.registry, ExactKnowledge(), list, list, lambda: 0, {})
    History(watch, 0.0, lambda: 0.0)
    show_replicas(watch.metrics.registry, None)
    client: Any = SimpleNamespace(up=True, ends={})
    show_questions(watch.metrics.registry, lambda: client)
    GatewayMetrics(watch.metrics.registry, None, 1, lambda: 0.0)
    shown = set(re.findall(r"^# TYPE (\S+)", b"".join(watch.exposition()).decode(), re.MULTILINE))
    assert len(read) > 10
    assert {name.removesuffix("_sum") for name in read} <= shown
