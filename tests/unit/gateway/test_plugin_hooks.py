"""Where metric sources and parsers of others are asked: for every page, and for every body."""

import asyncio
import contextlib
from collections.abc import Mapping

from fairlead.apis.request import ParsedRequest
from fairlead.core.endpoint import Endpoint
from fairlead.core.events import MetricsFailed, MetricsSampled
from fairlead.core.prefix import ChainHasher
from fairlead.core.tokens import TokenEstimator
from fairlead.gateway.understand import Understanding
from fairlead.plugins.guarding import Measuring, Parsing
from fairlead.pool.scrape import ScrapeOptions, Scraper


class Heat:
    name = "heat"
    provides = ("heat",)

    def measure(self, endpoint: Endpoint, page: bytes) -> Mapping[str, float]:
        return {"heat": float(page.partition(b"# heat ")[2].split()[0])}


class Rank:
    name = "rank"
    paths = ("/v1/rank",)

    def parse(self, path: str, body: bytes) -> ParsedRequest:
        return ParsedRequest(model="ranker", prompt=(body,), prompt_bytes=len(body), root=b"rank")


async def test_a_page_that_changed_only_for_the_source_is_news() -> None:
    heat = 20

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                page = f"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n# heat {heat}\n".encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)
        writer.close()
        done.set()

    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    fed: list[float] = []

    def feed(event: MetricsSampled | MetricsFailed) -> None:
        if isinstance(event, MetricsSampled):
            fed.append(event.sample.extra["heat"])

    options = ScrapeOptions(fast_s=0.05, idle_s=0.05)
    scraper = Scraper(loop, feed, options=options, measure=Measuring([Heat()]))
    port = server.sockets[0].getsockname()[1]
    scraper.up(Endpoint("a", f"127.0.0.1:{port}"))
    async with asyncio.timeout(20):
        while 20.0 not in fed:
            await asyncio.sleep(0.01)
        heat = 55
        while 55.0 not in fed:
            await asyncio.sleep(0.01)
    assert set(fed) == {20.0, 55.0}
    await scraper.close()
    await asyncio.wait_for(done.wait(), 20)
    server.close()
    await server.wait_closed()


def test_a_body_is_read_by_the_parser_of_its_path() -> None:
    understanding = Understanding(TokenEstimator(), ChainHasher(), lambda: 1.0, parse=Parsing([Rank()]))
    found, _ = understanding.request(understanding.head({":path": "/v1/rank", ":method": "POST"}), b"rank these " * 100)
    assert (found.model, found.prompt_bytes) == ("ranker", 1100)
    assert found.prefix.hashes
    other, _ = understanding.request(
        understanding.head({":path": "/v1/completions"}), b'{"model": "m", "prompt": "hi"}'
    )
    assert (other.api, other.model) == ("completions", "m")
