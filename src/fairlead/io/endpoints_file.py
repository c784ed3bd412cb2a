"""Endpoints from a file, followed while it changes: discovery without Kubernetes.

Rules
* Followed as `watched_files` says.
* What cannot be read or parsed changes nothing and is reported, once per cause.
"""

import asyncio
import os
import stat
from pathlib import Path

from fairlead.io.endpoint_set import EndpointSet, Feed, Report, Resolver, resolve_host
from fairlead.io.watched_files import WatchedFiles
from fairlead.model.endpoint import Endpoint
from fairlead.wire.endpoint_list import Listing, parse_endpoints_text
from fairlead.wire.plain_yaml import MAX_BYTES
from fairlead.wire.problem import Problem


class EndpointsFile:
    """Feeds `EndpointUp` and `EndpointDown` for what a YAML or JSON file lists."""

    def __init__(
        self,
        path: str | Path,
        feed: Feed,
        report: Report,
        *,
        watch: bool = True,
        poll_s: float = 0.5,
        resolve_s: float = 30.0,
        resolver: Resolver = resolve_host,
    ) -> None:
        self._path = Path(path)
        self._report = report
        self._watch = watch
        self._set = EndpointSet(feed, report, resolver=resolver, resolve_s=resolve_s)
        self._watched = WatchedFiles(lambda: [str(self._path)], self._load, poll_s, "endpoints")
        self._text: bytes | None = None
        self._complaint = ""
        #: The file was read and understood at least once.
        self.loaded = False

    async def start(self) -> tuple[Problem, ...]:
        """Load, resolve names once (bounded in time), and begin to watch. Returns the first load's problems."""
        await self._watched.note()
        listing = await self._load()
        await self._set.start()
        if self._watch:
            self._watched.start()
        return listing.problems if listing else (Problem("", 0, self._complaint),)

    async def close(self) -> None:
        """Stop watching. What is up stays up."""
        await self._watched.close()
        await self._set.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """What is up."""
        return self._set.endpoints

    async def _load(self) -> Listing | None:
        """Read and apply, unless the content is what it was. `None` = the file could not be read."""
        try:
            text = await asyncio.to_thread(self._read)
        except OSError as error:
            self._complain(f"cannot read {self._path}: {error.strerror or error}")
            return None
        self._complaint = ""
        if text == self._text:
            return None
        self._text = text
        listing = parse_endpoints_text(text)
        self.loaded = self.loaded or listing.ok
        self._set.apply(listing)
        return listing

    def _read(self) -> bytes:
        if not stat.S_ISREG(os.stat(self._path).st_mode):
            raise OSError("not a regular file")  # opening a pipe would wait for its writer
        with open(self._path, "rb") as file:
            return file.read(MAX_BYTES + 1)

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            self._complaint = message
            self._report(Problem("", 0, message))
