"""The index of an indexer that runs already, for one that begins."""

import asyncio

import aiohttp

TIMEOUT, MAX_SNAPSHOT = 30.0, 1 << 30


async def fetch(session: aiohttp.ClientSession, url: str) -> bytes:
    """`url`: `http://host:port`. Raises `ValueError`, for people: not there, too slow, too large."""
    try:
        async with (
            asyncio.timeout(TIMEOUT),
            session.get(f"{url.rstrip('/')}/snapshot", allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ValueError(f"{url}: status {response.status}")
            found = bytearray()
            async for part in response.content.iter_any():
                found += part
                if len(found) > MAX_SNAPSHOT:
                    raise ValueError(f"{url}: its snapshot is larger than {MAX_SNAPSHOT} bytes")
    except TimeoutError:
        raise ValueError(f"{url}: no snapshot within {TIMEOUT:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ValueError(f"{url}: {error or type(error).__name__}") from None
    return bytes(found)
