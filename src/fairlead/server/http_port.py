"""An aiohttp application on a TCP port of its own."""

from aiohttp import web


class HttpPort:
    """`await start()`, then `port`; `await close()`.

    `grace_s`: seconds that requests being answered get at `close`, which takes no more connections.
    """

    def __init__(self, host: str, port: int, grace_s: float) -> None:
        """Port 0 = any that is free."""
        self._host = host
        self._wanted_port = port
        self._grace_s = grace_s
        self._runner: web.AppRunner | None = None
        #: The port in use, once started.
        self.port = 0

    def make_app(self) -> web.Application:
        """What is served, also for those who bring their own server."""
        return web.Application()

    async def start(self) -> None:
        """Raises `OSError` when the port is taken."""
        runner = web.AppRunner(self.make_app(), access_log=None, shutdown_timeout=self._grace_s)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._wanted_port).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = int(runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
