"""Checks of KV events: whether they arrive, from publishers that Fairlead connects to or that connect to Fairlead."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import zmq
from msgspec import Struct

from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ConfigError
from fairlead.core.kv.recipe import ANY_MODEL
from fairlead.core.trust import ALGORITHM as WRONG_ALGORITHM
from fairlead.core.trust import BLOCK_SIZE as WRONG_SIZE
from fairlead.core.trust import SEED as WRONG_SEED
from fairlead.core.trust import Case, diagnose
from fairlead.doctor.http import Answer
from fairlead.doctor.kv_listening import KvListening, listening
from fairlead.doctor.requests import COMPLETIONS, answers_none, completion, filling, shown
from fairlead.doctor.run import Finding, Kind, Severity, Skipped, check
from fairlead.doctor.site import Site, series, tried
from fairlead.pool.kv_events import discovery
from fairlead.pool.kv_events.discovery import Limits, rank_address
from fairlead.pool.kv_events.keys import authenticator, read_keys
from fairlead.pool.kv_events.replay import Context, Socket, receive, subscriber
from fairlead.pool.kv_events.wire import live, topic_of

_ENGINES = "docs/kv-events.md#on-the-engine"
_SELF_CHECK = "docs/kv-events.md#the-self-check"
_BELIEVED = "docs/kv-events.md#who-is-believed"


OFF = Kind(
    "kv-events.off", Severity.ERROR, "kvEvents is on, but an engine publishes none",
    "start it with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":"
    "\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'; an engine that does not know /kv_event_sources needs"
    " kvEvents.port", _ENGINES,
)  # fmt: skip
UNCONNECTED = Kind(
    "kv-events.unconnected", Severity.ERROR, "an endpoint's publisher cannot be reached",
    "correct kvEvents.port, open the port, let it listen on all addresses (tcp://*:5557); with curve: serverKey must be"
    " the publisher's public key", _ENGINES,
)  # fmt: skip
SIZE = Kind(
    "kv-events.block-size", Severity.ERROR, "kvEvents.blockSize is not the engine's: no block ever matches",
    "leave kvEvents.blockSize out: events carry it", _SELF_CHECK,
)  # fmt: skip
SEED = Kind(
    "kv-events.hash-seed", Severity.ERROR, "kvEvents.hashSeed is not the engine's PYTHONHASHSEED: no block matches",
    "set kvEvents.hashSeed to it, or use keys: own, which needs no hashes", _SELF_CHECK,
)  # fmt: skip
ALGORITHM = Kind(
    "kv-events.hash-algorithm", Severity.ERROR, "kvEvents.hashAlgorithm is not the engine's: no block ever matches",
    "set kvEvents.hashAlgorithm to its --prefix-caching-hash-algo, or use keys: own", _SELF_CHECK,
)  # fmt: skip
UNREADABLE = Kind(
    "kv-events.unreadable", Severity.WARNING, "an engine's events cannot be read",
    "report the engine and its version; readable events are used", "docs/kv-events.md#what-is-read",
)  # fmt: skip
REPLAY = Kind(
    "kv-events.replay", Severity.WARNING, "missed events cannot be fetched from an engine",
    "correct kvEvents.replayPort, or open the port of the engine's replay_endpoint",
    "docs/kv-events.md#when-something-is-missing",
)  # fmt: skip
NAMESAKE = Kind(
    "kv-events.topic-of-another", Severity.WARNING, "an engine publishes under another endpoint's name",
    "correct the topic in its --kv-events-config, or the addresses under endpoints: two look swapped",
    _ENGINES,
)  # fmt: skip

UNHEARD = Kind(
    "kv-unheard.published", Severity.WARNING, "an engine publishes KV events, but Fairlead does not listen",
    "set kvEvents.enabled: true, and tokens.models for its model. Then decisions know what is cached, also by other "
    "clients. Or remove --kv-events-config from the engine", "docs/kv-events.md",
)  # fmt: skip

NO_TOKENS = Kind(
    "kv-tokens.missing", Severity.WARNING, "kvEvents is on, but no prompt gets token ids to look up",
    "set tokens.models: modelPath, a directory that the engine loads, or render: engine", "docs/tokens.md",
)  # fmt: skip

_CAUSES = {WRONG_SIZE: SIZE, WRONG_SEED: SEED, WRONG_ALGORITHM: ALGORITHM}


def _by_hashes(kv: KvListening, slot: int) -> list[Finding]:
    """A finding if the hashes of recently stored blocks do not match the configured algorithm, seed or block size."""
    diagnosis = diagnose(kv.recipe, Case(b"", 0, "", "", 0, 0, -1), kv.heads(slot))
    kind = _CAUSES.get(diagnosis.cause)
    return [kind.at(kv.endpoints[slot].id, diagnosis.detail)] if kind is not None else []


async def _size(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    """A finding if the block size on the metrics page, known before any block is stored, is not the configured one."""
    configured, reading = kv.recipe.block_size, await site.reading(kv.endpoints[slot])
    reported = reading.sample.block_size if reading is not None else 0
    if not (configured and reported) or configured == reported:
        return []
    return [SIZE.at(kv.endpoints[slot].id, f"kvEvents.blockSize is {configured}, its metrics page says {reported}")]


def _topic(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    topic, here = kv.sources[slot].topic, kv.endpoints[slot]
    pod = topic_of(topic.encode()).pod if topic else ""
    other_names = {
        name for endpoint in site.endpoints if endpoint.id != here.id for name in (endpoint.id, endpoint.address)
    }
    if pod and pod in other_names and pod not in (here.id, here.address):
        return [NAMESAKE.at(here.id, f"its topic is {topic}")]
    return []


async def _kv_events_of(site: Site, kv: KvListening, slot: int) -> list[Finding]:
    name, source = kv.endpoints[slot].id, kv.sources[slot]
    findings = await _size(site, kv, slot)
    if source.source is None:
        # The check `endpoints` reports an endpoint that does not answer.
        return findings if source.away else [*findings, OFF.at(name, source.reason)]
    if not kv.linked(slot):
        reasons = [f": {subscription.refusal}" for subscription in kv.subscriptions(slot) if subscription.refusal]
        return [*findings, UNCONNECTED.at(name, "".join((f"no connection to {source.source.events}", *reasons[:1])))]
    known = {finding.code for finding in findings}
    findings += [finding for finding in _by_hashes(kv, slot) if finding.code not in known]
    counts = [subscription.feed.count for subscription in kv.subscriptions(slot)]
    bad = sum(count.bad_events + count.bad_batches for count in counts)
    if bad:
        reason = next((f": {count.bad_reason}" for count in counts if count.bad_reason), "")
        findings.append(UNREADABLE.at(name, f"{bad} of {bad + kv.event_count(slot)} events and batches{reason}"))
    if any(count.failed_replays and not count.replayed for count in counts):  # one that brings batches is only long
        findings.append(REPLAY.at(name, f"no answer from {source.source.replay}"))
    return [*findings, *_topic(site, kv, slot)]


@check("kv-unheard", "KV events that engines publish are listened to", needs=("endpoints",))
async def kv_unheard(site: Site) -> list[Finding]:
    if site.config.kv_events.enabled:
        return []

    async def ask(endpoint: Endpoint) -> list[Finding]:
        source = await discovery.ask(site.client.session, endpoint.address, ANY_MODEL, None)
        return [] if source is None else [UNHEARD.at(endpoint.id, f"GET /kv_event_sources: {source.events}")]

    return await site.each(ask)


@check("kv-tokens", "prompts can be looked up in the KV index")
async def kv_tokens(site: Site) -> list[Finding]:
    return [NO_TOKENS.at("tokens.models")] if site.config.kv_events.enabled and not site.has("tokens") else []


@check(
    "kv-events",
    "KV events of every engine arrive and match the configuration",
    needs=("endpoints", "events"),
    budget=20.0,
)
async def kv_events(site: Site) -> list[Finding]:
    if site.config.kv_events.bind:
        raise Skipped("publishers connect to kvEvents.bind: see kv-dialled")
    kv = await listening(site)
    return [finding for slot in range(len(kv.endpoints)) for finding in await _kv_events_of(site, kv, slot)]


# `kv-dialled`: with `kvEvents.bind`, whether the publishers that connect use names of the pool's endpoints as topics.
#
# A running scheduler has the port. Its metrics show which publishers send events and how many batches it refused.
# Without a running scheduler, the check listens on the port itself. Engines publish only changes, so with `--probe`
# each engine gets small requests until its events arrive.


TAKEN = Kind(
    "kv-dialled.port", Severity.CRITICAL, "Fairlead cannot listen at the address of kvEvents.bind",
    "stop what listens there, or choose another port", _BELIEVED,
)  # fmt: skip
TOPIC = Kind(
    "kv-dialled.topic", Severity.ERROR, "a publisher's topic names no endpoint of the pool, so its events are refused",
    "set the topic in --kv-events-config to kv@<address:port or name of the endpoint>@<model>", _BELIEVED,
)  # fmt: skip
NO_EVENTS = Kind(
    "kv-dialled.nobody", Severity.ERROR, "no events of an endpoint have arrived",
    "let the endpoint in its --kv-events-config be kvEvents.bind of this machine; with curve, list its public key in"
    " clientsFile; an idle engine sends nothing",
    _BELIEVED,
)  # fmt: skip

NO_ANSWERS = Kind(
    "kv-dialled.no-answers", Severity.NOTE, "a model server answers no prompts, or none that fills a block",
    "nothing; whether its events arrive could not be checked", _BELIEVED,
)  # fmt: skip
RANKS = Kind(
    "kv-dialled.ranks", Severity.ERROR, "an engine has more data-parallel ranks than kvEvents.bind listens for",
    "set kvEvents.ranks to their number: rank n connects to the port n higher", _ENGINES,
)  # fmt: skip

#: Seconds of each round. A publisher loses the events that it sends before it has reconnected, so the endpoints that
#: are still silent get another request in every round. The rounds grow longer to spare the engines.
ROUNDS = (0.5, 1.0, 2.0, 4.0, 4.0)
#: Seconds to wait for the traffic of clients if the check may not send requests.
_WITHOUT_PROBE = 3.0
_POLL = 0.1


class _Received(Struct, frozen=True):
    """What has arrived so far: the endpoints without events, the number of batches from unknown publishers, and the
    last topic of those."""

    silent: list[Endpoint]
    strange: int = 0
    topic: str = ""


_Look = Callable[[], Awaitable[_Received]]


class _Listened(Struct, frozen=True):
    """What had arrived when the check ended, after `seconds`, and after `requests` to each silent endpoint.
    `unable`: by endpoint, why it cannot be asked. `errors`: by endpoint, its last error."""

    received: _Received
    seconds: float
    requests: int
    unable: dict[str, str]
    errors: dict[str, str]

    def without_events(self) -> list[Finding]:
        asked = "one request" if self.requests == 1 else f"{self.requests} requests"
        evidence = f"nothing was heard in {self.seconds:.1f} s, after {asked} to it"
        silent = [endpoint.id for endpoint in self.received.silent] if self.requests else []
        return [
            NO_ANSWERS.at(name, self.unable[name])
            if name in self.unable
            else NO_EVENTS.at(name, evidence + (f"; {self.errors[name]}" if name in self.errors else ""))
            for name in silent
        ]


async def _listened(site: Site, look: _Look, seconds: Sequence[float]) -> _Listened:
    """Wait until all endpoints have sent events, or a round brings as many unknown batches as endpoints are silent."""
    now = asyncio.get_running_loop().time
    started, requests, received = now(), 0, await look()
    unable: dict[str, str] = {}
    errors: dict[str, str] = {}
    for length in seconds:
        before, end = received.strange, now() + length
        async with asyncio.TaskGroup() as group:
            if site.probe:
                requests += 1
                for endpoint in received.silent:
                    if endpoint.id not in unable:
                        group.create_task(_asked(site, endpoint, unable, errors))
            while now() < end and received.strange - before < len(received.silent):
                await asyncio.sleep(_POLL)
                received = await look()
        if received.strange - before >= len(received.silent):
            break
    return _Listened(received, now() - started, requests, unable, errors)


async def _asked(site: Site, endpoint: Endpoint, unable: dict[str, str], errors: dict[str, str]) -> None:
    """Send the engine a request, so that it has something to report. Notes in `unable` why it cannot be asked, and in
    `errors` what else it answers."""
    filled = await filling(site, endpoint)
    if filled.why_not:
        unable[endpoint.id] = filled.why_not
        return
    body = completion(await site.model(endpoint), filled.tokens)
    answer = await tried(
        site.client.post(f"http://{endpoint.address}{COMPLETIONS}", body, await site.upstream_headers())
    )
    if isinstance(answer, Answer) and answer.status == 200:
        errors.pop(endpoint.id, None)
        return
    error = shown(answer) if isinstance(answer, Answer) else str(answer)
    noted = unable if await answers_none(site, endpoint, error) else errors
    noted[endpoint.id] = f"{COMPLETIONS}: {error}"


async def _by_scheduler(site: Site) -> list[Finding]:
    async def look() -> _Received:
        page = await site.metrics_now()
        known = {labels.get("endpoint", "") for labels, _ in series(page, "fairlead_kv_feed_connected")}
        refused = sum(count for _, count in series(page, "fairlead_kv_rejected_batches_total"))
        return _Received([endpoint for endpoint in site.endpoints if endpoint.id not in known], int(refused))

    listened = await _listened(site, look, ROUNDS if site.probe else ())
    received = listened.received
    if received.strange:
        evidence = f"the scheduler has refused {received.strange} batches of unknown publishers"
        return [TOPIC.at(endpoint.id, evidence) for endpoint in received.silent]
    return listened.without_events()


async def _by_ourselves(site: Site) -> list[Finding]:
    bind = site.config.kv_events.bind
    curve, clients = await asyncio.to_thread(read_keys, site.config.kv_events.curve, True)
    context: Context = zmq.Context(1)
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        if curve is not None:
            stack.callback(authenticator(context, clients).stop)
        socket = subscriber(context, Limits(), curve)
        try:
            for rank in range(_listened_for(site)):
                socket.bind(rank_address(bind, rank))
        except (ConfigError, zmq.ZMQError) as error:
            return [TAKEN.at("", f"{bind}: {error}")]
        listened = await _listened(site, _own_ear(site, socket), ROUNDS if site.probe else (_WITHOUT_PROBE,))
    if listened.received.strange:
        return [TOPIC.at("", f"received: {listened.received.topic or 'an empty topic'}")]
    return listened.without_events()


def _listened_for(site: Site) -> int:
    """The number of ranks for which the scheduler listens."""
    return max(site.config.kv_events.ranks, 1 + max((endpoint.rank for endpoint in site.endpoints), default=0))


async def _unheard_ranks(site: Site, endpoint: Endpoint) -> list[Finding]:
    reading, most = await site.reading(endpoint), _listened_for(site)
    ranks = int(reading.sample.ranks or 1) if reading is not None else 1
    if ranks <= most:
        return []
    return [RANKS.at(endpoint.id, f"its metrics page shows {ranks} ranks, Fairlead listens for {most}")]


def _own_ear(site: Site, socket: Socket) -> _Look:
    received = _Received(list(site.endpoints))

    async def look() -> _Received:
        """Read all waiting batches. A publisher that connects gets the subscription only while the socket is read."""
        nonlocal received
        while (frames := receive(socket)) is not None:
            with contextlib.suppress(ValueError):
                received = _with(received, site, live(frames).topic)
        return received

    return look


def _with(received: _Received, site: Site, topic: bytes) -> _Received:
    pod = topic_of(topic).pod
    known = {endpoint.id for endpoint in site.endpoints if pod in _names(endpoint)}
    if not known:
        return _Received(received.silent, received.strange + 1, topic.decode("utf-8", "replace"))
    silent = [endpoint for endpoint in received.silent if endpoint.id not in known]
    return _Received(silent, received.strange, received.topic)


def _names(endpoint: Endpoint) -> set[str]:
    return {endpoint.id, endpoint.id.rpartition("/")[2], endpoint.address}


@check("kv-dialled", "publishers that connect belong to the pool", needs=("endpoints", "events"), budget=30.0)
async def kv_dialled(site: Site) -> list[Finding]:
    if not site.config.kv_events.bind:
        raise Skipped("kvEvents.bind is not set: publishers are connected to, see kv-events")
    findings = await (_by_scheduler(site) if site.has("admin") else _by_ourselves(site))
    return [*findings, *await site.each(lambda endpoint: _unheard_ranks(site, endpoint))]
