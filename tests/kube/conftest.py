"""A real kube-apiserver for tests; README.md here says how to use it."""

import gc
import itertools
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from kr_build import CannotBuild, ensure_built, find_go
from kr_cluster import Cluster
from kr_helm import CannotFetch, Helm, ensure_helm
from kr_runs import Children

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kube)


def do_without(error: Exception) -> NoReturn:
    """Skip the test, or fail where nothing may be missing."""
    if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
        pytest.fail(str(error))
    pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _frozen_servers_leave_sockets() -> Iterator[None]:
    """A connection that is given up while a frozen API server owes its TLS handshake is closed by asyncio some time
    later, and a test's loop may be gone by then. Such sockets are collected here, and are nobody's leak."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def kube_binary() -> Path:
    """The API server, built on first use. Without Go tests are skipped; FAIRLEAD_REQUIRE_ALL makes that a failure."""
    try:
        return ensure_built(sys.__stderr__ or sys.stderr)
    except CannotBuild as error:
        do_without(error)


@pytest.fixture(scope="session")
def go() -> str:
    """Path of Go."""
    try:
        return find_go()
    except CannotBuild as error:
        do_without(error)


@pytest.fixture(scope="session")
def short_directories() -> Iterator[Callable[[], Path]]:
    """New directories with paths short enough for a socket in them."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="flk-", dir="/tmp")))
        return made[-1]

    try:
        yield make
    finally:
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def kube(kube_binary: Path, short_directories: Callable[[], Path]) -> Iterator[Cluster]:
    """The cluster that all tests share, with the chart's CRDs. Do not stop it, and stay in your `namespace`."""
    cluster = Cluster(kube_binary, short_directories())
    try:
        cluster.start().install_crds()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def namespace(kube: Cluster) -> str:
    """A new namespace of the shared cluster."""
    return kube.namespace(f"test-{os.getpid()}-{next(_numbers)}")


@pytest.fixture
def own_kube(kube_binary: Path, short_directories: Callable[[], Path]) -> Iterator[Callable[..., Cluster]]:
    """`own_kube()` starts a cluster for this test alone, to be restarted, killed, frozen or compacted (3 s).

    Further arguments are flags of kube-apiserver. `own_kube(twin_of=cluster)` is a second API server on its etcd.
    """
    clusters: list[Cluster] = []

    def start(*arguments: str, twin_of: Cluster | None = None) -> Cluster:
        directory = short_directories()
        cluster = twin_of.twin(directory) if twin_of else Cluster(kube_binary, directory, arguments)
        clusters.append(cluster)
        return cluster.start()

    try:
        yield start
    finally:
        for cluster in reversed(clusters):
            cluster.stop()


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm on the project's chart."""
    try:
        return Helm(ensure_helm(), tmp_path_factory.mktemp("helm"))
    except CannotFetch as error:
        do_without(error)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Children]:
    """`start(*arguments)` runs fairlead until the test ends."""
    children = Children(tmp_path)
    try:
        yield children
    finally:
        children.end()
