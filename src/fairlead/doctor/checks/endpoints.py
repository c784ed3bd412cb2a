"""`endpoints`: whether a model server answers at every address, and says that it is well."""

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.http import Unreached
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.model.endpoint import Endpoint

_DOCS = "docs/troubleshooting.md#requests-fail"

UNREACHABLE = Kind(
    "endpoints.unreachable", Severity.CRITICAL, "nothing answers at the address of an endpoint",
    "correct address and port under endpoints:, or start the model server; behind a firewall, open the port", _DOCS,
)  # fmt: skip
NAMELESS = Kind(
    "endpoints.no-address", Severity.CRITICAL, "the name of an endpoint has no address",
    "correct the host name under endpoints:, or the name service of this machine", _DOCS,
)  # fmt: skip
TLS = Kind(
    "endpoints.tls", Severity.CRITICAL, "an endpoint speaks TLS, and gateways send it plain HTTP",
    "let the model server listen without TLS inside of the cluster, or put the port that does under endpoints:", _DOCS,
)  # fmt: skip
STRANGER = Kind(
    "endpoints.no-model-server", Severity.CRITICAL, "something answers at the address, and it is no model server",
    "correct the port under endpoints: is it that of the metrics, of KV events, of another service?", _DOCS,
)  # fmt: skip
SICK = Kind(
    "endpoints.sick", Severity.CRITICAL, "a model server says that it is not well",
    "look at its log and restart it; requests that are sent there fail", _DOCS,
)  # fmt: skip


async def _one(site: Site, endpoint: Endpoint) -> list[Finding]:
    try:
        health = await site.ask(endpoint, "/health")
    except Unreached as error:
        kind = {"tls": TLS, "not-http": STRANGER}.get(error.trouble, UNREACHABLE)
        return [kind.at(endpoint.id, f"{endpoint.address}: {error}")]
    if health.status >= 500:
        return [SICK.at(endpoint.id, f"GET http://{endpoint.address}/health: {health.status}")]
    if await site.served(endpoint) or site.engine(endpoint).startswith("triton"):
        return []
    # Not every engine lists its models; one that has neither them nor load gauges is none.
    reading = await site.reading(endpoint)
    if health.status == 200 and reading is not None and not reading.empty:
        return []
    return [STRANGER.at(endpoint.id, f"http://{endpoint.address} has no list of models at /v1/models")]


async def _run(site: Site) -> list[Finding]:
    nameless = [NAMELESS.at(name, reason) for name, reason in site.nameless.items()]
    return nameless + await site.each(lambda endpoint: _one(site, endpoint))


CHECK = Check(
    name="endpoints",
    about="a model server answers at every endpoint and is well",
    kinds=(UNREACHABLE, NAMELESS, TLS, STRANGER, SICK),
    run=_run,
    budget=60.0,
)
