"""Stub replicas, and a client that talks to them byte by byte."""

from collections.abc import AsyncIterator

import pytest
from stub_http import QUICK, STUCK, Http

from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool


@pytest.fixture
def http() -> Http:
    return Http()


@pytest.fixture
def quick_config() -> StubConfig:
    return QUICK


@pytest.fixture
def stuck_config() -> StubConfig:
    return STUCK


@pytest.fixture
async def quick(quick_config: StubConfig) -> AsyncIterator[StubPool]:
    async with StubPool(quick_config, replicas=2) as pool:
        yield pool
