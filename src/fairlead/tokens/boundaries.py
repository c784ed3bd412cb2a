"""Where a text may be cut so that its pieces, encoded one by one, give the tokens of the whole.

Theory. A Hugging Face tokenizer first takes its added tokens with `normalized: false` (nearly all special tokens are
such) out of the raw text, the leftmost first and the longest of those, and only then normalises, splits and encodes
what lies between them, each stretch by itself. So a text can be cut in front of such a match:

* the piece before it holds the same matches, for a match never reaches over another one;
* the piece that begins with it finds it again at its start, so what follows is not at the start of a text (Metaspace
  adds its blank only there) and is encoded as in the whole.

Some added tokens look at their neighbours, and are no place to cut: `lstrip` takes the white space before it, which
belongs to the piece before, and `single_word` wants no letter there. A token that begins with a letter, a digit or `_`
is none either, for it can take from a `single_word` match before it the end of its word.

`tests/property/test_tokens_pieces.py` holds this against both libraries.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct


class AddedToken(Struct, frozen=True):
    """As in `tokenizer.json`."""

    content: str
    id: int = -1
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class Boundaries:
    """Cuts texts. Time is linear in the text, whatever the vocabulary."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        raw = [token for token in added if token.content and not token.normalized]
        self._places = frozenset(token.content for token in raw if _cuts(token))
        self._find = _finder([token.content for token in raw]) if self._places else None
        if self._find is None:
            self._places = frozenset()

    def __len__(self) -> int:
        """How many tokens may be cut at."""
        return len(self._places)

    def pieces(self, text: str) -> list[str]:
        """`text` in order, cut in front of every place; never an empty piece."""
        if self._find is None or not text:
            return [text] if text else []
        places = self._places
        cuts = [match.start() for match in self._find(text) if match.group() in places]
        if not cuts:
            return [text]
        cuts.append(len(text))
        pieces = [text[: cuts[0]]] if cuts[0] else []
        pieces += [text[cuts[i] : cuts[i + 1]] for i in range(len(cuts) - 1)]
        return pieces


def _cuts(token: AddedToken) -> bool:
    first = token.content[0]
    return not (token.lstrip or token.single_word or first.isalnum() or first == "_")


def _finder(words: Sequence[str]) -> Callable[[str], Iterator[re.Match[str]]] | None:
    """`None` for a vocabulary that is made to be too deep for a pattern; nothing is cut then."""
    try:
        return re.compile(_trie(words)).finditer
    except (RecursionError, OverflowError, re.error):
        return None


def _trie(words: Sequence[str]) -> str:
    """A pattern for the longest of `words`. As a plain alternation, a vocabulary with 1,000 placeholder tokens would
    try all of them at every `<` of a text."""
    root: dict[str, dict] = {}  # type: ignore[type-arg]
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(root)


def _pattern(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    # A chain of single letters is joined here rather than by recursion: words may be long.
    chain = ""
    while len(node) == 1 and "" not in node:
        letter, node = next(iter(node.items()))
        chain += re.escape(letter)
    if not node or set(node) == {""}:
        return chain
    branches = "|".join(re.escape(letter) + _pattern(child) for letter, child in node.items() if letter)
    return f"{chain}(?:{branches}){'?' if '' in node else ''}"
