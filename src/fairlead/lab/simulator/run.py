"""Simulate a scenario, `simulate(scenario, policy)`, and find policies by name or in a YAML or Python file.

from fairlead.lab.simulator.run import simulate
from fairlead.lab.simulator.scenarios import headline
summary = simulate(headline(rate=20), "policy: default")
print(summary.ttft_mean_ms, summary.e2e_mean_ms, summary.prefix_hit_rate, summary.shed)
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

from fairlead.compat.load import load
from fairlead.config.building import schedulers
from fairlead.config.builtins import BUILTINS, POLICIES
from fairlead.config.plugins import build_policy
from fairlead.config.problems import suggestion
from fairlead.config.registry import GROUP, Registry, declared, installed_plugins
from fairlead.config.schema import Config
from fairlead.core.errors import PLUGIN_FAILURES, ConfigError, FairleadError, described
from fairlead.core.policy import Policy, interruptible
from fairlead.core.records import DecisionRecord, OutcomeRecord, StallRecord
from fairlead.lab.simulator.result import Summary, summarise
from fairlead.lab.simulator.simulation import Simulation
from fairlead.lab.simulator.world import Scenario

_MARK = "# a policy of the file "


def source_text(path: Path) -> str:
    """The text of a Python policy file behind a line with its path; `configuration` reads it. Raises `OSError` or
    `ConfigError`."""
    text = f"{_MARK}{path}\n{path.read_text(encoding='utf-8')}"
    configuration(text)
    return text


def configuration(text: str) -> tuple[str, Registry | None]:
    """The text of a configuration, and the plugins that it may name: those of the file, then the installed ones (`None`
    = only these). `text` is that of a configuration, or a result of `source_text`.

    Raises `ConfigError` if the file cannot be run, does not define exactly one policy, or names it like a built-in
    plugin.
    """
    if not text.startswith(_MARK):
        return text, None
    first, _, source = text.partition("\n")
    path = first.removeprefix(_MARK)
    policies = _policies(_module(path, source))
    if len(policies) != 1:
        has = "no policy" if not policies else f"several policies: {', '.join(sorted(policies))}"
        raise ConfigError(
            f"has {has}; give one class the attribute `type` and the method `choose` or `cost`", "$", path
        )
    ((name, cls),) = policies.items()
    if isabstract(cls):
        raise ConfigError(f"class {cls.__name__} lacks `{', '.join(sorted(cls.__abstractmethods__))}`", "$", path)
    kind = Registry(list).kind_of(name)
    if kind is not None:
        raise ConfigError(f"`type` {name!r} of class {cls.__name__} names a built-in {kind}; choose another", "$", path)
    point = EntryPoint(name, f"{cls.__module__}:{cls.__qualname__}", GROUP)
    return f'policy: "{name}"\n', Registry(
        lambda: [point, *(each for each in installed_plugins() if each.name != name)]
    )


def modules_beside(text: str) -> list[Path]:
    """The modules that the policy of a Python file may import from its own directory, packages included. Below it,
    only directories with Python files directly in them are searched."""
    if not text.startswith(_MARK):
        return []
    path = Path(text.partition("\n")[0].removeprefix(_MARK))
    return [module for module in python_files(path.parent) if module != path]


def python_files(folder: Path) -> Iterator[Path]:
    """The Python files of a directory and of its packages, as in `modules_beside`."""
    yield from folder.glob("*.py")
    for package in {file.parent for file in folder.glob("*/*.py")}:
        if package.name.isidentifier() and not package.is_symlink():  # which may lead back
            yield from python_files(package)


class _Beside(MetaPathFinder):
    """Finds what a policy file imports from its own directory: first there, as for a script, but after the standard
    library. Only the file that was run last has one, so that files in two directories can each have a module `helper`.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._names: set[str] = set()

    def turn_to(self, folder: str) -> None:
        """Look in this directory from now on, and forget the modules that were imported from another."""
        if folder == self._folder:
            return
        for name in [name for name in sys.modules if name.partition(".")[0] in self._names]:
            del sys.modules[name]
        self._folder, self._names = folder, set()
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """The module of that name in the directory; `None` if there is none, or if another finder comes first."""
        if path is not None or fullname in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(fullname, [self._folder])
        if spec is None or (spec.loader is None and PathFinder.find_spec(fullname) is not None):
            return None  # a directory without `__init__.py` comes after every module, as in Python
        self._names.add(fullname)
        return spec


_beside = _Beside()


def _module(path: str, source: str) -> ModuleType:
    """Run the file. It can import modules from its own directory."""
    module = ModuleType(f"fairlead_policy_{sha256((path + source).encode()).hexdigest()[:16]}")
    vars(module)["__file__"] = path
    _beside.turn_to(str(Path(path).resolve().parent))
    sys.modules[module.__name__] = module
    try:
        interruptible(exec, compile(source, path, "exec"), vars(module))
    except PLUGIN_FAILURES as error:
        raise ConfigError(f"cannot be run: {described(error)}", "$", path) from error
    return module


def _policies(module: ModuleType) -> dict[str, Any]:
    """The policies that the file itself defines, by name; imported classes do not count."""
    own: Iterable[Any] = (member for member in vars(module).values() if isinstance(member, type))
    return {
        member.type: member
        for member in own
        if member.__module__ == module.__name__
        and callable(declared(member, "choose"))
        and isinstance(declared(member, "type"), str)
    }


def policy_from(text: str | Path) -> Policy:
    """The policy of a configuration, given as text such as `policy: round-robin` or as a file, or of a text that
    `source_text` made from a Python file. Only the scheduling part of a configuration matters.

    Raises `ConfigError` or `PluginError`.
    """
    config, registry = config_from(text)
    return build_policy(config, registry=registry)


def config_from(text: str | Path) -> tuple[Config, Registry | None]:
    """The configuration, and the plugins that it may name, as in `configuration`. Raises `ConfigError`."""
    registry = None
    if isinstance(text, str):
        text, registry = configuration(text)
    return load(text, need_endpoints=False, registry=registry), registry


def note_of_schedulers(name: str, config: Config) -> str:
    """A note if the policy called `name` names schedulers in other processes; empty = it names none."""
    addresses = ", ".join(settings.address for settings in schedulers(config).values())
    return f"note: {name}: simulations do not ask {addresses}: {config.policy.name} decides" if addresses else ""


def simulate(
    scenario: Scenario,
    policy: str | Policy = "policy: default",
    seed: int = 0,
    *,
    watch: Callable[[DecisionRecord | OutcomeRecord | StallRecord], None] | None = None,
    validate: bool = False,
) -> Summary:
    """Run a scenario to its end. `policy` is the text of a configuration, or a policy object that has not been used
    yet, because policies keep state. `watch` is called with each record of a decision, an outcome or a stall.
    `validate` checks every invariant after every event, at about a hundred times the cost."""
    made, registry = config_from(policy) if isinstance(policy, str) else (policy, None)
    simulation = Simulation(scenario, made, seed, watch=watch, validate=validate, registry=registry)
    simulation.run()
    return summarise(simulation)


#: The name of the default policy without flow control: requests are sent on arrival.
AT_ONCE = "default-at-once"


def known_policies() -> dict[str, str]:
    """Name → text of a configuration. `default` is first, then the same without flow control. Policies that need
    parameters are left out."""
    names = dict.fromkeys(["default", AT_ONCE, *POLICIES, *BUILTINS["policy"]])
    texts = {name: f"policy: {name}\n" for name in names}
    texts[AT_ONCE] = "policy: default\nflowControl: {enabled: false}\n"
    return {name: text for name, text in texts.items() if _works(text)}


def named_file(text: str) -> tuple[str, str]:
    """Split `NAME=FILE` into its two parts. If `text` is a file, or names none after `=`, both parts are `text`."""
    name, _, path = text.partition("=")
    return (text, text) if not path or Path(text).is_file() else (name, path)


def policy_text(name: str) -> str:
    """The configuration text of a known or installed policy, or of a file, given as `tuned=path.yaml` or `path.yaml`.
    The file may be a Python file with a policy in it.

    Raises `ValueError` if `name` is none of these, `ConfigError` or `PluginError` if the file is wrong, or `OSError`.
    """
    texts = known_policies()
    if name in texts:
        return texts[name]
    path = Path(named_file(name)[1])
    if not path.is_file() and Registry().find("policy", name) is not None:
        policy_from(text := f"policy: {name}\n")
        return text
    if not path.is_file():
        raise ValueError(f"{name!r} is neither a policy nor a file; {suggestion(name, texts)}")
    if path.suffix == ".py":
        return source_text(path)
    policy_from(path)
    return path.read_text(encoding="utf-8")


def _works(text: str) -> bool:
    try:
        policy_from(text)
    except FairleadError:
        return False
    return True
