"""A FakeKube and clients of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest
from fake_kube import FakeKube

from fairlead.pool.kube.auth import Access, FixedSecret, Secret, Where
from fairlead.pool.kube.client import KubeClient


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    server = FakeKube()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(kube: FakeKube, rng: Random) -> AsyncIterator[KubeClient]:
    made = KubeClient(Access(Where(kube.url), FixedSecret(Secret("good"))), rng)
    yield made
    await made.close()


@pytest.fixture
def rng() -> Random:
    return Random(7)


@pytest.fixture
async def tasks() -> AsyncIterator[Callable[[Any], asyncio.Task[Any]]]:
    """Starts what runs for ever; ends it after the test."""
    started: list[asyncio.Task[Any]] = []

    def start(coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        started.append(task)
        return task

    yield start
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def _until(condition: Callable[[], object], what: str = "") -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Any:
    """Wait for something to become true; the test fails when it does not in 20 s."""
    return _until


def _pod(name: str, ip: str = "10.0.0.1", ready: bool = True, labels: dict[str, str] | None = None, **meta: Any) -> Any:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "vllm", **(labels or {})}, **meta},
        "status": {"podIP": ip, "conditions": conditions},
    }


@pytest.fixture
def pod() -> Any:
    """Makes pods."""
    return _pod
