"""The embedded gateway asks the scheduler where it listens."""

import pytest

from fairlead.compat.load import load
from fairlead.server.embedded import gateway_options, pinned

FILE = "endpoints: ['127.0.0.1:1']\nextProc: {host: '%s', port: 9002}\nals: {port: 9005}\n"


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("10.0.0.7", "10.0.0.7"),
        ("::", "[::1]"),
        ("fd00::7", "[fd00::7]"),
        ("box.example", "box.example"),
    ],
)
def test_it_dials_the_host_that_the_scheduler_listens_on(host: str, dialled: str) -> None:
    config = load(FILE % host)
    options = gateway_options(config)
    assert (options.ext_proc, options.als) == (f"{dialled}:9002", f"{dialled}:9005")


def test_a_replacement_listens_where_the_gateway_dials() -> None:
    """Whatever the file says by then."""
    assert pinned(load(FILE % "10.0.0.7"))["extProc"] == {"host": "10.0.0.7", "port": 9002}
