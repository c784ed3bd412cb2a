"""`fairlead top`: reads the dashboard's stream, or one snapshot of it, and draws it in a terminal.

A lost connection is retried until the command ends.
"""

import re
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException, HTTPResponse
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fairlead.cli.basics import FAILED
from fairlead.cli.options import OTHER_PORT, Admin, admin_url, complain, completion, examples, hint_of, opened
from fairlead.core.errors import ADMIN_PORT
from fairlead.core.text import escaped, masked, plain
from fairlead.server.observe.instruments import OTHER

#: Seconds of silence after which a connection counts as lost, and seconds between two attempts.
_SILENCE, _RETRY = 5.0, 1.0
_MAX_LINE = 64 << 20

Page = dict[str, Any]


def snapshot(base: str) -> Page:
    """Read one snapshot, which has the keys `about` and `now`. Raises `OSError` or `ValueError`."""
    with _open(f"{base}/dashboard/snapshot") as answer:
        message = msgspec.json.decode(answer.read(_MAX_LINE))
    if not isinstance(message, dict) or "now" not in message:
        raise ValueError(OTHER_PORT)
    begun = message["about"]
    return {"about": begun["about"], "now": message["now"]}


def follow(base: str, every: float) -> Iterator[tuple[Page, str]]:
    """Yield the state every `every` seconds, each with the present problem, if any. Never ends."""
    state: Page = {}
    while True:
        try:
            for state in _stream(base, every):
                yield state, ""
            problem = "the scheduler ended the connection"
        except (OSError, ValueError) as error:
            problem = f"{masked(base)} does not answer: {error}"
        yield state, f"{problem}; trying again"
        time.sleep(_RETRY)


def _stream(base: str, every: float) -> Iterator[Page]:
    about: Any = {}
    due = 0.0
    with _open(f"{base}/dashboard/stream") as answer:
        event = b""
        while line := answer.readline(_MAX_LINE):
            if line.startswith(b"event: "):
                event = line[7:].strip()
            elif line.startswith(b"data: ") and event == b"beginning":
                about = msgspec.json.decode(line[6:])["about"]
            elif line.startswith(b"data: ") and event == b"now" and time.monotonic() >= due:
                # A snapshot that arrives up to 0.1 s early is shown: snapshots have an interval of their own.
                due = time.monotonic() + every - 0.1
                yield {"about": about, "now": msgspec.json.decode(line[6:])}


def _open(url: str) -> HTTPResponse:
    """Open a page. Raises `OSError`, with the server's text if it refuses."""
    try:
        return opened(url, _SILENCE)
    except urllib.error.HTTPError as error:
        words = error.read(300).decode(errors="replace").strip()
        if error.code == 404:
            ours = words.startswith(ADMIN_PORT)
            words = "it has no dashboard (is admin.debug off?)" if ours else OTHER_PORT
        raise OSError(words or f"status {error.code}") from None
    except HTTPException:
        raise OSError(OTHER_PORT) from None
    except urllib.error.URLError as error:
        said = error.reason.strerror if isinstance(error.reason, OSError) else ""
        raise ConnectionError(said or str(error.reason)) from None


# Draws the dashboard's numbers, with the dashboard's words.

Row = dict[str, Any]

#: Columns to sort by; all except names in descending order.
SORTS: dict[str, Callable[[Row], Any]] = {
    # Numbers in names are compared as numbers.
    "name": lambda row: [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", row["id"])],
    "waiting": lambda row: -row["queue"],
    "running": lambda row: -row["active"],
    "kv": lambda row: -(row["kv"] or 0.0),
    "sent": lambda row: -(row["sent"] or 0),
    "hits": lambda row: -(row["hit_rate"] or 0.0),
    "ttft": lambda row: -(row["actual_ms"] or 0.0),
}
_DASH = "–"
#: Widths in characters: of a state without wrapping; the room for names, for which columns are left out; the least room
#: for names if no more columns can be left out.
_STATE, _NAME, _LEAST_NAME = 18, 24, 16
_Column = tuple[str, int, Callable[[Row], str | Text]]
#: Lines of the screen that are not rows of tables; rows of endpoints and of traffic that are shown in any case.
_OTHER_LINES, _LEAST_ENDPOINTS, _LEAST_TRAFFIC = 17, 3, 4


def view(state: dict[str, Any], sort: str, width: int, height: int | None = None, problem: str = "") -> RenderableType:
    """The whole screen. `width`, `height`: its characters and lines; `None` = as many lines as needed."""
    if not state:
        return Text(plain(problem) or "waiting for the first numbers …", "bold red" if problem else "")
    about, now, problem = plain([state["about"], state["now"], problem])  # names from clients may have escape codes
    parts: list[RenderableType] = [_title(about, now)]
    if problem:
        parts.append(Text(f"! {problem}; these numbers are old", "bold red"))
    parts += _notices(now["notices"], now["totals"]["error_rate"])
    parts.append(_figures(now))
    if now["schedulers"] > 1:
        parts.append(Text(f"numbers of this scheduler, one of {now['schedulers']}; in flight and at endpoints: all"))
    if now["replicas"]:
        parts.append(Text.assemble(("replicas ", "dim"), now["replicas"]))
    endpoints, traffic, queues = sorted(now["endpoints"], key=SORTS[sort]), now["traffic"], now["queues"]
    most = most_traffic = None
    if height is not None:
        used = len(now["notices"]) + (len(queues["bands"]) + 2 if queues and queues["bands"] else 0)
        most_traffic = max(height - _OTHER_LINES - used - len(endpoints), _LEAST_TRAFFIC)
        most = max(height - _OTHER_LINES - used - min(len(traffic), most_traffic), _LEAST_ENDPOINTS)
    parts.append(_endpoints(endpoints, width, most))
    parts.append(_traffic(traffic, now["traffic_left_out"], most_traffic))
    if queues and queues["bands"]:
        parts.append(_queues(queues))
    return Group(*parts)


def _title(about: Row, now: Row) -> Text:
    title = Text.assemble(("Fairlead ", "bold"), about["version"], "  pool ", (about["pool"], "bold"))
    running_s = now.get("running_s", now["at"] - about["started"])  # older schedulers do not report it
    title.append(f"  policy {now['policy']}  running for {_seconds(running_s)}")
    return title


def _notices(notices: Iterable[Row], error_rate: float | None) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for notice in notices:
        sign, color = ("!", "bold red") if notice["level"] == "bad" else ("△", "yellow")
        since = f" since {_hour(notice['since'])}" if notice["since"] else ""
        runbook = f" (docs/runbook.md#{notice['runbook'].lower()})" if notice["runbook"] else ""
        lines.append(Text(f"{sign} {notice['text']}{since}{notice['detail']}{runbook}", color))
    if not lines and error_rate:
        failing = "less than 0.1%" if error_rate < 0.0005 else f"{error_rate:.1%}"
        why = "of the requests get 4xx: mistakes of clients, or refused here"
        lines.append(Text(f"△ every endpoint answers, but {failing} {why}", "yellow"))
    return lines or [Text("✓ all is well", "green")]


def _figures(now: Row) -> Text:
    totals, latency, queues = now["totals"], now["latency"], now["queues"]
    hits = totals["hit_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else None
    held = totals["inside"] / totals["forecasts"] if totals["forecasts"] else None
    waiting = _DASH if queues is None else f"{queues['waiting']:,} (saturation {queues['saturation']:.2f})"
    rows = (
        ("requests", f"{_number(totals['arrived_per_s'], 1)} /s, {totals['requests']:,} decided"),
        ("errors", f"{_percent(totals['error_rate'])}, {totals['errors']:,} in all"),
        ("5xx", f"{_number(totals['server_errors_per_s'], 1)} /s"),
        ("4xx", f"{_number(totals['client_errors_per_s'], 1)} /s"),
        ("in flight", f"{now['leases']:,}"),
        ("queue", waiting),
        ("TTFT", f"p50 {_ms(latency['ttft']['p50'])}, p95 {_ms(latency['ttft']['p95'])}"),
        ("prefix hits", _percent(hits)),
        ("forecasts held", _percent(held)),
    )
    text = Text()
    for i, (name, value) in enumerate(rows):
        is_bad = name == "errors" and totals["error_rate"]
        text.append(f"{name} ", "dim").append(value, "bold red" if is_bad else "bold")
        text.append("" if i == len(rows) - 1 else "   ")
    return text


def _endpoints(rows: list[Row], width: int, most: int | None) -> Table:
    shown = _first(rows, most)
    columns, names = _fitting(shown, width)
    left = len(rows) - len(shown)
    table = _table((name for name, _, _ in columns), 2, f"and {left} more endpoints" if left else None)
    for row in shown:
        name, *figures = (cell(row) for _, _, cell in columns)
        table.add_row(_cut(str(name), names), *figures)
    return table


def _first(rows: list[Row], most: int | None) -> list[Row]:
    """All rows, or so many that a line fits which says how many more there are."""
    return rows if most is None or len(rows) <= most else rows[: most - 1]


def _fitting(rows: list[Row], width: int) -> tuple[list[_Column], int]:
    """The columns that fit beside the names of endpoints, and how many characters they leave for the names."""
    roles = any(row["role"] for row in rows)
    columns = [column for column in _COLUMNS if width >= column[1] and (roles or column[0] != "role")]
    while True:
        widths = [max(cell_len(str(text)) for text in (name, *map(cell, rows))) for name, _, cell in columns]
        left = width - min(widths[1], _STATE) - sum(widths[2:]) - 3 * len(widths)
        least = max(column[1] for column in columns)
        if left >= min(widths[0], _NAME) or not least:
            return columns, max(left, _LEAST_NAME)
        columns = [column for column in columns if column[1] < least]


def _cut(name: str, width: int) -> str:
    """The name without its middle if it is too long: names of pods differ at their ends."""
    end = max((width - 1) // 2, 12)
    return name if cell_len(name) <= width else f"{name[: width - 1 - end]}…{name[-end:]}"


def _near(row: Row) -> str:
    """The sign before numbers that are estimated; empty if they are not."""
    return "" if row["fresh"] else "≈"


#: Columns of the table of endpoints: name, the least screen width at which the column is shown, and its content.
_COLUMNS: tuple[_Column, ...] = (
    ("endpoint", 0, lambda row: row["id"]),
    ("state", 0, lambda row: Text(*_state(row))),
    ("role", 90, lambda row: row["role"] or _DASH),
    ("waiting", 0, lambda row: f"{_near(row)}{row['queue']:,.0f}"),
    ("running", 0, lambda row: f"{_near(row)}{row['active']:,.0f}"),
    ("KV", 0, lambda row: f"{_near(row)}{_percent(row['kv'])}"),
    ("in flight", 120, lambda row: f"{row['leases']:,}"),
    ("sent/min", 90, lambda row: _number(row["sent"], 0)),
    ("hits", 80, lambda row: _percent(row["hit_rate"])),
    ("TTFT predicted", 105, lambda row: _ms(row["predicted_ms"])),
    ("TTFT actual", 80, lambda row: _ms(row["actual_ms"])),
    ("in band", 130, lambda row: _percent(row["inside"])),
    ("index", 130, lambda row: f"{row['source']} {_percent(row['trust'])}"),
)


def _state(row: Row) -> tuple[str, str]:
    if row["state"] == "out":
        return f"out {_hour(row['since'])}: {row['reason']}", "red"
    words = {
        "serving": ("serving", "green"),
        "unread": ("metrics not read", "yellow"),
        "suspect": ("may hang", "yellow"),
    }
    return words[row["state"]]


def _traffic(rows: list[Row], unknown: int, most: int | None) -> RenderableType:
    """`unknown`: how many more rows there are."""
    if not rows:
        return Text("no request has arrived since the start", "dim")
    shown = _first(rows, most)
    left, failing = len(rows) - len(shown) + unknown, sum(row["errors"] > 0 for row in rows[len(shown) :])
    more = f"and {left} more{f', {failing} of them with errors' if failing else ''}" if left else None
    table = _table(("model", "band", "requests/s", "in flight", "requests", "errors", "hits"), 1, more)
    for row in shown:
        model = "(names without metrics of their own)" if row["model"] == OTHER else row["model"] or "(none named)"
        model += f" → {row['target']}" if row["target"] else ""
        table.add_row(
            model,
            row["priority"],
            _number(row["per_s"], 1),
            f"{row['running']:,}",
            f"{row['requests']:,}",
            f"{row['errors']:,}",
            _percent(row["hit_rate"]),
        )
    return table


def _queues(queues: Row) -> Table:
    table = _table(("queue", "waiting", "longest", "until served", "of its limit"), 1)
    for band in queues["bands"]:
        waits = band["waiting"] > 0
        table.add_row(
            f"band {band['priority']}",
            f"{band['waiting']:,}",
            _seconds(band["oldest_s"]) if waits else _DASH,
            _seconds(band["delay_s"]) if waits else _DASH,
            _percent(band["used"]),
        )
    return table


def _table(names: Iterable[str], left: int, caption: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left", padding=(0, 1))
    for i, name in enumerate(names):
        # Texts are wrapped if there is no room. Names of endpoints are shortened already, and figures stay whole.
        wraps = name == "state" or (i == 0 and name != "endpoint")
        table.add_column(name, justify="left" if i < left else "right", no_wrap=not wraps, overflow="fold")
    return table


def _number(value: float | None, digits: int) -> str:
    return _DASH if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return _DASH if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    if value is None:
        return _DASH
    if value < 1000.0:
        return f"{value:.1f} ms" if value < 10.0 else f"{value:.0f} ms"
    return f"{value / 1000.0:.2f} s"


def _hour(value: float) -> str:
    """The local time of day, with the date if it is more than half a day ago."""
    is_today = time.time() - value < 43_200.0
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", time.localtime(value))


def _seconds(value: float) -> str:
    if value < 120.0:
        return f"{value:.0f} s"
    return f"{value / 60.0:.0f} min" if value < 7200.0 else f"{value / 3600.0:.0f} h"


@examples("""
\b
Examples:
  fairlead top
  fairlead top --admin http://10.0.0.5:9090 --sort waiting
  fairlead top --once
  fairlead top --once --json | jq '.now.totals'
""")
def top(
    old_url: Annotated[str, typer.Argument(hidden=True)] = "",
    admin: Admin = "",
    once: Annotated[bool, typer.Option("--once", help="Print the current state once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per update.")] = False,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help=f"Order of endpoints: {', '.join(SORTS)}.",
            autocompletion=completion("fairlead.cli.top", "SORTS"),
        ),
    ] = "name",
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, max=60.0, help="Time between updates.")] = 1.0,
) -> None:
    """Watch a running scheduler: endpoints, traffic, queues and warnings, until Ctrl-C.

    It shows what the dashboard shows. NO_COLOR turns colours off. With --once, exit code 1 means that nothing answers.
    """
    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r} is not one of {', '.join(SORTS)}", param_hint="--sort")
    address = admin_url(admin, old_url)
    if not once:
        (_top_stream if as_json else _live)(address, sort, every)
        return
    try:
        state = snapshot(address)
    except (OSError, ValueError) as error:
        hint = f"; {hint_of(error)}" if isinstance(error, ConnectionError) else ""
        complain(f"{masked(address)} does not answer: {error}{hint}")
        raise typer.Exit(FAILED) from None
    _print(state, as_json, sort)


def _print(state: dict[str, Any], as_json: bool, sort: str) -> None:
    if as_json:
        typer.echo(escaped(msgspec.json.encode(state)))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(view(state, sort, console.width))


def _top_stream(address: str, sort: str, every: float) -> None:
    for state, problem in follow(address, every):
        if problem:
            complain(problem)
        else:
            _print(state, True, sort)


def _live(address: str, sort: str, every: float) -> None:
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        for state, problem in follow(address, every):
            console.print(view(state, sort, console.width, problem=problem))
        return
    with Live(Text(f"asking {masked(address)} …"), console=console, screen=True, auto_refresh=False) as live:
        for state, problem in follow(address, every):
            live.update(view(state, sort, console.width, console.height, problem), refresh=True)
