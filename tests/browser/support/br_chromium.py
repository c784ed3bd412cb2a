"""A headless Chromium, driven over the DevTools protocol. Ended by its own process id."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_START_SECONDS, _CALL_SECONDS = 60.0, 60.0


def require_chromium() -> str:
    """Its path. Without one the tests are skipped; `FAIRLEAD_REQUIRE_ALL=1` makes that a failure."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    text = "no Chromium; on Debian and Ubuntu: apt-get install chromium"
    if os.environ.get("FAIRLEAD_REQUIRE_ALL"):
        pytest.fail(text)
    pytest.skip(text)


class Chromium:
    """The process, which several tests may share: each `Browser` has a profile of its own."""

    def __init__(self, path: str, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        #: `HOST:PORT` of the DevTools protocol.
        self.address = ""

    def start(self) -> Self:
        self._process = subprocess.Popen(
            [
                self._path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync",
                "--disable-component-update", "--hide-scrollbars", "--force-color-profile=srgb",
                "--remote-debugging-port=0", f"--user-data-dir={self._folder}", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        told = self._folder / "DevToolsActivePort"
        until = time.monotonic() + _START_SECONDS
        while not (told.is_file() and told.read_text().count("\n")):
            assert self._process.poll() is None and time.monotonic() < until, "Chromium does not start"
            time.sleep(0.05)
        self.address = f"127.0.0.1:{told.read_text().splitlines()[0]}"
        return self

    def end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Browser:
    """`async with Browser(chromium)`, then `page(url)`. Its tabs know nothing of another one's, and end with it."""

    def __init__(self, chromium: Chromium) -> None:
        self._at = chromium.address

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://{self._at}/json/version") as answer:
            url = json.loads(await answer.text())["webSocketDebuggerUrl"]
        self._whole = Page(await self._session.ws_connect(url, max_msg_size=0))
        self._profile = (await self._whole.call("Target.createBrowserContext"))["browserContextId"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._whole.call("Target.disposeBrowserContext", browserContextId=self._profile)
        await self._whole.disconnect()
        await self._session.close()

    async def page(self, url: str, width: int = 1400, height: int = 1000, dark: bool = False) -> "Page":
        """Open `url` in a tab of its own, at that size."""
        target = await self._whole.call("Target.createTarget", url="about:blank", browserContextId=self._profile)
        socket = await self._session.ws_connect(f"ws://{self._at}/devtools/page/{target['targetId']}", max_msg_size=0)
        page = Page(socket)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height)
        await page.dress(dark)
        page.loaded.clear()
        await page.call("Page.navigate", url=url)
        await asyncio.wait_for(page.loaded.wait(), _CALL_SECONDS)
        return page


class Page:
    """One tab. `messages`: what the console was told as a warning or an error, and uncaught exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self.messages: list[str] = []
        self.loaded = asyncio.Event()
        #: Addresses of all requests.
        self.requested: list[str] = []
        #: (seconds, event's name) of each server-sent event.
        self.events: list[tuple[float, str]] = []
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        with contextlib.suppress(AssertionError, TimeoutError):
            await self.call("Page.close")
        await self.disconnect()

    async def disconnect(self) -> None:
        await self._socket.close()
        await self._reader

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        future = self._awaited[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(future, _CALL_SECONDS)

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                future = self._awaited.pop(told["id"])
                if "error" in told:
                    future.set_exception(AssertionError(told["error"]["message"]))
                elif not future.done():
                    future.set_result(told["result"])
                continue
            self._note(told["method"], told["params"])
        for future in self._awaited.values():
            if not future.done():
                future.set_exception(AssertionError("the tab is closed"))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.messages.append(str([one.get("value", one.get("description")) for one in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.messages.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])
        elif method == "Network.eventSourceMessageReceived":
            self.events.append((told["timestamp"], told["eventName"]))

    async def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 30.0) -> None:
        """Wait until the expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = await self.run(f"!!({script})")
            if found:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {script}")

    async def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}[key]
        name = "Space" if key == " " else key
        common = {"key": key, "code": name, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    async def dress(self, dark: bool) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        made = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(made["data"]))
