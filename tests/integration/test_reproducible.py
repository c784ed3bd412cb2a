"""Wheel and sdist are the same bytes whenever, wherever and by whomever they are built from the same sources."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
INCLUDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def build(place: Path, mask: int, touched: float) -> dict[str, bytes]:
    """Of a copy of the sources with other times and, for new files, other rights."""
    place.mkdir()
    for name in ("pyproject.toml", *INCLUDED):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place / name)
    for path in place.rglob("*"):
        os.utime(path, (touched, touched))
    command = [sys.executable, "-m", "hatchling", "build", "-d", "dist"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, umask=mask)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in (place / "dist").iterdir()}


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    first = build(tmp_path / "one", 0o022, 1.6e9)
    second = build(tmp_path / "another-place", 0o077, 1.7e9)
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]
    assert first == second
