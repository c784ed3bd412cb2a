"""The HTTP side of one replica: a listening socket, its connections, and the handlers of its paths."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPMethod
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from fairlead.apis.engine_metrics import DEFAULT_ENGINE, TRTLLM_PATH
from fairlead.core.endpoint import host_port
from fairlead.lab.engine import tokens as tk
from fairlead.lab.stub import fields
from fairlead.lab.stub.config import NO_FAULTS, VERSION, StubConfig, changed
from fairlead.lab.stub.connection import Connection, Heads, Held
from fairlead.lab.stub.exposition import HttpStats, Part
from fairlead.lab.stub.fields import SCALE_OUT, ApiError, Body, encoded
from fairlead.lab.stub.generation import REQUEST_HEADER
from fairlead.lab.stub.metrics_page import other_page, vllm_page
from fairlead.lab.stub.plans import (
    Models,
    Plan,
    id_tokens,
    plan_chat,
    plan_completion,
    plan_message,
    plan_response,
    prompts_of,
    render_chat,
)
from fairlead.lab.stub.replica import Replica
from fairlead.pool.http1 import HttpRequest

_METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
_BACKLOG = 1024
#: Turns of the loop until an accepted connection is registered here. If the listener closes earlier, asyncio forgets
#: the connection without closing it, and the client waits forever.
_ACCEPT_TURNS = 3
_SWEEP_S = 1.0
_METHODS = frozenset(HTTPMethod)

log = logging.getLogger(__name__)


class ReplicaServer:
    """Serves one replica on one port. A server is used once; a restart creates a new one."""

    def __init__(self, replica: Replica, process: list[Part]) -> None:
        config = replica.config
        self.replica = replica
        self.heads = Heads()
        self.max_head = config.max_head
        self.max_body = config.max_body
        self.address = ""
        self._routes = routes(replica.spec.max_loras > 0, config.engine_type)
        self._http = HttpStats(time.time())
        self._page = (
            vllm_page(replica, process, self._http.parts())
            if config.engine_type == DEFAULT_ENGINE
            else other_page(replica)
        )
        self._frozen_page: bytes | None = None
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises `OSError` if it is in use."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=_BACKLOG)
        port = int(self._listener.sockets[0].getsockname()[1])
        self.address = host_port(host, port)
        config = self.replica.config
        if config.identity_headers:
            self.heads = Heads(
                (
                    ("x-inference-pod", self.replica.name),
                    ("x-inference-namespace", config.namespace),
                    ("x-inference-port", str(port)),
                )
            )
        self._sweep()
        return port

    async def stop(self) -> None:
        """Close the port and cut every connection, like a killed server."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        listener, self._listener = self._listener, None
        if listener is not None:
            for sock in listener.sockets:
                asyncio.get_running_loop().remove_reader(sock.fileno())
            for _ in range(_ACCEPT_TURNS):
                await asyncio.sleep(0)
            listener.close()
        self.replica.close()
        for connection in list(self._connections):
            connection.cut()
        if listener is not None:
            await listener.wait_closed()
        await asyncio.sleep(0)  # in the next turn of the loop, the cut connections call `closed`

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def held(self) -> list[Held]:
        """What each connection buffers, in no order."""
        return [connection.held for connection in self._connections]

    # ---------------------------------------------------------------- called by connections

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def serve(self, connection: Connection, request: HttpRequest) -> None:
        connection.request_id = ""
        if self.replica.config.request_id_headers:
            connection.request_id = (
                request.headers.get("x-request-id") or uuid.UUID(int=self.replica.rng.getrandbits(128)).hex
            )
        key = self.replica.config.api_key
        if key and request.path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {key}":
            connection.reply(401, b'{"error":"Unauthorized"}')
            return
        entry = self._routes.get(request.path)
        if entry is None:
            connection.reply(404, b'{"detail":"Not Found"}')
            return
        methods, handler = entry
        if request.method not in methods:
            allow = f"allow: {', '.join(methods)}\r\n".encode()
            body = b'{"detail":"Method Not Allowed"}'
            connection.reply(405, body, before=allow, head_only=request.method == "HEAD")
            return
        try:
            handler(self, connection, request)
        except ApiError as error:
            connection.reply(error.status, error.body())
        except Exception:
            log.exception("request to %s failed", request.path)
            if connection.responded:
                connection.cut()
            else:
                connection.reply(500, ApiError("Internal server error", 500).body())

    def answered(self, request: HttpRequest, status: int, seconds: float) -> None:
        # Unknown paths must not create new labels; the real server uses "none" for them.
        path = request.path if request.path in self._routes else "none"
        method = request.method if request.method in _METHODS else "OTHER"
        self._http.answered(path, method, status, seconds, len(request.body))

    # ---------------------------------------------------------------- metrics

    def metrics(self, connection: Connection) -> None:
        delay = self.replica.faults.metrics_delay_s
        if delay > 0:
            timer = asyncio.get_running_loop().call_later(delay, self._send_metrics, connection)
            connection.exchange = _Delayed(timer)
        else:
            self._send_metrics(connection)

    def _send_metrics(self, connection: Connection) -> None:
        faults = self.replica.faults
        if not faults.metrics_frozen:
            self._frozen_page = None
        elif self._frozen_page is None:
            self._frozen_page = self._page()
        if faults.metrics_status:
            connection.reply(faults.metrics_status, b"", content_type=b"")
            return
        connection.reply(200, self._frozen_page or self._page(), content_type=_METRICS_TYPE)

    # ---------------------------------------------------------------- idle connections

    def _sweep(self) -> None:
        """Close connections that are silent for too long in the middle of a request."""
        limit = self.replica.config.request_timeout_s
        for connection in list(self._connections):
            since = connection.quiet_since
            if since is not None and connection.mid_request and 0 < limit < time.monotonic() - since:
                connection.close()
        pause_s = min(_SWEEP_S, limit / 2) if limit > 0 else _SWEEP_S
        self._sweeper = asyncio.get_running_loop().call_later(pause_s, self._sweep)


class _Delayed:
    """The exchange of a delayed metrics page."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

    def lost(self) -> None:
        self._timer.cancel()

    def writable(self) -> None:
        """Nothing has been written yet."""


def model_list(models: Models, max_model_len: int, rng: random.Random) -> bytes:
    """The body of /v1/models."""
    base = [_card(name, models.base, None, max_model_len, models.created, rng) for name in models.names]
    loras = [_card(name, path, models.base, None, created, rng) for name, (path, created) in models.loras.items()]
    return encoded({"object": "list", "data": [*base, *loras]})


def _card(
    name: str, root: str, parent: str | None, max_model_len: int | None, created: int, rng: random.Random
) -> dict[str, object]:
    allowed = ("sampling", "logprobs", "view")
    kinds = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
    permission = {
        "id": f"modelperm-{rng.getrandbits(64):016x}",
        "object": "model_permission",
        "created": created,
        **{f"allow_{kind}": kind in allowed for kind in kinds},
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


# The handlers of a replica's paths. A handler answers on the connection, now or later, or raises `ApiError`.

if TYPE_CHECKING:
    from fairlead.lab.stub.kv_publisher import KvPublisher


Handler = Callable[[ReplicaServer, Connection, HttpRequest], None]


def _body(request: HttpRequest) -> fields.Body:
    return fields.parse_body(request.body, request.headers.get("content-type", ""))


# ---------------------------------------------------------------- generation


def _generate(
    prefix: str,
    make: Callable[[Body, Models, StubConfig], Plan],
    site: ReplicaServer,
    connection: Connection,
    request: HttpRequest,
) -> None:
    replica = site.replica
    plan = make(_body(request), replica.models, replica.config)
    asked = request.headers.get("x-request-id") or plan.request_id
    answer_id = f"{prefix}{asked or format(replica.rng.getrandbits(64), '016x')}"
    replica.submit(connection, plan, answer_id, int(time.time()), request.headers.get(REQUEST_HEADER, ""))


def scale_out(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    """Refuse rendering and token generation for other servers, as vLLM does without `--enable-scale-out`."""
    raise ApiError(SCALE_OUT, 403)


# ---------------------------------------------------------------- tokens


def tokenize(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    body = _body(request)
    replica = site.replica
    replica.models.resolve(fields.string(body, "model"))
    if "messages" in body:
        tokens = render_chat(fields.array(body, "messages"), body.get("tools"))
    elif isinstance(body.get("prompt"), str):
        prompt = body["prompt"]
        tokens = prompts_of(prompt, replica.config.vocab_size)[0][0] if prompt else b""
    else:
        raise fields.missing(body, "prompt")
    ids = tk.ids(tokens)
    strings = None
    if fields.boolean(body, "return_token_strs"):
        width = tk.TOKEN_BYTES
        strings = [tk.text(tokens[position : position + width]) for position in range(0, len(tokens), width)]
    limit = replica.spec.max_model_len
    connection.reply(200, encoded({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}))


def count_tokens(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    replica = site.replica
    plan = plan_message({**_body(request), "max_tokens": 1}, replica.models, replica.config)
    connection.reply(200, encoded({"input_tokens": len(plan.prompts[0]) // tk.TOKEN_BYTES}))


def detokenize(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    body = _body(request)
    site.replica.models.resolve(fields.string(body, "model"))
    ids = [fields.integer({"tokens": item}, "tokens", 0) or 0 for item in fields.array(body, "tokens")]
    tokens = id_tokens(ids, site.replica.config.vocab_size) if ids else b""
    connection.reply(200, encoded({"prompt": tk.text(tokens)}))


# ---------------------------------------------------------------- models and adapters

_MAX_ADAPTERS = 1000


def models(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    replica = site.replica
    connection.reply(200, model_list(replica.models, replica.spec.max_model_len, replica.rng))


def load_lora(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    body, models = _body(request), site.replica.models
    name, path = fields.string(body, "lora_name"), fields.string(body, "lora_path")
    if not name or not path:
        raise ApiError("Both 'lora_name' and 'lora_path' must be provided.")
    if len(models.loras) >= _MAX_ADAPTERS:
        raise ApiError(f"No more than {_MAX_ADAPTERS} adapters can be loaded.")
    if name in models.loras or name in models.names:
        raise ApiError(f"The lora adapter '{name}' has already been loaded.")
    models.loras[name] = (path, int(time.time()))
    message = f"Success: LoRA adapter '{name}' added successfully."
    connection.reply(200, message.encode("utf-8", "replace"), content_type=b"")


def unload_lora(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    body = _body(request)
    name = fields.string(body, "lora_name")
    if not name:
        raise ApiError("'lora_name' needs to be provided to unload a LoRA adapter.")
    if site.replica.models.loras.pop(name, None) is None:
        raise ApiError(f"The lora adapter '{name}' cannot be found.", 404)
    message = f"Success: LoRA adapter '{name}' removed successfully."
    connection.reply(200, message.encode("utf-8", "replace"), content_type=b"")


# ---------------------------------------------------------------- state


def health(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    faults = site.replica.faults
    truth = 503 if faults.engine_dead else 200
    connection.reply(faults.health_status or truth, b"", content_type=b"")


def _answering(tell: Callable[[Replica], object]) -> Handler:
    """A handler that answers with the result of `tell`, as JSON."""
    return lambda site, connection, request: connection.reply(200, encoded(tell(site.replica)))


# ---------------------------------------------------------------- faults


def faults(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    """GET returns the faults, POST changes the fields in its body, DELETE ends all faults. Each answers with the faults
    that are then in force."""
    replica = site.replica
    if request.method == "DELETE":
        replica.faults = NO_FAULTS
    elif request.method == "POST":
        try:
            replica.faults = changed(replica.faults, dict(_body(request)))
        except ValueError as error:
            raise ApiError(str(error)) from None
    connection.reply(200, msgspec.json.encode(replica.faults))


# ---------------------------------------------------------------- KV events

_Count = Annotated[int, Meta(ge=0, le=100_000)]
#: The limit of messages and of batches in the default configuration of vLLM's publisher.
_QUEUE = 100_000


class KvFaults(Struct, forbid_unknown_fields=True):
    """Faults of a replica's KV events, applied in this order."""

    #: Replace the engine by one with an empty cache. Its batches are numbered from the start, without an announcement.
    #: Running requests fail.
    restart: bool = False
    #: The number of next batches that are not sent, although they are numbered and can be replayed; 0 = send again.
    lose: _Count | None = None
    #: Report that this many of the last stored blocks are in another tier too.
    offload: _Count = 0
    #: Report that these blocks (hashes as returned by `offload`) are no longer in that tier.
    drop: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=100_000)] = []
    medium: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")] = "CPU"


def kv_event_sources(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    """Where this replica publishes, in vLLM's form. The addresses are the bound ones, with their actual ports."""
    publisher = site.replica.kv_events
    if publisher is None:
        connection.reply(404, b'{"detail":"Not Found"}')
        return
    config = publisher.config
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.events_address,
        "replay_endpoint": publisher.replay_address or None,
        "buffer_steps": config.buffer_steps,
        "hwm": _QUEUE,
        "max_queue_size": _QUEUE,
        "topic": "" if config.topic == "-" else config.topic,
    }
    connection.reply(200, encoded({str(config.rank): source}))


def kv_faults(site: ReplicaServer, connection: Connection, request: HttpRequest) -> None:
    """POST applies `KvFaults`. Both GET and POST answer with the number of the next batch, `next_sequence`."""
    publisher = site.replica.kv_events
    if publisher is None:
        raise ApiError("This server publishes no KV events; start it with --kv-events.", 404)
    answer: dict[str, object] = {}
    if request.method == "POST":
        try:
            asked = msgspec.convert(dict(_body(request)), KvFaults)
        except msgspec.ValidationError as error:
            raise ApiError(str(error)) from None
        answer = _do(asked, site.replica, publisher)
    connection.reply(200, encoded({"next_sequence": publisher.next_sequence, **answer}))


def _do(asked: KvFaults, replica: Replica, publisher: "KvPublisher") -> dict[str, object]:
    if any(digest >> 64 for digest in asked.drop):
        raise ApiError("Hashes in `drop` must fit into 64 bits.")
    if asked.restart:
        replica.restart_engine()
    if asked.lose is not None:
        publisher.lose(asked.lose)
    offloaded = publisher.offload(asked.offload, asked.medium)
    if asked.drop:
        publisher.drop(asked.drop, asked.medium)
    if offloaded or asked.drop:
        publisher.flush()  # now, so that the number in the answer includes it
    return {"offloaded": offloaded} if asked.offload else {}


_GET, _POST = ("GET",), ("POST",)

#: Path to methods and handler. `_ADAPTERS` exist only on a server that was started with adapters.
ROUTES: Mapping[str, tuple[tuple[str, ...], Handler]] = {
    "/v1/completions": (_POST, partial(_generate, "cmpl-", plan_completion)),
    "/v1/chat/completions": (_POST, partial(_generate, "chatcmpl-", plan_chat)),
    "/v1/messages": (_POST, partial(_generate, "chatcmpl-", plan_message)),
    "/v1/messages/count_tokens": (_POST, count_tokens),
    "/v1/responses": (_POST, partial(_generate, "resp_", plan_response)),
    "/v1/completions/render": (_POST, scale_out),
    "/v1/chat/completions/render": (_POST, scale_out),
    "/inference/v1/generate": (_POST, scale_out),
    "/tokenize": (_POST, tokenize),
    "/detokenize": (_POST, detokenize),
    "/v1/models": (_GET, models),
    "/v1/load_lora_adapter": (_POST, load_lora),
    "/v1/unload_lora_adapter": (_POST, unload_lora),
    "/health": (_GET, health),
    "/ping": (("GET", "POST"), health),
    "/version": (_GET, _answering(lambda replica: {"version": VERSION})),
    "/load": (_GET, _answering(lambda replica: {"server_load": replica.in_flight})),
    "/is_sleeping": (_GET, _answering(lambda replica: {"is_sleeping": replica.faults.asleep})),
    "/reset_prefix_cache": (_POST, _answering(lambda replica: {"success": replica.engine.blocks.clear()})),
    "/metrics": (_GET, lambda site, connection, request: site.metrics(connection)),
    "/kv_event_sources": (_GET, kv_event_sources),
    "/fault": (("GET", "POST", "DELETE"), faults),
    "/fault/kv_events": (("GET", "POST"), kv_faults),
}

_ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


def routes(adapters: bool, engine_type: str = DEFAULT_ENGINE) -> Mapping[str, tuple[tuple[str, ...], Handler]]:
    chosen = {path: entry for path, entry in ROUTES.items() if adapters or path not in _ADAPTERS}
    if engine_type == "trtllm-serve":
        # There, /metrics returns the statistics of the steps since the last query as JSON; the stub has none.
        chosen |= {TRTLLM_PATH: chosen["/metrics"], "/metrics": (_GET, _answering(lambda replica: []))}
    return chosen
