"""The documentation as `make docs` says to open it: as files, in a real browser."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from br_chromium import Browser

ROOT = Path(__file__).parents[2]
QUERY = "document.querySelector('[data-md-component=search-query]')"


@pytest.mark.slow
async def test_search_finds_a_word_in_the_site_as_files(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True, timeout=300)
    page = await browser.page(f"file://{site}/faq.html")
    await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    assert await page.run("document.querySelector('[role=dialog]').ariaLabel") == "Search"
    await page.run(f"{QUERY}.focus(), 0")
    await page.call("Input.insertText", text="runner-up")
    await page.until(
        "[...document.querySelectorAll('.md-search-result__item a')].some(a => /glossary.html/.test(a.href))"
    )
    assert [url for url in page.requested if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.messages == []
