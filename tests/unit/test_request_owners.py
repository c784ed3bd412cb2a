"""Nothing but the registry keeps requests by their id: read off the sources."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "fairlead"
#: Where something is kept by request id all the same, and why that is nobody's state.
EXEMPT = {
    "core/requests.py": "the registry",
    "server/observe/decisions.py": "records of the last decisions, to look them up by id; bounded",
    "server/observe/metrics.py": "decisions whose labels have no series yet, counted when they end; bounded",
    "server/live/shadows.py": "cases shown to policies on trial in other processes; bounded by time, nobody waits",
    "server/sdk/check.py": "one batch of answers, within a call",
    "lab/simulator/capture.py": "a finished run, read from a journal",
    "lab/simulator/journal.py": "a finished run, read from a journal",
    "lab/simulator/replay.py": "what a journal says was decided, and answers of the policy beside, within an event",
    "server/observe/tracing.py": "trace ids of the last requests, to name them beside figures; bounded",
    "lab/simulator/simulation.py": "the simulated clients, a list whose places are the ids",
}
#: `x[request.id]`, `x.get(event.request_id)`, `x.pop(…)`, `request.id in x`.
USE = re.compile(
    r"[\w\])](\.(get|pop|setdefault))?[\[(](\w+\.)*(request_id|request\.id)\b"
    r"|\b(request_id|request\.id) (not )?in (?!\()"
)
CALL = re.compile(r"[\w\])]\((\w+\.)*(request_id|request\.id)\b")
#: The registry's own look-up.
LOOK_UP = re.compile(r"\brequests\.get\(")
NAMES = re.compile(r"by_id|by_request|of_request_id")


def kept_by_id(source: str) -> list[str]:
    """Lines that look like a dictionary whose keys are ids of requests."""
    found = []
    for number, line in enumerate(source.splitlines(), 1):
        plain = LOOK_UP.sub("(", line)
        uses = [use.group() for use in USE.finditer(plain) if not CALL.fullmatch(use.group())]
        if uses:
            found.append(f"{number}: {line.strip()}")
    for node in ast.walk(ast.parse(source)) if NAMES.search(source) else ():
        if isinstance(node, ast.AnnAssign) and NAMES.search(ast.unparse(node.target)):
            kind = ast.unparse(node.annotation)
            if re.search(r"[dD]ict\[int,", kind):
                found.append(f"{node.lineno}: {ast.unparse(node.target)}: {kind}")
    return found


def test_only_the_registry_keeps_requests_by_id() -> None:
    owners = {}
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        found = kept_by_id(file.read_text())
        if found:
            owners[name] = found
    assert {name: lines for name, lines in owners.items() if name not in EXEMPT} == {}
    assert "core/requests.py" in owners


def test_the_usual_spellings_are_seen() -> None:
    for line in (
        "self._leases[request.id] = lease",
        "lease = self._leases.get(event.request_id)",
        "del waiting[instruction.request_id]",
        "self._told.pop(request_id, None)",
        "if request_id in self._told: pass",
        "assert lease.request.id not in self._leases",
        "self._by_id: dict[int, Waiting] = {}",
    ):
        assert kept_by_id(line), line
    for line in ("f(request.id)", "entry = self.requests.get(event.request_id)", "Route(request.id, endpoint)"):
        assert not kept_by_id(line), line
