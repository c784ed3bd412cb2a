"""What parsing a chat request costs, next to reading the same body whole: `python bench/parse.py [--json]`.

Every figure is the best of several rounds, in microseconds per body; the bodies are alike in every run.
"""

import argparse
import json
import sys
from collections.abc import Callable
from timeit import repeat

import msgspec

from fairlead.parse.request import parse_request
from fairlead.parse.usage import UsageScanner

ROUNDS = 7
ASCII = 'The quick brown fox jumps over the lazy dog.\n"Really?" it asked. '
MIXED = "Der schnelle braune Fuchs – „wirklich?“ – springt über den Hund. 日本語も 🦊 "
SIZES = {"1kb": 1_000, "24kb": 24_000, "500kb": 490_000}


def chat_body(size: int, text: str) -> bytes:
    """A conversation of turns of about 2 kB that is `size` bytes long or a little more."""
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    turn = text * max(1, min(2_000, size) // len(text.encode()))
    while len(_encode(messages)) < size - 200:
        messages.append({"role": ("user", "assistant")[len(messages) % 2 == 0], "content": turn})
    return _encode(messages)


def _encode(messages: list[dict[str, str]]) -> bytes:
    body = {"model": "meta-llama/Llama-3.1-8B", "messages": messages, "max_tokens": 256, "temperature": 0.7}
    return json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}, ensure_ascii=False).encode()


def microseconds(action: Callable[[], object], number: int) -> float:
    return min(repeat(action, number=number, repeat=ROUNDS)) / number * 1e6


def measure_requests() -> dict[str, tuple[int, float, float, float]]:
    """Label → (bytes, Fairlead, json.loads, msgspec decoding everything)."""
    rows = {}
    for kind, text in (("chat", ASCII), ("chat_utf8", MIXED)):
        for name, size in SIZES.items():
            body = chat_body(size, text)
            number = max(5, 3_000_000 // len(body))
            rows[f"{kind}_{name}"] = (
                len(body),
                microseconds(lambda: parse_request("/v1/chat/completions", body), number),  # noqa: B023
                microseconds(lambda: json.loads(body), number),  # noqa: B023
                microseconds(lambda: msgspec.json.decode(body), number),  # noqa: B023
            )
    return rows


def measure_responses() -> dict[str, float]:
    """Microseconds per chunk of a stream: without and with usage in it."""
    chunk = {"id": "chatcmpl-8a09a5988c4f3f87", "object": "chat.completion.chunk", "created": 1795145995, "model": "m"}
    chunk["choices"] = [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}]
    plain = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    chunk["usage"] = {"prompt_tokens": 125, "total_tokens": 130, "completion_tokens": 5}
    last = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    scanner = UsageScanner(stream=True)
    return {
        "chunk_us": microseconds(lambda: scanner.feed(plain), 10_000),
        "usage_chunk_us": microseconds(lambda: scanner.feed(last), 10_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    as_json = parser.parse_args().json
    requests, responses = measure_requests(), measure_responses()
    if as_json:
        figures = {f"{label}_us": round(row[1], 2) for label, row in requests.items()}
        json.dump(figures | {label: round(us, 2) for label, us in responses.items()}, sys.stdout)
        print()
        return
    print(f"{'request':<16}{'bytes':>9}{'fairlead µs':>13}{'json µs':>10}{'msgspec µs':>12}")
    for label, (size, ours, std, full) in requests.items():
        print(f"{label:<16}{size:>9,}{ours:>13.2f}{std:>10.2f}{full:>12.2f}")
    print()
    for label, us in responses.items():
        print(f"{label:<16}{us:>9.2f}")


if __name__ == "__main__":
    main()
