"""The example distribution works as installed, and a broken one stops the start."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "fairlead-example-plugin"


def unpack(site: Path) -> None:
    """What `pip install` leaves of the example: its package, and the metadata that its pyproject.toml says."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(EXAMPLE / "src" / "fairlead_example_plugin", site / "fairlead_example_plugin", ignore=ignore)
    info = site / f"fairlead_example_plugin-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
             for group, points in project["entry-points"].items()]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    unpack(folder)
    return folder


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=site)


def test_a_configuration_may_name_it(site: Path) -> None:
    done = run(site, "-m", "fairlead", "validate", str(EXAMPLE / "fairlead.yaml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid. Policy custom: 5 filters, 3 scorers, picker max-score. Endpoints: 2." in done.stdout
    assert "note:" not in done.stdout


def test_it_is_explained(site: Path) -> None:
    for name in ("free-tokens", "scorer.free-tokens"):
        done = run(site, "-m", "fairlead", "config", "explain", name)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("free-tokens (Scorers, in scorers): 1 where the whole request fits")
        assert "expectedOutput: whole number (default 500)" in done.stdout
    assert "did you mean 'free-tokens'?" in run(site, "-m", "fairlead", "config", "explain", "free-token").stderr


def test_without_it_the_configuration_does_not_load(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "fairlead", "validate", str(EXAMPLE / "fairlead.yaml"))
    assert done.returncode == 2
    assert "$.scorers[2].type: unknown scorer type 'free-tokens'" in done.stdout


def test_its_own_tests_pass(site: Path) -> None:
    done = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"), "--rootdir", str(site))
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("command", ["serve", "validate"])
def test_one_that_breaks_at_import_stops_the_start_and_is_named(site: Path, command: str) -> None:
    module = site / "fairlead_example_plugin" / "__init__.py"
    module.write_text("import absent_library\n" + module.read_text())
    done = run(site, "-m", "fairlead", command, str(EXAMPLE / "fairlead.yaml"))
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert "plugin free-tokens: of fairlead-example-plugin 0.1.0 could not be loaded" in said
    assert "No module named 'absent_library' (__init__.py, line 1)" in said
    assert "Traceback" not in said


def test_one_that_exits_at_import_is_named_too(site: Path) -> None:
    module = site / "fairlead_example_plugin" / "__init__.py"
    module.write_text("import sys\nsys.exit(7)\n" + module.read_text())
    done = run(site, "-m", "fairlead", "validate", str(EXAMPLE / "fairlead.yaml"))
    assert (done.returncode, "could not be loaded: SystemExit: 7 (__init__.py, line 2)" in done.stdout) == (2, True)


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit", "GeneratorExit"])
def test_one_that_cannot_be_made_stops_the_start_too(site: Path, error: str) -> None:
    module = site / "fairlead_example_plugin" / "__init__.py"
    broken = module.read_text().replace("self.name = name", f"raise {error}('no licence')")
    module.write_text(broken)
    done = run(site, "-m", "fairlead", "serve", str(EXAMPLE / "fairlead.yaml"), "--scheduler-only")
    assert (done.returncode, f"{error}: no licence (__init__.py, line " in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed: nothing can build a wheel")
@pytest.mark.install
def test_pip_installs_it(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "-q")
    subprocess.run([*pip, "--target", str(tmp_path), str(EXAMPLE)], check=True)
    done = run(tmp_path, "-m", "fairlead", "validate", str(EXAMPLE / "fairlead.yaml"))
    assert done.returncode == 0, done.stdout
