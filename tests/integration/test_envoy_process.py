"""The embedded gateway as a process: it ends when it should, leaves nothing, and says why it cannot start."""

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from embedded_gateway import Gateway
from ports import free_ports
from tcp import TcpServer

from fairlead.gateway.envoy.admin import GatewayError
from fairlead.gateway.envoy.options import Options

pytestmark = pytest.mark.envoy


async def slow_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request with ten chunks in half a second."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
    for i in range(10):
        writer.write(b"7\r\nchunk %d\r\n" % i)
        await asyncio.sleep(0.05)
    writer.write(b"0\r\n\r\n")


async def test_stop_lets_streams_finish_and_leaves_nothing(tmp_path: Path) -> None:
    async with TcpServer(slow_stream) as server, aiohttp.ClientSession() as http:
        gateway = Gateway(Options(port=0, ext_proc="127.0.0.1:1"), [server.address], directory=tmp_path)
        await gateway.start()
        pid, address = gateway.pid, gateway.address
        (files,) = tmp_path.iterdir()
        assert files.stat().st_mode & 0o77 == 0
        descriptor = os.open(files, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so systemd-tmpfiles leaves them alone
        os.close(descriptor)
        async with http.post(f"http://{address}/v1/completions", data=b"x") as response:
            stopping = asyncio.create_task(gateway.stop(10.0))
            assert (await response.read()).endswith(b"chunk 9")
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"http://{address}/")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert not list(tmp_path.iterdir()) and gateway.pid == 0
        await gateway.stop()


PARENT = """
import asyncio
from embedded_gateway import Gateway
from ports import free_ports
from fairlead.gateway.envoy.options import Options
async def main():
    gateway = Gateway(Options(port=0))
    await gateway.start()
    print(gateway.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists on Linux only")
async def test_envoy_dies_with_its_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 30))
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}/exe").exists():  # a zombie that init has not collected yet has no executable
            with contextlib.suppress(OSError):
                os.readlink(f"/proc/{pid}/exe")
            await asyncio.sleep(0.02)


async def test_another_envoy_at_the_port_of_the_admin_page_is_not_taken_for_ours() -> None:
    (port,) = free_ports(1)
    async with Gateway(Options(port=0, admin_port=port)):
        with pytest.MonkeyPatch.context() as patch:  # taken after the check
            patch.setattr("fairlead.gateway.envoy.gateway.check_free", lambda *address: None)
            with pytest.raises(GatewayError, match=f"127.0.0.1:{port} is taken"):
                await Gateway(Options(port=0, admin_port=port)).start()


async def test_a_taken_port_and_a_wrong_binary_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GatewayError, match=f"127.0.0.1:{port} is taken"):
            await Gateway(Options(port=port)).start()
        with pytest.MonkeyPatch.context() as patch:  # taken while the gateway waits for the scheduler
            patch.setattr("fairlead.gateway.envoy.gateway.check_free", lambda *address: None)
            with pytest.raises(GatewayError, match=f"127.0.0.1:{port} is taken"):
                async with asyncio.timeout(20):
                    await Gateway(Options(port=port), start_timeout=600).start()
        with pytest.raises(GatewayError, match=f"127.0.0.1:{port} is taken: .* another adminPort"):
            await Gateway(Options(port=0, admin_port=port)).start()
    with pytest.raises(GatewayError, match="Envoy ended with code 1"):
        await Gateway(Options(port=0), binary="/bin/false").start()
    with pytest.raises(GatewayError, match="/does-not-exist cannot be run: No such file"):
        await Gateway(Options(port=0), binary="/does-not-exist").start()
