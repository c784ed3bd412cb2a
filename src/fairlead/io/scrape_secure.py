"""The careful way to a metrics page, for https and bearer tokens: aiohttp, certificates checked, no redirects."""

import asyncio
import os
import ssl

import aiohttp

from fairlead.io.scrape_http import answers
from fairlead.io.scrape_target import USER_AGENT, ScrapeOptions

_MAX_TOKEN = 65_536


class ScrapeError(Exception):
    """A page could not be had; the message says why. `answered`: the server did, see `scrape_http.answers`."""

    def __init__(self, reason: str, answered: bool = False) -> None:
        super().__init__(reason)
        self.answered = answered


class SecureFetcher:
    """One session for all endpoints that need it."""

    def __init__(self, options: ScrapeOptions) -> None:
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._ssl: ssl.SSLContext | bool = True
        self._token = ""
        self._token_stamp: tuple[int, int] | None = None

    async def fetch(self, url: str) -> bytes:
        """The page. Raises `ScrapeError`; the caller bounds the time."""
        try:
            headers = await asyncio.to_thread(self._headers) if self._options.token_file else {}
            session = self._session or self._open()
            async with session.get(url, headers=headers, ssl=self._ssl, allow_redirects=False) as response:
                if response.status != 200:
                    raise ScrapeError(f"status {response.status}", answers(response.status))
                return await self._body(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ScrapeError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        limit = self._options.max_page
        parts = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > limit:
                raise ScrapeError(f"the page is larger than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    def _open(self) -> aiohttp.ClientSession:
        if not self._options.verify:
            self._ssl = False
        elif self._options.ca_file:
            self._ssl = ssl.create_default_context(cafile=self._options.ca_file)
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=1, keepalive_timeout=30)
        agent = {"User-Agent": USER_AGENT, "Accept": "text/plain", "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(
            connector=connector, headers=agent, timeout=aiohttp.ClientTimeout(), cookie_jar=aiohttp.DummyCookieJar()
        )
        return self._session

    def _headers(self) -> dict[str, str]:
        path = self._options.token_file
        found = os.stat(path)
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp != self._token_stamp:
            with open(path, encoding="ascii") as file:
                token = file.read(_MAX_TOKEN).strip()
            if not token.isprintable() or not token:
                raise ScrapeError(f"no usable token in {path}")
            self._token, self._token_stamp = token, stamp
        return {"Authorization": f"Bearer {self._token}"}
