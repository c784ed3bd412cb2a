"""Envoy configurations for every pair of body modes that the scheduler supports.

The pairs of the embedded gateway are its own configuration, unchanged. The others are what gateways of other people
look like (the Gateway API Inference Extension's chart): one route, the destination in a header, no fallback, no
stripping of control headers, and trailers shown where a direction is full duplex, as Envoy demands.
"""

from typing import Any, NamedTuple

from msgspec import structs

from fairlead.config.schema import Config
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.ext_proc import DESTINATION
from fairlead.server.embedded import gateway_options

Json = dict[str, Any]

FULL_DUPLEX = "FULL_DUPLEX_STREAMED"


class Pair(NamedTuple):
    """Body modes of request and response: in lower case those of `Options`, in upper case Envoy's."""

    request: str
    response: str
    #: The gateway sends its access log and says so.
    log: bool = True

    @property
    def name(self) -> str:
        return f"{self.request}/{self.response}{'' if self.log else ' without access log'}".replace(
            FULL_DUPLEX, "FULL_DUPLEX"
        )

    @property
    def own(self) -> bool:
        """A configuration of the embedded gateway."""
        return self.request.islower()

    @property
    def fails_open(self) -> bool:
        """Requests that the scheduler waves through reach the pool."""
        return self.own or self.request == "BUFFERED_PARTIAL"


#: Every way to hand over a request, with every way to leave: at the pick, at the response headers, after the first
#: chunk, and (where nobody else would tell the end) never. BUFFERED is `buffered`.
PAIRS = (
    Pair("whole", "none"),
    Pair("whole", "headers", log=False),
    Pair("whole", "first-chunk"),
    Pair("whole", "first-chunk", log=False),
    Pair("buffered", "none"),
    Pair("buffered", "headers", log=False),
    Pair("buffered", "first-chunk"),
    Pair("buffered", "full", log=False),
    Pair("BUFFERED_PARTIAL", "NONE"),
    Pair("BUFFERED_PARTIAL", "NONE", log=False),
    Pair("BUFFERED_PARTIAL", "STREAMED"),
    Pair("BUFFERED_PARTIAL", "STREAMED", log=False),
    Pair(FULL_DUPLEX, "NONE"),
    Pair(FULL_DUPLEX, "NONE", log=False),
    Pair(FULL_DUPLEX, "STREAMED"),
    Pair(FULL_DUPLEX, FULL_DUPLEX),
    Pair(FULL_DUPLEX, FULL_DUPLEX, log=False),
    Pair("STREAMED", "NONE"),
    Pair("STREAMED", "NONE", log=False),
    Pair("STREAMED", "STREAMED"),
    Pair("STREAMED", "STREAMED", log=False),
    Pair("NONE", "NONE"),
    Pair("NONE", "NONE", log=False),
    Pair("NONE", "STREAMED"),
    Pair("NONE", "STREAMED", log=False),
)

#: Full duplex for one direction only, and doubles of the above: for soaks.
MORE_PAIRS = (
    Pair("whole", "headers"),
    Pair("buffered", "headers"),
    Pair("whole", "full"),
    Pair("whole", "full", log=False),
    Pair("buffered", "full"),
    Pair(FULL_DUPLEX, "STREAMED", log=False),
    Pair("STREAMED", FULL_DUPLEX),
    Pair("STREAMED", FULL_DUPLEX, log=False),
    Pair("NONE", FULL_DUPLEX),
    Pair("NONE", FULL_DUPLEX, log=False),
)


def bootstrap(pair: Pair, port: int, ext_proc: str, endpoints: list[str], **options: Any) -> Json:
    """Envoy's bootstrap for a pair. `options`: further fields of `Options`."""
    chosen = {"port": port, "ext_proc": ext_proc, "als": ext_proc if pair.log else "", "endpoints": tuple(endpoints)}
    chosen["paths"] = ("/*",)  # the mirror has paths of its own
    if pair.own:
        modes = {"request_mode": pair.request, "response_mode": pair.response}
        return build(Options(**chosen, **modes, **options))
    found = build(Options(**chosen, request_mode="buffered", response_mode="full", **options))
    config = ext_proc_filter(found)
    config["processing_mode"] = {
        "request_header_mode": "SEND",
        "request_body_mode": pair.request,
        "request_trailer_mode": "SEND" if pair.request == FULL_DUPLEX else "SKIP",
        "response_header_mode": "SEND",
        "response_body_mode": pair.response,
        "response_trailer_mode": "SEND" if pair.response == FULL_DUPLEX else "SKIP",
    }
    config["grpc_service"]["initial_metadata"] = [
        entry for entry in config["grpc_service"].get("initial_metadata", []) if "whole" not in entry["key"]
    ]
    if not pair.fails_open:
        foreign(found)
    # Else BUFFERED_PARTIAL could not tell a partial body: the buffer would be as large as the embedded gateway's.
    virtual_host(found).pop("request_body_buffer_limit", None)
    return found


def embedded(config: Config, port: int, endpoints: list[str]) -> Json:
    """What `fairlead serve` gives its Envoy, but for the port, and for files that Envoy follows."""
    own = structs.replace(gateway_options(config), port=port, paths=("/*",), upstream_token_file="")
    return build(structs.replace(own, endpoints=tuple(endpoints)))


def foreign(bootstrap: Json) -> Json:
    """Make it a gateway of somebody else, which knows nothing of us but the protocol. Returns it."""
    manager = connection_manager(bootstrap)
    manager.pop("early_header_mutation_extensions")
    for entry in manager["http_filters"]:
        entry.pop("disabled", None)
    config = ext_proc_filter(bootstrap)
    config.pop("forward_rules", None)
    config["failure_mode_allow"] = False
    config["message_timeout"] = config["max_message_timeout"] = "1000s"
    route = {"cluster": "dst", "timeout": "86400s", "idle_timeout": "86400s"}
    virtual_host(bootstrap)["routes"] = [{"match": {"prefix": "/"}, "route": route}]
    cluster(bootstrap, "dst")["original_dst_lb_config"] = {"use_http_header": True, "http_header_name": DESTINATION}
    return bootstrap


def connection_manager(bootstrap: Json) -> Json:
    """Of the listener that clients connect to."""
    return connection_managers(bootstrap)[0]


def connection_managers(bootstrap: Json) -> list[Json]:
    """That, and the one for large uploads if there is one."""
    listeners = bootstrap["static_resources"]["listeners"]
    return [listener["filter_chains"][0]["filters"][0]["typed_config"] for listener in listeners]


def ext_proc_filter(bootstrap: Json) -> Json:
    filters = connection_manager(bootstrap)["http_filters"]
    return next(entry["typed_config"] for entry in filters if entry["name"].endswith("ext_proc"))


def virtual_host(bootstrap: Json) -> Json:
    found: Json = connection_manager(bootstrap)["route_config"]["virtual_hosts"][0]
    return found


def cluster(bootstrap: Json, name: str) -> Json:
    return next(entry for entry in bootstrap["static_resources"]["clusters"] if entry["name"] == name)
