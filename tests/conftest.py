"""Fixtures for all tests."""

import asyncio
import gc
import importlib.util
import logging
import os
import signal
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from hypothesis import settings

from fairlead.core.scheduler import Pipeline

# How long an example takes is the machine's affair.
# CI sees the same examples each time; elsewhere, and in `make fuzz`, each run looks at others.
settings.register_profile("fairlead", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fairlead")

TESTS = Path(__file__).parent
PROTOS = TESTS / "protos"
sys.path.insert(0, str(TESTS / "support"))


#: Files of tests that take longest. They are begun first, so that the processes that run tests end together.
LONGEST = (
    "test_bench_programs.py",
    "test_docs_run.py",
    "test_dashboard_states.py",
    "test_live_kube.py",
    "test_pools_kube.py",
    "test_rolling_kube.py",
    "test_chart_valkey.py",
    "test_leases_kube.py",
    "test_reflector_outage.py",
)


@pytest.hookimpl(tryfirst=True)  # a random order is one of these, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


#: A test is stopped so many seconds before `faulthandler_timeout` ends its process.
STOP_EARLIER_S = 60


def pytest_collection_finish() -> None:
    """All that collecting has made stays to the end. No later look for garbage needs to go through it: in a process
    that has collected all tests each takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So does what a file's tests have left, after its last one: reports, caches, modules."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(autouse=True)
def a_test_that_hangs_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """And tells where its tasks wait."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        try:
            for task in asyncio.all_tasks():
                task.print_stack(file=sys.__stderr__)
        except RuntimeError:
            print("no event loop runs in the main thread", file=sys.__stderr__)
        pytest.fail(f"{request.node.nodeid} was stopped after {limit:g} s")

    # 0 sets no timer.
    limit = max(0.0, float(request.config.getini("faulthandler_timeout")) - STOP_EARLIER_S)
    previous = signal.signal(signal.SIGALRM, stop)
    # Again and again, because an event loop only logs what its callbacks raise.
    signal.setitimer(signal.ITIMER_REAL, limit, 10.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, previous)


class _Failures(logging.Handler):
    """Instructions that a driver could not carry out. It goes on without them, so a test would not notice."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}")


@pytest.fixture(autouse=True)
def every_instruction_is_carried_out(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test does not say `@pytest.mark.failing_instructions`."""
    logger, failures = logging.getLogger("fairlead.gateway.driver"), _Failures()
    logger.addHandler(failures)
    yield
    logger.removeHandler(failures)
    if request.node.get_closest_marker("failing_instructions") is None:
        assert failures.seen == []


@pytest.fixture(autouse=True)
def every_request_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registry, queues, questions and ledger agree in every pipeline that the test made."""
    made: list[weakref.ref[Pipeline]] = []
    genuine = Pipeline.__init__

    def init(self: Pipeline, *args: Any, **fields: Any) -> None:
        genuine(self, *args, **fields)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Pipeline, "__init__", init)
    yield
    for one in made:
        pipeline = one()
        if pipeline is not None:
            pipeline.validate()


@pytest.fixture(autouse=True)
def logging_is_set_up_by_no_other_test() -> Iterator[None]:
    """A command that a test runs in this process sets up logging to a stream that the test's end closes."""
    root, ours = logging.getLogger(), logging.getLogger("fairlead")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


@pytest.fixture
def bytes_kept() -> Callable[[Callable[[], object]], int]:
    """`bytes_kept(act)`: how many bytes Python holds after a call that it did not hold before, its result included."""

    def measure(act: Callable[[], object]) -> int:
        gc.collect()
        tracemalloc.start()
        try:
            result = act()
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        del result
        return kept

    return measure


@pytest.fixture(scope="session")
def pb(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The generated classes of `protos/ext_proc_subset.proto`: an independent codec to check ours against."""
    from grpc_tools import protoc

    out = tmp_path_factory.mktemp("protos")
    include = Path(importlib.util.find_spec("grpc_tools").origin).parent / "_proto"  # type: ignore[union-attr,arg-type]
    arguments = ["protoc", f"-I{PROTOS}", f"-I{include}", f"--python_out={out}", "ext_proc_subset.proto"]
    assert protoc.main(arguments) == 0
    spec = importlib.util.spec_from_file_location("ext_proc_subset_pb2", out / "ext_proc_subset_pb2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
