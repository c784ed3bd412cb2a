"""What checks need, and what to do where it is not there."""

from typing import Literal

Need = Literal["endpoints", "admin", "gateway", "any-gateway", "probe", "events", "tokens", "embedded"]
NEEDS: dict[Need, str] = {
    "endpoints": "no endpoints are known: the configuration has none, and no running scheduler was found to tell them",
    "admin": "no running scheduler was found at the admin port; start it, or say where with --admin",
    "gateway": "no --gateway URL was given",
    "any-gateway": "neither --gateway nor --gateway-admin was given",
    "probe": "it sends small requests to model servers: allow that with --probe",
    "events": "kvEvents is off, or its events are heard by another process",
    "tokens": "no tokeniser is configured under tokens.models",
    "embedded": "the gateway is somebody else's",
}
