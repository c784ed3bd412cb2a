"""Options of the embedded gateway: what is refused, and where it says the mistake is."""

from typing import Any

import pytest

from fairlead.config.schema import QueueLimits
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.options import Address, Options, Tls, parse_address, parse_endpoint


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9002", Address("127.0.0.1", 9002)),
        ("[fd00::1]:9002", Address("fd00::1", 9002)),
        ("epp.default.svc:1", Address("epp.default.svc", 1)),
        ("unix:/run/epp.sock", Address(path="/run/epp.sock")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "x", "x:", ":1", "x:0", "x:65536", "x:-1", "x:1a", "x:٣", "::1:80", "a b:1", "a/b:1"),
        *("unix:rel", "unix:", "unix:/" + "x" * 107),
    ],
)
def test_what_is_no_address_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, "$.als")
    assert caught.value.path == "$.als"


@pytest.mark.parametrize("text", ["localhost:1", "unix:/x", "vllm-0:8000"])
def test_endpoints_are_literal(text: str) -> None:
    with pytest.raises(ConfigError, match=r"literal ip:port"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"host": "localhost"}, "$.host"),
        ({"port": 65536}, "$.port"),
        ({"admin_port": -1}, "$.admin_port"),
        ({"admin_port": 8080}, "$.admin_port"),
        ({"ext_proc": "nowhere"}, "$.ext_proc"),
        ({"als": "nowhere"}, "$.als"),
        ({"endpoints": ("10.0.0.1:1", "x:1")}, "$.endpoints[1]"),
        ({"body_limit": 0}, "$.body_limit"),
        ({"body_limit": 1 << 32}, "$.body_limit"),
        ({"message_timeout": 0.0}, "$.message_timeout"),
        ({"queue_timeout": float("nan")}, "$.queue_timeout"),
        ({"queue_timeout": 0.5}, "$.queue_timeout"),
        ({"max_streams": 0}, "$.max_streams"),
        ({"als_interval": -1.0}, "$.als_interval"),
        ({"tls": Tls()}, "$.tls.ca_file"),
        ({"tls": Tls(verify=False, cert_file="x")}, "$.tls"),
    ],
)
def test_contradictions_are_refused_with_their_place(wrong: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**wrong).check()
    assert caught.value.path == path


def test_the_defaults_are_valid() -> None:
    Options().check()
    assert Options().message_timeout < Options().queue_timeout


def test_as_many_requests_may_wait_as_flow_control_lets_wait() -> None:
    """Of each criticality. Beyond, they would bypass it."""
    of_a_band = QueueLimits().band.requests
    assert of_a_band is not None
    assert Options().max_streams > 3 * of_a_band
