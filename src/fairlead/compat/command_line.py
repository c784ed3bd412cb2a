"""The reference picker's command line: the flags of its releases (0.10, the extension's 1.x), and their effect here.

Rules (of pflag, and of Go's flag package before it)
* `--name=value`, `--name value`, `-v 4`, `-v=4`, `-v4`; also with one dash and in camel case, as in older releases.
* A boolean takes a value only after `=`; without one it is true. A value as the next word has no effect there either:
  charts of the extension render booleans that way.
* If a flag is repeated, the last value counts. Lists are appended to.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

from fairlead.core.errors import ConfigError

_TRUE, _FALSE = ("1", "t", "T", "TRUE", "true", "True"), ("0", "f", "F", "FALSE", "false", "False")


class Flag(NamedTuple):
    kind: Literal["bool", "int", "text", "list"]
    #: The reference's default, as its `--help` shows it.
    default: str
    #: The effect here, for docs/cli.md, and for the log if the flag is `ignored`; without the word "ignored".
    meaning: str
    ignored: bool = False


def _ignored(kind: Literal["bool", "int", "text"], default: str, why: str) -> Flag:
    return Flag(kind, default, why, ignored=True)


_METRIC = "name of vLLM's metric, in `metrics.engines`; 0.10 refuses it"

FLAGS: Mapping[str, Flag] = {
    "config-file": Flag("text", "", "the configuration"),
    "config-text": Flag("text", "", "the configuration itself; not together with `config-file`"),
    "pool-name": Flag("text", "", "`kubernetes.pool`"),
    "pool-namespace": Flag("text", "", "`kubernetes.namespace`; without it `$NAMESPACE`"),
    "pool-group": Flag("text", "inference.networking.k8s.io", "`kubernetes.group`"),
    "endpoint-selector": Flag("text", "", "`kubernetes.selector`: labels by `=`; not together with `pool-name`"),
    "endpoint-target-ports": Flag("list", "", "`kubernetes.targetPorts`"),
    "kubeconfig": Flag("text", "", "`kubernetes.kubeconfig`"),
    "ha-enable-leader-election": Flag("bool", "false", "`kubernetes.leaderElection.enabled`"),
    "grpc-port": Flag("int", "9002", "`extProc.port`, on all interfaces"),
    "grpc-health-port": Flag("int", "9003", "`extProc.healthPort`"),
    "metrics-port": Flag(
        "int", "9090", "`admin.metricsPort`, on all interfaces; `admin.port` is the next one, for itself"
    ),
    "secure-serving": Flag("bool", "true", "TLS for ext_proc, with a certificate made at the start unless `cert-path`"),
    "cert-path": Flag("text", "", "`extProc.tls.certDir`"),
    "metrics-cert-dir": Flag("text", "", "`admin.tls.certDir`"),
    "metrics-client-ca-file": Flag("text", "", "refused: client certificates are not supported; see `admin.tokenFile`"),
    "refresh-metrics-interval": Flag(
        "text", "50ms", "`metrics.interval` and `idleInterval`, where it is given; else 200 ms"
    ),
    "metrics-staleness-threshold": Flag("text", "2s", "`metrics.staleness`"),
    "grpc-max-recv-msg-size": _ignored("text", "4MiB", "`parsing.maxBodyBytes` bounds requests (64 MiB)"),
    "v": Flag("int", "2", "`log.level`: `debug` from 4 on, else `info`"),
    "zap-log-level": Flag("text", "", "`log.level`; counts before `v`"),
    "zap-encoder": Flag("text", "console", "`log.format`: `json`, else `logfmt`"),
    "tracing": Flag(
        "bool", "true", "`false`: none. Else spans go to `tracing.endpoint` of the configuration, if it has one"
    ),
    "total-queued-requests-metric": Flag("text", "vllm:num_requests_waiting", _METRIC),
    "total-running-requests-metric": Flag("text", "vllm:num_requests_running", _METRIC),
    "kv-cache-usage-percentage-metric": Flag("text", "vllm:kv_cache_usage_perc", _METRIC),
    "lora-info-metric": Flag("text", "vllm:lora_requests_info", _METRIC),
    "cache-info-metric": Flag("text", "vllm:cache_config_info", _METRIC),
    "metrics-endpoint-auth": _ignored(
        "bool", "true", "no API server is asked who may read metrics; see `admin.tokenFile`, or a NetworkPolicy"
    ),
    "health-checking": _ignored("bool", "false", "health is served at `grpc-port` and `grpc-health-port` in any case"),
    "enable-cert-reload": _ignored("bool", "false", "certificates are read again when they change in any case"),
    "drain-timeout": _ignored("text", "30s", "requests in flight get up to 30 s"),
    "grpc-max-send-msg-size": _ignored("text", "4MiB", "answers are sent in pieces of at most 62,000 bytes"),
    "grpc-enable-compression": _ignored("bool", "false", "answers are not compressed"),
    "enable-grpc-stream-metrics": _ignored("bool", "false", "streams are counted in any case"),
    "refresh-prometheus-metrics-interval": _ignored("text", "5s", "every scrape shows the present"),
    "disable-endpoint-subset-filter": _ignored("bool", "false", "a gateway's subset hint is always obeyed"),
    "emit-endpoint-scores": _ignored("bool", "false", "scores are in the journal and at `/debug/decisions`"),
    "enable-pprof": _ignored("bool", "true", "there is no profiler to reach over the network"),
    "tls-min-version": _ignored("text", "", "TLS 1.2 and 1.3"),
    "tls-cipher-suites": _ignored("text", "", "of TLS 1.2 ECDHE with AES-GCM or ChaCha20, as HTTP/2 demands"),
    "allow-experimental-plugins": _ignored("bool", "false", "plugins that exist here are always allowed"),
    "zap-devel": _ignored("bool", "true", "see `zap-encoder` and `v`"),
    "zap-stacktrace-level": _ignored("text", "", "unexpected errors have a traceback in any case"),
    "zap-time-encoding": _ignored("text", "", "times are RFC 3339"),
    "model-server-metrics-scheme": Flag("text", "http", "`metrics.scheme`"),
    "model-server-metrics-path": Flag("text", "/metrics", "`metrics.path`"),
    "model-server-metrics-port": Flag("int", "", "`metrics.port`"),
    "model-server-metrics-https-insecure-skip-verify": Flag(
        "bool", "true", "given as true, `metrics.tls.verify: false`; without it certificates are verified"
    ),
    "enable-multi-engine": _ignored("bool", "false", "engines are always distinguished by label"),
    "engine-label-key": _ignored("text", "", "the label is `llm-d.ai/engine-type`"),
}


def parse(arguments: Sequence[str], stray: list[tuple[str, str]] | None = None) -> dict[str, str]:
    """Parse flags into values by name; booleans become `true` or `false`. Raises `ConfigError`. `stray`: gets (flag and
    word, why) for values of booleans that have no effect."""
    given: dict[str, str] = {}
    words = iter(arguments)
    name = ""
    for argument in words:
        if argument in _TRUE + _FALSE and name in FLAGS and FLAGS[name].kind == "bool":
            if stray is not None:
                stray.append((f"--{name} {argument}", f"a boolean's value stands behind '=': --{name}={argument}"))
            continue
        name, value = _split(argument)
        flag = FLAGS.get(name)
        if flag is None:
            near = get_close_matches(name, FLAGS, n=1)
            hint = f"did you mean --{near[0]}?" if near else "fairlead epp --help lists the flags"
            raise ConfigError(f"unknown flag; {hint}", argument.partition("=")[0])
        if value is None:
            value = "true" if flag.kind == "bool" else next(words, None)
        if value is None:
            raise ConfigError("a value is missing", argument)
        value = _checked(flag, value, f"--{name}")
        given[name] = f"{given[name]},{value}" if flag.kind == "list" and name in given else value
    return given


def _split(argument: str) -> tuple[str, str | None]:
    bare = argument.removeprefix("-").removeprefix("-")
    if bare == argument or not bare:
        raise ConfigError("expected a flag; a boolean's value stands behind '=', as in --tracing=false", argument)
    if not argument.startswith("--") and re.fullmatch(r"v-?\d+", bare):
        return "v", bare[1:]
    name, equals, value = bare.partition("=")
    kebab = re.sub(r"([a-z])([A-Z])", r"\1-\2", name).lower()
    return kebab, value if equals else None


def _checked(flag: Flag, value: str, name: str) -> str:
    if flag.kind == "bool":
        if value not in _TRUE + _FALSE:
            raise ConfigError(f"expected true or false, got {value!r}", name)
        return "true" if value in _TRUE else "false"
    if flag.kind == "int" and not re.fullmatch(r"-?\d{1,9}", value):
        raise ConfigError(f"expected a number, got {value!r}", name)
    return value


def without_effect(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, why) for given flags without effect, and for flags that are on by default in the reference but have
    no effect here."""
    for name, flag in FLAGS.items():
        if flag.ignored and (name in given or name == "metrics-endpoint-auth") and given.get(name) != "false":
            yield f"--{name}", flag.meaning
