"""Plugins beside the policy: metric sources, parsers, and what stands before the policy."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.apis.request import parse_request
from fairlead.compat.load import load, problems
from fairlead.config.building import build_flow_controller
from fairlead.config.plugins import build_measure, build_parse, build_policy
from fairlead.core.errors import PluginError
from fairlead.testing import endpoint

ONE = "endpoints: ['127.0.0.1:8000']\n"
MODULE = """
from fairlead.apis.request import ParsedRequest
from fairlead.plugins.params import Params

class Heat:
    type = "heat"
    provides = ("heat",)
    class Params(Params):
        factor: float = 1.0
    def __init__(self, params, name="heat"):
        self.name, self._factor = name, params.factor
    def measure(self, endpoint, page):
        return {"heat": float(page) * self._factor}

class Rank:
    type = "rank"
    paths = ("/v1/rank",)
    def __init__(self, params, name="rank"):
        self.name = name
    def parse(self, path, body):
        return ParsedRequest(model=body.decode())

class Nameless:
    def measure(self, endpoint, page):
        return {}

class Pathless:
    paths = "/v1/rank"
    def parse(self, path, body):
        return None

class Fair:
    def __init__(self, params, name="fair"):
        self.name = name
    def turns(self, window):
        return []

class Level:
    def __init__(self, params, name="full"):
        self.name = name
    def level(self, fleet, now):
        return 0.0

class Order:
    def __init__(self, params, name="order"):
        self.name = name
    def key(self, waiting):
        return 0.0
"""
POINTS = ("heat=Heat", "rank=Rank", "nameless=Nameless", "pathless=Pathless", "fair=Fair", "full=Level", "order=Order")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "fl_extra_plugins.py").write_text(MODULE)
    info = tmp_path / "fl_extra-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-extra\nVersion: 3.0\n")
    points = "".join(f"{point.replace('=', '=fl_extra_plugins:')}\n" for point in POINTS)
    (info / "entry_points.txt").write_text(f"[fairlead.plugins]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("fl_extra_plugins", None)


def test_a_metric_source_gives_columns_that_a_scorer_may_name() -> None:
    text = f"metricSources: [{{type: heat, factor: 2}}]\nscorers: [{{type: metric, metric: heat, better: low}}]\n{ONE}"
    measure = build_measure(load(text))
    assert measure is not None
    assert measure(endpoint(), b"21") == {"heat": 42.0}
    (problem,) = problems(text.replace("metricSources: [{type: heat, factor: 2}]\n", ""))
    assert "unknown metric 'heat'" in problem.message
    assert build_measure(load(ONE)) is None


def test_a_parser_stands_before_the_built_in_one() -> None:
    parse = build_parse(load(f"parsers: [{{type: rank}}]\n{ONE}"))
    assert parse("/v1/rank", b"ranker").model == "ranker"
    assert build_parse(load(ONE)) is parse_request


@pytest.mark.parametrize(("kind", "type"), [("fairness", "fair"), ("ordering", "order"), ("saturation", "full")])
def test_flow_control_plugins_of_other_distributions_are_used(kind: str, type: str) -> None:
    config = load(f"flowControl: {{{kind}: {{type: {type}}}}}\n{ONE}")
    assert config.flow_control is not None and config.notes == ()
    assert [(spec.kind, spec.type) for spec in config.flow_control.plugins()] == [(kind, type)]
    flow_controller = build_flow_controller(config, build_policy(config))
    assert flow_controller is not None
    band = flow_controller.flow.queues._band(0)
    used = {
        "fairness": band.fairness.name,
        "ordering": band.ordering.name,
        "saturation": flow_controller.flow.gate.name,
    }
    assert used[kind] == type


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("metricSources: [{type: nameless}]", "metric source without `provides"),
        ("parsers: [{type: pathless}]", "parser without `paths"),
    ],
)
def test_what_a_class_has_to_have(text: str, reason: str) -> None:
    with pytest.raises(PluginError, match=f"fl-extra 3.0 is a {reason}"):
        load(f"{text}\n{ONE}")


def test_kinds_are_not_mixed_up() -> None:
    (problem,) = problems(f"parsers: [{{type: heat}}]\n{ONE}")
    assert (problem.path, problem.hint) == ("$.parsers[0].type", "'heat' is a metric-source")
