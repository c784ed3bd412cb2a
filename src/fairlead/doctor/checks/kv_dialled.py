"""`kv-dialled`: with `kvEvents.bind`, whether publishers dial in under names of the pool.

A running scheduler has the port, and tells what it refused. Without one we listen there ourselves for a moment.
"""

import asyncio
import contextlib

import zmq

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.kv_listening import own_keys
from fairlead.doctor.requests import COMPLETIONS, completion
from fairlead.doctor.run import Check, Skipped
from fairlead.doctor.site import Site
from fairlead.io.kv_events.settings import Limits
from fairlead.io.kv_events.sockets import Context, Socket, receive, subscriber
from fairlead.model.endpoint import Endpoint
from fairlead.wire.kv_events_frames import live, topic_of

_DOCS = "docs/kv-events.md#who-is-believed"

TOPIC = Kind(
    "kv-dialled.topic", Severity.ERROR, "a publisher's topic names no endpoint of the pool: its events are refused",
    "set the topic in --kv-events-config to kv@<address:port or name of the endpoint>@<model>", _DOCS,
)  # fmt: skip
NOBODY = Kind(
    "kv-dialled.nobody", Severity.ERROR, "no events of an endpoint have come in",
    "let its --kv-events-config dial kvEvents.bind of this machine; engines say nothing until they have work", _DOCS,
)  # fmt: skip
TAKEN = Kind(
    "kv-dialled.port", Severity.CRITICAL, "the address of kvEvents.bind cannot be listened on",
    "end what listens there, or choose another port", _DOCS,
)  # fmt: skip

#: Seconds in which publishers dial again, and in which they tell of a request.
_DIALLING, _TELLING, _POLL = 1.5, 1.5, 0.02


async def _by_scheduler(site: Site) -> list[Finding]:
    heard = {labels.get("endpoint", "") for labels, _ in await site.metric("fairlead_kv_feed_connected")}
    silent = [endpoint.id for endpoint in site.endpoints if endpoint.id not in heard]
    refused = sum(count for _, count in await site.metric("fairlead_kv_rejected_batches_total"))
    if refused and silent:
        return [
            TOPIC.at(name, f"the scheduler has refused {refused:g} batches of unknown publishers") for name in silent
        ]
    if site.probe:
        return [NOBODY.at(name, "the scheduler has no feed of it") for name in silent]
    return []


async def _probe(site: Site) -> None:
    """Something for the engines to tell of."""
    if not site.probe:
        return
    await site.each(lambda endpoint: _asked(site, endpoint))


async def _asked(site: Site, endpoint: Endpoint) -> list[Finding]:
    body = completion(await site.model(endpoint), 4 * 64)
    with contextlib.suppress(Unreached):
        await site.client.post(f"http://{endpoint.address}{COMPLETIONS}", body)
    return []


async def _by_ourselves(site: Site) -> list[Finding]:
    bind, curve = site.config.kv_events.bind, await asyncio.to_thread(own_keys, site)
    context: Context = zmq.Context(1)
    try:
        socket = subscriber(context, Limits(), curve)
        try:
            socket.bind(bind)
        except zmq.ZMQError as error:
            return [TAKEN.at("", f"{bind}: {error}")]
        topics = await _heard(socket, _DIALLING)
        await _probe(site)
        topics |= await _heard(socket, _TELLING)
    finally:
        context.destroy(linger=0)
    return _judged(site, sorted(topics))


async def _heard(socket: Socket, seconds: float) -> set[bytes]:
    """Topics of what comes. A publisher that dials gets our subscription only while the socket is being read."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    topics: set[bytes] = set()
    while loop.time() < end:
        frames = receive(socket)
        if frames is None:
            await asyncio.sleep(_POLL)
            continue
        with contextlib.suppress(ValueError):
            topics.add(live(frames).topic)
    return topics


def _judged(site: Site, topics: list[bytes]) -> list[Finding]:
    names = {
        endpoint.id: {endpoint.id, endpoint.id.rpartition("/")[2], endpoint.address} for endpoint in site.endpoints
    }
    pods = {topic: topic_of(topic).pod for topic in topics}
    strange = [topic for topic, pod in pods.items() if not any(pod in known for known in names.values())]
    if strange:
        evidence = f"heard: {strange[0].decode('utf-8', 'replace') or 'an empty topic'}"
        return [TOPIC.at("", evidence)]
    silent = [name for name, known in names.items() if not known & {*pods.values()}]
    return [NOBODY.at(name, "nothing was heard after a request to it") for name in silent] if site.probe else []


async def _run(site: Site) -> list[Finding]:
    if not site.config.kv_events.bind:
        raise Skipped("kvEvents.bind is not set: publishers are connected to, see kv-events")
    if site.has("admin"):
        await _probe(site)
        await asyncio.sleep(_TELLING if site.probe else 0.0)
        return await _by_scheduler(site)
    return await _by_ourselves(site)


CHECK = Check(
    name="kv-dialled",
    about="publishers that dial in are of the pool",
    kinds=(TAKEN, TOPIC, NOBODY),
    run=_run,
    needs=("endpoints", "events"),
)
