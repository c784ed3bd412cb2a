"""What it costs to make token ids of prompts: `python bench/tokens.py [--tokenizer FILE] [--json]`.

Everything goes the way of a request: from the bytes of a chat body over its JSON and the chat template to packed ids.

* `cold_100k_ms`: a conversation of 100,000 tokens of which nothing was seen before. `first_100k_ms`: the first prompt
  after the tokenizer was loaded, when the library's own memory of words is empty too.
* `warm_100k_ms`: the same body again. `turn_100k_ms`, `turn_100k_p99_ms`: the next turn of it, 500 new tokens each.
* `one_100k_ms`: 100,000 new tokens in a single message.
* `cold_1k_us`, `warm_1k_us`: 1,000 tokens. `template_us`: of this, the template for 100,000 tokens in 200 messages.
* `keys_100k_ms`: the keys of the blocks (of 16 tokens) of 100,000 ids, which comes after.
* `oracle_…`: the same with `tokenizers`, through this package (pieces are kept there too) and plain.

Figures are CPU time of this process, the median of several: other work on the machine does not count. Without
`--tokenizer` a vocabulary of 8,000 is trained on this repository's own text first; figures of a real model's
`tokenizer.json` are nearer to life.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import fastokens
import tokenizers

from fairlead.apis.request import parse_request
from fairlead.apis.tokens import PromptTokeniser, PromptTokens
from fairlead.apis.tokens.pieces import PieceCache
from fairlead.apis.tokens.prompt_tokeniser import ModelTokens
from fairlead.apis.tokens.template import ChatTemplate
from fairlead.apis.tokens.tokeniser import load
from fairlead.core.kv.keys import prompt_keys

ROOT = Path(__file__).parents[1]
PATH = "/v1/chat/completions"
MESSAGES = 200
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ BEGIN + message['role'] + '\n' + message['content'] + END + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ BEGIN + 'assistant\n' }}{% endif %}"
)


def own_text(files: int) -> list[str]:
    """Lines of this repository's documents and sources. `files`: of so many of them; 0 = all."""
    found = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    return [line for file in found[: files or None] for line in file.read_text().splitlines(keepends=True)]


def trained(lines: list[str]) -> bytes:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    return tokenizer.to_str().encode()


class Texts:
    """Text that was never seen before but for its words: lines in an order of its own."""

    def __init__(self, lines: list[str], seed: int) -> None:
        self._lines = [line for line in lines if len(line) > 20]
        self._random = Random(seed)

    def new(self, size: int) -> str:
        parts: list[str] = []
        length = 0
        while length < size:
            parts.append(self._random.choice(self._lines))
            length += len(parts[-1])
        return "".join(parts)[:size]


class Side:
    """A tokeniser of one library."""

    def __init__(self, document: bytes, libraries: tuple[Any, Any]) -> None:
        self.cache = PieceCache(1 << 30, contextlib.nullcontext())
        made, self.state = load(document, b"", self.cache, libraries)
        if made is None:
            sys.exit(f"the tokenizer cannot be loaded: {self.state}")
        contents = [token["content"] for token in json.loads(document)["added_tokens"] if not token["normalized"]]
        begin, end = (*contents, "<|begin|>", "<|end|>")[:2]
        self.template = ChatTemplate(TEMPLATE, datetime.now, {"BEGIN": begin, "END": end})
        model = ModelTokens(made, {"default": self.template}, self.state, "ok")
        self.prompts = PromptTokeniser({"*": model}, self.cache)

    def run(self, body: bytes) -> tuple[float, PromptTokens]:
        """(seconds, what was found)."""
        parsed = parse_request(PATH, body)
        start = time.process_time()
        found = self.prompts.tokens_of(parsed, body, "m")
        return time.process_time() - start, found

    def count(self, text: str) -> int:
        body = json.dumps({"prompt": text}).encode()
        return self.prompts.tokens_of(parse_request("/v1/completions", body), body, "m").total


def chat(texts: Texts, size: int, messages: int = MESSAGES) -> list[dict[str, str]]:
    each = max(size // messages, 1)
    return [{"role": ("user", "assistant")[i % 2], "content": texts.new(each)} for i in range(messages)]


def body_of(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=False).encode()


def repeated(rounds: int, once: Callable[[], float]) -> float:
    return median(once() for _ in range(rounds))


def measure(document: bytes, lines: list[str], rounds: int) -> dict[str, float | str]:
    texts = Texts(lines, 1)
    ours = Side(document, (fastokens, tokenizers))
    oracle = Side(document, (None, tokenizers))
    sample = texts.new(200_000)
    per_token = len(sample) / oracle.count(sample)
    big, small = int(100_000 * per_token), int(1000 * per_token)
    found: dict[str, float | str] = {"state": ours.state, "bytes_per_token": round(per_token, 2)}

    def cold(side: Side, size: int, messages: int = MESSAGES) -> float:
        side.cache.clear()
        return side.run(body_of(chat(texts, size, messages)))[0]

    found["first_100k_ms"] = cold(ours, big) * 1e3
    for name, side in (("", ours), ("oracle_", oracle)):
        found[f"{name}cold_100k_ms"] = repeated(rounds, lambda side=side: cold(side, big)) * 1e3  # type: ignore[misc]
        found[f"{name}one_100k_ms"] = repeated(rounds, lambda side=side: cold(side, big, 1)) * 1e3  # type: ignore[misc]
        found[f"{name}cold_1k_us"] = repeated(rounds * 5, lambda side=side: cold(side, small, 4)) * 1e6  # type: ignore[misc]
        body = body_of(chat(texts, small, 4))
        found[f"{name}warm_1k_us"] = repeated(rounds * 5, lambda side=side, body=body: side.run(body)[0]) * 1e6  # type: ignore[misc]
        messages = chat(texts, big)
        body = body_of(messages)
        side.run(body)
        found[f"{name}warm_100k_ms"] = repeated(rounds * 3, lambda side=side, body=body: side.run(body)[0]) * 1e3  # type: ignore[misc]
        turns = []
        for _ in range(rounds * 10):
            messages += chat(texts, int(500 * per_token), 2)
            turns.append(side.run(body_of(messages))[0])
        found[f"{name}turn_100k_ms"] = median(turns) * 1e3
        found[f"{name}turn_100k_p99_ms"] = quantiles(turns, n=100)[98] * 1e3
    found |= plain(document, ours, texts, big, rounds)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def plain(document: bytes, side: Side, texts: Texts, size: int, rounds: int) -> dict[str, float]:
    """Parts by themselves, and the library without this package."""
    messages = chat(texts, size)
    _, tokens = side.run(body_of(messages))
    text = side.template.render(messages, {"add_generation_prompt": True})
    library = tokenizers.Tokenizer.from_str(document.decode())
    expected = library.encode(text, add_special_tokens=False).ids
    if list(memoryview(tokens.ids).cast("I")) != expected:
        sys.exit("the ids are wrong")

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            start = time.process_time()
            call()
            return time.process_time() - start

        return once

    return {
        "tokens": float(tokens.total),
        "template_us": repeated(rounds * 3, timed(lambda: side.template.render(messages, {}))) * 1e6,
        "keys_100k_ms": repeated(rounds * 3, timed(lambda: prompt_keys(1, tokens.ids, 16))) * 1e3,
        "oracle_plain_100k_ms": repeated(
            rounds, timed(lambda: library.encode(texts.new(size), add_special_tokens=False).ids)
        ) * 1e3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=0, help="learn from so many files only; 0 = all")
    parser.add_argument("--json", action="store_true", help="print JSON on one line")
    given = parser.parse_args()
    lines = own_text(given.files)
    document = Path(given.tokenizer).read_bytes() if given.tokenizer else trained(lines)
    found = measure(document, lines, given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:26} {value}")


if __name__ == "__main__":
    main()
