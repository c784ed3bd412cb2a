"""The life of `fairlead stub`: start a pool, say where it is, wait for a signal, stop."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import yaml

from fairlead.stub.config import StubConfig
from fairlead.stub.pool import PortTaken, StubPool
from fairlead.stub.replica import Replica


def run(
    config: StubConfig, replicas: int, host: str, port: int, endpoints: Path | None, say: Callable[[str], object]
) -> str:
    """Serve until SIGINT or SIGTERM. Returns what went wrong, in words for a user; empty when nothing did."""
    return asyncio.run(_serve(config, replicas, host, port, endpoints, say))


async def _serve(
    config: StubConfig, replicas: int, host: str, port: int, endpoints: Path | None, say: Callable[[str], object]
) -> str:
    loop = asyncio.get_running_loop()
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_stop.set)
    if port + replicas - 1 > 65535:
        return f"{replicas} replicas from port {port} on need ports above 65535"
    try:
        pool = StubPool(config, replicas, host, port)
    except ValueError as error:
        return str(error)
    try:
        async with pool:
            if endpoints is not None:
                await asyncio.to_thread(endpoints.write_text, endpoints_yaml(pool, config))
            spec = config.spec()
            say(
                f"{config.served_model} ({config.preset}): KV cache {spec.kv_tokens:,} tokens,"
                f" {spec.max_num_seqs} sequences, time ratio {config.time_ratio:g}"
            )
            for index, (name, address) in enumerate(zip(pool.names, pool.addresses, strict=True)):
                say(f"{name}  http://{address}{_sources(pool.replica(index))}")
            await asked_to_stop.wait()
    except PortTaken as error:
        return f"{error}; {error.cure}"
    except OSError as error:
        return f"cannot write {endpoints}: {error.strerror or error}"
    return ""


def _sources(replica: Replica) -> str:
    publisher = replica.kv_events
    if publisher is None:
        return ""
    replay = f"  replay {publisher.replay_address}" if publisher.replay_address else ""
    return f"  events {publisher.events_address}{replay}"


def endpoints_yaml(pool: StubPool, config: StubConfig) -> str:
    """The pool as an endpoints file, which the gateway can watch."""
    entries = [
        {"name": name, **_split(address), "labels": {"model": config.served_model, "app": "fairlead-stub"}}
        for name, address in zip(pool.names, pool.addresses, strict=True)
    ]
    text: str = yaml.safe_dump({"endpoints": entries}, sort_keys=False)
    return text


def _split(address: str) -> dict[str, str | int]:
    host, _, port = address.rpartition(":")
    return {"address": host.strip("[]"), "port": int(port)}
