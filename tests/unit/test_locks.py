"""The locks: every package that the project needs, at a version that it allows, by hash, and from no index by name."""

import importlib.util
import re
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "deploy" / "locks").glob("*.txt"))
PINNED = re.compile(r"(?P<name>[a-z0-9.-]+)==(?P<version>[\w.]+)(?: ; (?P<marker>[^\\]+))? \\")
HASHED = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?P<more> \\)?")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fairlead_release", ROOT / "tools" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(lock: Path) -> dict[str, set[str]]:
    """Versions by name: one per marker."""
    found: dict[str, set[str]] = {}
    for line in lock.read_text().splitlines():
        if pinned := PINNED.fullmatch(line):
            found.setdefault(pinned["name"], set()).add(pinned["version"])
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_nothing_but_versions_and_hashes_is_in_them(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert lines
    hashed = True
    for line in lines:
        if hashed:
            assert PINNED.fullmatch(line), line
            hashed = False
        else:
            value = HASHED.fullmatch(line)
            assert value, line
            hashed = not value["more"]
    assert hashed


def test_the_locks_hold_what_the_project_asks_for(release: ModuleType) -> None:
    wanted = release.wanted()
    assert {lock.stem for lock in LOCKS} == {*wanted}
    for lock in LOCKS:
        pinned = pins(lock)
        for requirement in map(Requirement, wanted[lock.stem]):
            versions = pinned.get(canonicalize_name(requirement.name), set())
            assert versions, f"{lock.stem}: {requirement} is not there: make lock"
            assert all(map(requirement.specifier.contains, versions)), f"{lock.stem}: {requirement}: make lock"


def test_the_image_gets_what_is_tested() -> None:
    tested, image = pins(ROOT / "deploy/locks/ci.txt"), pins(ROOT / "deploy/locks/image.txt")
    assert {name: versions for name, versions in image.items() if tested.get(name) != versions} == {}


def test_what_is_needed_by_what_is_needed_is_there_too(release: ModuleType) -> None:
    """By the metadata of what is installed here."""
    pinned = pins(ROOT / "deploy/locks/image.txt")
    waiting, seen = [Requirement(one) for one in release.wanted()["image"]], set[str]()
    while waiting:
        requirement = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        assert name in pinned
        if name not in seen:
            seen.add(name)
            waiting += map(Requirement, requires(name) or [])
    assert len(seen) > 40


def test_the_image_installs_by_hash_alone() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    installs = [line for line in lines if " install " in line]
    assert len(installs) == 3
    own = "--no-deps dist/fairlead-"
    assert [line for line in installs if "--require-hashes" not in line and own not in line] == []
