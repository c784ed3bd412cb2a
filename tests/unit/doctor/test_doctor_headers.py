"""What a check reads in Envoy's configuration."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fairlead.compat.load import load
from fairlead.core.headers import CONTROL_HEADERS
from fairlead.doctor.checks.gateway import headers
from fairlead.doctor.site import CannotExamine, Site
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options

Start = Callable[..., Awaitable[int]]
NAMES = sorted(CONTROL_HEADERS)


async def kept(server: Start, document: Any) -> str:
    """What is said of headers that a gateway with this configuration lets through; empty = it lets none through."""
    body = json.dumps(document).encode()
    port = await server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
    config = load("endpoints: ['127.0.0.1:1']\nadmin: {port: 0}\ngateway: none\n")
    async with Site(config, gateway_admin=f"http://127.0.0.1:{port}") as site:
        return "".join(finding.evidence for finding in await headers.run(site))


def mutations(names: list[str]) -> list[dict[str, str]]:
    return [{"remove": name} for name in names]


PLACES: dict[str, Callable[[list[str]], Any]] = {
    "filter": lambda names: {"mutations": {"request_mutations": mutations([name.title() for name in names])}},
    "route": lambda names: {"routes": [{"request_headers_to_remove": names}]},
    "entry": lambda names: {"early_header_mutation_extensions": [{"typed_config": {"mutations": mutations(names)}}]},
}


@pytest.mark.parametrize("place", PLACES)
async def test_headers_that_are_taken_off_are_found(server: Start, place: str) -> None:
    assert await kept(server, PLACES[place](NAMES)) == ""
    assert await kept(server, PLACES[place](NAMES[1:])) == f"Envoy's configuration does not remove {NAMES[0]}"


@pytest.mark.parametrize(
    "elsewhere",
    [
        mutations(NAMES),
        {"mutations": {"response_mutations": mutations(NAMES)}},
        [None, 1, "remove", {"request_mutations": 1}, {"request_headers_to_remove": NAMES[0]}],
    ],
    ids=["nowhere", "responses", "nonsense"],
)
async def test_what_takes_nothing_off_requests_does_not_count(server: Start, elsewhere: Any) -> None:
    assert await kept(server, elsewhere) == f"Envoy's configuration does not remove {', '.join(NAMES[:4])}"


async def test_our_own_configuration_takes_off_all(server: Start) -> None:
    assert await kept(server, build(Options())) == ""


@pytest.mark.parametrize(
    "answer", [b"200 OK\r\ncontent-length: 9\r\n\r\nfairlead\n", b"404 Not Found\r\ncontent-length: 2\r\n\r\n{}"]
)
async def test_a_page_that_is_not_of_an_envoy(server: Start, answer: bytes) -> None:
    port = await server(b"HTTP/1.1 " + answer)
    config = load("endpoints: ['127.0.0.1:1']\nadmin: {port: 0}\ngateway: none\n")
    with pytest.raises(CannotExamine, match="something else answers there; --gateway-admin is the URL"):
        async with Site(config, gateway_admin=f"http://127.0.0.1:{port}"):
            pass


def test_the_check_needs_a_gateway() -> None:
    assert headers.needs == ("any-gateway",)
