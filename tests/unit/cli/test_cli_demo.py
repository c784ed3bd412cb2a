"""The options of `fairlead demo` stand in the command itself, so that `--help` imports little; and its exit codes."""

from inspect import signature
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from fairlead.cli.app import build_app
from fairlead.cli.demo import demo
from fairlead.lab.demo import Plan


def test_defaults_are_those_of_the_plan() -> None:
    options = {name: parameter.default for name, parameter in signature(demo).parameters.items()}
    del options["as_json"], options["check"]
    plan = structs.asdict(Plan())
    assert options == {name: plan[name] for name in options}


@pytest.mark.parametrize(
    ("hits", "failed", "arguments", "code"),
    [
        (0.9, 0, [], 0),
        (0.9, 0, ["--check"], 0),
        (0.7, 0, [], 0),
        (0.7, 0, ["--check"], 1),
        (0.9, 1, [], 1),
        (0.9, 1, ["--check"], 1),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, hits: float, failed: int, arguments: list[str], code: int) -> None:
    asked: list[bool] = []

    async def run(_plan: Plan, _console: object, check: bool) -> dict[str, dict[str, Any]]:
        asked.append(check)
        slow: dict[str, Any] = {"ttft_ms": {"p50": 900.0, "p95": 900.0}, "prefix_hit_rate": 0.1, "failed": 0}
        return {"round-robin": slow, "default": fast}

    fast: dict[str, Any] = {"ttft_ms": {"p50": 9.0, "p95": 9.0}, "prefix_hit_rate": hits, "failed": failed}
    monkeypatch.setattr("fairlead.lab.demo.run", run)
    assert CliRunner().invoke(build_app(), ["demo", *arguments]).exit_code == code
    assert asked == [bool(arguments)]
