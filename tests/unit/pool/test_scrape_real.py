"""The scraper on real sockets: plain http, https and bearer tokens."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
from aiohttp import web
from certificates_made import make_pair

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import MetricsFailed, MetricsSampled
from fairlead.pool import authorities
from fairlead.pool.authorities import FollowedAuthorities
from fairlead.pool.scrape import ScrapeError, ScrapeOptions, Scraper, SecureFetcher

DATA = Path(__file__).parents[2] / "data" / "metrics"
CERTIFICATE = DATA / "tls" / "server.pem"
PAGE = (DATA / "vllm-lora.txt").read_bytes()

Serve = Callable[..., Awaitable[int]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server for a handler; returns its port."""
    runners: list[web.AppRunner] = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], tls: bool = False) -> int:
        app = web.Application()
        app.router.add_get("/metrics", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        context = None
        if tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(CERTIFICATE, DATA / "tls" / "server.key")
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        return int(runner.addresses[0][1])

    yield start
    for runner in runners:
        await runner.cleanup()


async def first_event(url: str, options: ScrapeOptions | None = None) -> MetricsSampled | MetricsFailed:
    events: asyncio.Queue[MetricsSampled | MetricsFailed] = asyncio.Queue()
    scraper = Scraper(asyncio.get_running_loop(), events.put_nowait, options=options)
    scraper.up(Endpoint("a", "127.0.0.1:1", metrics_url=url))
    try:
        return await asyncio.wait_for(events.get(), 10)
    finally:
        await scraper.close()


async def whole(request: web.Request) -> web.Response:
    return web.Response(body=PAGE, content_type="text/plain")


async def in_chunks(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for i in range(0, len(PAGE), 1500):
        await response.write(PAGE[i : i + 1500])
        await asyncio.sleep(0)
    return response


async def closing(request: web.Request) -> web.Response:
    response = web.Response(body=PAGE)
    response.force_close()
    return response


@pytest.mark.parametrize("handler", [whole, in_chunks, closing])
async def test_plain_http(serve: Serve, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
    port = await serve(handler)
    event = await first_event(f"http://127.0.0.1:{port}/metrics")
    assert isinstance(event, MetricsSampled)
    assert (event.sample.waiting, event.sample.running) == (16.0, 4.0)


async def test_a_server_that_closes_each_time_is_scraped_all_the_same(serve: Serve) -> None:
    port = await serve(closing)
    events: list[object] = []
    enough = asyncio.Event()

    def feed(event: object) -> None:
        events.append(event)
        if len(events) == 5:
            enough.set()

    scraper = Scraper(asyncio.get_running_loop(), feed, options=ScrapeOptions(fast_s=0.02))
    scraper.up(Endpoint("a", f"127.0.0.1:{port}"))
    await asyncio.wait_for(enough.wait(), 10)
    await scraper.close()
    assert all(isinstance(event, MetricsSampled) for event in events)


async def test_refused_connection() -> None:
    event = await first_event("http://127.0.0.1:1/metrics")
    assert isinstance(event, MetricsFailed)
    assert event.reason.startswith("cannot connect: ")


async def test_https_with_its_own_authority(serve: Serve) -> None:
    port = await serve(whole, tls=True)
    event = await first_event(f"https://localhost:{port}/metrics", ScrapeOptions(ca_file=str(CERTIFICATE)))
    assert isinstance(event, MetricsSampled)
    assert event.sample.adapters == {"b", "c"}


async def test_a_new_bundle_of_authorities_counts_at_once_and_a_broken_one_never(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(authorities, "LOOK_S", 0.0)
    url = f"https://localhost:{await serve(closing, tls=True)}/metrics"
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(make_pair(tmp_path, "20200131235959Z", "20990131235959Z"))
    fetcher = SecureFetcher(ScrapeOptions(ca_file=str(bundle)))
    try:
        with pytest.raises(ScrapeError, match="certificate verify failed"):
            await fetcher.fetch(url)
        bundle.write_bytes(bundle.read_bytes() + CERTIFICATE.read_bytes())
        await until(lambda: fetcher.fetch(url))
        bundle.write_text("half a bund")
        said = "the old ones stay in use: cannot use the certificate authorities in "
        async with asyncio.timeout(30):
            while said not in caplog.text:
                assert await fetcher.fetch(url) == PAGE
        for _ in range(10):
            assert await fetcher.fetch(url) == PAGE
        assert caplog.text.count(said) == 1
    finally:
        await fetcher.close()


async def test_a_bundle_that_cannot_be_read_in_time_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, reads, go_on = tmp_path / "ca.pem", list[str](), Event()
    bundle.write_bytes(make_pair(tmp_path, "20200131235959Z", "20990131235959Z") + CERTIFICATE.read_bytes())
    monkeypatch.setattr(authorities, "LOOK_S", 0.0)
    followed = FollowedAuthorities(str(bundle))
    first, whole_bundle, usable = followed.context(), bundle.read_bytes(), authorities.trusting

    async def until(happened: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not happened():
                await asyncio.sleep(0.01)
                assert followed.context() is first

    bundle.write_bytes(whole_bundle[:-400])
    await until(lambda: "ends within a certificate" in caplog.text)
    bundle.unlink()
    os.mkfifo(bundle)
    await until(lambda: "is not a regular file" in caplog.text)

    def hangs(ca_file: str) -> ssl.SSLContext:
        reads.append(ca_file)
        go_on.wait(30.0)
        return usable(ca_file)

    monkeypatch.setattr(authorities, "trusting", hangs)
    (tmp_path / "whole.pem").write_bytes(whole_bundle)
    os.replace(tmp_path / "whole.pem", bundle)
    try:
        await until(lambda: reads)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert followed.context() is first
        assert reads == [str(bundle)], "one look at a time"
    finally:
        go_on.set()
    async with asyncio.timeout(10):
        while followed.context() is first:
            await asyncio.sleep(0.01)


async def until(fetch: Callable[[], Awaitable[bytes]]) -> None:
    """Fetch again until a page comes."""
    async with asyncio.timeout(10):
        while True:
            with suppress(ScrapeError):
                assert await fetch() == PAGE
                return
            await asyncio.sleep(0.1)


async def test_https_is_verified_unless_told_otherwise(serve: Serve) -> None:
    port = await serve(whole, tls=True)
    url = f"https://127.0.0.1:{port}/metrics"
    event = await first_event(url)
    assert isinstance(event, MetricsFailed)
    assert "certificate" in event.reason.lower()
    assert isinstance(await first_event(url, ScrapeOptions(verify=False)), MetricsSampled)


async def test_bearer_token_is_sent_and_read_again_when_it_changes(serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def guarded(request: web.Request) -> web.Response:
        seen.put_nowait(request.headers.get("Authorization", ""))
        return web.Response(body=PAGE)

    port = await serve(guarded)
    options = ScrapeOptions(fast_s=0.02, token_file=str(token))
    scraper = Scraper(asyncio.get_running_loop(), lambda event: None, options=options)
    scraper.up(Endpoint("a", f"127.0.0.1:{port}"))
    assert await asyncio.wait_for(seen.get(), 10) == "Bearer first"
    (tmp_path / "next").write_text("second")
    (tmp_path / "next").rename(token)
    async with asyncio.timeout(10):
        while await seen.get() != "Bearer second":
            pass
    await scraper.close()


async def test_slow_path_failures(serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "token"

    async def far(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    port = await serve(far)
    url = f"http://127.0.0.1:{port}/metrics"
    missing = await first_event(url, ScrapeOptions(token_file=str(token)))
    assert isinstance(missing, MetricsFailed)
    assert "FileNotFoundError" in missing.reason
    token.write_text("")
    empty = await first_event(url, ScrapeOptions(token_file=str(token)))
    assert empty == MetricsFailed("a", f"no usable token in {token}")
    token.write_text("secret")
    assert await first_event(url, ScrapeOptions(token_file=str(token))) == MetricsFailed(
        "a", "status 302", answered=True
    )
    large = await serve(whole)
    options = ScrapeOptions(token_file=str(token), max_page=100)
    event = await first_event(f"http://127.0.0.1:{large}/metrics", options)
    assert event == MetricsFailed("a", "the page is larger than 100 bytes")


async def test_slow_path_times_out(serve: Serve, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")

    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    port = await serve(never)
    options = ScrapeOptions(token_file=str(token), timeout_s=0.1)
    event = await first_event(f"http://127.0.0.1:{port}/metrics", options)
    assert event == MetricsFailed("a", "no answer within 0.1 s")
