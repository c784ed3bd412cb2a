"""Encode texts to token ids. Long texts are encoded in pieces, with the same tokens as the whole text."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder
from msgspec.structs import asdict

from fairlead.apis.tokens.pieces import PieceCache, packed

# Finds where a text may be cut so that its pieces, encoded one by one, give the tokens of the whole.
#
# Theory. A Hugging Face tokenizer first takes the added tokens with `normalized: false` (nearly all special tokens) out
# of the raw text: the leftmost match first, and the longest of several at one place. Only then does it normalize, split
# and encode each stretch between them on its own. So a text can be cut in front of such a match:
#
# * The piece before the match has the same matches as in the whole text, because matches never overlap.
# * The piece that begins with the match finds it again at its start. So the text after the match is not at the start of
#   a text (where Metaspace adds its blank) and is encoded as in the whole.
#
# Some added tokens depend on their neighbors, so the text is not cut there. `lstrip` takes the white space before the
# token, which belongs to the piece before. `single_word` allows no letter before the token. A token that begins with a
# letter, a digit or `_` is excluded too: cutting it off would make a `single_word` token before it a whole word.
#
# `tests/property/test_tokens_pieces.py` checks this with both libraries.


class AddedToken(Struct, frozen=True):
    """An added token, as in `tokenizer.json`."""

    content: str
    id: int = -1
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class Boundaries:
    """Cuts texts, in time linear in the text for any vocabulary."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        raw = [token for token in added if token.content and not token.normalized]
        self._places = frozenset(token.content for token in raw if _cuts(token))
        self._find = _finder([token.content for token in raw]) if self._places else None
        if self._find is None:
            self._places = frozenset()

    def __len__(self) -> int:
        """The number of tokens in front of which a text may be cut."""
        return len(self._places)

    def pieces(self, text: str) -> list[str]:
        """Cut `text` in front of every such token. No piece is empty."""
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
    """A function that finds the longest matches of `words`. `None` if the vocabulary was made to be too deep for a
    regular expression; texts are not cut then."""
    try:
        return re.compile(_trie(words)).finditer
    except (RecursionError, OverflowError, re.error):
        return None


def _trie(words: Sequence[str]) -> str:
    """A regular expression for the longest of `words`. A plain alternation of a vocabulary with 1,000 placeholder
    tokens would try all of them at every `<` of a text."""
    root: dict[str, dict] = {}  # type: ignore[type-arg]
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(root)


def _pattern(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    # A chain of single letters is joined in a loop instead of by recursion, because words may be long.
    chain = ""
    while len(node) == 1 and "" not in node:
        letter, node = next(iter(node.items()))
        chain += re.escape(letter)
    if not node or set(node) == {""}:
        return chain
    branches = "|".join(re.escape(letter) + _pattern(child) for letter, child in node.items() if letter)
    return f"{chain}(?:{branches}){'?' if '' in node else ''}"


# One interface to the two tokeniser libraries.
#
# `fastokens` is 10 to 100 times as fast. `tokenizers` is what engines use, so it is correct by definition. This package
# can be imported without either: `library()` returns `None` for a library that is not installed.

FAST = "fastokens"
ORACLE = "tokenizers"


class Backend(Protocol):
    """A tokenizer of one library. Whatever exception the library raises, the backend raises `ValueError`."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text by itself, little-endian 32 bit, without special tokens around it."""
        ...

    def encode_whole(self, text: str) -> bytes:
        """The ids of a text with the special tokens that the tokenizer puts around a text."""
        ...


def library(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


class FastBackend:
    name = FAST

    def __init__(self, module: ModuleType, document: str, more: Sequence[AddedToken] = ()) -> None:
        """Raises `ValueError` for a tokenizer that the library cannot load."""
        self._tokenizer = _made(module.Tokenizer.from_json_str, document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if more:
            _made(self._tokenizer.add_tokens, list(more))

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return self._flat(list(texts), False)

    def encode_whole(self, text: str) -> bytes:
        return self._flat([text], True)[0]

    def _flat(self, texts: list[str], special: bool) -> list[bytes]:
        ids, offsets = _made(lambda given: self._tokenizer.encode_batch_flat(given, special), texts)
        if len(texts) == 1:
            return [ids]
        ends = (np.frombuffer(offsets, "<u8") * 4).tolist()
        return [ids[start:end] for start, end in pairwise(ends)]


class OracleBackend:
    name = ORACLE

    def __init__(self, module: ModuleType, document: str, more: Sequence[AddedToken] = ()) -> None:
        """Raises `ValueError` for a tokenizer that the library cannot load."""
        self._tokenizer = _made(module.Tokenizer.from_str, document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for token in more:
            named = module.AddedToken(**{name: value for name, value in asdict(token).items() if name != "id"})
            _made(self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens, [named])

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return [_made(self._ids, (text, False)) for text in texts]

    def encode_whole(self, text: str) -> bytes:
        return _made(self._ids, (text, True))

    def _ids(self, given: tuple[str, bool]) -> bytes:
        text, special = given
        # The batch form lets other threads run meanwhile, `encode` does not; `fast` computes no offsets.
        return packed(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)


T = TypeVar("T")


def _made(make: Callable[[Any], T], given: Any) -> T:
    try:
        return make(given)
    except Exception as exc:  # both libraries raise bare Exception, and one raises its panics as BaseException
        raise ValueError(str(exc)[:200] or type(exc).__name__) from None
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise ValueError(f"the library failed: {exc}"[:200]) from None


# Chooses the library that encodes for a tokenizer. Both encode texts that tend to show differences. On any difference,
# the library that engines use is chosen.
#
# The texts contain what byte-level, Metaspace and WordPiece tokenizers are known to treat differently: runs of white
# space of every kind, long rows of digits, combining marks, scripts without blanks, emoji of several code points, code,
# and special tokens inside text, whole, truncated and adjacent.

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "a",
    "Hello, world! It's what they'd've done; we'll see. DON'T, I'M, you'RE",
    "   leading and trailing   ",
    "one  two   three    four\t\ttabs\t \tmixed \n \n\n  \r\n\r\r\n\x0b\x0c\u00a0\u2003\u3000\u200b\ufeff end \n",
    "\n" * 40 + " " * 130 + "\t" * 20,
    "0123456789" * 12 + " 3.14159e-10 1,000,000 ٣٤٥ ½ ² Ⅻ 1" + "0" * 60,
    "def f(x: int) -> dict[str, Any]:\n    return {'a': [1, 2], \"b\": f'{x!r:>10}'}  # café\n\n\n\tif x != y: pass\n",
    "#include <vector>\nint main(){std::vector<int>v={1,2};for(auto&x:v)x<<=2;/* … */return 0;}\n",
    '{"k": [1.5, null, true], "path": "\\\\dir\\n", "html": "<a href=\\"#\\">&amp;</a>"}',
    "http://example.com/a_b-c?d=e&f=%20#g user@example.org __dunder__ snake_case camelCase SHOUTING",
    "你好，世界。这是一个没有空格的句子，用来测试分词器。日本語の文章もカタカナも混ぜる。한국어 문장도 있습니다.",
    "Привет, мир! Ελληνικά. שלום עולם مرحبا بالعالم हिन्दी वाक्य ไทยไม่มีช่องว่าง தமிழ்",
    "👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ☕️ 🏳️‍🌈 e\u0301 é n\u0303 ñ Å Å ﬁ ﬂ ａｂｃ ½ ǆ İ ı ß ẞ",
    "zalgo: t\u0335\u0321e\u0336\u0322s\u0337\u0323t \u0301alone \u200dzwj\u200d \u202ertl\u202c \U0001f3fb",
    "\x00\x01\x02\x7f\x80\x9f \ufffd \uffff \U0010ffff \ue000",
    "<|im_start|>user\n<|im_end|><s></s><unk><pad>[INST] [/INST]<<SYS>><|eot_id|><|endoftext|><bos><eos>",
    "a" * 300 + "é" * 100 + "中" * 100 + "!" * 200 + "=" * 77 + "-" * 80 + "ab" * 150,
    "The quick brown fox jumps over the lazy dog. " * 8,
    "▁metaspace ▁▁ Ġbyte Ġlevel Ċ âĢ¦ ##piece @@ </w>",
)
#: The most added tokens put into test texts; a vocabulary may have thousands.
_MAX_ADDED = 64


class Choice(Struct, frozen=True):
    """The chosen backend, `None` if no library can load the tokenizer, and its `state` in words."""

    backend: Backend | None
    state: str


def choose(
    document: str,
    more: Sequence[AddedToken],
    added: Sequence[AddedToken],
    fast: ModuleType | None,
    oracle: ModuleType | None,
) -> Choice:
    """Choose the library for a tokenizer. `document`: content of `tokenizer.json`. `more`: added tokens that it lacks.
    `added`: all added tokens. `fast`, `oracle`: the libraries, `None` if missing. Takes as long as loading twice
    (seconds) and a few milliseconds for the texts."""
    if fast is None and oracle is None:
        return Choice(None, "none (neither fastokens nor tokenizers is installed)")
    quick, why_not = _load(FastBackend, fast, document, more)
    sure, problem = _load(OracleBackend, oracle, document, more)
    if sure is None:
        if quick is None:
            return Choice(None, f"none ({ORACLE}: {problem}; {FAST}: {why_not})")
        return Choice(quick, f"{FAST} (unchecked: {ORACLE} {problem})")
    if quick is None:
        return Choice(sure, f"{ORACLE} ({FAST} {why_not})")
    difference = disagreement(quick, sure, texts_for(added))
    return Choice(sure, f"{ORACLE} ({FAST} disagreed: {difference})") if difference else Choice(quick, FAST)


def _load(
    kind: type[FastBackend] | type[OracleBackend], module: ModuleType | None, document: str, more: Sequence[AddedToken]
) -> tuple[Backend | None, str]:
    if module is None:
        return None, "is not installed"
    try:
        return kind(module, document, more), ""
    except ValueError as exc:
        return None, f"cannot load it: {exc}"


def texts_for(added: Sequence[AddedToken]) -> list[str]:
    """`TEXTS`, and texts that contain the tokenizer's own added tokens."""
    contents = [token.content for token in added if token.content][:_MAX_ADDED]
    texts = list(TEXTS)
    texts += [f"x {content} y{content}z\n{content}\n {content}{content[:-1]}" for content in contents]
    texts.append("".join(contents))
    texts.append(" word 12 ".join(contents))
    texts.append("\n".join(f"{content}user\ntext" for content in contents))
    return texts


def disagreement(backend: Backend, reference: Backend, texts: Sequence[str]) -> str:
    """The first text that two backends encode differently; empty = none."""
    for number, text in enumerate(texts):
        if _outcome(backend, text) != _outcome(reference, text):
            return f"text {number}: {text[:40]!r}"
    return ""


def _outcome(backend: Backend, text: str) -> tuple[bytes, bytes] | None:
    """The ids without and with special tokens around the text; `None` = the text cannot be encoded."""
    try:
        return backend.encode([text])[0], backend.encode_whole(text)
    except ValueError:
        return None


# Encodes texts to token ids, as the engine's tokenizer does.

#: A word that any tokenizer can encode, to find out what a tokenizer puts around a text.
_PROBE = "around"


class _Document(Struct):
    added_tokens: list[AddedToken] = []


class _Config(Struct):
    added_tokens_decoder: dict[str, AddedToken] = {}


_decode_document = Decoder(_Document).decode
_decode_config = Decoder(_Config).decode


class Tokeniser:
    """The tokeniser of one model. `state` names the library that encodes, see docs/tokens.md."""

    def __init__(self, backend: Backend, state: str, boundaries: Boundaries, cache: PieceCache) -> None:
        self.state = state
        #: The name of the library that encodes.
        self.library = backend.name
        self.cache = cache
        self._backend = backend
        self._boundaries = boundaries
        self._around = _around(backend)

    def encode(self, text: str, special: bool = False) -> bytes:
        """The ids of a text, little-endian 32 bit. `special`: with the special tokens around it.

        Raises `ValueError` for a text that has no encoding (an unpaired surrogate).
        """
        if not special:
            return self._encode(text)
        if self._around is None:
            return self._backend.encode_whole(text)
        before, after = self._around
        return before + self._encode(text) + after

    def _encode(self, text: str) -> bytes:
        return self.cache.encode(self._boundaries.pieces(text), self._backend.encode)


def load(
    document: bytes,
    config: bytes,
    cache: PieceCache,
    libraries: tuple[ModuleType | None, ModuleType | None] | None = None,
) -> tuple[Tokeniser | None, str]:
    """Load a tokeniser from the contents of `tokenizer.json` and `tokenizer_config.json` (may be empty). Return it with
    its state, or `None` with the reason. Takes seconds for a large vocabulary: do not call it on an event loop.

    `libraries`: fastokens and tokenizers, each `None` if missing; by default the installed ones.
    """
    fast, oracle = libraries or (library(FAST), library(ORACLE))
    try:
        added = _decode_document(document).added_tokens
        text = document.decode()
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError) as exc:
        return None, f"none (tokenizer.json is not readable: {exc})"
    more = _more(config, added)
    choice = choose(text, more, [*added, *more], fast, oracle)
    if choice.backend is None:
        return None, choice.state
    return Tokeniser(choice.backend, choice.state, Boundaries([*added, *more]), cache), choice.state


def _more(config: bytes, added: Sequence[AddedToken]) -> list[AddedToken]:
    """The added tokens that only `tokenizer_config.json` has, by id: in this order the engine's loader adds them to the
    vocabulary."""
    try:
        decoder = _decode_config(config).added_tokens_decoder if config else {}
    except (DecodeError, ValidationError, UnicodeDecodeError, RecursionError):
        return []
    known = {token.content for token in added}
    missing = [(int(number), token) for number, token in decoder.items() if number.isdecimal()]
    return [token for _, token in sorted(missing, key=lambda pair: pair[0]) if token.content not in known]


def _around(backend: Backend) -> tuple[bytes, bytes] | None:
    """The ids that the tokenizer puts before and after any text; `None` if they cannot be found out."""
    try:
        inner, complete = backend.encode([_PROBE])[0], backend.encode_whole(_PROBE)
    except ValueError:
        return None
    start = complete.find(inner)
    while start >= 0 and start % 4:
        start = complete.find(inner, start + 1)
    return None if start < 0 or not inner else (complete[:start], complete[start + len(inner) :])
