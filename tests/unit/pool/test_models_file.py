"""Following manifests of model names."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest

from fairlead.config.problems import Problem
from fairlead.config.schema import Models
from fairlead.core.models import ModelSet
from fairlead.pool import watched_files
from fairlead.pool.models_file import ModelsFile, check_models


def model(name: str, target: str = "t", obj: str = "") -> str:
    return (
        "apiVersion: inference.networking.x-k8s.io/v1alpha2\nkind: InferenceModel\n"
        f"metadata: {{name: {obj or name}}}\n"
        f"spec: {{modelName: {name}, poolRef: {{name: p}}, targetModels: [{{name: {target}}}]}}\n"
    )


class Heard:
    def __init__(self) -> None:
        self.sets: list[str] = []
        self.problems: list[str] = []
        self._news = asyncio.Event()

    def feed(self, models: ModelSet) -> None:
        self.sets.append(" ".join(f"{one.model}={one.targets[0].name}" for one in models.models))
        self._news.set()

    def report(self, file: str, problem: Problem) -> None:
        self.problems.append(f"{Path(file).name}: {problem}")
        self._news.set()

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def follow(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator["Follow"]:
    monkeypatch.setattr(watched_files, "SETTLE_S", 0.02)
    files: list[ModelsFile] = []

    def make(path: Path, *, allow_empty: bool = False) -> ModelsFile:
        files.append(ModelsFile(path, heard.feed, heard.report, allow_empty=allow_empty, poll_s=0.02))
        return files[-1]

    yield make
    for file in files:
        await file.close()


class Follow(Protocol):
    def __call__(self, path: Path, *, allow_empty: bool = False) -> ModelsFile: ...


async def test_a_file_that_changes(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(model("a"))
    file = follow(path)
    await file.start()
    assert heard.sets == ["a=t"]
    other = tmp_path / "other"
    other.write_text(model("a", "u"))
    os.replace(other, path)
    await heard.until(lambda: heard.sets[1:] == ["a=u"])
    # What says the same again is no change.
    path.write_text("# the same\n" + model("a", "u"))
    path.write_text(model("a", "u") + "---\n" + model("b"))
    await heard.until(lambda: heard.sets[2:] == ["a=u b=t"])
    assert not heard.problems


async def test_a_wrong_file_changes_nothing(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(model("a"))
    file = follow(path)
    await file.start()
    path.write_text(model("b") + "---\n" + model("c").replace("modelName", "modelNam"))
    await heard.until(lambda: len(heard.problems) == 2)
    assert heard.problems[0].startswith("m.yaml: line 9, $.spec.modelNam: unknown field 'modelNam'")
    assert heard.sets == ["a=t"]
    assert file.models is not None
    path.unlink()
    await heard.until(lambda: len(heard.problems) == 3)
    assert file.problem == f"cannot read {path}: No such file or directory" in heard.problems[2]
    path.write_text(model("d"))
    await heard.until(lambda: heard.sets[1:] == ["d=t"])
    assert not file.problem


async def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, heard: Heard, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(model("a"))
    await follow(path).start()
    with monkeypatch.context() as unreadable:
        unreadable.setattr(watched_files, "open", _refuse, raising=False)
        path.write_text(model("b"))
        await heard.until(lambda: heard.problems)
    await heard.until(lambda: heard.sets[1:] == ["b=t"])
    assert len(heard.problems) == 1


def _refuse(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


async def test_a_wrong_file_at_the_start(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "m.yaml"
    file = follow(path)
    await file.start()
    assert file.models is None
    path.write_text("kind: InferenceModel\n")
    await heard.until(lambda: len(heard.problems) > 1)
    assert file.models is None
    assert not heard.sets
    path.write_text(model("a"))
    await heard.until(lambda: heard.sets == ["a=t"])


async def test_a_directory(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    (tmp_path / "b.yaml").write_text(model("b"))
    (tmp_path / "a.yml").write_text(model("a"))
    (tmp_path / ".hidden.yaml").write_text("no")
    (tmp_path / "readme.txt").write_text("no")
    (tmp_path / "below").mkdir()
    file = follow(tmp_path)
    await file.start()
    assert (heard.sets, file.problem) == (["a=t b=t"], "")
    (tmp_path / "c.json").write_text('{"kind": "List", "items": []}')
    (tmp_path / "b.yaml").write_text("broken: [")
    await heard.until(lambda: heard.problems)
    (tmp_path / "a.yml").unlink()
    await heard.until(lambda: heard.sets[1:] == ["b=t"])
    assert file.problem.startswith(f"{tmp_path / 'b.yaml'}:1: ")
    (tmp_path / "b.yaml").unlink()
    await heard.until(lambda: heard.sets[2:] == [""])
    assert not file.problem


@pytest.mark.parametrize("text", ["", "---\n# nothing\n", "null\n", '{"kind": "List", "items": []}'])
async def test_a_file_that_becomes_empty_is_believed_only_if_that_is_allowed(
    text: str, tmp_path: Path, heard: Heard, follow: Follow
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(model("a") + "---\n" + model("b"))
    careful, believing = follow(path), follow(path, allow_empty=True)
    await careful.start()
    await believing.start()
    path.write_text(text)
    await heard.until(lambda: heard.problems and "" in heard.sets)
    said = f"{path} is empty: what it defined stays (models.allowEmpty: true takes them away)"
    assert (heard.problems, careful.problem, believing.problem) == ([f"m.yaml: {said}"], said, "")
    assert heard.sets == ["a=t b=t", "a=t b=t", ""]
    path.write_text("kind: Deployment\n")
    await heard.until(lambda: heard.sets[3:] == [""])
    assert not careful.problem, "whoever wrote this left them out"


async def test_a_file_that_is_empty_at_the_start_is_told(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("")
    careful, believing = follow(path), follow(path, allow_empty=True)
    await careful.start()
    await believing.start()
    said = f"{path} is empty: it defines no names (models.allowEmpty: true if that is meant)"
    assert (heard.sets, heard.problems, careful.problem) == (["", ""], [f"m.yaml: {said}"], said)
    assert not believing.problem
    path.write_text(model("a"))
    await heard.until(lambda: heard.sets[2:] == ["a=t", "a=t"])
    assert not careful.problem


async def test_of_a_directory_each_file_and_the_last_one_count(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(model(name))
    file = follow(tmp_path)
    await file.start()
    (tmp_path / "b.yaml").write_text("")
    await heard.until(lambda: heard.problems)
    assert file.problem.startswith(f"{tmp_path}/b.yaml is empty: what it defined stays")
    (tmp_path / "b.yaml").unlink()
    await heard.until(lambda: heard.sets == ["a=t b=t", "a=t"])
    assert not file.problem
    (tmp_path / "a.yaml").unlink()
    await heard.until(lambda: heard.problems[1:])
    assert file.problem.startswith(f"{tmp_path} is empty: what it defined stays"), "its volume may be gone"
    (tmp_path / "c.yaml").write_text(model("c"))
    await heard.until(lambda: heard.sets[2:] == ["c=t"])
    assert not file.problem


async def test_an_object_in_two_files(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    (tmp_path / "a.yaml").write_text(model("x", "first"))
    (tmp_path / "b.yaml").write_text(model("x", "second"))
    await follow(tmp_path).start()
    assert heard.sets == ["x=first"]
    assert "b.yaml: InferenceModel default/x stands in" in heard.problems[0]


async def test_a_swapped_symlink(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    """As ConfigMap volumes do it."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "m.yaml").write_text(model("a", f"v{version}"))
    os.symlink("1", tmp_path / "..data")
    os.symlink("..data/m.yaml", tmp_path / "m.yaml")
    await follow(tmp_path).start()
    os.symlink("2", tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "..data")
    await heard.until(lambda: heard.sets == ["a=v1", "a=v2"])


async def test_what_is_no_file(tmp_path: Path, heard: Heard, follow: Follow) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    file = follow(tmp_path / "pipe.yaml")
    await file.start()
    assert file.models is None
    assert "not a regular file" in heard.problems[0]


def test_checked_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(model("a"))
    found, problems = check_models(Models(file=str(tmp_path)))
    assert ([one.model for one in found.models], problems) == (["a"], [])
    (tmp_path / "b.yaml").write_text("kind: InferenceModel\n")
    found, problems = check_models(Models(file=str(tmp_path)))
    assert problems[0].startswith(f"{tmp_path}/b.yaml:1: field 'apiVersion' is missing")
    assert check_models(Models(file=str(tmp_path / "none")))[1] == [
        f"{tmp_path}/none: cannot be read: No such file or directory"
    ]
