"""`kv-events`: whether every engine's KV events can be heard, and fit what is configured."""

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.kv_listening import KvListening, listening
from fairlead.doctor.run import Check, Skipped
from fairlead.doctor.site import Site
from fairlead.fleet.diagnosis import ALGORITHM as WRONG_ALGORITHM
from fairlead.fleet.diagnosis import BLOCK_SIZE as WRONG_SIZE
from fairlead.fleet.diagnosis import SEED as WRONG_SEED
from fairlead.fleet.diagnosis import Case, diagnose
from fairlead.wire.kv_events_frames import topic_of

_DOCS = "docs/kv-events.md#on-the-engine"
_CHECK = "docs/kv-events.md#the-self-check"

OFF = Kind(
    "kv-events.off", Severity.ERROR, "kvEvents is on, and an engine publishes none",
    "start it with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":"
    "\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'; an engine that does not know /kv_event_sources needs"
    " kvEvents.port", _DOCS,
)  # fmt: skip
UNCONNECTED = Kind(
    "kv-events.unconnected", Severity.ERROR, "the publisher of an endpoint cannot be reached",
    "correct kvEvents.port, open the port, let it listen on all addresses (tcp://*:5557); with curve: serverKey must be"
    " the publisher's public key", _DOCS,
)  # fmt: skip
SIZE = Kind(
    "kv-events.block-size", Severity.ERROR, "kvEvents.blockSize is not the engine's: no block ever matches",
    "leave kvEvents.blockSize out: events tell it", _CHECK,
)  # fmt: skip
SEED = Kind(
    "kv-events.hash-seed", Severity.ERROR, "kvEvents.hashSeed is not the engine's PYTHONHASHSEED: no block matches",
    "set kvEvents.hashSeed to it, or take keys: own, which needs to know nothing of hashes", _CHECK,
)  # fmt: skip
ALGORITHM = Kind(
    "kv-events.hash-algorithm", Severity.ERROR, "kvEvents.hashAlgorithm is not the engine's: no block ever matches",
    "set kvEvents.hashAlgorithm to its --prefix-caching-hash-algo, or take keys: own", _CHECK,
)  # fmt: skip
UNREADABLE = Kind(
    "kv-events.unreadable", Severity.WARNING, "events of an engine cannot be read",
    "report the engine and its version; what can be read is used", "docs/kv-events.md#what-is-read",
)  # fmt: skip
REPLAY = Kind(
    "kv-events.replay", Severity.WARNING, "events that were missed cannot be fetched from an engine",
    "correct kvEvents.replayPort, or open the port of the engine's replay_endpoint",
    "docs/kv-events.md#when-something-is-missing",
)  # fmt: skip
NAMESAKE = Kind(
    "kv-events.topic-of-another", Severity.WARNING, "an engine publishes under the name of another endpoint",
    "correct the topic in its --kv-events-config, or the addresses under endpoints: it looks as if two are exchanged",
    _DOCS,
)  # fmt: skip

_CAUSES = {WRONG_SIZE: SIZE, WRONG_SEED: SEED, WRONG_ALGORITHM: ALGORITHM}


def by_hashes(kv: KvListening, slot: int) -> Finding | None:
    """Whether what the endpoint stored lately was named as configured."""
    found = diagnose(kv.recipe, Case(b"", 0, "", "", 0, 0, -1), kv.heads(slot))
    kind = _CAUSES.get(found.cause)
    return kind.at(kv.endpoints[slot].id, found.detail) if kind is not None else None


async def _size(site: Site, kv: KvListening, slot: int) -> Finding | None:
    """By the metrics page, which also tells it when nothing was stored yet."""
    configured = kv.recipe.block_size
    reading = await site.reading(kv.endpoints[slot])
    told = reading.sample.block_size if reading is not None else 0
    if configured and told and configured != told:
        return SIZE.at(kv.endpoints[slot].id, f"configured are {configured} tokens, its metrics page says {told}")
    return None


def _topic(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    topic, here = kv.sources[slot].topic, kv.endpoints[slot]
    pod = topic_of(topic.encode()).pod if topic else ""
    others = {name for one in site.endpoints if one.id != here.id for name in (one.id, one.address)}
    if pod and pod in others and pod not in (here.id, here.address):
        return [NAMESAKE.at(here.id, f"its topic is {topic}")]
    return []


async def _one(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    name, source = kv.endpoints[slot].id, kv.sources[slot]
    size = await _size(site, kv, slot)
    found = [size] if size is not None else []
    if source.source is None:
        # The check `endpoints` tells of one that is not there.
        return found if source.away else [*found, OFF.at(name, source.reason)]
    if not kv.linked(slot):
        return [*found, UNCONNECTED.at(name, f"no connection to {source.source.events}")]
    wrong = by_hashes(kv, slot)
    if wrong is not None and wrong.code not in {one.code for one in found}:
        found.append(wrong)
    counts = [one.feed.count for one in kv.subscriptions(slot)]
    bad = sum(count.bad_events + count.bad_batches for count in counts)
    if bad:
        found.append(UNREADABLE.at(name, f"{bad} of {bad + kv.told(slot)} events and batches"))
    if source.source.replay and (kv.behind(slot) or any(count.failed_replays for count in counts)):
        found.append(REPLAY.at(name, f"no answer from {source.source.replay}"))
    return [*found, *_topic(site, kv, slot)]


async def _run(site: Site) -> list[Finding]:
    if site.config.kv_events.bind:
        raise Skipped("publishers dial in, and cannot be asked: see kv-dialled")
    kv = await listening(site)
    return [finding for slot in range(len(kv.endpoints)) for finding in await _one(site, kv, slot)]


CHECK = Check(
    name="kv-events",
    about="KV events of every engine can be heard and fit the configuration",
    kinds=(OFF, UNCONNECTED, SIZE, SEED, ALGORITHM, UNREADABLE, REPLAY, NAMESAKE),
    run=_run,
    needs=("endpoints", "events"),
    budget=20.0,
)
