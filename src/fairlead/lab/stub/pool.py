"""Many replicas in one process: start them, list their addresses, stop and restart single ones; also as a command."""

import asyncio
import errno
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gaierror
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import yaml

from fairlead.apis.engine_metrics import DEFAULT_ENGINE, ENGINE_LABELS, TRTLLM_PATH
from fairlead.core.endpoint import host_port
from fairlead.core.errors import FairleadError
from fairlead.gateway.memory import raise_file_limit
from fairlead.lab.stub.config import Faults, StubConfig, changed
from fairlead.lab.stub.connection import Held
from fairlead.lab.stub.exposition import Part, process_parts
from fairlead.lab.stub.replica import Replica
from fairlead.lab.stub.server import ReplicaServer

if TYPE_CHECKING:
    from fairlead.lab.stub.kv_publisher import KvEventsConfig


class PortTaken(FairleadError):
    """A socket could not be opened. The message says what the user of the command can do."""


_ANOTHER = "is another server running there? Choose another --port"
_EVENT_CURES = {
    errno.EADDRINUSE: "is another server running there? Choose another --kv-events-port",
    errno.ENODEV: "for KV events --host must be an IPv4 address of this machine",
}
_NO_ADDRESS = "--kv-events-connect is an address as tcp://127.0.0.1:5557"
#: Open files per publisher: ten, and two more for its subscriber (libzmq 4.3, measured).
_FILES_PER_PUBLISHER = 12
_OTHER_FILES = 100


class StubPool:
    """`async with StubPool(config, replicas=8) as pool:` serves until the block is left.

    `ports`: 0 = free ports; another number = the port of the first replica, the other ports follow it; or a list with
    the port of each replica. Raises `ValueError` for invalid ports.
    """

    def __init__(
        self,
        config: StubConfig | None = None,
        replicas: int = 1,
        host: str = "127.0.0.1",
        ports: Sequence[int] | int = 0,
    ) -> None:
        if replicas < 1:
            raise ValueError("a pool needs at least one replica")
        self._config = config or StubConfig()
        if isinstance(ports, int):
            self._ports = [ports + index if ports else 0 for index in range(replicas)]
        else:
            self._ports = list(ports)
        if len(self._ports) != replicas:
            raise ValueError(f"{replicas} replicas need as many ports, not {len(self._ports)}")
        self.host = host
        self.names = [f"stub-{index}" for index in range(replicas)]
        self._kv_events = [self._config.kv_events_of(index) for index in range(replicas)]
        self._process: list[Part] = []
        self._servers: list[ReplicaServer | None] = [None] * replicas

    async def __aenter__(self) -> Self:
        self._process = process_parts(time.time())
        if any(self._kv_events):
            _have_files(len(self._servers))
        try:
            for index in range(len(self._servers)):
                await self._start(index)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop all replicas. Safe to call again."""
        for index in range(len(self._servers)):
            await self.stop(index)

    @property
    def addresses(self) -> list[str]:
        """`host:port` of every replica, including stopped ones."""
        return [host_port(self.host, port) for port in self._ports]

    @property
    def replicas(self) -> list[Replica]:
        """The running replicas."""
        return [server.replica for server in self._servers if server is not None]

    def replica(self, index: int) -> Replica:
        """A running replica. Raises `LookupError` if it is stopped."""
        return self._running(index).replica

    def connections(self, index: int) -> int:
        return self._running(index).connections

    def held(self, index: int) -> list[Held]:
        """What each connection of a replica buffers."""
        return self._running(index).held

    def set_faults(self, index: int, **changes: object) -> Faults:
        """Change some faults of one replica, see `Faults`. Raises `ValueError` for an unknown fault or a wrong type."""
        replica = self.replica(index)
        replica.faults = changed(replica.faults, changes)
        return replica.faults

    async def stop(self, index: int) -> None:
        """Kill a replica: its port is closed, its connections are cut, its cache is lost."""
        server, self._servers[index] = self._servers[index], None
        if server is not None:
            await server.stop()
            if server.replica.kv_events is not None:
                await server.replica.kv_events.close()

    async def restart(self, index: int) -> None:
        """Kill a replica if it runs, and start it again on the same port with an empty cache."""
        await self.stop(index)
        await self._start(index)

    async def _start(self, index: int) -> None:
        replica = Replica(self._config, self.names[index], index, asyncio.get_running_loop())
        server = ReplicaServer(replica, self._process)
        try:
            self._ports[index] = await server.start(self.host, self._ports[index])
        except OSError as error:
            why = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror or error
            taken = f"cannot listen on {self.host}:{self._ports[index]}: {why}"
            cure = (
                "is this an address of this machine? Choose another --host" if isinstance(error, gaierror) else _ANOTHER
            )
            raise PortTaken(f"{taken}; {cure}") from error
        self._servers[index] = server
        events = self._kv_events[index]
        if events is not None:
            try:
                self._kv_events[index] = self._publish(replica, server.address, events)
            except PortTaken:
                await self.stop(index)
                raise

    def _publish(self, replica: Replica, address: str, config: "KvEventsConfig") -> "KvEventsConfig":
        """Create a replica's publisher. Returns the configuration with its actual ports, for use after a restart."""
        import zmq

        from fairlead.lab.stub.kv_publisher import KvPublisher

        model = replica.config.served_model
        named = msgspec.structs.replace(config, topic=config.topic or f"kv@{address}@{model}")
        try:
            publisher = KvPublisher(named, address, model)
        except zmq.ZMQError as error:
            cure = _NO_ADDRESS if config.connect else _EVENT_CURES.get(error.errno or 0, "choose other addresses")
            raise PortTaken(f"cannot publish KV events: {error}; {cure}") from error
        replica.publish(publisher)
        return msgspec.structs.replace(named, events=publisher.events_address, replay=publisher.replay_address)

    def _running(self, index: int) -> ReplicaServer:
        server = self._servers[index]
        if server is None:
            raise LookupError(f"{self.names[index]} is stopped")
        return server


def _have_files(publishers: int) -> None:
    """Raise the limit of open files, because libzmq ends the process if none are left. Raises `PortTaken` if the hard
    limit is too low."""
    needed, limit = _FILES_PER_PUBLISHER * publishers + _OTHER_FILES, raise_file_limit()
    if needed > limit:
        raise PortTaken(f"KV events of {publishers} replicas need {needed} open files; raise the limit of {limit}")


# The `fairlead stub` command: start a pool, print its addresses, wait for a signal, stop.


async def serve(
    config: StubConfig, replicas: int, host: str, port: int, endpoints: Path | None, say: Callable[[str], object]
) -> None:
    """Serve until SIGINT or SIGTERM. `endpoints`: the endpoints file to write; `None` = none. `say` prints a line.
    Raises `FairleadError` if the pool cannot start or the file cannot be written."""
    loop = asyncio.get_running_loop()
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_stop.set)
    if port + replicas - 1 > 65535:
        raise FairleadError(f"{replicas} replicas from port {port} on need ports above 65535")
    try:
        pool = StubPool(config, replicas, host, port)
    except ValueError as error:
        raise FairleadError(str(error)) from None
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
    except OSError as error:
        raise FairleadError(f"cannot write {endpoints}: {error.strerror or error}") from None


def _sources(replica: Replica) -> str:
    publisher = replica.kv_events
    if publisher is None:
        return ""
    replay = f"  replay {publisher.replay_address}" if publisher.replay_address else ""
    return f"  events {publisher.events_address}{replay}"


def endpoints_yaml(pool: StubPool, config: StubConfig) -> str:
    """The pool as the text of an endpoints file for `fairlead serve`."""
    labels = {"model": config.served_model, "app": "fairlead-stub"}
    if config.engine_type != DEFAULT_ENGINE:
        labels[ENGINE_LABELS[0]] = config.engine_type
    entries = [
        {"name": name, **_split(address), "labels": dict(labels)}
        | ({"metricsUrl": f"http://{address}{TRTLLM_PATH}"} if config.engine_type == "trtllm-serve" else {})
        for name, address in zip(pool.names, pool.addresses, strict=True)
    ]
    text: str = yaml.safe_dump({"endpoints": entries}, sort_keys=False)
    return text


def _split(address: str) -> dict[str, str | int]:
    host, _, port = address.rpartition(":")
    return {"address": host.strip("[]"), "port": int(port)}
