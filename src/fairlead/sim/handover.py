"""Prefill and decode apart: a request's prompt on one server, its KV cache on the way, its answer on another.

What the sidecar of a decoding server does with the header `x-prefiller-host-port`, in order
* It has the prompt computed elsewhere, as a request for one token. The client sees nothing of that token.
* It sends the request to its own server, which fetches the KV blocks that it lacks (`Handover.seconds`), computes the
  last token of the prompt again, since only a computed token gives logits, and decodes.

Simplified: the blocks at the prefill server may be evicted as soon as the prompt is computed, those at the decoding
server are taken when the KV has arrived. Both hold them a little longer in truth. A prefill that fails fails the
request, as in the reference's sidecar.
"""

from typing import TYPE_CHECKING

from fairlead.engine.request import EngineRequest

if TYPE_CHECKING:
    from fairlead.sim.job import Job
    from fairlead.sim.simulation import Simulation


class Pairs:
    """The requests of a simulation that are computed on one server and answered by another."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self._by_address = {server.endpoint.address: i for i, server in enumerate(simulation.servers)}

    def send(self, job: "Job", prefill_address: str) -> None:
        """To the prefill server first."""
        sim = self._sim
        job.prefill_server = self._by_address[prefill_address]
        # Gateway to the decoder's sidecar, and from there to the prefill server.
        sim.kernel.call_at(sim.kernel.now + 2 * sim.network, self._arrived, job)

    def _arrived(self, job: "Job") -> None:
        sim = self._sim
        if job.status != "waiting":
            return
        if not sim.servers[job.server].up:
            sim.broken(job, "connection refused")
            return
        job.prefilled = self._request(job, job.prefill_server)
        job.prefilled.max_tokens = job.prefilled.limit = 1
        sim.put(job, job.prefill_server, job.prefilled)

    def _request(self, job: "Job", server: int) -> EngineRequest:
        sim = self._sim
        return sim.prompts.engine_request(job.index, job.record, sim.servers[server].replica.engine.block_size)

    def computed(self, job: "Job") -> None:
        """The prompt is; now its KV goes to the decoding server."""
        sim = self._sim
        assert job.prefilled is not None
        job.cached_tokens = job.prefilled.cached_tokens
        served = self._request(job, job.server)
        there = sim.servers[job.server].cached_tokens(served)
        took = sim.scenario.handover.seconds(max(served.prompt_tokens - there, 0))
        served.loaded = served.prompt_tokens
        sim.kernel.call_at(job.prefilled.finished_at + 2 * sim.network + took, self._moved, job, served)

    def _moved(self, job: "Job", served: EngineRequest) -> None:
        if job.status == "waiting":
            job.served = served
            self._sim.put(job, job.server, served)
