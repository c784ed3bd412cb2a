"""`fairlead envoy config`."""

import json
from pathlib import Path

import pytest
import typer
import yaml
from msgspec.structs import replace
from typer.testing import CliRunner

from fairlead.cli.envoy_config import envoy_config
from fairlead.compat.load import load
from fairlead.core.errors import ConfigError
from fairlead.gateway.envoy.authentication import new_key, write_jwt, write_keys
from fairlead.gateway.envoy.config import build
from fairlead.gateway.envoy.options import Options
from fairlead.server.embedded import gateway_options

app = typer.Typer()
app.command()(envoy_config)


def test_it_prints_what_build_makes() -> None:
    arguments = ["--listen", "0.0.0.0:80", "--ext-proc", "[::1]:9002", "--endpoint", "10.0.0.1:1", "--fail-closed"]
    done = CliRunner().invoke(
        app, [*arguments, "--response-mode", "none", "--als", "none", "--request-mode", "buffered"]
    )
    assert done.exit_code == 0, done.output
    options = Options(
        host="0.0.0.0",
        port=80,
        ext_proc="[::1]:9002",
        endpoints=("10.0.0.1:1",),
        fail_open=False,
        response_mode="none",
        request_mode="buffered",
    )
    assert yaml.load(done.stdout, yaml.CSafeLoader) == build(options)


def test_the_log_service_is_the_schedulers_port_unless_told_otherwise(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    done = CliRunner().invoke(app, ["--ext-proc", "127.0.0.1:7", "--tls-ca", str(ca), "--tls-server-name", "epp"])
    assert [c["name"] for c in yaml.load(done.stdout, yaml.CSafeLoader)["static_resources"]["clusters"]][-1] == "als"
    assert "server_name" not in done.stdout and "sni: epp" in done.stdout


@pytest.mark.envoy
def test_validate_asks_envoy() -> None:
    good = CliRunner().invoke(app, ["--endpoint", "10.0.0.1:1", "--validate"])
    assert good.exit_code == 0 and good.stdout.startswith("node:")
    bad = CliRunner().invoke(app, ["--endpoints-file", "/no/such/pool.json", "--validate"])
    assert bad.exit_code == 1 and "Envoy refuses the configuration" in str(bad.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "8080"], "--listen: expected host:port"),
        (["--listen", "foo:1"], "--listen: expected an IP address, got 'foo'"),
        (["--body-limit", "0"], "--body-limit: must be above 0"),
        (["--admin-port", "8080"], "--admin-port: is the port of the gateway itself"),
        (["--endpoint", "10.0.0.1:1", "--endpoint", "foo:1"], "--endpoint: expected a literal ip:port, got 'foo:1'"),
        (["--ext-proc", "x"], "--ext-proc: expected host:port"),
        (["--als", "x"], "--als: expected host:port"),
        (["--message-timeout", "-1"], "--message-timeout: must be above 0"),
        (["--queue-timeout", "0.5"], "--queue-timeout: must not be below"),
        (["--tls-server-name", "epp"], "--tls-server-name: needs --tls-ca"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


def test_a_file_says_what_its_gateway_would_use(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("endpoints: ['10.0.0.1:1', '10.0.0.2:1']\ngateway: {port: 81, retry: connect, bodyLimit: 1Mi}\n")
    done = CliRunner().invoke(app, [str(file), "--ext-proc", "10.0.0.9:9002", "--retry", "hedge"])
    assert done.exit_code == 0 and not done.stdout.startswith("#"), done.output
    options = gateway_options(load(file))
    assert (options.port, options.body_limit, options.retry) == (81, 1 << 20, "connect")
    expected = replace(options, ext_proc="10.0.0.9:9002", retry="hedge", endpoints=("10.0.0.1:1", "10.0.0.2:1"))
    assert yaml.load(done.stdout, yaml.CSafeLoader) == build(expected)


@pytest.mark.envoy
def test_the_token_of_model_servers_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("never shown")
    monkeypatch.setenv("FAIRLEAD_UPSTREAM_TOKEN", "anything")
    file = tmp_path / "fairlead.yaml"
    file.write_text('{endpoints: ["127.0.0.1:1"], gateway: {upstreamTokenFile: token}}')
    done = CliRunner().invoke(app, [str(file), "--validate"])
    assert done.exit_code == 0, done.output
    assert "environment_variable: FAIRLEAD_UPSTREAM_TOKEN" in done.stdout and "never shown" not in done.stdout
    assert "# Envoy's environment needs FAIRLEAD_UPSTREAM_TOKEN" in done.stdout
    jwt = "jwt: {issuer: i, jwksFile: jwks.json, forward: true}"
    for more in ("keys: {file: keys.txt, forward: true}", jwt):
        file.write_text(f'{{endpoints: ["127.0.0.1:1"], gateway: {{upstreamTokenFile: token, {more}}}}}')
        refused = CliRunner().invoke(app, [str(file)]).exception
        assert "upstreamTokenFile and forward exclude each other" in str(refused)


@pytest.mark.envoy
def test_keys_and_tokens_are_asked_for_as_by_the_embedded_gateway(tmp_path: Path) -> None:
    """Whose Envoy reads these filters from files."""
    file, (_, kept) = tmp_path / "f.yaml", new_key("team-a")
    (tmp_path / "keys.txt").write_text(kept.line)
    (tmp_path / "jwks.json").write_text('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}')
    gateway = "{keys: {file: keys.txt}, jwt: {issuer: i, jwksFile: jwks.json}}"
    file.write_text(f"endpoints: ['10.0.0.1:1']\ngateway: {gateway}\n")
    done = CliRunner().invoke(app, [str(file), "--validate"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"# Keys are those of {file} when this was printed.")
    options = gateway_options(load(file))
    assert options.jwt is not None
    write_jwt(tmp_path / "jwt.json", options.jwt, optional=True)
    write_keys(tmp_path / "keys.json", [kept], forward=False)
    written = [json.loads((tmp_path / name).read_text())["resources"][0] for name in ("jwt.json", "keys.json")]
    listener = yaml.load(done.stdout, yaml.CSafeLoader)["static_resources"]["listeners"][0]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    for printed, followed in zip(filters, written, strict=False):
        assert printed == {name: value for name, value in followed.items() if name != "@type"}
    (tmp_path / "keys.txt").write_text("no key")
    done = CliRunner().invoke(app, [str(file)])
    assert isinstance(done.exception, ConfigError) and "line 1" in str(done.exception)
