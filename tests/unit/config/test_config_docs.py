"""What docs/configuration.md shows loads, and every field has a meaning."""

import re
from pathlib import Path

import pytest

from fairlead.compat import reference
from fairlead.compat.load import load
from fairlead.config.builtins import ALIASES
from fairlead.config.check import fields
from fairlead.config.endpoint_list import KEYS
from fairlead.config.plugins import build_policy
from fairlead.config.schema import SECTIONS, FileSource

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "configuration.md").read_text()
BLOCKS = re.findall(r"^```yaml( fragment)?\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("fragment", "block"), BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_loads(fragment: str, block: str) -> None:
    build_policy(load(block, need_endpoints=not fragment))


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 5
    assert TEXT.count("```yaml") == len(BLOCKS)


def test_every_field_of_an_endpoint_is_explained() -> None:
    named = {*re.findall(r"`(\w+)`", TEXT)}
    assert {*KEYS, *fields(FileSource)} <= named


def test_every_section_is_named() -> None:
    assert [name for name in (*SECTIONS, "endpoints", "flowControl") if not re.search(rf"\b{name}\b", TEXT)] == []


def test_every_field_and_parameter_has_a_meaning() -> None:
    """In the reference, `fairlead config explain` and the chart's schema."""
    entries = [reference.top(), *reference.sections(), reference.bands(), *reference.plugins()]
    assert [f"{entry.name} {row[0]}" for entry in entries for row in entry.rows if not row[3]] == []
    assert [entry.name for entry in entries if entry.kind and not entry.about] == []


def test_every_alias_is_told() -> None:
    page = (DOCS / "configuration-reference.md").read_text()
    assert [alias for table in ALIASES.values() for alias in table if f"`{alias}`" not in page] == []


TUTORIAL = (DOCS / "plugin-tutorial.md").read_text()


def test_the_tutorial_shows_the_example_as_it_is() -> None:
    source = (
        Path(__file__).parents[3] / "examples/fairlead-example-plugin/src/fairlead_example_plugin/__init__.py"
    ).read_text()
    shown = re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)[0]
    assert shown in source
