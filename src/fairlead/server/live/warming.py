"""Pre-warming: an endpoint with an empty cache is sent the beginnings that many prompts share, before clients ask.

Rules
* A beginning is sent as a request for one token. The pipeline charges it and learns from it as from any other. It has
  the lowest priority, so under flow control it waits for all other requests. Only its endpoint may serve it.
* An endpoint is sent one beginning at a time, the most shared first, until `tokens` were sent or one fails. One whose
  model it does not serve is passed over, and after `TRIES` of them all for that name. While `BUSY` requests wait there
  for their first token none is sent. After `PATIENCE_S` of that, warming ends: clients' requests fill the cache then.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
from msgspec.structs import replace

from fairlead.apis.beginning import beginning
from fairlead.apis.splice import splice_model
from fairlead.config.schema import Config
from fairlead.core.beginnings import Beginning, Beginnings
from fairlead.core.endpoint import Endpoint
from fairlead.core.errors import ClientError
from fairlead.core.events import Event, FirstTokenSeen, RequestArrived, ResponseEnded, StreamLost
from fairlead.core.fleet import Fleet
from fairlead.core.instructions import Reject, Route, WarmUp
from fairlead.core.models import salted
from fairlead.core.request import Request
from fairlead.gateway.understand import Head, Reading, Understanding
from fairlead.pool.aio import cancelled
from fairlead.pool.scrape import LazySession, TokenFile
from fairlead.server.observe.component_metrics import WarmingCounts
from fairlead.server.observe.log import get

log = get("warming")

PRIORITY, TENANT = -(2**31), "fairlead-warming"
#: With this many waiting requests an endpoint is busy; seconds between two checks; the most seconds of waiting.
BUSY, LOOK_S, PATIENCE_S = 4, 0.1, 10.0
#: What `_send` returns if the endpoint does not serve the model: no endpoint was chosen, or the server lacks it.
_REFUSED = "refused"
_NOT_HERE = (_REFUSED, "status 404")
#: How many beginnings for one name are tried at an endpoint that does not serve it: the name may have other targets.
TRIES = 3
#: Seconds from sending a beginning to the end of its answer.
TIMEOUT_S = 60.0


class Noticing(Understanding):
    """An `Understanding` that also remembers the beginnings that clients' prompts share."""

    def __init__(self, beginnings: Beginnings, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.beginnings = beginnings
        #: `request` for our own requests, whose prompts must not be counted.
        self.quietly = super().request

    def request(
        self, head: Head, body: bytes, blind: bool = False, external_id: str = ""
    ) -> tuple[Request, Reading | None]:
        request, reading = self.quietly(head, body, blind, external_id)
        counted = request
        if head.catalogue is not None:  # its prompt was hashed without the model, and a beginning has one
            counted = replace(request, prefix=salted(request.prefix, request.model))
        digest, end = self.beginnings.seen(counted)
        if end:
            self.beginnings.keep(digest, request.path, beginning(request.api, body, end))
        return request, reading


class _Client:
    """Receives what the pipeline decides for one of our own requests."""

    def __init__(self) -> None:
        self.routed: asyncio.Future[Route | None] = asyncio.get_running_loop().create_future()
        self._sending: asyncio.Task[Any] | None = None

    def send(self, task: asyncio.Task[Any] | None) -> None:
        """Note the task that sends the request to its endpoint; `None` = the request has ended."""
        self._sending = task

    def route(self, route: Route) -> None:
        if not self.routed.done():
            self.routed.set_result(route)

    def reject(self, reject: Reject) -> None:
        self.fail()

    def hold(self, seconds: float) -> None:
        """Ignored: this client sets no deadline for the decision."""

    def connected(self) -> bool:
        return not self.routed.done() or self._sending is not None

    def fail(self) -> None:
        if not self.routed.done():
            self.routed.set_result(None)
        elif self._sending is not None:
            self._sending.cancel()


class Warming:
    """Warms endpoints, each with at most `warming.tokens` prompt tokens."""

    def __init__(self, config: Config, fleet: Fleet, understanding: Noticing, feed: Callable[[Event], None]) -> None:
        self._most, self._token = config.warming.tokens, TokenFile(config.gateway.upstream_token_file)
        self._fleet, self._understanding, self._feed = fleet, understanding, feed
        self._now = asyncio.get_running_loop().time
        self.counts = WarmingCounts(understanding.beginnings)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session = LazySession({"Content-Type": "application/json", "Accept-Encoding": "identity"})

    def warm(self, asked: WarmUp) -> None:
        """Start warming an endpoint. If it is already being warmed, start over, because it has lost its cache."""
        before = self._tasks.pop(asked.endpoint_id, None)
        if before is not None:
            before.cancel()
        beginnings = self._understanding.beginnings.hottest()
        if beginnings:
            task = asyncio.get_running_loop().create_task(self._warm(asked.endpoint_id, beginnings))
            self._tasks[asked.endpoint_id] = task
            task.add_done_callback(lambda done: self._done(asked.endpoint_id, done))
            task.add_done_callback(log.failure("warming an endpoint failed", endpoint=asked.endpoint_id))

    async def close(self) -> None:
        await cancelled(*self._tasks.values())
        await self._session.close()

    def _done(self, endpoint_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(endpoint_id) is task:
            del self._tasks[endpoint_id]

    async def _warm(self, endpoint_id: str, beginnings: list[Beginning]) -> None:
        began = self._now()
        left, sent, why, lacking = self._most, 0, "done", Counter[str]()
        for kept in beginnings:
            endpoint = await self._free(endpoint_id)
            if endpoint is None:
                why = "gone or busy"
                break
            request = await self._request(kept, endpoint.address)
            if request is None:
                continue
            if request.prompt_tokens > left or lacking[request.model] >= TRIES:
                if self._fleet.exact is not None:
                    self._fleet.exact.dropped(request)
                continue
            problem = await self._send(request, kept)
            if problem in _NOT_HERE:
                lacking[request.model] += 1
                continue
            if problem:
                self.counts.failed += 1
                why = problem
                break
            self.counts.sent += 1
            self.counts.tokens += request.prompt_tokens
            left, sent = left - request.prompt_tokens, sent + 1
        tokens, took = self._most - left, round(self._now() - began, 2)
        log.info("warmed a cold endpoint", endpoint=endpoint_id, requests=sent, tokens=tokens, took_s=took, end=why)

    async def _free(self, endpoint_id: str) -> Endpoint | None:
        """Wait until few requests wait at the endpoint; `None` = it is gone, or stayed busy for `PATIENCE_S`."""
        table, until = self._fleet.table, self._now() + PATIENCE_S
        while (slot := table.slot(endpoint_id)) is not None and self._now() < until:
            if table.queue[slot] < BUSY:
                return table.endpoints[slot]
            await asyncio.sleep(LOOK_S)
        return None

    async def _request(self, kept: Beginning, address: str) -> Request | None:
        headers = {":path": kept.path, "content-type": "application/json"}
        head = self._understanding.head(headers, frozenset((address,)))
        try:
            request, reading = self._understanding.quietly(head, kept.body)
        except ClientError:
            return None
        if reading is not None:
            request = self._understanding.known(request, await reading, head)
        return replace(request, priority=PRIORITY, fairness_id=TENANT, session="")

    async def _send(self, request: Request, kept: Beginning) -> str:
        """Send a beginning. Returns the problem; empty = none. In any case an event ends the request in the
        registry."""
        client = _Client()
        self._feed(RequestArrived(request, client))
        end: Event = StreamLost(request.id)
        try:
            route = await client.routed
            if route is None:
                return _REFUSED
            body = splice_model(kept.body, route.target) if route.target else kept.body
            url = f"http://{route.endpoint.address}{kept.path}"
            client.send(asyncio.current_task())
            own = await self._token.headers()
            began = self._now()
            post = self._session.open().post(url, data=body, headers=own, allow_redirects=False)
            async with asyncio.timeout(TIMEOUT_S), post as answer:
                await answer.content.readany()
                self._feed(FirstTokenSeen(request.id))
                ttft_ms = (self._now() - began) * 1e3
                async for _ in answer.content.iter_any():
                    pass
            took_ms = (self._now() - began) * 1e3
            end = ResponseEnded(
                request_id=request.id, status=answer.status, ttft_ms=ttft_ms, duration_ms=took_ms, response_bytes=0
            )
            return "" if answer.status == 200 else f"status {answer.status}"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            return str(error) or type(error).__name__
        finally:
            client.send(None)
            self._feed(end)
