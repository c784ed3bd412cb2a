"""`fairlead envoy-config`: the gateway's configuration, for an Envoy that somebody else runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fairlead.cli.options import examples


class RequestMode(StrEnum):
    whole = "whole"
    buffered = "buffered"


#: Options of the gateway whose flag is called otherwise.
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


@examples("""
\b
Examples:
  fairlead envoy-config --endpoint 10.0.0.1:8000 > envoy.yaml
  fairlead envoy-config --endpoints-file eds.json --listen 0.0.0.0:80
  fairlead envoy-config --ext-proc unix:/run/fairlead.sock --validate
""")
def envoy_config(
    listen: Annotated[str, typer.Option(help="Where clients connect, ip:port.")] = "127.0.0.1:8080",
    ext_proc: Annotated[str, typer.Option(help="The scheduler: host:port or unix:/path.")] = "127.0.0.1:9002",
    als: Annotated[str, typer.Option(help="Its access log service; empty = the same port, 'none' = no log.")] = "",
    endpoint: Annotated[
        list[str] | None, typer.Option(help="ip:port of a model server, for requests nobody scheduled. Repeatable.")
    ] = None,
    endpoints_file: Annotated[
        Path | None, typer.Option(help="An EDS file with the model servers instead; Envoy follows it.")
    ] = None,
    admin_port: Annotated[int, typer.Option(help="Envoy's admin page on 127.0.0.1; 0 = none.")] = 0,
    request_mode: Annotated[RequestMode, typer.Option(help="See docs/gateway.md.")] = RequestMode.whole,
    response_mode: Annotated[ResponseMode, typer.Option(help="What the scheduler sees.")] = ResponseMode.first_chunk,
    retry: Annotated[Retry, typer.Option(help="When a second choice is tried; see docs/gateway.md.")] = Retry.hedge,
    body_limit: Annotated[int, typer.Option(help="Bytes; larger request bodies get 413.")] = 64 << 20,
    message_timeout: Annotated[float, typer.Option(help="Seconds until a silent scheduler is taken for hung.")] = 1.0,
    queue_timeout: Annotated[float, typer.Option(help="Seconds a request may wait in the scheduler.")] = 600.0,
    fail_open: Annotated[
        bool, typer.Option("--fail-open/--fail-closed", help="Without a scheduler: round robin, or 503.")
    ] = True,
    access_log: Annotated[str, typer.Option(help="A JSON line per request into this file; - = stdout.")] = "",
    tls_ca: Annotated[Path | None, typer.Option(help="TLS to the scheduler: who signed its certificate.")] = None,
    tls_server_name: Annotated[str, typer.Option(help="TLS to the scheduler: the name it must have.")] = "",
    validate: Annotated[bool, typer.Option("--validate", help="Have Envoy check it first.")] = False,
) -> None:
    """Print Envoy's configuration (YAML): the one that the embedded gateway runs with, for the options given."""
    from fairlead.core.errors import ConfigError
    from fairlead.gateway.envoy.binary import validate as check
    from fairlead.gateway.envoy.config import render
    from fairlead.gateway.envoy.options import Options, Tls, parse_address

    if tls_ca is not None and not tls_ca.is_file():
        raise ConfigError(f"{tls_ca} is no file", "--tls-ca")
    address = parse_address(listen, "--listen")
    options = Options(
        host=address.host,
        port=address.port,
        admin_port=admin_port,
        ext_proc=ext_proc,
        als="" if als == "none" else als or ext_proc,
        tls=Tls(ca_file=str(tls_ca), server_name=tls_server_name) if tls_ca else None,
        endpoints=tuple(endpoint or ()),
        endpoints_file=str(endpoints_file) if endpoints_file else "",
        request_mode=request_mode.value,
        response_mode=response_mode.value,
        retry=retry.value,
        body_limit=body_limit,
        message_timeout=message_timeout,
        queue_timeout=queue_timeout,
        fail_open=fail_open,
        access_log=access_log,
    )
    try:
        text = render(options)
    except ConfigError as error:
        raise ConfigError(error.message, _flag(error.path)) from None
    if validate:
        check(text)
    typer.echo(text, nl=False)


def _flag(path: str) -> str:
    """Who said what stands at a path of the options: `$.body_limit` -> `--body-limit`."""
    name = path.removeprefix("$.").partition("[")[0].partition(".")[0]
    return f"--{_FLAGS.get(name, name.replace('_', '-'))}"
