"""What knowing an idle fleet costs: scrape 100 endpoints without traffic, then see how soon a busy one is noticed.

    python bench/idle.py            a table
    python bench/idle.py --json     {"endpoints": 100, "page_kb": 57.1, "cores": 0.05, "busy_seen_ms": 190.0}

The model servers are one light asyncio server in a child process, one connection per endpoint. Their page is the
captured one under tests/data/metrics, padded to its natural size with histograms; like a real server's it changes a
little with every scrape. `cores` is the CPU time of this process, which runs the scraper and nothing else, per second.
`busy_seen_ms` is the longest of all trials, from just before the server is told to be busy to the event that says so.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from fairlead.core.endpoint import Endpoint
from fairlead.core.events import MetricsFailed, MetricsSampled
from fairlead.pool.scrape import ScrapeOptions, Scraper

PAGE = Path(__file__).parents[1] / "tests" / "data" / "metrics" / "vllm-idle.txt"
BUSY = b'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0\n'


class ModelServer(asyncio.Protocol):
    """Answers any request with the page of the endpoint that the path names: `/metrics/17`."""

    busy: set[int] = set()
    scrapes = 0

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        number = int(data[len("GET /metrics/") :].split(b" ", 1)[0])
        ModelServer.scrapes += 1
        own = b'http_requests_total{handler="/metrics",method="GET"} %d.0\n' % ModelServer.scrapes
        running = BUSY if number not in self.busy else BUSY.replace(b" 0.0", b" 1.0")
        size = len(own) + len(self.before) + len(running) + len(self.after)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: text/plain\r\n\r\n" % size
        self.transport.write(b"".join((head, own, self.before, running, self.after)))


def make_page(size: int) -> bytes:
    """The captured page, padded with histograms of the same shape until it has about `size` bytes."""
    page = PAGE.read_bytes()
    number = 0
    while len(page) < size:
        name = f"vllm:request_time_in_phase_{number}_seconds"
        lines = [f"# HELP {name} Histogram of time spent in a phase of a request.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{engine="0",le="{0.3 * 1.6**i:.4g}",model_name="tiny"}} 0.0' for i in range(21)]
        page += ("\n".join(lines) + "\n").encode()
        number += 1
    return page


def serve(control: Connection, size: int) -> None:
    """The child process: serve until told to stop."""

    async def main() -> None:
        before, _, after = make_page(size).partition(BUSY)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ModelServer(before, after), "127.0.0.1", 0, backlog=1024)
        control.send((server.sockets[0].getsockname()[1], len(before) + len(BUSY) + len(after)))
        stopped = loop.create_future()

        def obey() -> None:
            try:
                ModelServer.busy = control.recv()
            except EOFError:
                loop.remove_reader(control.fileno())
                stopped.set_result(None)

        loop.add_reader(control.fileno(), obey)
        await stopped

    asyncio.run(main())


async def measure(control: Connection, port: int, args: argparse.Namespace) -> dict[str, float]:
    """Scrape idly for `args.seconds`, then make one endpoint after the other busy."""
    loop = asyncio.get_running_loop()
    running: dict[str, float | None] = {}
    failures: list[str] = []
    news = asyncio.Event()

    def feed(event: MetricsSampled | MetricsFailed) -> None:
        if isinstance(event, MetricsFailed):
            failures.append(event.reason)
        else:
            running[event.endpoint_id] = event.sample.running
            news.set()

    scraper = Scraper(loop, feed, options=ScrapeOptions())
    for number in range(args.endpoints):
        url = f"http://127.0.0.1:{port}/metrics/{number}"
        scraper.up(Endpoint(str(number), f"127.0.0.1:{port}", metrics_url=url))
    await asyncio.sleep(1.5)
    cpu, began, pages = time.process_time(), time.perf_counter(), scraper.stats.ok
    await asyncio.sleep(args.seconds)
    elapsed = time.perf_counter() - began
    cores, rate = (time.process_time() - cpu) / elapsed, (scraper.stats.ok - pages) / elapsed

    seen = await busy_trials(control, running, news, args)
    await scraper.close()
    if failures:
        sys.exit(f"{len(failures)} scrapes failed: {failures[0]}")
    return {"cores": cores, "rate": rate, "max": max(seen), "mean": sum(seen) / len(seen)}


async def busy_trials(
    control: Connection, running: dict[str, float | None], news: asyncio.Event, args: argparse.Namespace
) -> list[float]:
    """Milliseconds until each of some endpoints, made busy at random moments, was known to be."""
    seen: list[float] = []
    rng = random.Random(1)
    for _ in range(args.trials):
        number = rng.randrange(args.endpoints)
        began = time.perf_counter()
        control.send({number})
        await until(running, str(number), 1.0, news)
        seen.append((time.perf_counter() - began) * 1000)
        control.send(set())
        await until(running, str(number), 0.0, news)
        await asyncio.sleep(1.1 + rng.random() * 0.3)
    return seen


async def until(running: dict[str, float | None], name: str, value: float, news: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        while running[name] != value:
            news.clear()
            await news.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--page-kb", type=float, default=57.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=child_main, args=(ours, theirs, int(args.page_kb * 1000)), daemon=True)
    child.start()
    theirs.close()
    port, size = ours.recv()
    try:
        found = asyncio.run(measure(ours, port, args))
    finally:
        ours.close()
        child.join(5)
    report(args, size, found)


def child_main(ours: Connection, theirs: Connection, size: int) -> None:
    ours.close()  # else the child would never see the end of the pipe
    serve(theirs, size)


def report(args: argparse.Namespace, size: int, found: dict[str, float]) -> None:
    page_kb, cores, seen = round(size / 1000, 1), round(found["cores"], 4), round(found["max"], 1)
    if args.json:
        print(json.dumps({"endpoints": args.endpoints, "page_kb": page_kb, "cores": cores, "busy_seen_ms": seen}))
        return
    rows = [
        ("endpoints", f"{args.endpoints}", ""),
        ("page", f"{page_kb} kB", ""),
        ("scrapes per second", f"{found['rate']:.0f}", ""),
        ("CPU per scrape", f"{found['cores'] / found['rate'] * 1e6:.0f} us", ""),
        ("cores", f"{cores}", "target <= 0.1"),
        (f"busy seen, longest of {args.trials}", f"{seen} ms", "target <= 250 ms"),
        ("busy seen, mean", f"{found['mean']:.1f} ms", ""),
    ]
    for name, value, target in rows:
        print(f"{name:<28}{value:>12}   {target}".rstrip())


if __name__ == "__main__":
    main()
