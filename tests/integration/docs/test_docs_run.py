"""What the documents mark `run` does what they say. See conftest.py for the marks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
_MARK = re.compile(r"^```\w+ run\b", re.MULTILINE)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if _MARK.search(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("document", PAGES, ids=lambda document: document.name)
def test_every_block_that_is_marked_runs(document: Path, page: Any) -> None:
    text = document.read_text()
    assert page.run(text) == len(_MARK.findall(text))


def test_the_newcomers_path_is_marked(runnable: Callable[[str], list[Any]]) -> None:
    """README → a configuration → serving → load → a policy of one's own in the table."""
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md", "docs/policy-tutorial.md"))
    bodies = "".join(block.body for block in runnable(text))
    for step in ("fairlead validate", "fairlead serve", "fairlead explain", "fairlead bench", "fairlead sim compare"):
        assert step in bodies
    assert re.search(r"-p \w+\.py", bodies)


def test_a_policy_is_some_thirty_lines(runnable: Callable[[str], list[Any]]) -> None:
    block = next(block for block in runnable((ROOT / "docs/policy-tutorial.md").read_text()) if block.file)
    assert len(block.body.splitlines()) <= 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```sh run\nfalse\n```\n", "exit code 1"),
        ("```console run\n$ echo one\ntwo\n```\n", "does not print 'two'"),
        ("```console run\n$ printf 'a\\nb\\n'\nb\na\n```\n", "does not print 'a' (in this order)"),
        ('```sh run background until="never"\necho gone\n```\n', "ended with 0"),
        ("```sh run\ntrue | false | true\n```\n", "exit code 1"),
    ],
)
def test_a_block_that_does_not_hold_fails(text: str, said: str, page: Any) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        page.run(text)


def test_files_and_dots(page: Any) -> None:
    text = "```yaml run file=a.yaml\nx: 1\n```\n```console run\n$ cat a.yaml\n…: 1\n```\n```sh\nfalse\n```\n"
    assert page.run(text) == 2
