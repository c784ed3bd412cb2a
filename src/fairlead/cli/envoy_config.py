"""`fairlead envoy config`: the gateway's configuration, for an Envoy that Fairlead does not run."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.options import examples

if TYPE_CHECKING:
    from fairlead.gateway.envoy.options import Options


class RequestMode(StrEnum):
    whole = "whole"
    buffered = "buffered"


#: Fields of the gateway's options → their flags, where the names differ.
_FLAGS = {"host": "listen", "port": "listen", "endpoints": "endpoint", "tls": "tls-ca"}


class ResponseMode(StrEnum):
    first_chunk = "first-chunk"
    headers = "headers"
    none = "none"
    full = "full"


class Retry(StrEnum):
    connect = "connect"
    unanswered = "unanswered"
    hedge = "hedge"


_File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A configuration: take the settings of its embedded gateway.")
]
_ExtProc = Annotated[str, typer.Option(metavar="ADDRESS", help="The scheduler: HOST:PORT or unix:/PATH.")]
_Als = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="Access log service of the scheduler; none = no log.", show_default="--ext-proc"
    ),
]
_Endpoint = Annotated[list[str] | None, typer.Option(metavar="IP:PORT", help="A model server to fall back to; repeat.")]
_EndpointsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="An EDS file with the model servers, which Envoy follows.")
]
_RequestMode = Annotated[
    RequestMode, typer.Option(metavar="|".join(RequestMode), help="How requests reach the scheduler.")
]
_ResponseMode = Annotated[
    ResponseMode, typer.Option(metavar="|".join(ResponseMode), help="How much of responses the scheduler sees.")
]
_Retry = Annotated[Retry, typer.Option(metavar="|".join(Retry), help="When a second endpoint is tried.")]
_MessageTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="A scheduler that is silent for longer counts as hung.")
]
_QueueTimeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long a request may wait in the scheduler.")]
_FailOpen = Annotated[
    bool, typer.Option("--fail-open/--fail-closed", help="Without a scheduler: balance round robin, or answer 503.")
]
_TlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The scheduler's certificate authority; turns TLS on.")
]


@examples("""
\b
Examples:
  fairlead envoy config fairlead.yaml > envoy.yaml
  fairlead envoy config fairlead.yaml --ext-proc 10.0.0.5:9002
  fairlead envoy config --endpoint 10.0.0.1:8000 --endpoint 10.0.0.2:8000
  fairlead envoy config --ext-proc unix:/run/fairlead.sock --validate
""")
def envoy_config(
    ctx: typer.Context,
    file: _File = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="Where clients connect.")] = "127.0.0.1:8080",
    ext_proc: _ExtProc = "127.0.0.1:9002",
    als: _Als = "",
    endpoint: _Endpoint = None,
    endpoints_file: _EndpointsFile = None,
    admin_port: Annotated[int, typer.Option(metavar="PORT", help="Envoy's admin page on 127.0.0.1; 0 = none.")] = 0,
    request_mode: _RequestMode = RequestMode.whole,
    response_mode: _ResponseMode = ResponseMode.first_chunk,
    retry: _Retry = Retry.hedge,
    body_limit: Annotated[int, typer.Option(metavar="BYTES", help="Larger requests get 413.")] = 64 << 20,
    message_timeout: _MessageTimeout = 1.0,
    queue_timeout: _QueueTimeout = 600.0,
    fail_open: _FailOpen = True,
    access_log: Annotated[str, typer.Option(metavar="FILE", help="Write a JSON line per request; - = stdout.")] = "",
    tls_ca: _TlsCa = None,
    tls_server_name: Annotated[str, typer.Option(metavar="NAME", help="Name in the scheduler's certificate.")] = "",
    validate: Annotated[bool, typer.Option("--validate", help="Let Envoy check the result first.")] = False,
) -> None:
    """Print an Envoy configuration (YAML) for an Envoy that you run yourself.

    With FILE it is that of the embedded gateway, and the options given here override it. docs/gateway.md explains the
    modes. The keys in the files of gateway.keys and gateway.jwt.jwksFile are copied: print it again when they change.
    """
    from msgspec.structs import replace

    from fairlead.core.errors import ConfigError
    from fairlead.gateway.envoy.options import Options, Tls, parse_address

    if tls_ca is not None and not tls_ca.is_file():
        raise ConfigError(f"{tls_ca} is not a file", "--tls-ca")
    if tls_server_name and tls_ca is None:
        raise ConfigError("needs --tls-ca, the file of whoever signed that certificate", "--tls-server-name")
    address = parse_address(listen, "--listen")
    same = ("admin_port", "ext_proc", "body_limit", "message_timeout", "queue_timeout", "fail_open", "access_log")
    said: dict[str, dict[str, object]] = {
        **{name: {name: ctx.params[name]} for name in same},
        "listen": {"host": address.host, "port": address.port},
        "als": {"als": "" if als == "none" else als or ext_proc},
        "tls_ca": {"tls": Tls(ca_file=str(tls_ca), server_name=tls_server_name) if tls_ca else None},
        "endpoint": {"endpoints": tuple(endpoint or ())},
        "endpoints_file": {"endpoints_file": str(endpoints_file) if endpoints_file else ""},
        "request_mode": {"request_mode": request_mode.value},
        "response_mode": {"response_mode": response_mode.value},
        "retry": {"retry": retry.value},
    }
    options = _of_file(file) if file is not None else Options()
    for name, fields in said.items():
        source = ctx.get_parameter_source(name)
        if file is None or (source is not None and source.name == "COMMANDLINE"):
            options = replace(options, **fields)
    typer.echo(_comments(options, file), nl=False)
    typer.echo(_rendered(options, validate), nl=False)


def _comments(options: "Options", file: Path | None) -> str:
    """Lines above the configuration that say what is not in it, or will not be followed."""
    from fairlead.gateway.envoy.authentication import UPSTREAM_VARIABLE

    lines = ""
    if options.asks_for_keys or (options.jwt and options.jwt.jwks):
        lines += f"# Keys are those of {file} when this was printed. Print it again to add or revoke some.\n"
    if options.upstream_token_variable:
        lines += f"# Envoy's environment needs {UPSTREAM_VARIABLE}, the token of gateway.upstreamTokenFile in {file}.\n"
    return lines


def _rendered(options: "Options", validate: bool) -> str:
    """The Envoy configuration as text. Raises a `ConfigError` that names the flag with the wrong value."""
    from fairlead.core.errors import ConfigError
    from fairlead.gateway.envoy.binary import validate as check
    from fairlead.gateway.envoy.config import render

    try:
        text = render(options)
    except ConfigError as error:
        raise ConfigError(error.message, _flag(error.path)) from None
    if validate:
        check(text)
    return text


def _of_file(file: Path) -> "Options":
    """The options of the gateway that `fairlead serve` would start for this configuration. Raises `ConfigError`."""

    from msgspec.structs import replace

    from fairlead.compat.load import load
    from fairlead.pool.lookups import run
    from fairlead.server.embedded import first_pool, printed_options

    config = load(file)
    pool, http2 = run(first_pool(config))
    return replace(printed_options(config, http2), endpoints=tuple(pool))


def _flag(path: str) -> str:
    """The flag for a path in the gateway's options: `$.body_limit` → `--body-limit`."""
    name = path.removeprefix("$.").partition("[")[0].partition(".")[0]
    return f"--{_FLAGS.get(name, name.replace('_', '-'))}"
