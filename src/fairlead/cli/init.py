"""`fairlead init`: examines model servers and writes a configuration for them."""

import re
import sys
from collections.abc import Callable, Iterable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fairlead.cli.basics import DEFAULT_FILE, FAILED
from fairlead.cli.options import complain, examples
from fairlead.core.text import plain

if TYPE_CHECKING:
    from fairlead.doctor.survey import Server

T = TypeVar("T")
#: A name of an object in Kubernetes (RFC 1123, section 2.1).
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

_Servers = Annotated[
    list[str] | None, typer.Argument(metavar="HOST:PORT", help="A model server; repeat.", show_default=False)
]
_Prefill = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="A server that only prefills; repeat. Others decode.", show_default=False),
]
_Pool = Annotated[
    str, typer.Option(metavar="NAME", help="Kubernetes: the InferencePool to follow.", show_default=False)
]
_Namespace = Annotated[str, typer.Option(metavar="NAME", help="Kubernetes: its namespace.", show_default=False)]
_KvEvents = Annotated[bool | None, typer.Option("--kv-events/--no-kv-events", help="Follow what engines have cached.")]
_Tokenizer = Annotated[
    str,
    typer.Option(metavar="DIR", help="For KV events: the model's tokenizer.", show_default="ask the engines"),
]


@examples("""
\b
Examples:
  fairlead init                                  asks
  fairlead init 10.0.0.1:8000 10.0.0.2:8000
  fairlead init 10.0.0.1:8000 --prefill 10.0.0.9:8000 --kv-events
  fairlead init --pool llama --namespace serving
""")
def init(
    servers: _Servers = None,
    prefill: _Prefill = None,
    pool: _Pool = "",
    namespace: _Namespace = "",
    kv_events: _KvEvents = None,
    tokenizer: _Tokenizer = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where clients connect.")] = 8080,
    admin_port: Annotated[
        int, typer.Option(metavar="PORT", min=1, max=65535, help="Port of metrics, health and dashboard.")
    ] = 9090,
    out: Annotated[Path, typer.Option(metavar="FILE", dir_okay=False, help="The file to write.")] = DEFAULT_FILE,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    probe: Annotated[bool, typer.Option(help="Ask the servers what they serve.")] = True,
) -> None:
    """Probe model servers and write a commented configuration for them. In a terminal it asks for what is missing.

    Exit codes: 0 written, 1 a server does not answer, 2 wrong usage. Nothing is written unless all is well.
    """
    from fairlead.core.errors import ConfigError

    if out.exists() and not force:
        raise ConfigError("exists already: --force overwrites it, --out writes another", str(out))
    asks = not (servers or prefill or pool) and sys.stdin.isatty()
    servers, prefill = _listed(servers or ()), _listed(prefill or ())
    if asks:
        servers, prefill, pool, namespace = _interruptible(_ask)
    for name, option in ((pool, "--pool"), (namespace, "--namespace")):
        if name and not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of Kubernetes: lower-case letters, digits, '-' and '.'", option)
    if prefill and not servers:
        raise ConfigError("these only compute prompts: also name the servers that decode, HOST:PORT", "--prefill")
    if pool and (servers or prefill):
        raise ConfigError("endpoints come from the InferencePool: leave out the servers, or --pool", "--pool")
    if not (servers or prefill or pool):
        raise ConfigError("name the model servers, e.g. fairlead init 10.0.0.1:8000, or --pool NAME", "HOST:PORT")
    _check([*servers, *prefill])
    surveyed = _surveyed([*servers, *prefill], probe)
    published = any(server.kv_events for server in surveyed)
    if kv_events and surveyed and not published:
        raise ConfigError("no server publishes KV events: see docs/kv-events.md#on-the-engine", "--kv-events")
    if kv_events is None:
        kv_events = published and (
            not asks or _interruptible(lambda: typer.confirm("Use KV events, to know exactly what is cached?", True))
        )
    silent = [server.address for server in surveyed if not server.kv_events]
    if kv_events and silent:
        typer.echo(f"note: no KV events at {', '.join(silent)}; `fairlead doctor` says how to switch them on")
    lines = [*_endpoints(servers, prefill, surveyed), *_kubernetes(pool, namespace), *_settings(pool, port, admin_port)]
    lines += _kv(kv_events, tokenizer)
    _write(out, "\n".join(lines) + "\n", force)
    named = "" if out == DEFAULT_FILE else f" {out}"
    typer.echo(f"written: {out}\nnext: fairlead doctor{named} && fairlead serve{named}")


def _listed(words: Iterable[str]) -> list[str]:
    """The addresses in words that have one, or several with commas between them. From the base URL of a client, such as
    `http://10.0.0.1:8000/v1`, its address is taken."""
    addresses = (address for word in words for address in word.replace(",", " ").split())
    urls = ((address, re.fullmatch("(?:http://)?([^/@]+)/?(?:v1/?)?", address, re.I)) for address in addresses)
    return [url[1] if url is not None else address for address, url in urls]


def _check(addresses: list[str]) -> None:
    """Raises `ConfigError` that names each address that cannot be used, or is there twice."""
    from msgspec import structs

    from fairlead.config.endpoint_list import parse_endpoints_text
    from fairlead.core.errors import ConfigError

    said = []
    for problem in parse_endpoints_text(dumps(addresses).encode()).problems:
        number = re.search("[0-9]+", problem.path)
        argument = addresses[int(number[0])] if number else "HOST:PORT"
        said.append(str(structs.replace(problem, path=argument, line=0)))
    if said:
        raise ConfigError("\n".join(said))


def _interruptible(ask: Callable[[], T]) -> T:
    """The answer. Ctrl-C ends the command as it does elsewhere; as an error of the prompt it would exit with 1."""
    try:
        return ask()
    except typer.Abort:
        raise KeyboardInterrupt from None


def _ask() -> tuple[list[str], list[str], str, str]:
    """(servers, those that only prefill, pool, namespace)"""
    named = typer.prompt("Model servers, HOST:PORT each (none: pods of Kubernetes)", default="", show_default=False)
    servers = _listed([named])
    if not servers:
        pool = typer.prompt("Name of the InferencePool")
        return [], [], pool, typer.prompt("Its namespace", default="default")
    named = typer.prompt("Servers that only prefill (none: all do both)", default="", show_default=False)
    return servers, _listed([named]), "", ""


def _surveyed(addresses: list[str], probe: bool) -> "list[Server]":
    """Ask the servers what they serve, print it, and return it. Ends the command if a server does not answer."""
    if not addresses or not probe:
        return []
    import asyncio

    from fairlead.cli.options import busy
    from fairlead.doctor.survey import differences, survey

    with busy("asking the servers"):
        surveyed = asyncio.run(survey(addresses))
    for server in surveyed:
        complain(str(server)) if server.problem else typer.echo(f"found {plain(str(server))}")
    if any(server.problem for server in surveyed):
        complain("nothing was written: start these servers, correct or omit their addresses, or use --no-probe")
        raise typer.Exit(FAILED)
    typer.echo("How many requests an engine runs at once (its slots) is learned while it serves.")
    for difference in differences(surveyed):
        typer.echo(f"note: {difference}")
    return surveyed


def _endpoints(servers: list[str], prefill: list[str], surveyed: "list[Server]") -> list[str]:
    if not (servers or prefill):
        return []
    said = {server.address: server for server in surveyed}
    lines = ["# Model servers.", "endpoints:"]
    for address in [*servers, *prefill]:
        role = ("prefill" if address in prefill else "decode") if prefill else ""
        server = said.get(address)
        engine = server.engine if server is not None and server.engine != "vllm" else ""
        labels = [f"llm-d.ai/role: {role}"] * bool(role) + [f"llm-d.ai/engine-type: {engine}"] * bool(engine)
        url = f', metricsUrl: "{server.metrics_url}"' if server is not None and server.metrics_url else ""
        entry = f'{{address: "{address}"{url}, labels: {{{", ".join(labels)}}}}}' if labels else f'"{address}"'
        lines.append(
            f"  - {entry}" + (f"  # {', '.join(server.models)}" if server is not None and server.models else "")
        )
    if prefill:
        lines += [
            "",
            "# A prompt and its answer are computed by different servers if that saves time.",
            "policy: prefill-decode",
        ]
    return [*lines, ""]


def _kubernetes(pool: str, namespace: str) -> list[str]:
    if not pool:
        return []
    # A name of digits is a number in YAML.
    inside = f"pool: {dumps(pool)}" + (f", namespace: {dumps(namespace)}" if namespace else "")
    return ["# Endpoints are the ready pods of this InferencePool.", f"kubernetes: {{{inside}}}", ""]


def _settings(pool: str, port: int, admin_port: int) -> list[str]:
    behind = "; behind a gateway of your own: `gateway: none`, with extProc.tls" if pool else ""
    return [
        f"# Where clients connect: an Envoy that Fairlead starts{behind} (docs/gateway.md).",
        f"gateway: {{port: {port}}}",
        "",
        f"# Metrics, health, decisions and the dashboard: http://127.0.0.1:{admin_port}/",
        f"admin: {{port: {admin_port}}}",
        "",
        "# Keeps the numbers behind each decision in memory, for `fairlead explain`.",
        "journal: {explain: true}",
        "",
    ]


def _kv(wanted: bool, tokenizer: str) -> list[str]:
    model = f"modelPath: {dumps(tokenizer)}" if tokenizer else "render: engine"
    lines = ["kvEvents: {enabled: true}", f'tokens: {{models: {{"*": {{{model}}}}}}}']
    mark = "" if wanted else "# "
    about = "# KV events: what each engine has cached, as it says itself (docs/kv-events.md)."
    return [about, *(mark + line for line in lines)]


def _write(out: Path, text: str, force: bool) -> None:
    """Write the file. Raises `ConfigError` if the text would not load; then the file is unchanged."""
    from fairlead.compat.load import load
    from fairlead.core.errors import ConfigError
    from fairlead.server.files import write_output

    load(text)
    try:
        write_output(out, text, new=not force)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(out)) from None
