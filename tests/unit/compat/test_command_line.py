"""The reference's flags, as pflag and Go read them."""

import pytest

from fairlead.compat.command_line import parse, without_effect
from fairlead.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--pool-name", "a", "--pool-namespace=b"], {"pool-name": "a", "pool-namespace": "b"}),
        (["-poolName", "a", "-grpcPort", "9"], {"pool-name": "a", "grpc-port": "9"}),
        (["-v", "4"], {"v": "4"}),
        (["-v=4"], {"v": "4"}),
        (["--v=1", "-v4"], {"v": "4"}),
        (["--tracing"], {"tracing": "true"}),
        (["--tracing=F", "--secure-serving=1"], {"tracing": "false", "secure-serving": "true"}),
        (["--config-text", "--- a: b", "--cert-path="], {"config-text": "--- a: b", "cert-path": ""}),
        (["--health-checking", "--pool-name", "--odd"], {"health-checking": "true", "pool-name": "--odd"}),
        (["--endpoint-target-ports", "80", "--endpoint-target-ports=81,82"], {"endpoint-target-ports": "80,81,82"}),
        (["--enable-pprof", "true", "--v", "1"], {"enable-pprof": "true", "v": "1"}),
        ([], {}),
    ],
)  # fmt: skip
def test_flags_are_read_as_go_reads_them(arguments: list[str], given: dict[str, str]) -> None:
    assert parse(arguments) == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pool-nam", "a"], r"--pool-nam: unknown flag; did you mean --pool-name\?"),
        (["--no-such-flag"], "unknown flag; fairlead epp --help"),
        (["--pool-name"], "--pool-name: a value is missing"),
        (["false"], "a boolean's value stands behind '=', as in --tracing=false"),
        (["--tracing", "off"], "expected a flag"),
        (["--v=4", "1"], "expected a flag"),
        (["--tracing=maybe"], "--tracing: expected true or false, got 'maybe'"),
        (["--grpc-port=high"], "--grpc-port: expected a number, got 'high'"),
        (["-"], "expected a flag"),
        (["--"], "expected a flag"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(arguments)


def test_a_value_of_a_boolean_as_a_word_of_its_own_has_no_effect_and_is_named() -> None:
    stray: list[tuple[str, str]] = []
    assert parse(["--tracing", "false"], stray) == {"tracing": "true"}
    assert stray == [("--tracing false", "a boolean's value stands behind '=': --tracing=false")]


def test_what_has_no_effect_is_named() -> None:
    told = dict(without_effect({"enable-pprof": "true", "drain-timeout": "5s", "pool-name": "a", "zap-devel": "false"}))
    assert told.keys() == {"--enable-pprof", "--drain-timeout", "--metrics-endpoint-auth"}
    assert dict(without_effect({"metrics-endpoint-auth": "false"})) == {}
