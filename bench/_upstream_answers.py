"""The answers of `_upstream.py`: each is an iterator of pieces to write and pauses between them."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from random import Random
from typing import Any

from _wheel import Wheel
from fairlead.pool.http1 import HttpRequest

_MAX_CHUNKS = 1_000_000
_MAX_CHUNK_BYTES = 65536
_MARKER = re.compile(rb'"x-bench" ?: ?"([^"]{0,500})"')
_STREAMING = re.compile(rb'"stream" ?: ?true')
#: `"stream": true` and settings are looked for in this much of the upload's beginning and of its end.
_LOOKED_AT = 65536
_NOISE = Random(0).randbytes(1 << 18)

#: Bytes to write, then seconds to wait before the next piece.
Piece = tuple[bytes, float]


class Port:
    """What all connections of one port share."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.number = 0
        self.running = 0
        self.served = 0

    def head(self, status: int, content_type: str, length: int | None, more: str = "") -> bytes:
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        return (
            f"HTTP/1.1 {status} Bench\r\ncontent-type: {content_type}\r\n{framing}\r\n"
            f"x-bench-port: {self.number}\r\n{more}\r\n"
        ).encode()

    def whole(self, status: int, content: Any, content_type: str = "application/json", more: str = "") -> bytes:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.head(status, content_type, len(body), more) + body

    def metrics(self) -> bytes:
        labels = '{engine="0",model_name="bench"}'
        lines = (
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {float(self.running)}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{labels} 0.0",
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{labels} {min(1.0, self.running / 256)}",
            "# TYPE vllm:request_success_total counter",
            f'vllm:request_success_total{{finished_reason="length",model_name="bench"}} {float(self.served)}',
            "# TYPE vllm:cache_config_info gauge",
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="16384"} 1.0',
        )
        return "\n".join((*lines, "")).encode()


class Settings:
    """The `x-bench-…` settings of one request."""

    def __init__(self, request: HttpRequest, body: bytes) -> None:
        """`body`: where settings are looked for."""
        self._headers = request.headers
        found = _MARKER.search(body) if b'"x-bench"' in body else None
        pairs = found.group(1).decode("latin-1").split(";") if found else []
        self._marked = dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def text(self, name: str, default: str) -> str:
        return self._headers.get(f"x-bench-{name}", "").lower() or self._marked.get(name, default)

    def number(self, name: str, default: float, most: float = 1e9) -> float:
        """A bad value counts as the default."""
        try:
            value = float(self.text(name, str(default)))
        except ValueError:
            return default
        return min(value, most) if value >= 0 else default


def choose(port: Port, request: HttpRequest) -> Iterator[Piece]:
    """The answer to a whole request."""
    path, body = request.path, request.body
    if path == "/metrics":
        return _once(port.whole(200, port.metrics(), "text/plain; version=1.0.0; charset=utf-8"))
    if path == "/health":
        return _once(port.whole(200, b""))
    if path == "/v1/models":
        return _once(port.whole(200, {"object": "list", "data": [{"id": "bench", "object": "model"}]}))
    ends = body if len(body) <= 2 * _LOOKED_AT else body[:_LOOKED_AT] + body[-_LOOKED_AT:]
    settings = Settings(request, ends)
    mode = settings.text("mode", "sse" if _STREAMING.search(ends) else "json")
    if mode == "sse":
        return sse(port, settings, len(body))
    if mode == "verify":
        return verify(port, settings)
    if mode == "early":
        return early(port, request)
    if mode == "echo":
        return _once(port.whole(200, {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}))
    return completion(port, settings, len(body))


def _once(answer: bytes) -> Iterator[Piece]:
    return iter(((answer, 0.0),))


def early(port: Port, request: HttpRequest) -> Iterator[Piece]:
    settings = Settings(request, request.body)
    status = int(settings.number("status", 413, 599))
    close = settings.number("close", 0) > 0
    if close:
        request.keep_alive = False
    answer = {"error": {"message": "early answer", "code": status}}
    return _once(port.whole(status, answer, more="connection: close\r\n" if close else ""))


def _usage(settings: Settings, body_bytes: int, output: int) -> bytes:
    prompt = body_bytes // 4
    cached = min(int(settings.number("cached", 0)), prompt)
    return (
        b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        % (prompt, prompt + output, output, cached)
    )


def completion(port: Port, settings: Settings, body_bytes: int) -> Iterator[Piece]:
    delay = settings.number("delay-ms", 0) / 1000
    if delay:
        yield b"", delay
    text = b"bench " * 110
    body = (
        b'{"id":"chatcmpl-bench","object":"chat.completion","created":1795145995,"model":"bench","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"%b"},"logprobs":null,"finish_reason":"length"}],%b}'
    ) % (text, _usage(settings, body_bytes, 110))
    yield port.whole(200, body), 0.0


def sse(port: Port, settings: Settings, body_bytes: int) -> Iterator[Piece]:
    count = int(settings.number("chunks", 16, _MAX_CHUNKS))
    interval = settings.number("interval-ms", 0) / 1000
    head = port.head(200, "text/event-stream; charset=utf-8", None)
    chunk = _chunk(_event(int(settings.number("chunk-bytes", 230, _MAX_CHUNK_BYTES))))
    usage = b'data: {"id":"chatcmpl-bench","choices":[],%b}\n\n' % _usage(settings, body_bytes, count)
    last = _chunk(usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    delay = settings.number("delay-ms", 0) / 1000
    if not interval:
        if delay:
            yield head, delay
            head = b""
        for first in range(0, count, 256):
            yield head + chunk * min(256, count - first), 0.0
            head = b""
        yield last, 0.0
        return
    yield head, delay
    for _ in range(count):
        yield chunk, interval
    yield last, 0.0


def _event(size: int) -> bytes:
    before = b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"'
    after = b'"},"finish_reason":null}]}\n\n'
    return before + b"x" * max(1, size - len(before) - len(after)) + after


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def verify(port: Port, settings: Settings) -> Iterator[Piece]:
    chance = Random(int(settings.number("seed", 0)))
    most = math.log(max(1.0, settings.number("max-bytes", len(_NOISE), len(_NOISE))))
    count = int(settings.number("chunks", 30, 10_000))
    parts = []
    for number in range(count):
        size = int(math.exp(chance.uniform(0, most)))
        parts.append((b"%08d" % number)[-size:] + _NOISE[: max(0, size - 8)])
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    by_length = chance.random() < 0.5
    length = sum(map(len, parts)) if by_length else None
    head = port.head(200, "application/octet-stream", length, f"x-bench-sha256: {digest.hexdigest()}\r\n")
    if chance.random() < 0.5:
        yield head, chance.uniform(0, 0.003)
        head = b""
    for part in parts:
        pause = chance.uniform(0, 0.005) if chance.random() < 0.3 else 0.0
        yield head + (part if by_length else _chunk(part)), pause
        head = b""
    yield head + (b"" if by_length else b"0\r\n\r\n"), 0.0
