"""What a scheduler has to know about the embedded gateway that runs next to it.

The parent passes it to each new scheduler on the command line (`cli.serve`). A new version of Fairlead may be installed
while a parent runs, so a scheduler must understand parents of any version: fields may be added, and unknown fields are
ignored.
"""

import signal
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import Struct

from fairlead.compat.load import load
from fairlead.config.problems import Problem
from fairlead.config.reload import plan_reload
from fairlead.config.schema import Config
from fairlead.core.errors import FairleadError
from fairlead.gateway.envoy.process import CONFIG, ENDPOINTS, LAST_CONFIG


class RunningGateway(Struct, frozen=True):
    """`admins`: the addresses of Envoy's admin pages; empty = no embedded gateway. `directory`: where the gateway's
    files are. `worker`: the number of this scheduler, from 0, among `workers`. `flags`: values of the command line that
    override the file's, without those of a single worker. `ending`: the signal that says that the gateway is stopping;
    the default is that of older parents. `restarted`: it replaces a
    scheduler that died, so a file that cannot be used any longer does not keep it from starting."""

    admins: list[str] = []
    directory: str = ""
    worker: int = 0
    workers: int = 1
    flags: dict[str, Any] = {}
    ending: int = signal.SIGUSR1
    restarted: bool = False

    def configurations(self, file: Path, flags: Mapping[str, Any], present: bytes | None) -> tuple[Config, Config]:
        """Return the configuration to run, and the one that the gateway and its schedulers began with. They differ if
        the file has changed since: settings that need a restart stay. `flags`: those of this scheduler. `present`: what
        the file contains; `None` = it is read here. If it cannot be used, what was in force before stays, as in a
        scheduler that runs. Raises `FairleadError`."""
        notes: tuple[Problem, ...] = ()
        content = self._kept(CONFIG)
        if content is not None:
            try:
                config, begun = (load(file, flags=values, content=content) for values in (flags, self.flags))
            except FairleadError as error:  # a plugin, or a field of an older version, is gone since
                why = (
                    f"what the file contained at the start cannot be used any longer, so all of it is new here: {error}"
                )
                notes = (Problem("$", 0, why, "restart the gateway too"),)
            else:
                last = self._kept(LAST_CONFIG)
                for usable in (present, *([] if last is None else [last])):
                    with suppress(FairleadError):
                        changes, _ = plan_reload(config, load(file, flags=self.flags, content=usable), begun)
                        return changes.config, begun
                return config, begun
        config = load(file, flags=flags, content=present)
        config = config.model_copy(update={"notes": (*config.notes, *notes)})
        return config, config

    def _kept(self, name: str) -> bytes | None:
        """The content of a file of the gateway; `None` = there is none, for example in one of an older version."""
        try:
            return Path(self.directory, name).read_bytes() if self.directory else None
        except OSError:
            return None

    @property
    def mark(self) -> str:
        """The part that the replica names of all workers of this gateway share; empty = there is only one worker."""
        return blake2b(self.directory.encode(), digest_size=4).hexdigest() if self.workers > 1 else ""

    @property
    def pool_file(self) -> Path | None:
        """The file with the endpoints that Envoy balances over by itself. Only the first worker writes it; `None` = not
        this scheduler."""
        return Path(self.directory, ENDPOINTS) if self.directory and not self.worker else None

    @property
    def is_counted_here(self) -> bool:
        """Whether this scheduler counts what only the gateway's access log shows. Only one worker does."""
        return not self.admins or self.pool_file is not None


NONE_RUNS = RunningGateway()
