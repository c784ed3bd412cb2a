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
        (["--tracing", "false"], "a boolean's value stands behind '=', as in --tracing=false"),
        (["--tracing=maybe"], "--tracing: expected true or false, got 'maybe'"),
        (["--grpc-port=high"], "--grpc-port: expected a number, got 'high'"),
        (["-"], "expected a flag"),
        (["--"], "expected a flag"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(arguments)


def test_what_has_no_effect_is_named() -> None:
    told = dict(without_effect({"enable-pprof": "true", "drain-timeout": "5s", "pool-name": "a", "zap-devel": "false"}))
    assert told.keys() == {"--enable-pprof", "--drain-timeout", "--metrics-endpoint-auth"}
    assert dict(without_effect({"metrics-endpoint-auth": "false"})) == {}
