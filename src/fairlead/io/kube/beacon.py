"""The leader's address for gateways: one EndpointSlice that each new leader writes over.

Rules
* Only who leads writes, each time with the version that was seen, so of two writers one gets 409 and looks again.
* A slice that was changed by others is put right again, but not at once: who was stopped for a while and still takes
  itself for the leader must learn of its successor first.
* Who ends leaves the slice to its successor. Without one it is emptied, so that gateways know that nobody answers.
* Without permission nothing is written, and the missing rule is told. Leading never depends on it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from random import Random

from msgspec import Raw

from fairlead.io.kube.client import KubeClient, KubeError, Resource, Unreachable
from fairlead.io.kube.reflector import Reflector
from fairlead.wire.kube_objects import Unreadable
from fairlead.wire.kube_slice import (
    GROUP,
    VERSION,
    Place,
    Service,
    Slice,
    read_service,
    read_slice,
    slice_name,
    slice_object,
)

#: Seconds before what others changed is put right, and after a failure.
REPAIR_S, RETRY_S = 1.0, 1.0
_CONFLICTS = (404, 409)


class Beacon:
    """`lead(True)`: the slice of `service` names `place` from now on. `await run()` never returns."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        service: str,
        place: Place,
        rng: Random,
        *,
        told: Callable[[str], object] = lambda trouble: None,
    ) -> None:
        #: Times that the slice was written.
        self.writes = 0
        self._client = client
        self._namespace = namespace
        self._name = service
        self._place = place
        self._told = told
        self._services = Resource("", "v1", "services", namespace)
        self._slices = Resource(GROUP, VERSION, "endpointslices", namespace)
        self._service: Service | None = None
        self._seen = Slice()
        self._leading = False
        #: It named us since we lead.
        self._named = False
        self._trouble = ""
        self._woken = asyncio.Event()
        self.reflector: Reflector[Slice] = Reflector(
            client,
            self._slices,
            read_slice,
            lambda key, found: self._see(found or Slice()),
            rng,
            query={"fieldSelector": f"metadata.name={slice_name(service, place)}"},
            synced=self._woken.set,
            told=self._contact,
        )

    def lead(self, leading: bool) -> None:
        self._leading, self._named = leading, False
        self._woken.set()

    async def run(self) -> None:
        watching = asyncio.create_task(self.reflector.run(), name="leader's slice")
        try:
            await self.reflector.ready.wait()
            while True:
                self._woken.clear()
                pause = await self._round() if self._leading else None
                # Not `wait_for`: until Python 3.12 it loses a cancellation that comes together with the result.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def withdraw(self) -> None:
        """Nobody leads any more. Raises nothing; a slice that names another one stays."""
        service = self._service
        if service is None or self._leading or not self._seen.names(self._place, service):
            return
        with contextlib.suppress(KubeError, Unreachable, Unreadable, TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._put(service, empty=True)

    async def _round(self) -> float | None:
        """Seconds until the next look; `None` = nothing is to be done."""
        try:
            if self._service is None:
                self._service = read_service(await self._client.read(self._services, self._name))
            if self._seen.names(self._place, self._service):
                self._named = True
                self._say("")
                return None
            if self._named:
                await asyncio.sleep(REPAIR_S)
                if self._seen.names(self._place, self._service):
                    return None
            if self._leading:
                await self._put(self._service)
                self._named = True
                self._say("")
        except KubeError as error:
            if error.code in _CONFLICTS and self._service is not None:
                return await self._look()
            self._say(f"the service {self._name} does not lead here: {error}")
            return RETRY_S
        except (Unreachable, Unreadable) as error:
            self._say(f"the service {self._name} does not lead here: {error}")
            return RETRY_S
        return None

    async def _put(self, service: Service, empty: bool = False) -> None:
        seen = self._seen
        value = slice_object(service, self._namespace, self._place, seen.version, empty)
        if seen.version:
            answer = await self._client.update(self._slices, slice_name(self._name, self._place), value)
        else:
            answer = await self._client.create(self._slices, value)
        self.writes += 1
        self._seen = read_slice(Raw(answer))

    async def _look(self) -> float:
        """Somebody else wrote: read the slice, and its service, anew."""
        self._service = None
        try:
            self._seen = read_slice(Raw(await self._client.read(self._slices, slice_name(self._name, self._place))))
        except KubeError as error:
            if error.code != 404:
                self._say(str(error))
                return RETRY_S
            self._seen = Slice()
        except (Unreachable, Unreadable) as error:
            self._say(str(error))
            return RETRY_S
        return 0.0

    def _see(self, found: Slice) -> None:
        self._seen = found
        self._woken.set()

    def _contact(self, trouble: str) -> None:
        if trouble:
            self._say(trouble)
        elif self._trouble:
            self._woken.set()

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._told(trouble)
