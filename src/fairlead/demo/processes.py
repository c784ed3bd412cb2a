"""Child processes of the demo: started, waited for, and ended, whatever happens."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque

import aiohttp

from fairlead.model.errors import FairleadError

#: How commands begin each line of an error, see `cli.main`.
_ERROR = "error: "


class Child:
    """A `fairlead` command in a process of its own. Its last output is kept, to be shown when it fails."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: Process | None = None
        self._tail: deque[str] = deque(maxlen=15)
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> "Child":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fairlead", *self._arguments, stdout=PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None and self._reader is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(15.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._tail.append(line.decode(errors="replace").rstrip())

    async def ready(self, url: str, seconds: float = 30.0) -> None:
        """Wait until `url` answers 200. Raises `FairleadError` with the child's last words if it does not."""
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while asyncio.get_running_loop().time() < deadline:
                if self._process.returncode is not None:
                    break
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.1)
        raise FairleadError(await self._complaint())

    async def _complaint(self) -> str:
        """Why it is not ready: the errors that it told, else its last words."""
        assert self._process is not None and self._reader is not None
        if self._process.returncode is not None:
            await self._reader
        errors = [line.removeprefix(_ERROR) for line in self._tail if line.startswith(_ERROR)]
        words = "\n".join(errors or self._tail) or "(it said nothing)"
        return f"`fairlead {self._arguments[0]}` did not become ready: {words}"
