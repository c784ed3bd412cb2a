"""The pure ring takes time and chance from outside: what import-linter cannot see of that, read off the sources.

import-linter knows modules only. `random` and `datetime` are allowed as modules, for `Random` (a type, and a generator
that is seeded) and for the arithmetic of dates; their other names are a clock or a generator of the process.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = "The pure ring knows no I/O, clock or chance"

#: Every name of these is a clock, a wait, or unseeded chance.
FORBIDDEN_MODULES = ("time", "random", "secrets", "uuid")
ALLOWED = ("random.Random",)
FORBIDDEN = {f"datetime.{of}" for of in ("datetime.now", "datetime.utcnow", "datetime.today", "date.today")}
#: Without arguments they are seeded by the operating system.
SEEDED = "random.Random"


def pure_files() -> list[Path]:
    """Sources of the modules that the contract in pyproject.toml names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (modules,) = (contract["source_modules"] for contract in contracts if contract["name"] == CONTRACT)
    found = []
    for module in modules:
        place = ROOT / "src" / module.replace(".", "/")
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        assert files and all(file.is_file() for file in files), module
        found += files
    return found


def impurities(source: str) -> Iterator[str]:
    """`line: name` of everything in a module that reads a clock or draws from a generator that nobody seeded."""
    tree = ast.parse(source)
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins |= {name.asname or name.name.partition(".")[0]: name.name for name in node.names}
            used = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            origins |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            used = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        yield from (f"{node.lineno}: {name}" for name in used if not _allowed(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _origin(node, origins) in FORBIDDEN:
            yield f"{node.lineno}: {_origin(node, origins)}"
        elif isinstance(node, ast.Call) and _origin(node.func, origins) == SEEDED and not (node.args or node.keywords):
            yield f"{node.lineno}: {SEEDED}()"


def _allowed(name: str) -> bool:
    return name in ALLOWED or name.partition(".")[0] not in FORBIDDEN_MODULES


def _origin(node: ast.expr, origins: dict[str, str]) -> str:
    """What a dotted expression stands for, through the names under which things were imported."""
    if isinstance(node, ast.Name):
        return origins.get(node.id, "")
    if isinstance(node, ast.Attribute):
        before = _origin(node.value, origins)
        return f"{before}.{node.attr}" if before else ""
    return ""


def test_the_pure_ring_reads_no_clock_and_draws_from_no_generator_of_its_own() -> None:
    files = pure_files()
    assert len({file.relative_to(ROOT / "src" / "fairlead").parts[0] for file in files}) >= 4
    found = [f"{file.relative_to(ROOT)}:{what}" for file in files for what in impurities(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "import random as chance",
        "from random import Random, choice",
        "from random import SystemRandom",
        "from random import *",
        "def f():\n    from random import shuffle",
        "import time",
        "from time import monotonic as now",
        "import secrets",
        "from uuid import uuid4",
        "from random import Random\nrng = Random()",
        "import datetime\nat = datetime.datetime.now()",
        "import datetime as dt\nat = dt.datetime.utcnow",
        "from datetime import datetime\nat = datetime.now(None)",
        "from datetime import datetime as d\nclass A:\n    def f(self):\n        return [d.today() for _ in ()]",
        "from datetime import date\nat = date.today()",
    ],
)
def test_a_clock_or_a_generator_is_found(line: str) -> None:
    assert len(list(impurities(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "from random import Random\ndef f(rng: Random, time):\n    return Random(7), rng.random(), time.time()",
        "from datetime import UTC, datetime\nat = datetime.fromtimestamp(0.0, UTC).now",
        "from fairlead.core.clock import time, random\nat = time()",
        "from . import time\nat = time.time()",
        "class A:\n    def f(self):\n        return self.clock.time(), self.datetime.now(), now()",
    ],
)
def test_what_is_given_or_seeded_is_left_alone(line: str) -> None:
    assert list(impurities(line)) == []
