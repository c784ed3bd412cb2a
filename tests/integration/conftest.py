"""Fixtures of several integration tests."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from echo_server import MADE, Serve, serving


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MADE.clear()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts an echo server on a free port; gives it and its target."""
    async with serving() as start:
        yield start
