"""The section `kvEvents`: what engines tell of their KV caches, and how it is heard."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, structs

from fairlead.config.problems import Report
from fairlead.config.section import Section
from fairlead.config.units import PositiveSeconds
from fairlead.fleet.kv.engine_hash import ALGORITHMS

KEY = "kvEvents"
_Port = Annotated[int, Meta(ge=0, le=65535)]


class KvCurve(Section, frozen=True, kw_only=True):
    """CurveZMQ. Keys are Z85 text of 40 characters."""

    #: Files with our own keys.
    public_key_file: str
    secret_key_file: str
    #: The publishers' public key, where we connect to them.
    server_key: str = ""
    #: Public keys of publishers that may dial in, one a line.
    clients_file: str = ""


class KvIndexer(Section, frozen=True, kw_only=True):
    """An index that another process keeps (`fairlead indexer`)."""

    #: Ask it instead of listening here, e.g. `http://kv-cache-indexer:9090`; empty = the index is in this process.
    url: str = ""
    #: How long a request waits for its answer; then learned prefixes count.
    budget: PositiveSeconds = 0.005
    #: Begin with the index of another one, e.g. `http://other:9090`; empty = with that of `snapshot`, if any.
    warm_from: str = ""


class KvEvents(Section, frozen=True, kw_only=True):
    """Off unless `enabled`: prefixes are then known from own decisions only."""

    enabled: bool = False
    #: Of rank 0 at every endpoint; 0 = each engine is asked (`GET /kv_event_sources`). Rank n has ports n higher.
    port: _Port = 0
    #: Beside `port`: where missed events can be fetched; 0 = nowhere.
    replay_port: _Port = 0
    ranks: Annotated[int, Meta(ge=1, le=256)] = 1
    #: Let publishers dial in here instead, e.g. `tcp://0.0.0.0:5555`. Those of the pool's endpoints are believed.
    bind: str = ""
    curve: KvCurve | None = None
    #: File that keeps the index over restarts; empty = none.
    snapshot: str = ""
    snapshot_interval: PositiveSeconds = 60.0
    #: Copies of blocks that are remembered, at about 50 bytes each.
    max_blocks: Annotated[int, Meta(ge=10_000, le=200_000_000)] = 4_000_000
    #: `own`: by token ids, nothing need be known of the engine's hashes. `engine`: by the engine's own.
    keys: Literal["own", "engine"] = "own"
    #: Of the engine, with `keys: engine`: its hash algorithm and PYTHONHASHSEED (`null` = not set).
    hash_algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256"
    hash_seed: str | None = None
    #: Tokens per block; 0 = as the events say.
    block_size: Annotated[int, Meta(ge=0, le=4096)] = 0
    #: Share of answers whose cached tokens are compared with the prediction, once an endpoint has proved itself.
    check: Annotated[float, Meta(ge=0, le=1)] = 0.05
    indexer: KvIndexer = KvIndexer()


assert set(ALGORITHMS) == {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}


def check_kv_events(section: KvEvents, report: Report) -> None:
    """What must fit together."""
    if section.replay_port and not section.port:
        report.add((KEY, "replayPort"), "the engines tell their replay ports themselves", "set port: too, or leave it")
    if section.bind and section.port:
        report.add((KEY, "bind"), "publishers dial in, or we connect to their port", "leave one of them out")
    if section.keys == "engine" and section.hash_seed is None and section.hash_algorithm.startswith("xxhash"):
        hint = "set PYTHONHASHSEED on the servers and hashSeed here"
        report.add((KEY, "hashAlgorithm"), "without a seed these hashes are random", hint)
    _check_indexer(section, report)
    if section.curve is not None and not section.bind and not section.curve.server_key:
        report.add((KEY, "curve"), "to connect, the publishers' public key is needed", "set serverKey")


def _check_indexer(section: KvEvents, report: Report) -> None:
    indexer = section.indexer
    for field, url in (("url", indexer.url), ("warmFrom", indexer.warm_from)):
        if url and not is_url(url):
            report.add((KEY, "indexer", field), "expected http://host:port", "e.g. http://kv-cache-indexer:9090")
    if not indexer.url:
        return
    if not section.enabled:
        report.add((KEY, "indexer", "url"), "nobody asks it", "set enabled: true")
    here = {"port": section.port, "bind": section.bind, "snapshot": section.snapshot, "curve": section.curve}
    for field, value in (here | {"warmFrom": indexer.warm_from}).items():
        if value:
            place = (KEY, "indexer", field) if field == "warmFrom" else (KEY, field)
            report.add(place, "the indexer listens to events, this process does not", "leave out this or indexer.url")


def is_url(text: str) -> bool:
    """Of HTTP, with a host and nothing after the port that a page's name could not follow."""
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0 and not found.query
    except ValueError:
        return False


def asked_elsewhere(section: KvEvents, urls: Sequence[str], report: Report) -> KvEvents:
    """`urls`: the `cacheIndexerURL`s of plugins. They stand for `indexer.url`, unless this process listens itself."""
    urls = [url for url in urls if url]
    if not urls:
        return section
    if section.enabled:
        text = "cacheIndexerURL is not asked: kvEvents says where prefix knowledge comes from"
        if urls[0] != section.indexer.url:
            report.note((KEY,), text)
        return section
    if len(set(urls)) > 1 or not is_url(urls[0]):
        report.add((KEY, "indexer", "url"), f"cacheIndexerURL: expected one http://host:port, got {urls[0]!r}")
        return section
    return structs.replace(section, enabled=True, indexer=structs.replace(section.indexer, url=urls[0]))


def located(section: KvEvents, base: Path | None) -> KvEvents:
    """With paths as seen from the configuration's directory."""
    if base is None:
        return section
    if section.snapshot:
        section = structs.replace(section, snapshot=str(base / section.snapshot))
    curve = section.curve
    if curve is not None:
        paths = {"public_key_file": curve.public_key_file, "secret_key_file": curve.secret_key_file}
        if curve.clients_file:
            paths["clients_file"] = curve.clients_file
        curve = structs.replace(curve, **{field: str(base / path) for field, path in paths.items()})
    return structs.replace(section, curve=curve)
