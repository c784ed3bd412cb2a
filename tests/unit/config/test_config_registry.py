"""Built-ins, aliases and foreign plugins; what a configuration becomes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from fairlead.compat.load import load, problems
from fairlead.compat.recorded import record, restore
from fairlead.config.plugins import build_hasher, build_policy
from fairlead.config.problems import InvalidConfig
from fairlead.config.registry import ALIASES, BUILTINS, METHODS, Registry, changed_code
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import PluginError
from fairlead.core.fleet import Fleet
from fairlead.core.policy import Clamped, Context
from fairlead.core.request import Request

ONE = "endpoints: ['127.0.0.1:8000']\n"

MODULE = '''
from pydantic import BaseModel, ConfigDict, Field, model_validator
import numpy as np
from fairlead.core.policy import Stage

class Wild:
    """Scores far outside of 0..1."""
    type = "wild"
    class Params(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")
        how_much: float = Field(7.0, validation_alias="howMuch")
        pair: tuple[int, str] = (1, "a")
        @model_validator(mode="after")
        def fits(self):
            if self.how_much > 1000:
                raise ValueError("that is too much")
            return self
    def __init__(self, params, name="wild"):
        self.name, self.params = name, params
        if params.how_much < 0:
            raise ValueError("too little")
    def score(self, request, fleet, cycle):
        return np.full(len(fleet.table), self.params.how_much)

class Nothing:
    """A filter without parameters."""
    type = "nothing"
    stage = Stage.LOAD
    def __init__(self, params, name="nothing"):
        self.name = name
    def keep(self, request, fleet, cycle):
        return None

class Soft:
    def keep(self, request, fleet, cycle):
        return None

class NoMethod:
    pass

class BadParams:
    Params = dict
    def pick(self, request, fleet, totals, cycle):
        return 0
'''
ENTRY_POINTS = """[fairlead.plugins]
wild = fl_wild_plugins:Wild
nothing = fl_wild_plugins:Nothing
soft = fl_wild_plugins:Soft
no-method = fl_wild_plugins:NoMethod
bad-params = fl_wild_plugins:BadParams
no-class = fl_wild_plugins:np
absent = fl_wild_plugins:Absent
no-module = fl_absent_module:X
queue-depth = fl_absent_module:X
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution with plugins, as pip would have installed it."""
    (tmp_path / "fl_wild_plugins.py").write_text(MODULE)
    info = tmp_path / "fl_wild-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-wild\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("fl_wild_plugins", None)


#: Parameters of those that cannot do without.
NEEDED: dict[str, dict[str, object]] = {
    "by-label": {"label": "zone"},
    "metric": {"metric": "waiting", "better": "low"},
    "metric-limit": {"metric": "kvUsage", "operator": "LessThan", "value": 0.5},
    "priority-holdback-policy": {"min_ceiling": 0.5},
}


def test_every_builtin_can_be_made_with_its_defaults() -> None:
    for kind, table in BUILTINS.items():
        for name, cls in table.items():
            plugin = cls(cls.Params(**NEEDED.get(name, {})), name="n")
            assert plugin.name == "n"
            assert hasattr(plugin, METHODS[kind])
            assert cls.type == name


def test_aliases_lead_to_builtins_and_shadow_none() -> None:
    for kind, table in ALIASES.items():
        for alias, (target, implied) in table.items():
            assert alias not in BUILTINS[kind]
            found = Registry().find(kind, alias)
            assert found is not None
            assert (found.type, found.foreign) == (target, None)
            found.params(**implied)


def test_regular_aliases_exist_but_not_where_the_formula_differs() -> None:
    """The reference has types of these names that do something else, or the same with other parameters."""
    for kind, name in (("scorer", "load-aware"), ("scorer", "lora-affinity"), ("scorer", "session-affinity")):
        assert Registry().find(kind, name) is not None  # type: ignore[arg-type]
        assert Registry().find(kind, f"{name}-{kind}") is None  # type: ignore[arg-type]
    assert Registry().find("scorer", "kv-utilization-scorer") is not None


def test_entry_points_are_not_even_listed_for_builtins() -> None:
    def fail() -> list[object]:
        raise AssertionError("asked for entry points")

    registry = Registry(fail)  # type: ignore[arg-type]
    build_policy(load(ONE, registry=registry), registry=registry)
    config = load(f"selection: {{topK: 2}}\n{ONE}", registry=registry)
    assert len(build_policy(config, registry=registry).scorers) == 6  # type: ignore[attr-defined]


def test_a_foreign_scorer_is_found_checked_and_clamped(installed: Path) -> None:
    config = load(f"scorers: [{{type: wild, weight: 2, howMuch: 9}}, {{type: load-aware}}]\n{ONE}")
    assert config.policy.scorers[0].parameters.how_much == 9.0
    profile = build_policy(config)
    assert isinstance(profile.scorers[0][0], Clamped)
    assert not isinstance(profile.scorers[1][0], Clamped)
    fleet = Fleet()
    fleet.up(Endpoint("a", "10.0.0.1:1"))
    request = Request(id=1, arrived=0.0)
    pick = profile.choose(request, fleet, Context(0.0, Random(1)))
    assert pick.trace is not None
    name, weight, column = pick.trace.scorers[0]
    assert (name, weight) == ("wild", 2.0)
    assert np.array_equal(column, [1.0])


def test_parameters_of_a_foreign_model_are_recorded_and_restored(installed: Path) -> None:
    config = load(f"scorers: [{{type: wild, howMuch: 9}}]\n{ONE}")
    recorded = json.loads(json.dumps(record(config)))
    assert recorded["policy"]["scorers"][0]["parameters"] == {"howMuch": 9.0, "pair": [1, "a"]}
    assert restore(recorded).policy.scorers[0].parameters == config.policy.scorers[0].parameters


def test_a_foreign_filter_without_parameters(installed: Path) -> None:
    config = load(f"filters: [{{type: nothing}}]\n{ONE}")
    assert [f.name for f in build_policy(config).filters][-1] == "nothing"


def test_parameters_of_foreign_plugins_are_checked_like_ours(installed: Path) -> None:
    (problem,) = problems(f"scorers:\n- {{type: wild, howMuhc: 9}}\n{ONE}")
    assert (problem.path, problem.line, problem.hint) == ("$.scorers[0].howMuhc", 2, "did you mean 'howMuch'?")


def test_what_only_the_foreign_struct_knows_is_reported_too(installed: Path) -> None:
    (late,) = problems(f"scorers:\n- {{type: wild, howMuch: 1001}}\n{ONE}")
    assert (late.path, late.line, late.message) == ("$.scorers[0]", 2, "that is too much")
    (inner,) = problems(f"scorers:\n- type: wild\n  pair: [1, 2]\n{ONE}")
    assert (inner.path, inner.line, inner.message) == ("$.scorers[0].pair[1]", 3, "expected a string, got 2")


def test_a_plugin_that_went_away_between_load_and_build(installed: Path) -> None:
    config = load(f"scorers: [{{type: wild}}]\n{ONE}")
    with pytest.raises(PluginError, match="no longer there as a scorer"):
        build_policy(config, registry=Registry(list))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-module", "No module named 'fl_absent_module'"),
        ("absent", "has no attribute 'Absent'"),
        ("soft", "is a filter without `stage: Stage`"),
        ("no-method", "has none of the methods"),
        ("no-class", "is not a class"),
        ("bad-params", "has a `Params` that is no pydantic model"),
    ],
)
def test_a_plugin_that_does_not_load_stops_the_start(installed: Path, name: str, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        load(f"scorers: [{{type: {name}}}]\n{ONE}")
    assert f"plugin {name}: of fl-wild 1.2" in str(caught.value)
    assert reason in str(caught.value)
    (problem,) = problems(f"scorers: [{{type: {name}}}]\n{ONE}")
    assert (problem.path, reason in problem.message) == ("$.scorers[0].type", True)


def test_other_problems_come_with_the_plugin_that_does_not_load(installed: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(f"scorers: [{{type: absent}}]\nseed: x\n{ONE}")
    assert len(caught.value.problems) == 2


def test_a_plugin_of_another_kind_and_an_unknown_one_next_to_it(installed: Path) -> None:
    (kind,) = problems(f"filters: [{{type: wild}}]\n{ONE}")
    assert (kind.message, kind.hint) == ("unknown filter type 'wild'", "'wild' is a scorer")
    (unknown,) = problems(f"filters: [{{type: wyld}}]\n{ONE}")
    assert unknown.hint == "did you mean 'wild'?"


def test_the_same_type_from_two_distributions_is_ambiguous(installed: Path) -> None:
    info = installed / "fl_other-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-other\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[fairlead.plugins]\nwild = fl_wild_plugins:Wild\n")
    with pytest.raises(PluginError, match=r"more than once, by fl-other 2\.0 and fl-wild 1\.2"):
        load(f"scorers: [{{type: wild}}]\n{ONE}")


def test_builtins_cannot_be_replaced(installed: Path) -> None:
    assert Registry().find("filter", "queue-depth").cls is BUILTINS["filter"]["queue-depth"]  # type: ignore[union-attr]


def test_a_plugin_that_refuses_its_parameters(installed: Path) -> None:
    config = load(f"scorers: [{{type: wild, howMuch: -1}}]\n{ONE}")
    with pytest.raises(PluginError, match=r"\$\.scorers\[0\].*ValueError: too little"):
        build_policy(config)


def test_code_that_changed_after_it_was_loaded_is_named(installed: Path) -> None:
    file = installed / "fl_wild_plugins.py"
    assert str(file) not in changed_code()
    assert Registry().find("scorer", "wild") is not None
    assert str(file) not in changed_code()
    file.write_text(MODULE + "# new\n")
    assert Registry().find("scorer", "wild") is not None, "the old code, which is loaded once"
    assert str(file) in changed_code()


def test_plugin_errors_reach_the_callback(installed: Path) -> None:
    seen: list[PluginError] = []
    profile = build_policy(load(f"scorers: [{{type: wild}}]\n{ONE}"), seen.append)
    fleet = Fleet()
    fleet.up(Endpoint("a", "10.0.0.1:1"))
    profile.scorers[0][0].score = None  # type: ignore[method-assign,assignment]
    profile.choose(Request(id=1, arrived=0.0), fleet, Context(0.0, Random(1)))
    assert [error.plugin for error in seen] == ["wild"]


@pytest.mark.parametrize(
    ("text", "finest"),
    [
        ("", 256),
        ("policy: round-robin", 256),
        ("scorers: [{type: prefix-aware}]", 20),
        ("scorers: [{type: prefix-aware, hashBlockSize: 16}, {type: prefix-aware, name: b, hashBlockSize: 3}]", 12),
        ("scorers: [{type: prefix-cache-scorer, hashBlockSize: 100}, {type: load-aware}]", 400),
    ],
)
def test_the_hasher_follows_the_finest_prefix_scorer(text: str, finest: int) -> None:
    assert build_hasher(load(f"{text}\n{ONE}")).finest == finest
