"""`fairlead epp`: the reference's command line as values of the configuration, and as the image runs it."""

import subprocess
from pathlib import Path

import pytest
import yaml

from fairlead.cli import epp as command
from fairlead.cli.epp import configured
from fairlead.cli.main import main
from fairlead.compat.command_line import FLAGS
from fairlead.compat.load import load
from fairlead.config.schema import Config
from fairlead.core.errors import ConfigError
from fairlead.gateway.tls import ServerTls

ENTRYPOINT = Path(__file__).parents[3] / "deploy" / "entrypoint.sh"
CHOSEN = ["--config-text", "{endpoints: [10.0.0.1:80]}", "--secure-serving=false"]
DOCUMENT = "{kind: EndpointPickerConfig, apiVersion: llm-d.ai/v1alpha1}"
ENDPOINTS = "{kind: EndpointPickerConfig, apiVersion: llm-d.ai/v1alpha1, endpoints: [10.0.0.1:80]}"
#: As the reference's chart 0.10 renders them.
CHART = [
    "--pool-name", "llama", "--pool-namespace", "prod", "--pool-group", "inference.networking.k8s.io",
    "--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--ha-enable-leader-election",
    "--grpc-health-port", "9003", "--v=4", "--tracing=false", "--metrics-endpoint-auth=false",
]  # fmt: skip


def read(given: dict[str, str], directory: Path, text: str = "{}") -> Config:
    return load(text, flags=configured(given, directory), need_endpoints=False)


def test_by_default_it_listens_as_the_reference_does(tmp_path: Path) -> None:
    config = read({}, tmp_path)
    assert config.gateway.mode == "none"
    assert (config.ext_proc.host, config.ext_proc.port, config.ext_proc.health_port) == ("::", 9002, 9003)
    assert (config.admin.metrics_host, config.admin.metrics_port) == ("::", 9090)
    assert (config.admin.host, config.admin.port) == ("127.0.0.1", 9091), "what shows decisions is not for the network"
    assert config.ext_proc.tls is not None
    assert b"BEGIN CERTIFICATE" in ServerTls.from_directory(config.ext_proc.tls.cert_dir).pem[1]
    assert (config.log.level, config.log.format) == ("info", "logfmt")


def test_each_flag_that_acts_does(tmp_path: Path) -> None:
    given = {
        "pool-name": "llama", "pool-namespace": "prod", "pool-group": "inference.networking.x-k8s.io",
        "kubeconfig": "k", "ha-enable-leader-election": "true", "grpc-port": "1", "grpc-health-port": "2",
        "metrics-port": "3", "secure-serving": "false", "refresh-metrics-interval": "70ms",
        "metrics-staleness-threshold": "3s", "v": "5", "zap-encoder": "json", "tracing": "false",
        "metrics-cert-dir": "/m",
        "total-queued-requests-metric": "a:queued",
    }  # fmt: skip
    config = read(given, tmp_path, "{tracing: {endpoint: 'http://c:4318/v1/traces'}}")
    kubernetes = config.kubernetes
    assert (kubernetes.pool, kubernetes.namespace, kubernetes.group) == ("llama", "prod", given["pool-group"])
    assert (kubernetes.kubeconfig, kubernetes.leader_election.enabled) == (str(Path("k").absolute()), True)
    assert (config.ext_proc.port, config.ext_proc.health_port, config.ext_proc.tls) == (1, 2, None)
    assert (config.admin.metrics_port, config.admin.port) == (3, 4)
    assert config.admin.tls is not None and config.admin.tls.cert_dir == "/m"
    assert (config.metrics.interval, config.metrics.idle_interval, config.metrics.staleness) == (0.07, 0.07, 3.0)
    assert config.metrics.engines["vllm"].waiting == "a:queued"
    page = {"scheme": "https", "path": "/m", "port": "9400", "https-insecure-skip-verify": "true"}
    pages = read({f"model-server-metrics-{name}": value for name, value in page.items()}, tmp_path).metrics
    assert (pages.scheme, pages.path, pages.port, pages.tls.verify) == ("https", "/m", 9400, False)
    assert read({"model-server-metrics-scheme": "https"}, tmp_path).metrics.tls.verify
    assert (config.log.level, config.log.format, config.tracing.endpoint) == ("debug", "json", "")
    assert read({"zap-log-level": "error", "v": "5"}, tmp_path).log.level == "error"
    selected = read({"endpoint-selector": "app=a,tier=b", "endpoint-target-ports": "80,81"}, tmp_path).kubernetes
    assert (selected.selector, selected.target_ports) == ({"app": "a", "tier": "b"}, (80, 81))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pool-name": "a", "endpoint-selector": "b=c"}, "not together with --pool-name"),
        ({"metrics-client-ca-file": "ca.pem"}, "client certificates are not supported"),
        ({"endpoint-selector": "env in (a,b)"}, "expected KEY=VALUE"),
        ({"endpoint-selector": "app=a,role!=b"}, "expected KEY=VALUE"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(given, tmp_path)


def test_file_discovery_counts_before_the_name_of_a_pool(tmp_path: Path) -> None:
    discovery = "plugins: [{type: file-discovery, parameters: {path: e.yaml}}]\n"
    text = f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n{discovery}"
    text += "dataLayer: {discovery: {pluginRef: file-discovery}}\n"
    config = read({"pool-name": "epp", "pool-namespace": "default"}, tmp_path, text)
    assert (config.endpoints.file, config.kubernetes.on) == ("e.yaml", False)
    assert any("--pool-name" in note.message and note.path == "$.dataLayer.discovery" for note in config.notes)


def test_without_openssl_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install openssl, or give --cert-path"):
        configured({}, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config-file", "nope.yaml", "--secure-serving=false"], "nope.yaml"),
        (["--config-file", "a", "--config-text", "b"], "not together with --config-file"),
        (["--no-such-flag"], "unknown flag"),
        (["--secure-serving=false"], "error: no endpoints"),
        (["--secure-serving=false", "--config-text", "endpoints: 3"], "error: --config-text:1: $.endpoints: expected"),
        ([*CHOSEN, "--refresh-metrics-interval", "50"], "error: --refresh-metrics-interval: expected a duration"),
        ([*CHOSEN, "--grpc-port=99999"], "error: --grpc-port: expected an integer <= 65535"),
        ([*CHOSEN, "--lora-info-metric", "}{"], "error: --lora-info-metric: expected a metric name"),
        ([*CHOSEN, "--ha-enable-leader-election"], "error: --ha-enable-leader-election: there is no pool to lead"),
        (
            ["--secure-serving=false", "--endpoint-selector=app=vllm"],
            "error: --endpoint-selector: field 'targetPorts' is missing",
        ),
        ([*CHOSEN, "--pool-name", "llama"], "(leave out endpoints:, or kubernetes: and --pool-name)"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["epp", *arguments])
    lines = capsys.readouterr().err.splitlines()
    assert (stopped.value.code, len(lines)) == (2, 1)
    assert said in lines[0]


def test_a_configuration_as_text_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def remember(file: Path, flags: dict[str, object], notes: list[tuple[str, str]], names: object) -> None:
        served.append((load(file, flags=flags), [flag for flag, _ in notes]))

    monkeypatch.setattr("fairlead.cli.serve.serve_file", remember)
    command.epp(["--config-text", ENDPOINTS, "--secure-serving=false"])
    ((config, notes),) = served
    assert [listed.endpoint.address for listed in config.endpoints.static] == ["10.0.0.1:80"]
    assert notes == ["--metrics-endpoint-auth"]
    command.epp(["--pool-name", "llama", "--secure-serving=false"])
    policy = served[1][0].policy
    weights = [(scorer.stands_for, scorer.weight) for scorer in policy.scorers]
    assert weights == [("queue-scorer", 2), ("kv-cache-utilization-scorer", 2), ("prefix-cache-scorer", 3)]
    assert policy.picker == load(DOCUMENT, need_endpoints=False).policy.picker


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        (CHART, ["epp", *CHART]),
        (["-poolName", "a b"], ["epp", "-poolName", "a b"]),
        (["serve", "f.yaml"], ["serve", "f.yaml"]),
        (["--help"], ["--help"]),
        (["--version"], ["--version"]),
        ([], []),
    ],
)
def test_the_image_runs_it_when_its_first_argument_is_a_flag(
    arguments: list[str], run: list[str], tmp_path: Path
) -> None:
    fake = tmp_path / "fairlead"
    fake.write_text('#!/bin/sh\nfor argument; do echo "$argument"; done\n')
    fake.chmod(0o755)
    told = subprocess.run(
        [str(ENTRYPOINT), *arguments], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (told.stdout.splitlines(), told.stderr) == (run, "")


def test_a_configuration_of_the_reference_starts_no_gateway() -> None:
    plain = load(ENDPOINTS)
    assert (plain.gateway.mode, plain.ext_proc.host, plain.ext_proc.port) == ("none", "::", 9002)
    assert plain.ext_proc.health_port == 9003
    wanted = yaml.safe_load(ENDPOINTS) | {"gateway": {"port": 8081}, "extProc": {"port": 1}}
    told = load(yaml.safe_dump(wanted))
    assert (told.gateway.mode, told.gateway.port) == ("embedded", 8081)
    assert (told.ext_proc.port, told.ext_proc.health_port) == (1, 9003)


def test_its_help_lists_the_flags_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["epp", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in FLAGS if f"--{name} " not in shown and f"--{name}\n" not in shown] == []
