"""What pre-warming is worth when a model server is started anew: its first requests, with and without.

    python bench/warming.py [--json] [--rate 6] [--groups 12] [--replicas 4] [--seconds 20] [--rounds 2]

`fairlead serve` with its Envoy before stubs in real time (Qwen3-32B on two H100). Groups of prompts share a beginning
of about 6,000 tokens each. After `--seconds` of traffic one replica is killed and started again at once; what was sent
in the next 20 s counts, warm-up requests excluded. Rounds take turns; the requests are the same.

JSON: {SIDE: {"replica": ROW, "pool": ROW, "warmed_tokens"}}; SIDE is `cold` or `warmed`, `replica` is the one that was
started anew, and a ROW has `requests`, `hit_rate`, `ttft_ms` (mean), `p95_ms`.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
from msgspec import Struct

from _gateway import environment, free_ports
from _output import tell
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool

WINDOW_S, PATIENCE_S = 20.0, 30.0
SIDES = ("cold", "warmed")


class Answer(Struct):
    """Of a request that was sent at `sent`, seconds after the restart."""

    sent: float
    ttft_ms: float
    replica: str
    prompt: int
    cached: int


async def _ask(session: aiohttp.ClientSession, port: int, prompt: str, question: str, restarted: float) -> Answer:
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": question}],
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first, text = time.perf_counter(), 0.0, b""
    async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {await answer.text()}")
        async for piece in answer.content.iter_any():
            first, text = first or time.perf_counter(), text + piece
        replica = answer.headers["x-inference-pod"]
    prompt_tokens, cached = (
        int((re.findall(rb'"%b":(\d+)' % name, text) or [0])[-1]) for name in (b"prompt_tokens", b"cached_tokens")
    )
    return Answer(sent - restarted, (first - sent) * 1e3, replica, prompt_tokens, cached)


async def _serving(session: aiohttp.ClientSession, port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/v1/models") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def _run(options: argparse.Namespace, side: str, seed: int) -> tuple[list[Answer], str, float]:
    """The answers of the window, who was started anew, and the tokens that it was sent to warm it."""
    rng = Random(seed)
    groups = [" ".join(f"w{rng.randrange(10**6)}" for _ in range(3000)) for _ in range(options.groups)]
    gateway, admin, ext_proc = free_ports(3)
    stubs = StubConfig(model="m", identity_headers=True)
    async with StubPool(stubs, options.replicas) as pool, aiohttp.ClientSession() as session:
        config = {
            "endpoints": [
                {"name": name, "address": where} for name, where in zip(pool.names, pool.addresses, strict=True)
            ],
            "gateway": {"port": gateway},
            "admin": {"port": admin},
            "extProc": {"port": ext_proc},
            "als": {"port": free_ports(1)[0]},
            "warming": {"enabled": side == "warmed"},
            "seed": 1,
        }
        with tempfile.TemporaryDirectory(prefix="fairlead-bench-") as folder:
            file, log = Path(folder) / "fairlead.json", Path(folder) / "log"
            file.write_text(json.dumps(config))
            command = [sys.executable, "-m", "fairlead", "serve", str(file)]
            process = await asyncio.create_subprocess_exec(*command, env=environment(), stderr=log.open("wb"))
            try:
                await _serving(session, gateway)
                answers = await _load(options, session, pool, gateway, groups, rng)
                async with session.get(f"http://127.0.0.1:{admin}/metrics") as page:
                    warmed = re.findall(r"^fairlead_warming_tokens_total (\S+)", await page.text(), re.MULTILINE)
            finally:
                process.terminate()
                await process.wait()
        return answers, pool.names[0], float(warmed[0]) if warmed else 0.0


async def _load(
    options: argparse.Namespace,
    session: aiohttp.ClientSession,
    pool: StubPool,
    port: int,
    groups: list[str],
    rng: Random,
) -> list[Answer]:
    """Poisson arrivals over the groups, before and after the restart."""
    begin = time.perf_counter()
    restart_at, due, sent, restarted = begin + options.seconds, begin, [], False
    while due < restart_at + WINDOW_S:
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        if due >= restart_at and not restarted:
            restarted = True
            # Nothing is in flight there: what a crash cuts off is another subject.
            await asyncio.gather(*sent)
            restart_at = time.perf_counter()
            await pool.restart(0)
            due = restart_at
        question = f"Question {rng.randrange(10**9)}?"
        sent.append(asyncio.create_task(_ask(session, port, rng.choice(groups), question, restart_at)))
        due += rng.expovariate(options.rate)
    return [answer for answer in await asyncio.gather(*sent) if answer.sent >= 0.0]


def _row(answers: list[Answer]) -> dict[str, float]:
    ttft = [answer.ttft_ms for answer in answers] or [0.0]
    return {
        "requests": len(answers),
        "hit_rate": round(sum(answer.cached for answer in answers) / max(sum(one.prompt for one in answers), 1), 3),
        "ttft_ms": round(fmean(ttft), 1),
        "p95_ms": round(float(np.percentile(ttft, 95)), 1),
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    answers: dict[str, list[Answer]] = {side: [] for side in SIDES}
    tokens = dict.fromkeys(SIDES, 0.0)
    for seed in range(options.rounds):
        for side in SIDES:
            made, name, warmed = asyncio.run(_run(options, side, seed))
            answers[side] += made
            tokens[side] += warmed / options.rounds
    return {
        side: {
            "replica": _row([answer for answer in answers[side] if answer.replica == name]),
            "pool": _row(answers[side]),
            "warmed_tokens": round(tokens[side]),
        }
        for side in SIDES
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'':8} {'of':8} {'requests':>9} {'hit rate':>9} {'TTFT ms':>9} {'p95 ms':>9}")
    for side, rows in found.items():
        for part in ("replica", "pool"):
            row = rows[part]
            print(f"{side:8} {part:8} {row['requests']:9} {row['hit_rate']:9.1%} {row['ttft_ms']:9} {row['p95_ms']:9}")
    print(f"tokens sent to warm the replica: {found['warmed']['warmed_tokens']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    tell(compare(options), options.json, show)


if __name__ == "__main__":
    main()
