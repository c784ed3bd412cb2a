"""`fairlead explain`: why a request went where it went."""

from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

from fairlead.cli._options import FAILED, WRONG_INPUT, complain
from fairlead.cli._policy import Policy, Set, change

_EXAMPLES = """
\b
Examples:
  fairlead explain 94 journal/
  fairlead explain 3f2a9c01.000000000000005e journal/    (the response header's id)
  fairlead explain 94 http://localhost:9090
  fairlead explain 94 journal/ --policy round-robin
  fairlead explain 94 journal/ --set interference=0
"""


def explain(
    request: Annotated[
        str, typer.Argument(metavar="ID", help="A decision id, our number of a request, or a client's x-request-id.")
    ],
    source: Annotated[
        str, typer.Argument(metavar="JOURNAL|URL", help="Directory of a journal, or an admin port.")
    ] = "http://localhost:9090",
    policy: Policy = "",
    setting: Set = None,
    run: Annotated[str, typer.Option("--run", help="Of which process; default: the newest that knows it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Endpoints to show.")] = 12,
) -> None:
    """Why this endpoint, why not the others, what it would have taken, and how good the forecast was.

    Terms are those of the policy: milliseconds of the cost model, or weighted scores; they add up to the total. With
    --policy or --set another policy is asked on the very same numbers (a journal is needed).
    """
    from fairlead.model.errors import FairleadError

    try:
        if source.startswith(("http://", "https://")):
            if policy or setting:
                raise ValueError(
                    "another policy needs a journal: the admin port tells what was decided, not the numbers"
                )
            found = _fetch(source, request)
        else:
            found = _search(Path(source), request, run, policy, setting)
    except (ValueError, OSError) as error:
        complain(error)
        raise typer.Exit(WRONG_INPUT) from None
    except FairleadError as error:
        complain(error)
        raise typer.Exit(FAILED) from None
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    from fairlead.cli._explain_table import show

    show(found, top)


explain.__doc__ = f"{cleandoc(explain.__doc__ or '')}\n{_EXAMPLES}"


def _fetch(url: str, request: str) -> dict[str, Any]:
    """Raises `ValueError`, `OSError`, or `EngineError` where nothing answers."""
    import urllib.error
    from urllib.parse import quote
    from urllib.request import urlopen

    import msgspec

    from fairlead.model.errors import EngineError

    try:
        with urlopen(f"{url.rstrip('/')}/debug/decisions/{quote(request, safe='')}", timeout=10.0) as answer:
            found: dict[str, Any] = msgspec.json.decode(answer.read())
            return found
    except urllib.error.HTTPError as error:
        raise ValueError(error.read(500).decode(errors="replace").strip() or str(error)) from None
    except urllib.error.URLError as error:
        raise EngineError(
            url, f"does not answer ({error.reason}); is `fairlead serve` running, and is this its admin port?"
        ) from None


def _search(path: Path, request: str, run: str, policy: str, settings: list[str] | None) -> dict[str, Any]:
    from fairlead.cli._progress import busy
    from fairlead.config.recorded import restore
    from fairlead.config.registry import build_policy
    from fairlead.observe.journal_explain import explained, plain
    from fairlead.schedule.explain import again
    from fairlead.schedule.explain import explain as why
    from fairlead.sim.journal_search import search

    other = change(policy, settings)
    with busy(f"searching {path}"):
        found = search(path, request, run)
    config = restore(found.scheduling)
    made = explained(found.decision, found.outcome, lambda: build_policy(config))
    made["decision_id"] = f"{found.run}.{found.decision.request.id:016x}"
    if other is not None:
        trace, asked = found.decision.trace, other(config)
        if trace is None or trace.snapshot is None:
            raise ValueError("the numbers of this decision are not in the journal; nothing else can be asked")
        endpoint, answer = again(build_policy(asked), found.decision.request, trace)
        answer.snapshot, answer.held = trace.snapshot, trace.held
        instead = why(lambda: build_policy(asked), found.decision.request, answer, endpoint)
        made["instead"] = {"same": endpoint == found.decision.endpoint, **plain(instead)}
    return made
