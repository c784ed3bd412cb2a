"""Fixtures for tests with a real browser."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from br_chromium import Browser, Chromium, require_chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A headless Chromium."""
    made = Chromium(require_chromium(), tmp_path_factory.mktemp("chromium"))
    try:
        yield made.start()
    finally:
        made.end()


@pytest.fixture
async def browser(chromium: Chromium) -> AsyncIterator[Browser]:
    """It, with a profile of the test's own."""
    async with Browser(chromium) as made:
        yield made


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core 4.14.1 as its npm package has it (MPL-2.0, see data/axe-licence.txt)."""
    return (Path(__file__).parent / "data" / "axe.min.js").read_text()
