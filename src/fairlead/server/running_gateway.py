"""What a scheduler has to know of the embedded gateway that runs next to it.

The parent gives it to each new scheduler on the command line (`cli.serve`). Fairlead's files may be replaced while a
parent runs, so what parents of any version give must be understood: fields may be added, and unknown ones are ignored.
"""

from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import Struct

from fairlead.gateway.envoy.process import CONFIG, ENDPOINTS


class RunningGateway(Struct, frozen=True):
    """`admins`: the addresses of its admin pages; empty = it does not run here. `directory`: that of its files.
    `worker`: the number of this scheduler among `workers`. `flags`: those of the command, without a worker's own."""

    admins: list[str] = []
    directory: str = ""
    worker: int = 0
    workers: int = 1
    flags: dict[str, Any] = {}

    def content(self) -> bytes | None:
        """What the configuration file contained when the workers started; `None` = follow the file alone. One that
        starts later takes the settings that need a restart from there, as the others have them."""
        with suppress(OSError):
            return Path(self.directory, CONFIG).read_bytes() if self.workers > 1 else None
        return None

    @property
    def mark(self) -> str:
        """What the names of its schedulers have in common, as replicas; empty = there is only one."""
        return blake2b(self.directory.encode(), digest_size=4).hexdigest() if self.workers > 1 else ""

    @property
    def pool_file(self) -> Path | None:
        """The file with the endpoints that it balances over by itself, which only the first worker writes."""
        return Path(self.directory, ENDPOINTS) if self.directory and not self.worker else None

    @property
    def is_counted_here(self) -> bool:
        """Whether this scheduler counts requests that the gateway served without asking: of all workers one does."""
        return not self.admins or self.pool_file is not None


NONE_RUNS = RunningGateway()
