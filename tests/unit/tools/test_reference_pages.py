"""The pages that are written from the program are current, and complete."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from fairlead.cli.commands import COMMANDS
from fairlead.compat import reference
from fairlead.config.builtins import BUILTINS
from fairlead.config.check import fields
from fairlead.config.schema import SECTIONS

ROOT = Path(__file__).parents[3]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fairlead_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded("write_reference")


def test_the_schema_of_the_charts_values_is_current() -> None:
    module = loaded("write_values_schema")
    assert module.SCHEMA.read_text() == module.written(), "run `make docs`, or python tools/write_values_schema.py"


@pytest.mark.parametrize("name", ["cli.md", "configuration-reference.md", "findings.md", "picker-plugins.md"])
def test_the_page_is_current(name: str, tool: ModuleType) -> None:
    written = (ROOT / "docs" / name).read_text()
    assert written == tool.pages()[name], "run `make docs`, or python tools/write_reference.py"


def test_every_field_and_plugin_has_a_row(tool: ModuleType) -> None:
    page = tool.configuration_page()
    for key, kind in SECTIONS.items():
        for field in fields(kind):
            assert f"`{key}.{field}" in page
    for known in BUILTINS.values():
        for name in known:
            assert f"#### `{name}`" in page


def test_every_command_has_a_section_with_examples(tool: ModuleType) -> None:
    page = tool.cli_page()
    for name in COMMANDS:
        section = page.split(f"\n## fairlead {name}\n")[1].split("\n## ")[0]
        assert "Example" in section and f"fairlead {name}" in section


class Inner(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)

    how_far: int = Field(default=4, ge=1, description="How far, in metres.")
    needed: str | None


class Outer(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)

    inner: Inner
    by_name: dict[str, Inner] = {}
    names: list[str] = []


def test_a_struct_becomes_rows() -> None:
    assert [*reference._fields(Outer, "top")] == [
        ("top.inner.howFar", "whole number ≥ 1", "`4`", "How far, in metres."),
        ("top.inner.needed", "text", "needed", ""),
        ("top.byName", "mapping", "none", ""),
        ("top.byName.NAME.howFar", "whole number ≥ 1", "`4`", "How far, in metres."),
        ("top.byName.NAME.needed", "text", "needed", ""),
        ("top.names", "list of text", "none", ""),
    ]
