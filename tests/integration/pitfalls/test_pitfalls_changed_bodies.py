"""Bodies that the scheduler changes: exactly the new bytes arrive, with a length that fits, wherever that is possible.

A length that does not fit would let the rest of a body be read as the next message of the connection, so every case
sends several requests over one connection, and the model server and the clients are strict about framing.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from gw_http1 import Http1
from gw_http2 import Http2
from gw_messages import JSON, Ask, Broken, Fields
from gw_mirror import Mirror
from gw_modes import FULL_DUPLEX, Pair, bootstrap, ext_proc_filter
from gw_processes import Envoy, sees_the_scheduler
from gw_rewriter import Rewriter, arrived, made
from ports import free_ports

from fairlead.gateway import ext_proc as bodies
from fairlead.gateway.ext_proc import CONTINUE, Kind

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: (pair, content-length may be set by the scheduler). Without the leave Envoy takes it off the client's request.
REQUESTS = {
    "whole": (Pair("whole", "none", log=False), True),
    "buffered": (Pair("buffered", "none", log=False), True),
    "BUFFERED_PARTIAL": (Pair("BUFFERED_PARTIAL", "NONE", log=False), True),
    "FULL_DUPLEX": (Pair(FULL_DUPLEX, FULL_DUPLEX, log=False), True),
    "FULL_DUPLEX, no lengths": (Pair(FULL_DUPLEX, FULL_DUPLEX, log=False), False),
}
IMPOSSIBLE = {
    "STREAMED": (Pair("STREAMED", "NONE", log=False), True),
    "NONE": (Pair("NONE", "NONE", log=False), True),
}
RESPONSES = {
    "full": (Pair("whole", "full", log=False), True),
    "STREAMED": (Pair(FULL_DUPLEX, "STREAMED", log=False), True),
    "FULL_DUPLEX": (Pair(FULL_DUPLEX, FULL_DUPLEX, log=False), True),
}
SIZES = [1, 1_001, 61_000, 5 << 20]
OLD = b"o" * 1_000
#: More than any gateway here buffers of a BUFFERED_PARTIAL body.
LONG = b"l" * 3_000_000


def pattern(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


class Site:
    def __init__(self, gateway: Envoy, rewriter: Rewriter, mirror: Mirror, pair: Pair) -> None:
        self.gateway, self.rewriter, self.mirror, self.pair = gateway, rewriter, mirror, pair

    @property
    def partial(self) -> bool:
        """Long bodies are shown to the scheduler in part."""
        return self.pair.request == "BUFFERED_PARTIAL"

    @asynccontextmanager
    async def client(self, kind: str) -> AsyncIterator[Http1 | Http2]:
        async with (Http2 if kind == "h2" else Http1)(self.gateway.port) as client:
            yield client

    async def upload(self, kind: str, *uploads: bytes, trailers: Fields = ()) -> list[tuple[int, str]]:
        """One after the other over one connection; what the model server says of each."""
        async with self.client(kind) as client:
            told = []
            for body in uploads:
                asked = Ask("POST", "/upload", [JSON], [body], chunked=kind == "chunked", trailers=trailers)
                told.append(arrived(await client.ask(asked)))
            return told


async def opened(stack: AsyncExitStack, pair: Pair, lengths: bool, directory: Path) -> Site:
    mirror = await stack.enter_async_context(Mirror())
    rewriter = await stack.enter_async_context(Rewriter())
    rewriter.destination = mirror.address
    (port,) = free_ports(1)
    built = bootstrap(pair, port, rewriter.address, [mirror.address], message_timeout=5.0)
    if not lengths:
        ext_proc_filter(built).pop("allow_content_length_header")
    gateway = Envoy(directory)
    stack.callback(gateway.end)
    await asyncio.to_thread(gateway.start, built)
    await sees_the_scheduler(gateway.admin)
    return Site(gateway, rewriter, mirror, pair)


def fixture_for(modes: dict[str, tuple[Pair, bool]]) -> object:
    @pytest_asyncio.fixture(scope="module", loop_scope="module", params=modes, ids=str)
    async def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
        async with AsyncExitStack() as stack:
            yield await opened(stack, *modes[request.param], tmp_path_factory.mktemp("gateway"))

    return at


rewriting = fixture_for(REQUESTS)
streaming = fixture_for(IMPOSSIBLE)
responding = fixture_for(RESPONSES)
CLIENTS = pytest.mark.parametrize("kind", ["length", "chunked", "h2"])


@pytest.fixture(autouse=True)
def left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """The gateways are shared; what they are told to change is not."""
    yield
    for name in ("rewriting", "streaming", "responding"):
        if name in request.fixturenames:
            site = request.getfixturevalue(name)
            assert site.mirror.malformed == [], "something was read as a request that was none"
            rewriter = site.rewriter
            rewriter.body = rewriter.chunks = None
            rewriter.leave = False
            rewriter.response_head = bodies.resizable_response()
            rewriter.possible.clear()


# ---- requests ----


@CLIENTS
async def test_a_request_arrives_with_exactly_the_new_bytes(rewriting: Site, kind: str) -> None:
    for size in SIZES:
        rewriting.rewriter.body = pattern(size)
        told = await rewriting.upload(kind, OLD, OLD)
        assert told == [made(pattern(size))] * 2, size
    rewriting.rewriter.body = None
    assert await rewriting.upload(kind, OLD, b"1") == [made(OLD), made(b"1")]


@CLIENTS
async def test_a_long_request_may_become_a_short_one(rewriting: Site, kind: str) -> None:
    rewriting.rewriter.body = b"{}"
    told = await rewriting.upload(kind, LONG, LONG)
    possible = rewriting.rewriter.possible
    assert told == [made(b"{}") if changed else made(LONG) for changed in possible]
    assert all(possible) or rewriting.partial, "only the beginning of a body must be left alone"


@CLIENTS
async def test_the_scheduler_may_leave_with_the_new_body(rewriting: Site, kind: str) -> None:
    rewriting.rewriter.leave = True
    # Full duplex: only what fits one write, see tests/integration/pitfalls/README.md.
    for size in SIZES[:2] if rewriting.pair.request == FULL_DUPLEX else SIZES:
        rewriting.rewriter.body = pattern(size)
        assert await rewriting.upload(kind, OLD, OLD) == [made(pattern(size))] * 2, size


async def test_a_request_that_ends_by_trailers(rewriting: Site) -> None:
    rewriting.rewriter.body = pattern(1_001)
    told = await rewriting.upload("h2", OLD, OLD, trailers=[("x-checksum", "1")])
    # There a body whose end was not seen may have more to come.
    assert told == [made(OLD if rewriting.partial else pattern(1_001))] * 2


@CLIENTS
async def test_what_can_not_be_changed_arrives_as_it_was(streaming: Site, kind: str) -> None:
    streaming.rewriter.body = b"{}"
    assert await streaming.upload(kind, OLD, LONG) == [made(OLD), made(LONG)]
    assert streaming.rewriter.possible == [False, False]


# ---- responses ----


@pytest.mark.parametrize("kind", ["h1", "h2"])
@pytest.mark.parametrize("path", ["/v1/models", "/bytes/100000", "/stream/fast"])
async def test_chunks_of_a_response_may_shrink_and_grow(responding: Site, kind: str, path: str) -> None:
    responding.rewriter.chunks = lambda chunk, last: chunk.upper() * 2
    async with responding.client(kind) as client:
        for _ in range(2):
            doubled = await client.ask(Ask("GET", path))
            assert doubled.field("content-length") == ""
        responding.rewriter.chunks = lambda chunk, last: b""
        assert (await client.ask(Ask("GET", path))).body == b""
        responding.rewriter.chunks = None
        plain = await client.ask(Ask("GET", path))
        assert len(doubled.body) == 2 * len(plain.body) > 0
        assert doubled.body == doubled.body.upper()


@pytest.mark.parametrize("kind", ["h1", "h2"])
@pytest.mark.parametrize("size", SIZES)
async def test_bytes_held_back_may_come_with_the_last_chunk(responding: Site, kind: str, size: int) -> None:
    responding.rewriter.chunks = lambda chunk, last: pattern(size) if last else b""
    async with responding.client(kind) as client:
        for path in ("/v1/models", "/bytes/100000", "/v1/models"):
            got = await client.ask(Ask("GET", path))
            assert (got.status, made(got.body)) == (200, made(pattern(size)))


@pytest.mark.parametrize("kind", ["h1", "h2"])
async def test_a_buffered_response_may_change_too(tmp_path: Path, kind: str) -> None:
    """Below what the connection buffers; above it Envoy answers 500, whether the body is changed or not."""
    async with AsyncExitStack() as stack:
        site = await opened(stack, Pair("NONE", "BUFFERED", log=False), True, tmp_path)
        client = await stack.enter_async_context(site.client(kind))
        for size in (1, 1_001, 20_000):
            site.rewriter.chunks = lambda chunk, last, size=size: pattern(size)  # type: ignore[misc]
            for path in ("/v1/models", "/bytes/3000"):
                assert made((await client.ask(Ask("GET", path))).body) == made(pattern(size))


async def test_a_length_that_does_not_fit_is_never_mended_by_envoy(responding: Site) -> None:
    """Why `resizable_response` is a must: the response breaks, or is an error where Envoy still holds all of it."""
    responding.rewriter.response_head = CONTINUE[Kind.RESPONSE_HEADERS]
    responding.rewriter.chunks = lambda chunk, last: chunk * 2
    async with responding.client("h1") as client:
        try:
            status = (await client.ask(Ask("GET", "/v1/models"))).status
        except Broken:
            status = 0
        assert status in (0, 503)
