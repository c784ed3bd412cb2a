"""A first look at model servers, from which `fairlead init` writes a configuration."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from fairlead.apis.engine_metrics import TRTLLM_PATH
from fairlead.compat.load import load
from fairlead.core.endpoint import Endpoint, Sample
from fairlead.core.errors import ADMIN_PORT
from fairlead.core.text import plain
from fairlead.doctor.http import Answer, Unreached
from fairlead.doctor.site import Site, tried
from fairlead.pool.kv_events.discovery import ask


class Server(Struct, frozen=True, kw_only=True):
    """What one model server reports about itself."""

    #: `host:port`, as given by the user.
    address: str
    #: Why no request can be sent to it; empty = it answers.
    problem: str = ""
    #: A name in `engine_metrics.ENGINES`; empty = the metrics page matches none of them.
    engine: str = ""
    #: The URL of the metrics page, if its path is not `/metrics`; otherwise empty.
    metrics_url: str = ""
    version: str = ""
    #: The names of the models, without characters that have a meaning in a file or a terminal.
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    #: By model, if it is known: how many tokens prompt and answer may have together.
    contexts: Mapping[str, int] = {}
    sample: Sample = Sample()
    #: The address where the server publishes KV events; empty = it reports none.
    kv_events: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.address}: {self.problem}"
        sample = self.sample
        said = [
            f"{self.engine or 'unknown engine'} {self.version}".strip(),
            ", ".join(self.models) or "no list of models",
            f"{sample.num_blocks:,} KV blocks of {sample.block_size} tokens" if sample.num_blocks else "",
            f"adapters {', '.join(self.adapters)}" if self.adapters else "",
            f"{sample.max_adapters} adapter slots" if sample.max_adapters else "",
            f"KV events at {self.kv_events}" if self.kv_events else "no KV events",
        ]
        return f"{self.address}: {'; '.join(filter(None, said))}"


async def survey(addresses: list[str]) -> list[Server]:
    """The servers, in order of the addresses. Raises `ConfigError` for an invalid address."""
    async with Site(load("{endpoints: [" + ", ".join(f'"{address}"' for address in addresses) + "]}")) as site:
        known = {endpoint.id: endpoint for endpoint in site.endpoints}
        looks = (_look(site, known[address]) for address in addresses if address in known)
        servers = {server.address: server for server in await asyncio.gather(*looks)}
        return [
            servers.get(address) or Server(address=address, problem=site.nameless.get(address, "no such host"))
            for address in addresses
        ]


def differences(servers: list[Server]) -> list[str]:
    """In which respects the servers differ, and what that means for requests. One sentence each."""
    said = []
    listed = {frozenset(server.models) for server in servers if server.models}
    silent = [server.address for server in servers if not server.models]
    if len(listed) > 1:
        said.append("the servers do not serve the same models; each request goes to those that have its model")
    if listed and silent:
        said.append(f"no list of models at {', '.join(silent)}: requests for any model go there")
    lengths = {pair for server in servers for pair in server.contexts.items()}
    counts = Counter(model for model, _ in lengths)
    differing = sorted({context for model, context in lengths if counts[model] > 1})
    if differing:
        contexts = ", ".join(map(str, differing))
        said.append(f"max_model_len differs ({contexts}); each request goes to those that take its length")
    return said


async def _look(site: Site, endpoint: Endpoint) -> Server:
    version, page, served, source = await asyncio.gather(
        tried(site.ask(endpoint, "/version")),
        tried(site.ask(endpoint, "/metrics")),
        site.served(endpoint),
        ask(site.client.session, endpoint.address, "", None),
    )
    if isinstance(page, Unreached) and isinstance(version, Unreached):
        return Server(address=endpoint.id, problem=f"does not answer ({page})")
    if isinstance(version, Answer) and version.body.startswith(ADMIN_PORT.encode()):
        return Server(address=endpoint.id, problem=f"{ADMIN_PORT}, not a model server")
    engine, sample = site.fitting(page)
    metrics_url = ""
    if not engine:
        engine, sample = site.fitting(await tried(site.ask(endpoint, TRTLLM_PATH)))
        metrics_url = f"http://{endpoint.id}{TRTLLM_PATH}" if engine else ""
    if not (engine or served or _version(version)):
        listing = await tried(site.ask(endpoint, "/v1/models"))
        if isinstance(listing, Unreached) or listing.status not in (401, 403):
            said = listing if isinstance(listing, Unreached) else listing.status
            problem = f"no model server: no version, no known metrics page, no list of models (/v1/models: {said})"
            return Server(address=endpoint.id, problem=problem)
    return Server(
        address=endpoint.id,
        engine=engine,
        metrics_url=metrics_url,
        version=_version(version),
        models=tuple(plain(name) for name, adapter in served.items() if not adapter),
        adapters=tuple(plain(name) for name, adapter in served.items() if adapter),
        contexts=await site.contexts(endpoint),
        sample=sample,
        kv_events=source.events if source is not None else "",
    )


def _version(answer: Answer | Unreached) -> str:
    try:
        said = answer.json() if isinstance(answer, Answer) and answer.status == 200 else None
    except ValueError:
        return ""
    text = said.get("version") if isinstance(said, dict) else None
    return text[:40] if isinstance(text, str) and text.isprintable() else ""
