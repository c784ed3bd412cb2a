"""Read and follow the model names that operators define: manifests in files, and the list in the configuration.

Rules
* Files are followed as described in `watched_files`.
* In a directory, the files with names ending in `.yaml`, `.yml` or `.json` are read, in the order of their names.
  Names that begin with a dot (ConfigMap volumes contain such entries) and subdirectories are skipped.
* A file with any problem changes nothing: its last good content stays in force, and its problems are reported once.
  Half of a definition could send a whole model's traffic elsewhere. If a file is removed, its objects are removed. If
  the whole path is gone, the objects stay, because then something else is wrong.
* A file that has become empty, or a directory without any file left, changes nothing either, unless `allow_empty`:
  usually the program that writes it has failed. Without the names, servers would get names that they do not know.
* If two files contain the same object, the first file's counts.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import starmap
from pathlib import Path

from msgspec.structs import replace

from fairlead.config.problems import Problem
from fairlead.config.schema import Models
from fairlead.core.errors import ConfigError
from fairlead.core.models import InferenceModel, Latency, ModelDefinition, ModelRules, ModelSet, Origin, Target
from fairlead.pool.model_kinds import Manifests, read_manifests
from fairlead.pool.watched_files import WatchedFiles, read_regular

SUFFIXES = (".yaml", ".yml", ".json")
MAX_FILES = 1000

_EMPTY = "models.allowEmpty: true "

#: Receives a file and a problem in it, which may be a warning.
Report = Callable[[str, Problem], object]


class ModelsFile:
    """Feeds a `ModelSet` whenever the definitions have changed."""

    def __init__(
        self,
        path: str | Path,
        feed: Callable[[ModelSet], object],
        report: Report,
        *,
        watch: bool = True,
        allow_empty: bool = False,
        poll_s: float = 0.5,
    ) -> None:
        self._path = Path(path)
        self._feed = feed
        self._report = report
        self._watch = watch
        self._allow_empty = allow_empty
        self._watched = WatchedFiles(lambda: files_of(self._path), self._load, poll_s, "model names")
        #: By file: the content that was read last, and the last manifests without problems.
        self._texts: dict[str, bytes] = {}
        self._used: dict[str, Manifests] = {}
        #: The first problem of each file whose present content is not usable.
        self._unusable: dict[str, str] = {}
        #: By path: what was reported of an empty file that is ignored.
        self._emptied: dict[str, str] = {}
        self._complaint = ""
        #: The definitions in force; `None` until all files were read and parsed once.
        self.models: ModelSet | None = None

    async def start(self) -> None:
        """Load the files and start watching. `models` shows whether it worked."""
        await self._watched.note()
        await self._load()
        if self._watch:
            self._watched.start()

    async def close(self) -> None:
        """Stop watching. The definitions stay in force."""
        await self._watched.close()

    @property
    def problem(self) -> str:
        """What of the files is not in force, and why; empty = all of them are."""
        return self._complaint or next(iter({**self._unusable, **self._emptied}.values()), "")

    async def _load(self) -> None:
        try:
            texts = await asyncio.to_thread(read_files, self._path)
        except OSError as error:
            self._watched.retry()
            self._complain(f"cannot read {error.filename or self._path}: {error.strerror or error}")
            return
        self._complaint = ""
        fresh = {name: text for name, text in texts.items() if self._texts.get(name) != text}
        read = await asyncio.to_thread(lambda: {name: read_manifests(text) for name, text in fresh.items()})
        self._texts = dict(texts)
        self._take(read)

    def _take(self, read: Mapping[str, Manifests]) -> None:
        used = {name: manifests for name, manifests in self._used.items() if name in self._texts}
        kept, emptied = self._texts.keys() - read.keys(), self._emptied
        self._unusable = {name: problem for name, problem in self._unusable.items() if name in kept}
        self._emptied = {name: problem for name, problem in emptied.items() if name in kept}
        if not self._texts and self._is_emptied(str(self._path), self._used.values(), emptied):
            used = self._used
        for name, manifests in read.items():
            for problem in manifests.problems:
                self._report(name, problem)
            for note in manifests.notes:
                self._report(name, replace(note, warning=True))
            if manifests.problems:
                self._unusable[name] = manifests.problems[0].render(name)
            elif manifests.empty and self._is_emptied(name, [used.get(name, manifests)], emptied):
                continue
            else:
                used[name] = manifests
        self._used = used
        if self._unusable and self.models is None:
            return
        models = self._joined()
        if models != self.models:
            self.models = models
            self._feed(models)

    def _is_emptied(self, path: str, before: Iterable[Manifests], emptied: Mapping[str, str]) -> bool:
        """Whether an empty path is ignored, because it defined something `before` or is empty at the start. It is
        reported, unless it was `emptied` earlier."""
        known = sum(manifests.models.size for manifests in before)
        if self._allow_empty or not (known or path in emptied or self.models is None):
            return False
        problem = Problem("", 0, f"{path} is empty: it defines no names", f"{_EMPTY}if that is meant")
        if known:
            problem = Problem("", 0, f"{path} is empty: what it defined stays", f"{_EMPTY}takes them away")
        self._emptied[path] = str(problem)
        if emptied.get(path) != str(problem):
            self._report(path, problem)
        return True

    def _joined(self) -> ModelSet:
        owners: dict[tuple[type, str], str] = {}

        def first(name: str, definition: ModelDefinition) -> bool:
            owner = owners.setdefault((type(definition), str(definition.origin)), name)
            if owner != name:
                message = f"{type(definition).__name__} {definition.origin} stands in {owner} too, which counts"
                self._report(name, Problem("", 0, message, warning=True))
            return owner == name

        joined = ModelSet()
        for name in sorted(self._used):
            joined += self._used[name].models.where(partial(first, name))
        return joined

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            self._complaint = message
            self._report(str(self._path), Problem("", 0, message))


def files_of(path: Path) -> list[str]:
    """The file itself, or the files of a directory. Raises `OSError`."""
    if not stat.S_ISDIR(os.stat(path).st_mode):
        return [str(path)]
    names = sorted(name for name in os.listdir(path) if name.endswith(SUFFIXES) and not name.startswith("."))
    if len(names) > MAX_FILES:
        raise OSError(0, f"more than {MAX_FILES} files", str(path))
    return [str(path / name) for name in names]


def read_files(path: Path) -> dict[str, bytes]:
    """The content of each file, by name. Raises `OSError` if any file cannot be read."""
    return {name: read_regular(name) for name in files_of(path)}


async def follow_models(
    stack: AsyncExitStack, settings: Models, feed: Callable[[ModelSet], object], report: Report
) -> ModelsFile | None:
    """Feed the present definitions for the configured pool, and all changes while `stack` is open.

    Returns the files if there are any. Raises `ConfigError` with all problems if they cannot be used at the start.
    """
    if not settings.file:
        return None
    first: list[str] = []

    def reported(file: str, problem: Problem) -> None:
        if not problem.warning and models.models is None:
            first.append(problem.render(file))
        report(file, problem)

    models = ModelsFile(
        settings.file,
        lambda model_set: feed(model_set.of_pool(settings.pool, settings.namespace)),
        reported,
        watch=settings.watch,
        allow_empty=settings.allow_empty,
    )
    stack.push_async_callback(models.close)
    await models.start()
    if models.models is None:
        raise ConfigError("; ".join(first), "$.models.file")
    return models


def listed_models(settings: Models) -> ModelSet:
    """The models that the configuration defines, as objects older than all others, so that they take precedence. A
    rewrite overrides them, as it does every `InferenceModel`."""
    return ModelSet(
        tuple(
            InferenceModel(
                origin=Origin(namespace="configuration", name=entry.name, created=0.0),
                model=entry.name,
                targets=tuple(starmap(Target, entry.targets.items())),
                criticality=entry.criticality,
                latency=Latency(entry.ttft * 1e3, entry.tpot * 1e3),
            )
            for entry in settings.list
        )
    )


def rules_of(settings: Models) -> ModelRules:
    """How strictly the configuration checks names."""
    return ModelRules(reject_unmatched=settings.unmatched == "reject", sticky_sessions=settings.sticky == "session")


def check_models(settings: Models) -> tuple[ModelSet, list[str]]:
    """Read the files once. Return the definitions and a line for each problem."""
    path, listed = settings.file, listed_models(settings)
    try:
        read = {name: read_manifests(text) for name, text in (read_files(Path(path)) if path else {}).items()}
    except OSError as error:
        return listed, [f"{error.filename or path}: cannot be read: {error.strerror or error}"]
    models = sum((manifests.models for manifests in read.values()), listed)
    return models, [problem.render(name) for name, manifests in read.items() for problem in manifests.problems]
