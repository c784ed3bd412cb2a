"""Fixtures for tests with a real browser."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from br_chromium import Browser, require_chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    """A headless Chromium with a profile of its own."""
    async with Browser(require_chromium(), tmp_path / "profile") as made:
        yield made


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core 4.14.1 as its npm package has it (MPL-2.0, see data/axe-licence.txt)."""
    return (Path(__file__).parent / "data" / "axe.min.js").read_text()
