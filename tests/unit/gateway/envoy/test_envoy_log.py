"""Envoy's log lines, and what its last words mean."""

import logging

import pytest

from fairlead.core.errors import PROCESS_LIMIT
from fairlead.gateway.envoy.binary import explain, parse

# Printed by Envoy 1.40.0.
BIND = (
    "[2026-11-21 05:00:00.000][42][critical][main] [source/server/server.cc:438] error initializing configuration "
    "'/tmp/x.yaml': Failed to create listener: cannot bind '127.0.0.1:8080': Address already in use"
)
FIELD = (
    "[critical][main] error initializing configuration '/tmp/x.yaml': Protobuf message (type "
    "envoy.config.bootstrap.v3.Bootstrap reason INVALID_ARGUMENT: invalid JSON) has unknown fields"
)


def test_both_formats_are_read() -> None:
    assert parse("[warning][main] caught ENVOY_SIGTERM") == (logging.WARNING, "main", "caught ENVOY_SIGTERM")
    level, component, text = parse(BIND) or (0, "", "")
    assert (level, component) == (logging.ERROR, "main")
    assert text.startswith("error initializing configuration")


@pytest.mark.parametrize("line", ["", "no prefix", "[warning] half", "[loud][main] x", '{"json": 1}', "[" * 50])
def test_other_lines_continue_the_one_before(line: str) -> None:
    assert parse(line) is None


def test_a_taken_port_is_said_in_our_words() -> None:
    assert explain([BIND]) == (
        "127.0.0.1:8080 is taken: stop what listens there, or choose another port for the gateway"
    )
    denied = BIND.replace("Address already in use", "Permission denied")
    assert explain([denied]) == "the gateway cannot listen on 127.0.0.1:8080: Permission denied"


def test_a_refused_configuration_is_said_in_envoys_words() -> None:
    assert explain(["[info][main] hello", FIELD, "detail"], 1).startswith(
        "Envoy refuses the configuration: Protobuf message (type"
    )


@pytest.mark.parametrize(
    "line",
    [
        "[error][assert] assert failure: false. Details: Unable to create a thread with return code: 11",
        "# Check failed: Start().",
    ],
)
def test_a_limit_of_processes_is_named(line: str) -> None:
    assert explain([line, "Backtrace", "#0: [0x7fb3371c8050]"], -6) == f"Envoy cannot start a thread: {PROCESS_LIMIT}"


def test_ends_without_words() -> None:
    assert explain([], -11) == "Envoy was ended by SIGSEGV"
    assert explain([], -200) == "Envoy was ended by signal 200"
    assert explain(["", " "], 1) == "Envoy ended with code 1 and said nothing"
    assert explain(["libc.so.6: version not found"], 1) == "Envoy ended with code 1:\nlibc.so.6: version not found"
    assert len(explain(["x" * 100_000], 1)) < 2000
