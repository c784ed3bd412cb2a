"""A policy that is one Python file: how it is found, what is said of mistakes, and that it goes to other processes."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fairlead.core.errors import ConfigError, PluginError
from fairlead.lab.simulator.build import ScenarioSpec
from fairlead.lab.simulator.grid import Cell, run_grid
from fairlead.lab.simulator.run import (
    config_from,
    configuration,
    modules_beside,
    policy_from,
    policy_text,
    source_text,
)
from fairlead.lab.simulator.scenarios import headline
from fairlead.lab.simulator.simulation import Simulation
from fairlead.server import plugin_watch

pytestmark = pytest.mark.simulation

POLICY = """
from fairlead.plugins.policies.ranked import Ranked
from fairlead.plugins.policies.by_load import Lpwl

class Fewest(Ranked):
    type = "fewest"

    def cost(self, request, fleet, cycle):
        return fleet.table.inflight * 1.0
"""


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_policy_of_the_file_is_made_with_the_ability_filters(tmp_path: Path) -> None:
    made = policy_from(policy_text(str(write(tmp_path, POLICY))))
    assert type(made).__name__ == "Fewest" and made.name == "fewest"
    assert {one.name for one in made.filters} >= {"role", "model-compatibility", "health"}  # type: ignore[attr-defined]


def test_imported_policies_do_not_count(tmp_path: Path) -> None:
    text, registry = configuration(source_text(write(tmp_path, POLICY)))
    assert text == 'policy: "fewest"\n'
    assert registry is not None and registry.find("policy", "fewest") is not None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("default", "policy"), ("lpwl", "policy"), ("random", "picker"), ("round-robin", "picker"), ("queue", "scorer")],
)
def test_the_name_of_a_built_in_is_refused_because_that_would_run(name: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, POLICY.replace('"fewest"', f'"{name}"'))
    with pytest.raises(ConfigError, match=f"`type` '{name}' of class Fewest names a built-in {kind}; choose another"):
        policy_text(str(path))


@pytest.mark.parametrize("name", ["null", "5", "a: b", "no"])
def test_any_other_name_is_that_of_the_policy(name: str, tmp_path: Path) -> None:
    made = policy_from(policy_text(str(write(tmp_path, POLICY.replace('"fewest"', f'"{name}"')))))
    assert type(made).__name__ == "Fewest" and made.name == name


def test_other_texts_stay_as_they_are() -> None:
    assert configuration("policy: random\n") == ("policy: random\n", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "has no policy"),
        (POLICY + "\nclass Other(Fewest):\n    type = 'other'\n", "has several policies: fewest, other"),
        ("x = 1 / 0\n", "cannot be run: ZeroDivisionError: division by zero (mine.py, line 1)"),
        ("\n\ndef f(:\n", "cannot be run: SyntaxError"),
        (
            "import not_there_at_all\n",
            "cannot be run: ModuleNotFoundError: No module named 'not_there_at_all' (mine.py, line 1)",
        ),
        ("import sys\nsys.exit(3)\n", "cannot be run: SystemExit: 3 (mine.py, line 2)"),
        (POLICY.replace("def cost", "def costs"), "class Fewest lacks `cost`"),
        ("class P:\n    type = 'p'\n    def choose(self): ...\n    def __init__(self): ...\n", "unexpected keyword"),
        (POLICY + "\n    def __init__(self, *given, **named): ...\n", "must call `super().__init__("),
        ("class P:\n    type = 'p'\n    def choose(self): ...\n", "it is called with (parameters, name=…)"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises((ConfigError, PluginError), match=re.escape(said)):
        policy_from(policy_text(str(path)))


def test_a_mistake_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1\n")
    with pytest.raises(ConfigError, match=r"mine\.py"):
        source_text(path)


def test_it_can_import_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "FACTOR = 2.0\n", "fairlead_test_neighbour.py")
    text = "from fairlead_test_neighbour import FACTOR\n" + POLICY.replace("1.0", "FACTOR")
    assert policy_from(policy_text(str(write(tmp_path, text)))).name == "fewest"


def test_links_to_the_directory_itself_are_not_followed(tmp_path: Path) -> None:
    neighbour = write(tmp_path, "", "neighbour.py")
    for name in ("latest", "current"):
        (tmp_path / name).symlink_to(".")
    assert modules_beside(policy_text(str(write(tmp_path, POLICY)))) == [neighbour]


@pytest.mark.parametrize("first", ["a", "b"])
def test_modules_beside_two_files_may_have_the_same_name(first: str, tmp_path: Path) -> None:
    """A module, and a directory of modules; the text of both files is the same."""
    text = "from fl_helper import FACTOR\nfrom fl_library.part import HALF\n" + POLICY.replace("1.0", "FACTOR * HALF")
    texts = {}
    for name, factor in (("a", 2.0), ("b", -6.0)):
        (tmp_path / name / "fl_library").mkdir(parents=True)
        write(tmp_path / name, f"FACTOR = {factor}\n", "fl_helper.py")
        write(tmp_path / name / "fl_library", f"HALF = {abs(factor) / 2}\n", "part.py")
        texts[name] = policy_text(str(write(tmp_path / name, text)))
    factors = {}
    for name in (first, *{"a", "b"} - {first}, first):
        made: Any = policy_from(texts[name])
        factors[name] = vars(sys.modules[type(made).__module__])["FACTOR"], vars(sys.modules["fl_library.part"])["HALF"]
    assert factors == {"a": (2.0, 1.0), "b": (-6.0, 3.0)}


def test_a_module_beside_the_file_precedes_an_installed_one_but_not_pythons_own(tmp_path: Path) -> None:
    for folder in ("installed", "mine"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, f"WHO = {folder!r}\n", "fl_common.py")
    write(tmp_path / "mine", "", "colorsys.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path / "installed")
        text = "from colorsys import rgb_to_hls\nimport fl_common\nassert fl_common.WHO == 'mine'\n" + POLICY
        source_text(write(tmp_path / "mine", text))


def test_it_runs_in_other_processes_and_is_known_by_its_source(tmp_path: Path) -> None:
    spec = ScenarioSpec(name="agents", source="agents", head=20)
    text = policy_text(str(write(tmp_path, POLICY)))
    cells = [Cell(scenario=spec, policy="mine", text=text, seed=seed) for seed in range(2)]
    (tmp_path / "mine.py").unlink()
    results = run_grid(cells, processes=2)
    assert [result.error for result in results] == ["", ""]
    assert all(result.figures["done"] == 20 for result in results)
    assert cells[0].key("") != Cell(scenario=spec, policy="mine", text=text + "\n# changed", seed=0).key("")


@pytest.mark.parametrize("cost", ["while True: pass", "import time; time.sleep(1000)"])
def test_one_that_never_returns_rests_and_the_run_goes_on(
    cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_watch, "ALONE_S", 0.1)
    text = policy_text(str(write(tmp_path, POLICY.replace("return fleet.table.inflight * 1.0", cost))))
    config, registry = config_from(text)
    simulation = Simulation(headline(rate=20, seconds=5.0), config, registry=registry)
    assert simulation.run() and all(job.status == "done" for job in simulation.jobs)
    first, second = map(str, simulation.plugin_errors)
    assert "fewest: NeverReturned: did not return and was interrupted (mine.py, line 9)" in first
    assert "it decides nothing for 60 s" in second
