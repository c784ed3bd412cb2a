"""Which library encodes for a tokenizer: both encode texts that are made to differ, and on any difference the one that
engines use is taken.

The texts are where byte-level, Metaspace and WordPiece tokenizers are known to part: runs of white space of every kind,
digits in long rows, marks that combine, scripts without blanks, emoji of several code points, code, special tokens
inside of text, whole, cut short and side by side.
"""

from collections.abc import Sequence
from types import ModuleType

from msgspec import Struct

from fairlead.tokens.backend import FAST, ORACLE, Backend, FastBackend, OracleBackend
from fairlead.tokens.boundaries import AddedToken

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
#: Added tokens that are put into texts; a vocabulary may have thousands.
_MAX_ADDED = 64


class Choice(Struct, frozen=True):
    """`backend` is `None` if no library can load the tokenizer. `state` says it for people."""

    backend: Backend | None
    state: str


def choose(
    document: str,
    more: Sequence[AddedToken],
    added: Sequence[AddedToken],
    fast: ModuleType | None,
    oracle: ModuleType | None,
) -> Choice:
    """`document`: content of `tokenizer.json`. `more`: added tokens that it lacks; `added`: all. The modules may be
    missing. Takes as long as loading twice (seconds) and a few milliseconds for the texts."""
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
    """`TEXTS`, and texts with the tokenizer's own added tokens in them."""
    contents = [token.content for token in added if token.content][:_MAX_ADDED]
    texts = list(TEXTS)
    texts += [f"x {content} y{content}z\n{content}\n {content}{content[:-1]}" for content in contents]
    texts.append("".join(contents))
    texts.append(" word 12 ".join(contents))
    texts.append("\n".join(f"{content}user\ntext" for content in contents))
    return texts


def disagreement(one: Backend, other: Backend, texts: Sequence[str]) -> str:
    """Where two backends differ first; empty = nowhere."""
    for number, text in enumerate(texts):
        if _outcome(one, text) != _outcome(other, text):
            return f"text {number}: {text[:40]!r}"
    return ""


def _outcome(backend: Backend, text: str) -> tuple[bytes, bytes] | None:
    """Ids without and with special tokens around; `None` = the text cannot be encoded."""
    try:
        return backend.encode([text])[0], backend.encode_whole(text)
    except ValueError:
        return None
