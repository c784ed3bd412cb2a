"""The site's hooks, the comments on its Python page, and that its navigation names every page."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    spec = importlib.util.spec_from_file_location("fairlead_site_hooks", ROOT / "tools" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(hooks: ModuleType, markdown: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    return str(hooks.on_page_markdown(markdown, page, {}, []))


def test_the_navigation_names_every_page() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(
    ("markdown", "made"),
    [
        ("[a](../src/fairlead/core/scheduler.py)", "[a](files/src/fairlead/core/scheduler.py.txt)"),
        ("[a](../src/fairlead/plugins)", "a"),
        ("[a](policies.md#x) [b](https://example.org)", "[a](policies.md#x) [b](https://example.org)"),
        ("[a](../nowhere.py)", "[a](../nowhere.py)"),
        ("[a](../../outside.py)", "[a](../../outside.py)"),
        ("```sh run\nx\n```", "```sh\nx\n```"),
        ("```yaml run file=a.yaml\nx\n```", '```yaml title="a.yaml"\nx\n```'),
        ("Text:\n- one\n- two", "Text:\n\n- one\n- two"),
        ("Text:\n1. one\n2. two", "Text:\n\n1. one\n2. two"),
        ("- one\n- two", "- one\n- two"),
        ("```sh\nls\n- x\n```", "```sh\nls\n- x\n```"),
        (
            "<!-- tabs -->\n**pip**\n\n```sh run\nls\n```\n<!-- /tabs -->",
            '=== "pip"\n\n    ```sh\n    ls\n    ```\n',
        ),
    ],
)
def test_what_the_hooks_change(hooks: ModuleType, markdown: str, made: str) -> None:
    assert rendered(hooks, markdown) == made


def test_the_python_page_shows_the_comments_above_fields() -> None:
    griffe = pytest.importorskip("griffe", reason="the extra `docs` is not installed")
    extensions = griffe.load_extensions(str(ROOT / "tools" / "site_comments.py"))
    module = griffe.load("fairlead.core.request", search_paths=[ROOT / "src"], extensions=extensions)
    request = module["Request"].members
    assert request["fairness_id"].docstring.value == "The tenant; empty = all without one share a flow."
    assert request["blocks"].docstring.value.endswith("and never in a record, log\nor journal.")
    assert request["path"].docstring is None
