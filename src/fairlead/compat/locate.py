"""Finds the configuration in a ConfigMap, and the `EndpointPickerConfig` in a file: the file itself, or a text inside
Helm values."""

from typing import Any

from msgspec import Struct

from fairlead.config import yaml
from fairlead.config.check import fields
from fairlead.config.problems import Place, Problem, Report, describe, shorten, show
from fairlead.config.yaml import Document, Tree

KIND = "EndpointPickerConfig"
#: The values of the reference's charts: `router.epp`, in older ones `inferenceExtension`.
ROUTER, EPP, EXTENSION = "router", "epp", "inferenceExtension"
CUSTOM, FILE, INLINE = "pluginsCustomConfig", "pluginsConfigFile", "pluginsConfig"
#: Fields that only such a document has at its top level.
_TELLING = ("schedulingProfiles", "apiVersion", "kind")
#: The name that our chart gives the configuration in its ConfigMap.
OURS = "fairlead.yaml"
OF_THE_CHART = "belongs to the Helm chart; it has no effect here"
#: Notes that do not apply if `kvEvents` and `tokens` are next to the document.
LEARNED = "prefix knowledge is learned from the scheduler's own decisions, unless kvEvents are enabled beside this"
ESTIMATED = (
    "prompts are not sent to a tokenizer: tokens are estimated, and learned from what model servers report, unless "
    "tokens.models names the model beside this"
)


class Located(Struct):
    """A document, the report for its problems, and its place in the file (empty = the file is the document)."""

    values: dict[str, Any]
    report: Report
    place: Place = ()


def document_fields() -> tuple[str, ...]:
    from fairlead.compat import document

    return tuple(fields(document.Document))


def is_document(root: dict[str, Any]) -> bool:
    return any(key in root for key in _TELLING)


def in_config_map(document: Document) -> tuple[Document, Place]:
    """The configuration in a ConfigMap, with the lines of the whole document, and its place there: the only text, or
    the one that our chart writes. Any other document is returned as it is."""
    root = document.value
    if not isinstance(root, dict) or root.get("kind") != "ConfigMap":
        return document, ()
    texts = root.get("data")
    names = [*texts] if isinstance(texts, dict) else []
    place = "data", names[0] if len(names) == 1 else OURS
    node = document.tree.node(place)
    if node is None or not isinstance(node.value, str):
        there = f"there are: {', '.join(map(shorten, names)) or 'none'}"
        message = f"a ConfigMap's configuration is its only text, or the one named {OURS}"
        return Document(None, document.tree, [Problem(show(place[:1]), document.tree.line(place), message, there)]), ()
    inner = yaml.parse("\n" * _lines_before(node.line, node.value) + node.value)
    faults = [Problem(show(place) + each.path[1:], each.line, each.message, each.hint) for each in inner.problems]
    return Document(inner.value, inner.tree, faults), place


def in_values(root: dict[str, Any], tree: Tree, report: Report) -> Located | None:
    """The document inside chart values, if there is one. Problems on the path to it are reported."""
    if isinstance(root.get(ROUTER), dict):
        for key in root[ROUTER]:
            if key != EPP:
                report.note((ROUTER, key), OF_THE_CHART)
        if isinstance(root[ROUTER].get(EPP), dict):
            return _in_chart(root[ROUTER][EPP], (ROUTER, EPP), tree, report)
    chart = root.get(EXTENSION)
    if isinstance(chart, dict) and _is_named_texts(chart.get(CUSTOM)):
        return _in_chart(chart, (EXTENSION,), tree, report)
    return None


def _is_named_texts(custom: object) -> bool:
    return isinstance(custom, dict) and bool(custom) and all(isinstance(text, str) for text in custom.values())


def _in_chart(chart: dict[str, Any], place: Place, tree: Tree, report: Report) -> Located | None:
    for key in chart:
        if key not in (CUSTOM, FILE, INLINE):
            report.note((*place, key), OF_THE_CHART)
    inline = chart.get(INLINE)
    if isinstance(inline, dict) and inline:
        inner_place = (*place, INLINE)
        return Located(inline, Report(lambda inner: tree.line((*inner_place, *inner)), inner_place), inner_place)
    texts = chart.get(CUSTOM)
    if not isinstance(texts, dict) or not _is_named_texts(texts):
        report.add((*place, CUSTOM), f"expected files by name, got {describe(texts)}", "name: | and the text below it")
        return None
    name = chart.get(FILE, next(iter(texts)) if len(texts) == 1 else None)
    if not isinstance(name, str) or name not in texts:
        known = ", ".join(map(shorten, texts))
        report.add((*place, FILE), f"{describe(name)} is none of the files under {CUSTOM}", f"there are: {known}")
        return None
    return _text((*place, CUSTOM, name), texts[name], tree, report)


def _text(place: Place, text: str, tree: Tree, report: Report) -> Located | None:
    """The document in the text at `place`."""
    document = yaml.parse(text)
    node = tree.node(place)
    assert node is not None
    before = _lines_before(node.line, text)
    inner = Report(lambda path: before + document.tree.line(path), place)
    for fault in document.problems:
        report.add(place, f"line {before + fault.line}: {fault.message}", fault.hint)
    if document.problems:
        return None
    if not isinstance(document.value, dict):
        report.add(place, f"expected an {KIND}, got {describe(document.value)}")
        return None
    return Located(document.value, inner, place)


def _lines_before(line: int, text: str) -> int:
    """How many lines come before a text whose key is in this line: that of a block scalar begins a line below."""
    return line - (0 if "\n" in text else 1)
