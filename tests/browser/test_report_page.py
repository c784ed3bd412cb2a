"""The report of `fairlead sim compare` in a real browser, opened as a file."""

from pathlib import Path

from br_checks import accessible
from br_chromium import Browser

from fairlead.lab.simulator.grid import CellResult
from fairlead.lab.simulator.report import COLUMNS, write_report

SHEET = "document.documentElement"


async def test_the_report_fits_a_phone(browser: Browser, tmp_path: Path, axe: str) -> None:
    figures = {key: 12_345.678 + number for number, (_, key, _) in enumerate(COLUMNS)}
    results = [
        CellResult(key="", scenario=scenario, policy=policy, seed=0, figures=figures)
        for scenario in ("a-scenario-with-quite-a-long-name-that-does-not-end-soon", "agents")
        for policy in ("default", "round-robin", "a-policy-with-a-long-name-of-its-own")
    ]
    write_report(results, [], tmp_path)
    for width in (375, 1280):
        page = await browser.page(f"file://{tmp_path}/report.html", width, 900)
        assert await page.run(f"{SHEET}.scrollWidth <= innerWidth && innerWidth === {width}")
        plots = await page.run("[...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect().width)")
        assert len(plots) == 4 and all(250 < plot <= width for plot in plots)
        # Wide tables scroll by themselves: nothing of them is out of reach.
        assert await page.run(
            "[...document.querySelectorAll('.wide')].every(one => one.scrollWidth === one.clientWidth"
            " || getComputedStyle(one).overflowX === 'auto')"
        )
        await accessible(page, axe)
        assert page.messages == []
        await page.close()
