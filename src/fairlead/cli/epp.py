"""`fairlead epp`: serve with the reference picker's command line."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlead.cli.options import examples
from fairlead.core.errors import ConfigError

_METRICS = {
    "total-queued-requests-metric": "waiting",
    "total-running-requests-metric": "running",
    "kv-cache-usage-percentage-metric": "kvUsage",
    "lora-info-metric": "lora",
    "cache-info-metric": "cacheInfo",
}
#: The configuration that the reference uses if none is given.
_DEFAULT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: kv-cache-utilization-scorer}, {type: prefix-cache-scorer}]
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
#: Fields of the configuration that flags set which `fairlead serve` does not have, or which it names otherwise.
_FLAGS = {
    "admin.port": "--metrics-port",
    "admin.metricsPort": "--metrics-port",
    "metrics.interval": "--refresh-metrics-interval",
    "metrics.idleInterval": "--refresh-metrics-interval",
    "metrics.staleness": "--metrics-staleness-threshold",
    **{f"metrics.{key}": f"--model-server-metrics-{key}" for key in ("scheme", "path", "port")},
    **{f"metrics.engines.vllm.{key}": f"--{name}" for name, key in _METRICS.items()},
}
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error", "panic": "error"}


@examples("""
\b
Examples:
  fairlead epp --config-file config.yaml --pool-name llama --zap-encoder json
  fairlead epp --pool-name llama --secure-serving=false -v 4
""")
def epp(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="FLAG", help="A flag of the reference, see below.")
    ] = None,
) -> None:
    """Serve with the reference endpoint picker's flags: no gateway, ext_proc on port 9002 with TLS, health on 9003,
    metrics on 9090.

    The image runs this when its first argument is a flag. The log names flags that have no effect. Flags override the
    configuration.
    """
    from fairlead.cli.serve import FLAGS, serve_file
    from fairlead.compat.command_line import parse, without_effect
    from fairlead.config.problems import InvalidConfig
    from fairlead.gateway.directories import temporary_directory

    stray: list[tuple[str, str]] = []
    given = parse(flags or (), stray)
    with temporary_directory("fairlead-epp-") as base:
        values = configured(given, base)
        try:
            notes = [*stray, *without_effect(given)]
            serve_file(_configuration(given, base), values, notes=notes, names={**FLAGS, **_FLAGS})
        except InvalidConfig as error:
            if given.get("config-file"):
                raise
            raise InvalidConfig(error.problems, "--config-text" if given.get("config-text") else "") from None


def _configuration(given: Mapping[str, str], directory: Path) -> Path:
    file, text = given.get("config-file", ""), given.get("config-text", "")
    if file and text:
        raise ConfigError("not together with --config-file; leave out one of them", "--config-text")
    if file:
        return Path(file)
    made = directory / "config.yaml"
    made.write_text(text or _DEFAULT, encoding="utf-8")
    return made


def configured(given: Mapping[str, str], directory: Path) -> dict[str, Any]:
    """Convert flags to values of the configuration, in the structure of the file. `directory`: where a certificate is
    created if needed. Raises `ConfigError`."""
    from fairlead.cli.serve import flag_values, overlay

    if given.get("pool-name") and given.get("endpoint-selector"):
        raise ConfigError("not together with --pool-name; leave out one of them", "--endpoint-selector")
    if given.get("metrics-client-ca-file"):
        raise ConfigError("client certificates are not supported; use admin.tokenFile", "--metrics-client-ca-file")
    metrics_port = int(given.get("metrics-port", "9090"))
    converted = {
        "grpc-port": int(given.get("grpc-port", "9002")),
        "grpc-health-port": int(given.get("grpc-health-port", "9003")),
        "admin-port": metrics_port + 1,
        "ha-enable-leader-election": given.get("ha-enable-leader-election") == "true",
    }
    values = overlay({**flag_values({**given, **converted}), "admin.metricsPort": metrics_port})
    values["gateway"] = {"mode": "none"}
    values["admin"]["metricsHost"] = "::"
    if given.get("metrics-cert-dir"):
        values["admin"]["tls"] = {"certDir": os.path.abspath(given["metrics-cert-dir"])}
    if given.get("secure-serving") != "false":
        own = given.get("cert-path")
        values["extProc"]["tls"] = {"certDir": os.path.abspath(own) if own else self_signed(directory)}
    values["log"] = _log(given)
    if given.get("tracing") == "false":
        values["tracing"] = {"endpoint": ""}
    _add_metrics(given, values)
    return values


def _log(given: Mapping[str, str]) -> dict[str, str]:
    wanted = given.get("zap-log-level", "")
    numeric = wanted or given.get("v", "2")
    level = _LEVELS.get(wanted, "debug" if numeric.isdigit() and int(numeric) >= 4 else "info")
    return {"level": level, "format": "json" if given.get("zap-encoder") == "json" else "logfmt"}


def _add_metrics(given: Mapping[str, str], values: dict[str, Any]) -> None:
    metrics: dict[str, Any] = {}
    if interval := given.get("refresh-metrics-interval"):
        metrics |= {"interval": interval, "idleInterval": interval}
    if staleness := given.get("metrics-staleness-threshold"):
        metrics["staleness"] = staleness
    for key, usual in (("scheme", "http"), ("path", "/metrics"), ("port", "")):
        if (value := given.get(f"model-server-metrics-{key}", usual)) != usual:
            metrics[key] = int(value) if key == "port" else value
    if given.get("model-server-metrics-https-insecure-skip-verify") == "true":
        metrics["tls"] = {"verify": False}
    names = {key: given[name] for name, key in _METRICS.items() if given.get(name)}
    if names:
        metrics["engines"] = {"vllm": names}
    if metrics:
        values["metrics"] = metrics


def self_signed(directory: Path) -> str:
    """Create a self-signed certificate, as the reference does: its gateways do not verify it. Returns its directory."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "3650", "-subj", "/O=Fairlead", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt")]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"a certificate could not be created ({error}); install openssl, or give --cert-path"
        raise ConfigError(reason, "--secure-serving") from None
    return str(directory)
