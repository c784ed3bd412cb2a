"""What understanding a request costs: `python bench/parse.py [--json]`.

* `chat_24kb_us`, `chat_500kb_us`: a chat request understood and routed, from headers and body to the bytes of the
  answer: parse, hash, look for its conversation, make the `Request`, decide with the default policy over 8 endpoints,
  encode the pick. The prompts are new: not one block of them was ever seen.
* `chat_…_booked_us`: the same through `Pipeline.handle`, which also charges the lease, inserts the prefix and records.
* `chat_…_turn_us`, `chat_…_turn_booked_us`: the same for the second turns of conversations.
* `parse_…_us`: its parsing alone, next to reading the same body whole.

Figures are CPU time of this process in microseconds per body, the median of many batches (`_min`: the best one; for
parsing alone the best one). The bodies are alike in every run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from random import Random
from statistics import median

import msgspec

from fairlead.apis.request import parse_request
from fairlead.apis.usage import UsageScanner
from fairlead.compat.load import load
from fairlead.config.building import build_pipeline
from fairlead.config.plugins import build_hasher
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.events import EndpointUp, MetricsSampled, RequestArrived, ResponseEnded
from fairlead.core.instructions import Route
from fairlead.core.policy import Context
from fairlead.gateway.answers import Answers
from fairlead.gateway.ext_proc import Kind
from fairlead.gateway.understand import Understanding
from fairlead.testing import SimClock

ROUNDS = 7
ASCII = 'The quick brown fox jumps over the lazy dog.\n"Really?" it asked. '
MIXED = "Der schnelle braune Fuchs – „wirklich?“ – springt über den Hund. 日本語も 🦊 "
SIZES = {"1kb": 1_000, "24kb": 24_000, "500kb": 490_000}


def chat_body(size: int, text: str) -> bytes:
    """A conversation of turns of about 2 kB that is `size` bytes long or a little more."""
    return _encode(conversation(size, text))


def conversation(size: int, text: str, name: str = "helpful") -> list[dict[str, str]]:
    messages = [{"role": "system", "content": f"You are {name}, an assistant."}]
    turn = text * max(1, min(2_000, size) // len(text.encode()))
    length = len(_encode(messages))
    while length < size - 200:
        messages.append({"role": ("user", "assistant")[len(messages) % 2 == 0], "content": turn})
        length += len(turn.encode()) + 40
    return messages


def _encode(messages: list[dict[str, str]]) -> bytes:
    body = {"model": "meta-llama/Llama-3.1-8B", "messages": messages, "max_tokens": 256, "temperature": 0.7}
    return json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}, ensure_ascii=False).encode()


def microseconds(action: Callable[[], object], number: int) -> float:
    return min(_batch(action, number) for _ in range(ROUNDS))


def _batch(action: Callable[[], object], number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        action()
    return (time.process_time() - start) / number * 1e6


class Rig:
    """A scheduler without sockets."""

    def __init__(self, endpoints: int = 8) -> None:
        config = load("endpoints: [{address: '10.0.0.1:8000'}]")
        self.clock = SimClock()
        self.rng = Random(1)
        self.pipeline = build_pipeline(config, self.clock, self.rng)
        self.understanding = Understanding(self.pipeline.tokens, build_hasher(config), self.clock.time)
        self.answers = Answers("0123abcd")
        for i in range(endpoints):
            self.pipeline.handle(EndpointUp(Endpoint(f"default/e{i}", f"10.0.0.{i}:8000")))
            sample = Sample(waiting=0.0, running=1.0 + i, kv_usage=0.1)
            self.pipeline.handle(MetricsSampled(f"default/e{i}", self.clock.time(), sample))

    def route(self, headers: dict[str, str], body: bytes) -> int:
        """Understand, decide, answer. The id of the request."""
        request, _ = self.understanding.request(self.understanding.head(headers), body)
        now = self.clock.time()
        pick = self.pipeline.policy.choose(request, self.pipeline.fleet, Context(now, self.rng))
        return self._answer(request.id, self.pipeline.fleet.table.endpoints[pick.slot])

    def book(self, headers: dict[str, str], body: bytes) -> int:
        """The same, and remember it."""
        request, _ = self.understanding.request(self.understanding.head(headers), body)
        for instruction in self.pipeline.handle(RequestArrived(request)):
            if type(instruction) is Route:
                self._answer(request.id, instruction.endpoint)
        return request.id

    def _answer(self, request_id: int, endpoint: Endpoint | None) -> int:
        assert endpoint is not None
        self.answers.pick(Kind.REQUEST_HEADERS, endpoint.address, request_id, frozenset())
        return request_id

    def end(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            self.pipeline.handle(ResponseEnded(request_id=request_id, status=200))


def measure_routed(size: int, second: bool, booked: bool, batches: int) -> list[float]:
    """Microseconds per request, of every batch. `second`: the first turn of each conversation was seen."""
    rig = Rig()
    headers = {":path": "/v1/chat/completions", ":method": "POST", "content-type": "application/json"}
    number = max(2, 200_000 // size)
    results = []
    for batch in range(batches):
        talks = [conversation(size, ASCII, f"number {batch * number + i}") for i in range(number)]
        if second:
            rig.end([rig.book(headers, _encode(talk[:-2])) for talk in talks])
        bodies = [_encode(talk) for talk in talks]
        serve = rig.book if booked else rig.route
        start = time.process_time()
        ids = [serve(headers, body) for body in bodies]
        results.append((time.process_time() - start) / number * 1e6)
        rig.end(ids)
    return results


def measure_requests(batches: int) -> dict[str, tuple[int, float, float, float]]:
    """Label → (bytes, Fairlead, json.loads, msgspec decoding everything)."""
    rows = {}
    for kind, text in (("chat", ASCII), ("chat_utf8", MIXED)):
        for name, size in SIZES.items():
            body = chat_body(size, text)
            number = max(5, 30_000 * min(batches, 100) // len(body))
            rows[f"{kind}_{name}"] = (
                len(body),
                microseconds(lambda: parse_request("/v1/chat/completions", body), number),  # noqa: B023
                microseconds(lambda: json.loads(body), number),  # noqa: B023
                microseconds(lambda: msgspec.json.decode(body), number),  # noqa: B023
            )
    return rows


def measure_responses(batches: int) -> dict[str, float]:
    """Microseconds per chunk of a stream: without and with usage in it."""
    chunk = {"id": "chatcmpl-8a09a5988c4f3f87", "object": "chat.completion.chunk", "created": 1795145995, "model": "m"}
    chunk["choices"] = [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}]
    plain = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    chunk["usage"] = {"prompt_tokens": 125, "total_tokens": 130, "completion_tokens": 5}
    last = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    scanner, number = UsageScanner(stream=True), 100 * min(batches, 100)
    return {
        "chunk_us": microseconds(lambda: scanner.feed(plain), number),
        "usage_chunk_us": microseconds(lambda: scanner.feed(last), number),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--batches", type=int, default=100, help="per kind of body")
    options = parser.parse_args()
    routed = {
        f"chat_{name}{turn}{all_}": measure_routed(SIZES[name], second, booked, options.batches)
        for name in ("24kb", "500kb")
        for turn, second in (("", False), ("_turn", True))
        for all_, booked in (("", False), ("_booked", True))
    }
    requests, responses = measure_requests(options.batches), measure_responses(options.batches)
    if options.json:
        figures = {f"{name}_us": round(median(batches), 2) for name, batches in routed.items()}
        figures |= {f"{name}_min_us": round(min(batches), 2) for name, batches in routed.items()}
        figures |= {f"parse_{label}_us": round(row[1], 2) for label, row in requests.items()}
        json.dump(figures | {label: round(us, 2) for label, us in responses.items()}, sys.stdout)
        print()
        return
    print("understood and routed, µs: median (best batch)")
    for name, batches in routed.items():
        print(f"{name:<24}{median(batches):>9.1f} ({min(batches):.1f})")
    print(f"\n{'parsed only':<16}{'bytes':>9}{'fairlead µs':>13}{'json µs':>10}{'msgspec µs':>12}")
    for label, (size, ours, std, full) in requests.items():
        print(f"{label:<16}{size:>9,}{ours:>13.2f}{std:>10.2f}{full:>12.2f}")
    print()
    for label, us in responses.items():
        print(f"{label:<16}{us:>9.2f}")


if __name__ == "__main__":
    main()
