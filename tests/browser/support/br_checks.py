"""What every state of the page must stand."""

import os
from pathlib import Path
from typing import Any

from br_chromium import Page

#: A folder for the pictures of docs/dashboard.md (docs/img, to make them anew); unset = none are kept.
PICTURES = os.environ.get("FAIRLEAD_PICTURES", "")

_AXE = """
axe.run(document, {resultTypes: ["violations"], runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
  .then((found) => found.violations.map((one) => `${one.impact} ${one.id}: ` + one.nodes.map((node) =>
    `${node.target} ${node.failureSummary}`).slice(0, 3).join(" | ")))
"""


async def accessible(page: Page, axe: str) -> None:
    """axe finds nothing at all."""
    if await page.run("typeof window.axe === 'undefined'"):
        await page.run(f"{axe}; true")
    found = await page.run(_AXE)
    assert not found, "\n".join(found)


async def fits(page: Page) -> None:
    """Nothing sticks out sideways, once the page is laid out."""
    await page.until("document.scrollingElement.scrollWidth <= document.documentElement.clientWidth")


async def figure(page: Page, name: str) -> float:
    """A number on the page; its unit is left out."""
    text = await text_of(page, f'[data-figure="{name}"]')
    return float(text.replace(",", "").split(" ")[0])


async def text_of(page: Page, selector: str) -> str:
    found = await page.run(f"document.querySelector({selector!r})?.textContent ?? ''")
    return str(found)


async def rows(page: Page, table: str) -> dict[str, dict[str, str]]:
    """Cells of a table by row and column."""
    found: dict[str, Any] = await page.run(
        f"""Object.fromEntries([...document.querySelectorAll("#{table} tbody tr")].map((row) => [row.dataset.key,
        Object.fromEntries([...row.children].map((cell) => [cell.dataset.column, cell.textContent]))]))"""
    )
    return found


async def picture(page: Page, name: str, scrolled: bool = False) -> None:
    """For the documentation: the top of the page, or where it is `scrolled` to."""
    if PICTURES:
        await page.run("document.activeElement.blur()" + ("" if scrolled else "; scrollTo(0, 0)"))
        await page.screenshot(Path(PICTURES) / f"dashboard-{name}.png")
