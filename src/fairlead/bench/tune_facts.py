"""What a model server says of itself: name, context length, KV cache, prefix hits. Asked once, all optional."""

from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from fairlead.wire.engine_metrics import ENGINES, compile_engine
from fairlead.wire.promtext import read_page

_MOST_BYTES = 8 << 20


class Facts(Struct, kw_only=True, frozen=True):
    """0 or empty = it does not say."""

    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    num_blocks: int = 0
    #: Of all prompt tokens since its start, the share found in its cache; below 0 = nothing was asked yet.
    hit_rate: float = -1.0

    @property
    def kv_tokens(self) -> int:
        return self.block_size * self.num_blocks


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


def ask_facts(target: str, headers: dict[str, str], model: str = "", timeout_s: float = 10.0) -> Facts:
    """Of `http://host:port`. A page that does not come or cannot be read leaves its part unknown."""
    facts = Facts(model=model)
    try:
        listed = msgspec.json.decode(_get(target, "/v1/models", headers, timeout_s), type=_Models).data
    except (OSError, HTTPException, msgspec.DecodeError):
        listed = []
    for entry in listed:
        if not model or entry.id == model:
            facts = msgspec.structs.replace(facts, model=entry.id, max_model_len=max(entry.max_model_len or 0, 0))
            break
    try:
        page = _get(target, "/metrics", headers, timeout_s)
    except (OSError, HTTPException):
        return facts
    for engine in ENGINES.values():
        sample = read_page(page, compile_engine(engine)).sample
        if sample.num_blocks:
            asked, hits = sample.prefix_queries or 0.0, sample.prefix_hits or 0.0
            return msgspec.structs.replace(
                facts,
                block_size=sample.block_size,
                num_blocks=sample.num_blocks,
                hit_rate=hits / asked if asked > 0 else -1.0,
            )
    return facts


def _get(target: str, path: str, headers: dict[str, str], timeout_s: float) -> bytes:
    parts = urlsplit(target)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
        return body if 200 <= answer.status < 300 else b""
    finally:
        connection.close()
