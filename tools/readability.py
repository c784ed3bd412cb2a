"""How long and how hard to read the documentation is.

    python tools/readability.py                   a table: words, median sentence length, Flesch reading ease per page
    python tools/readability.py --json            the same as one JSON object, with the totals
    python tools/readability.py README.md ...     only these pages

* `words`: as `wc -w` counts them, code and tables included. The total leaves out generated pages: those with
  `<!-- Written by` near their top.
* `sentence_median`: words per sentence, over paragraphs and list items. Tables, headings and code blocks are no prose.
* `flesch`: Flesch reading ease of that prose, 206.835 - 1.015 * words / sentences - 84.6 * syllables / words. Syllables
  are estimated from spelling. A piece of inline code counts as one word of two syllables.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GENERATED = "<!-- Written by"
_BLOCKS = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_NO_PROSE = re.compile(r"^\s*(?:\||#|!\[|:::|<|options:|$)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_LINK = re.compile(r"!?\[((?:[^\]\\]|\\.)*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9])")
_WORD = re.compile(r"[A-Za-z0-9][\w'.,/×%+-]*")
_VOWELS = re.compile(r"[aeiouy]+")
#: Two vowels in a row that are two syllables.
_SPLIT = re.compile(r"(?<![tcsgl])i[aou]|eo|ua(?!l)|[aeiou]ing")
#: What inline code stands for while words are counted.
_CODE_WORD = "coded"


class Figures(NamedTuple):
    words: int
    sentences: int
    sentence_median: float
    flesch: float
    generated: bool


def pages() -> list[Path]:
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*named, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


def sentences(markdown: str) -> list[str]:
    """The sentences of a page's paragraphs and list items."""
    paragraphs = [""]
    for line in _BLOCKS.sub("\n", markdown).splitlines():
        if _NO_PROSE.match(line):
            paragraphs.append("")
        elif _ITEM.match(line):
            paragraphs.append(_ITEM.sub("", line))
        else:
            paragraphs[-1] += " " + line.strip()
    plain = [_LINK.sub(r"\1", _CODE.sub(_CODE_WORD, paragraph)).strip() for paragraph in paragraphs]
    return [part for text in plain for part in _SENTENCE_END.split(text) if _WORD.search(part)]


def words(sentence: str) -> list[str]:
    return _WORD.findall(sentence)


def syllables(word: str) -> int:
    """By spelling: groups of vowels, less a silent e."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    groups = len(_VOWELS.findall(letters)) + len(_SPLIT.findall(letters))
    silent = re.search(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouytd]ed$|[^aeiouyscxz]es$", letters) is not None
    return max(1, groups - silent)


def figures(markdown: str) -> Figures:
    parts = sentences(markdown)
    lengths = [len(words(part)) for part in parts]
    generated = GENERATED in markdown[:400]
    if not lengths:
        return Figures(len(markdown.split()), 0, 0.0, 0.0, generated)
    spoken = sum(syllables(word) for part in parts for word in words(part))
    ease = 206.835 - 1.015 * sum(lengths) / len(lengths) - 84.6 * spoken / sum(lengths)
    return Figures(len(markdown.split()), len(lengths), median(lengths), round(ease, 1), generated)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages; all of the documentation if none are named")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text(encoding="utf-8") for path in options.pages or pages()}
    rows = {str(path.resolve().relative_to(ROOT)): figures(text) for path, text in texts.items()}
    own = [text for text in texts.values() if not figures(text).generated]
    lengths = [len(words(part)) for text in own for part in sentences(text)]
    total = {
        "words": sum(len(text.split()) for text in own),
        "sentence_median": median(lengths or [0]),
        "generated_words": sum(row.words for row in rows.values() if row.generated),
    }
    if options.json:
        print(json.dumps({"pages": {name: row._asdict() for name, row in rows.items()}, "total": total}))
        return
    print(f"{'page':45} {'words':>7} {'sentence':>9} {'Flesch':>7}")
    for name, row in rows.items():
        mark = "  generated" if row.generated else ""
        print(f"{name:45} {row.words:7,} {row.sentence_median:9.0f} {row.flesch:7.1f}{mark}")
    print(f"{'all but generated pages':45} {total['words']:7,} {total['sentence_median']:9.0f}")


if __name__ == "__main__":
    main()
