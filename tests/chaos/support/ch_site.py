"""The parts of a trial's site that other tests do not have."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from gw_processes import UPSTREAM, Child, Serve
from ports import free_ports

#: The chart's limit.
MEMORY_MIB = 1024


def limited(how: str) -> list[str]:
    """A prefix that does `how` in a shell and then becomes the command behind it."""
    return ["bash", "-c", f'{how}; exec "$@"', "limited"]


class ModelServer(Child):
    """`bench/_upstream.py` on one port, which stays the same when it is started again."""

    def __init__(self, log: Path) -> None:
        super().__init__("a model server", log)
        (self.port,) = free_ports(1)

    def again(self) -> Self:
        self.log.unlink(missing_ok=True)
        self.spawn(sys.executable, str(UPSTREAM), "--listen", str(self.port))
        self.poll_until(lambda: "ports" in self.said())
        return self


class Prefixed(Serve):
    """A Fairlead whose command follows a prefix that ends by executing it: limits, an environment."""

    def __init__(self, directory: Path, prefix: Sequence[str] = ()) -> None:
        super().__init__(directory)
        self._prefix = prefix

    def spawn(self, *arguments: str) -> Self:
        return super().spawn(*self._prefix, *arguments)


def pool(servers: Sequence[ModelServer]) -> dict[str, object]:
    listed = [{"name": f"e{i}", "address": f"127.0.0.1:{server.port}"} for i, server in enumerate(servers)]
    # `Serve` lets all paths in, for tests of other things.
    return {"endpoints": listed, "seed": 1, "gateway": {"paths": []}}
