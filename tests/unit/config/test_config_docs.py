"""docs/configuration.md is complete, and what it shows loads."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from fairlead.compat.catalogue import CATALOGUE
from fairlead.compat.load import FIELDS, load
from fairlead.config.builtins import POLICIES
from fairlead.config.check import fields
from fairlead.config.endpoint_list import KEYS
from fairlead.config.registry import ALIASES, BUILTINS, RegisteredPlugin, build_policy
from fairlead.config.schema import SECTIONS, EngineNames, FileSource, ScrapeTls, Tls

TEXT = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
BLOCKS = re.findall(r"^```yaml( fragment)?\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("fragment", "block"), BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_loads(fragment: str, block: str) -> None:
    build_policy(load(block, need_endpoints=not fragment))


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 5
    assert TEXT.count("```yaml") == len(BLOCKS)


def names(kind: type[BaseModel]) -> list[str]:
    return [*fields(kind)]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_a_section_is_explained(section: str) -> None:
    for name in names(SECTIONS[section]):
        assert re.search(rf"`{section}\.{name}[`.]", TEXT), f"{section}.{name}"


def test_every_other_field_is_explained() -> None:
    assert [name for name in names(Tls) if f"`extProc.tls.{name}`" not in TEXT] == []
    assert [name for name in names(ScrapeTls) if f"`metrics.tls.{name}`" not in TEXT] == []
    others = [*names(EngineNames), *KEYS, *names(FileSource)]
    assert [name for name in others if f"`{name}`" not in TEXT] == []
    own = [name for name in FIELDS if name not in SECTIONS]
    assert [name for name in own if f"`{name}`" not in TEXT and f"`{name}." not in TEXT] == []


def test_every_plugin_and_parameter_is_explained() -> None:
    """Policies have a page of their own, see the tests of the documents."""
    for kind, table in BUILTINS.items():
        for name, cls in table.items() if kind != "policy" else ():
            assert f"`{name}`" in TEXT, f"{kind} {name}"
            missing = [field for field in names(RegisteredPlugin(name, cls).params) if f"`{field}`" not in TEXT]
            assert missing == [], f"{kind} {name}"


def test_every_alias_and_policy_is_explained() -> None:
    irregular = [alias for table in ALIASES.values() for alias, (target, _) in table.items() if target not in alias]
    assert [alias for alias in irregular if f"`{alias.removesuffix('-scorer')}" not in TEXT] == []
    assert [name for name in POLICIES if f"`{name}`" not in TEXT] == []


PLUGINS = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()


def test_every_plugin_of_the_reference_is_in_the_table() -> None:
    for name, entry in CATALOGUE.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PLUGINS, re.MULTILINE)
        if isinstance(entry.refused, str) and entry.refused:
            assert entry.refused in row
        else:
            assert entry.counterpart in row
            assert not isinstance(entry.note, str) or entry.note in row


def test_the_tutorial_shows_the_example_as_it_is() -> None:
    source = (
        Path(__file__).parents[3] / "examples/fairlead-example-plugin/src/fairlead_example_plugin/__init__.py"
    ).read_text()
    shown = re.findall(r"^```python\n(.*?)^```", PLUGINS, re.MULTILINE | re.DOTALL)[0]
    assert shown in source
