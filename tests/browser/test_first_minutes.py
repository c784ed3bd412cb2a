"""`fairlead init && fairlead doctor && fairlead serve` against three servers, and then a look at the dashboard."""

import asyncio
from pathlib import Path

import pytest
from br_checks import accessible, rows
from br_chromium import Browser
from command_line import answers, ask, run, running, stub, until
from ports import free_ports


@pytest.mark.slow
async def test_from_nothing_to_a_dashboard_with_a_decision(tmp_path: Path, browser: Browser, axe: str) -> None:
    with stub(tmp_path, "stubs", "--replicas", "3") as addresses:
        gateway, admin, ext_proc = free_ports(3)
        for command in (["init", *addresses, "--port", str(gateway), "--admin-port", str(admin)], ["doctor"]):
            done = await asyncio.to_thread(run, tmp_path, *command)
            assert done.returncode == 0, done.stdout + done.stderr
        with running(tmp_path, "serve", "--grpc-port", str(ext_proc)):
            url = f"http://127.0.0.1:{admin}/"
            await asyncio.to_thread(until, lambda: answers(url + "readyz"), tmp_path)
            page = await browser.page(url)
            await page.until("document.querySelectorAll('#endpoints tbody tr').length === 3")
            found = await rows(page, "endpoints")
            assert {name: row["state"] for name, row in found.items()} == dict.fromkeys(addresses, "serving")
            assert await asyncio.to_thread(ask, gateway)
            await page.until("document.querySelectorAll('#decision-rows tbody tr').length === 1")
            await accessible(page, axe)
            assert page.messages == []
            await page.close()
