"""`tools/readability.py` counts right on known texts, and the documentation stays short and readable."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "readability.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fairlead_readability", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "ease"),
    [
        ("The cat sat on the mat.", 116.1),  # 6 words, 6 syllables
        ("The Australian platypus is seemingly a hybrid of a mammal and reptilian creature.", 37.5),  # 13, 24
    ],
)
def test_the_reading_ease_of_known_sentences(tool: ModuleType, text: str, ease: float) -> None:
    assert tool.figures(text).flesch == pytest.approx(ease, abs=0.1)


@pytest.mark.parametrize(
    ("word", "count"),
    [("make", 1), ("table", 2), ("waited", 2), ("passed", 1), ("requests", 2), ("decision", 3), ("being", 2)],
)
def test_syllables(tool: ModuleType, word: str, count: int) -> None:
    assert tool.syllables(word) == count


PAGE = """\
# A heading of words

One two three. Four `five six` seven eight
nine!

- An item here
- See [the other page](page.md#part). It has 1.5 parts

| a | table |
|---|---|

```sh
not prose. At all.
```
"""


def test_only_prose_has_sentences(tool: ModuleType) -> None:
    lengths = [len(tool.words(part)) for part in tool.sentences(PAGE)]
    assert lengths == [3, 5, 3, 4, 4]
    assert tool.figures(PAGE).words == len(PAGE.split())


def test_the_total_leaves_generated_pages_out(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main(["--json"])
    shown = json.loads(capsys.readouterr().out)
    pages = shown["pages"]
    assert {name for name, page in pages.items() if page["generated"]} >= {"docs/cli.md", "docs/metrics.md"}
    assert shown["total"]["words"] == sum(page["words"] for page in pages.values() if not page["generated"])
    assert shown["total"]["generated_words"] > 10_000


@pytest.fixture(scope="module")
def documentation(tool: ModuleType) -> dict[str, Any]:
    return {str(path.relative_to(tool.ROOT)): tool.figures(path.read_text()) for path in tool.pages()}


def test_the_documentation_stays_short(documentation: dict[str, Any]) -> None:
    own = {name: page.words for name, page in documentation.items() if not page.generated}
    assert sum(own.values()) <= 45_000, sorted(own.items(), key=lambda row: -row[1])[:10]


def test_sentences_stay_short(documentation: dict[str, Any]) -> None:
    assert {name: page.sentence_median for name, page in documentation.items() if page.sentence_median > 18} == {}


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/concepts.md"])
def test_the_first_pages_are_easy_to_read(documentation: dict[str, Any], name: str) -> None:
    assert documentation[name].flesch >= 50
