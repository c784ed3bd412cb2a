"""What checks examine: the configuration, the endpoints, and the pages of both, each of them fetched once."""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct, structs

from fairlead.apis.engine_metrics import EngineSpecs, compile_engine, engine_of
from fairlead.apis.prometheus import Reading, find_family, read_page
from fairlead.apis.tokens import PromptTokeniser
from fairlead.compat.load import read_bytes
from fairlead.config.checks import engine_table, with_page
from fairlead.config.endpoint_list import Listed, parse_endpoints_text
from fairlead.config.schema import Config
from fairlead.core.endpoint import Endpoint, Sample, host_port
from fairlead.core.errors import FairleadError
from fairlead.core.text import masked, token_apart
from fairlead.doctor.http import TIMEOUT, Answer, Client, Unreached, speaks_tls, trusting_only
from fairlead.gateway.ports import dialled
from fairlead.pool.aio import cancelled
from fairlead.pool.endpoints_file import RESOLVE_TIMEOUT_S, preferred, resolve_host
from fairlead.pool.model_files import load_tokeniser
from fairlead.pool.scrape import TokenFile, page_address
from fairlead.pool.served_models import ModelList, read_model_list
from fairlead.server.http_port import read_tokens
from fairlead.server.observe.fleet_gauges import EndpointStatus

Need = Literal["endpoints", "admin", "gateway", "any-gateway", "probe", "events", "tokens", "embedded"]
NEEDS: dict[Need, str] = {
    "endpoints": "no endpoints are known: the configuration has none, and no running scheduler shows any",
    "admin": "no running scheduler was found at the admin port; start it, or say where with --admin",
    "gateway": "no --gateway URL was given",
    "any-gateway": "neither --gateway nor --gateway-admin was given",
    "probe": "it sends small requests to model servers: allow that with --probe",
    "events": "kvEvents is off, or an indexer receives the events (kvEvents.indexer.url)",
    "tokens": "no tokeniser is configured under tokens.models",
    "embedded": "the gateway is not the embedded one (gateway: none)",
}


class Row(EndpointStatus, frozen=True, kw_only=True):
    """An endpoint as listed on the scheduler's page `/debug/endpoints`."""

    #: `NAMESPACE/NAME`; empty = the scheduler has one pool.
    pool: str = ""

    @property
    def load(self) -> float:
        """The number of requests that the endpoint reports."""
        return (self.waiting or 0.0) + (self.running or 0.0)


class _Rows(Struct):
    endpoints: list[Row] = []


def rows_of(page: Any) -> list[Row]:
    """The rows of the decoded page `/debug/endpoints`; empty if it is another page."""
    try:
        return msgspec.convert(page, _Rows, strict=False).endpoints
    except msgspec.ValidationError:
        return []


T = TypeVar("T")

#: The most endpoints to examine with connections that stay open.
MOST_FOLLOWED = 64


def series(page: Answer | Unreached, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of one family on a metrics page; empty if there is no page or no such family."""
    if isinstance(page, Unreached) or page.status != 200:
        return []
    family = find_family(page.body, name.encode())
    listed = family.series if family is not None else []
    return [(row.labels() or {}, row.value) for row in listed if row.value is not None]


async def tried(asked: Awaitable[Answer]) -> Answer | Unreached:
    """Await an answer, and return an `Unreached` error instead of raising it."""
    try:
        return await asked
    except Unreached as error:
        return error


class CannotExamine(FairleadError):
    """There is nothing to examine; the message says what to do."""


class Site:
    """Use it as `async with Site(config) as site:`. Entering resolves addresses and looks for a running scheduler."""

    def __init__(
        self,
        config: Config,
        admin: str = "",
        gateway: str = "",
        gateway_admin: str = "",
        *,
        probe: bool = False,
    ) -> None:
        """`admin`: URL of a running scheduler's admin port; empty = as configured, and the scheduler need not run.
        `gateway`: URL for clients, with a key if it asks for one (`http://:KEY@HOST`); empty = not to be examined.
        `gateway_admin`: URL of Envoy's admin page; empty = as configured for the embedded gateway."""
        self.config = config
        self.gateway, self.gateway_headers = gateway.rstrip("/"), dict[str, str]()
        with contextlib.suppress(ValueError):  # the check `asking` reports that
            address, headers = token_apart(self.gateway)
            if headers:
                self.gateway, self.gateway_headers = address, headers
        own = config.gateway.admin_port if config.gateway.mode == "embedded" else 0
        self._gateway_admin_given = bool(gateway_admin)
        self.upstream_token = TokenFile(config.gateway.upstream_token_file)
        self.gateway_admin = gateway_admin.rstrip("/") or (f"http://127.0.0.1:{own}" if own else "")
        self.probe = probe
        self.endpoints: list[Endpoint] = []
        #: By id of an endpoint whose host name has no address: why.
        self.nameless: dict[str, str] = {}
        #: The problems in the endpoints file.
        self.file_problems: tuple[str, ...] = ()
        self.client = Client(config.metrics)
        self._wanted = admin.rstrip("/")
        self._admin = self._refusal = ""
        #: What is trusted at the admin port; `None` = as at metrics pages.
        self._admin_tls: ssl.SSLContext | None = None
        #: With `serve --workers`: the URLs of the workers' admin ports, in their order; otherwise empty. `elsewhere`:
        #: whether there are further schedulers of this pool.
        self.workers: list[str] = []
        self.elsewhere = False
        self.engines = engine_table(config.metrics)
        self._known: dict[Hashable, asyncio.Future[Any]] = {}
        self._stack = contextlib.AsyncExitStack()
        self._alone = asyncio.Lock()

    async def __aenter__(self) -> "Site":
        """Raises `CannotExamine`, or `ConfigError` for an endpoints file that cannot be read."""
        try:
            await self._stack.enter_async_context(self.client)
        except OSError as error:
            raise CannotExamine(f"$.metrics.tls.caFile: {error}") from None
        try:
            await self._look_for_scheduler()
            if self._admin:
                await self._look_for_workers()
            if self._gateway_admin_given:
                await self._look_for_envoy()
            await self._find_endpoints()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(*self._known.values())
        await self._stack.aclose()

    def keep(self, cleanup: Callable[[], Awaitable[object]]) -> None:
        """Call `cleanup` when the site is left."""
        self._stack.push_async_callback(cleanup)

    def has(self, need: Need) -> bool:
        config = self.config
        return {
            "endpoints": bool(self.endpoints),
            "admin": bool(self._admin),
            "gateway": bool(self.gateway),
            "any-gateway": bool(self.gateway or self.gateway_admin),
            "probe": self.probe,
            "events": config.kv_events.enabled and not config.kv_events.indexer.url,
            "tokens": bool(config.tokens.models),
            "embedded": config.gateway.mode == "embedded",
        }[need]

    async def once(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The result of `make`, called once per `key` for all checks. Cancelling a check does not cancel it."""
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(make())
        value: T = await asyncio.shield(self._known[key])
        return value

    async def each(self, ask: Callable[[Endpoint], Awaitable[Iterable[T]]]) -> list[T]:
        """Call `ask` for all endpoints at the same time. Return all results in the order of the endpoints."""
        parts = await asyncio.gather(*(ask(endpoint) for endpoint in self.endpoints))
        return [item for part in parts for item in part]

    # ---------------------------------------------------------------- a running scheduler

    async def _look_for_scheduler(self) -> None:
        url = self._wanted or self._configured_admin()
        if not url:
            return
        if not self._wanted and self.config.admin.tls:
            with contextlib.suppress(OSError):  # the check `tls` reports that
                certificate = Path(self.config.admin.tls.cert_dir, "tls.crt")
                self._admin_tls = await asyncio.to_thread(trusting_only, certificate)
        try:
            answer = await self._admin_page(url + "/", seconds=2.0)
            answers = answer.status == 200 and answer.body.startswith(b"fairlead")
            reason = "something else answers there"
            if answer.status == 401:
                reason = "it asks for a token (http://:TOKEN@HOST:PORT)"
                self._refusal = "the admin port asks for a token: say where it is with --admin http://:TOKEN@HOST:PORT"
        except Unreached as error:
            answers, reason = False, str(error)
            if error.trouble == "untrusted":
                self._refusal = f"the certificate of the admin port is not accepted: {error}"
        if answers:
            self._admin = url
        elif self._wanted:
            raise CannotExamine(
                f"no scheduler at {masked(url)}: {masked(reason)}; --admin is the URL of its admin port"
            )

    def _configured_admin(self) -> str:
        """The URL of the configured admin port, with its first token; empty = there is none."""
        settings, access = self.config.admin, ""
        if not settings.port:
            return ""
        if settings.token_file:
            with contextlib.suppress(OSError):  # then the port says that it asks for one
                tokens = read_tokens(Path(settings.token_file))
                access = f":{quote(tokens[0], safe='')}@" if tokens else ""
        return f"http{'s' * bool(settings.tls)}://{access}{host_port(dialled(settings.host), settings.port)}"

    def lack(self, need: Need) -> str:
        return self._refusal if need == "admin" and self._refusal else NEEDS[need]

    async def _look_for_workers(self) -> None:
        """With `serve --workers`, find the admin ports of all workers, which have consecutive numbers."""
        page = await self.admin_json("/debug/replicas") or {}
        worker, workers, parts = page.get("worker", 0), page.get("workers", 1), urlsplit(self._admin)
        if workers > 1 and parts.port:
            ports = (parts.port - worker + number for number in range(workers))
            access = "".join(parts.netloc.rpartition("@")[:2])
            self.workers = [f"{parts.scheme}://{access}{host_port(parts.hostname or '', port)}" for port in ports]
        self.elsewhere = len(page.get("replicas", ())) > workers - 1

    async def _look_for_envoy(self) -> None:
        try:
            await self.envoy_configuration()
        except (Unreached, ValueError) as error:
            why = f"no Envoy at {masked(self.gateway_admin)}: {masked(str(error))}"
            raise CannotExamine(f"{why}; --gateway-admin is the URL of its admin page") from None

    async def envoy_configuration(self) -> Any:
        """What Envoy's admin page says that its configuration is. Raises `Unreached`, or `ValueError` for another
        page."""
        answer = await self.once("envoy", lambda: self.client.get(f"{self.gateway_admin}/config_dump"))
        try:
            document = answer.json() if answer.status == 200 else None
        except ValueError:
            document = None
        if document is None:
            raise ValueError("something else answers there")
        return document

    async def each_worker(self, path: str) -> list[Answer | Unreached]:
        """A page from each worker's admin port, in the order of workers, or why there is none."""
        urls = self.workers or [self._admin]
        return list(await asyncio.gather(*(tried(self._admin_page(url + path)) for url in urls)))

    async def admin(self, path: str) -> Answer:
        """A page of the admin port. Raises `Unreached`."""
        return await self.once(("admin", path), lambda: self._admin_page(self._admin + path))

    async def _admin_page(self, url: str, seconds: float = TIMEOUT) -> Answer:
        return await self.client.get(url, seconds=seconds, tls=self._admin_tls)

    async def admin_json(self, path: str) -> Any:
        """A JSON page of the admin port; `None` = there is none."""
        try:
            answer = await self.admin(path)
            return answer.json() if answer.status == 200 else None
        except (Unreached, ValueError):
            return None

    async def each_pool(self, path: str) -> dict[str, Any]:
        """A JSON page of the admin port by pool; `None` = there is none. The pool has no name if it is the only one."""
        if not self.config.kubernetes.namespaces:
            return {"": await self.admin_json(path)}
        counted = await self.metric("llm_d_epp_ready_endpoints")
        pools = sorted({labels["inference_pool"] for labels, _ in counted if "inference_pool" in labels})
        pages = await asyncio.gather(*(self.admin_json(f"{path}?pool={pool}") for pool in pools))
        return dict(zip(pools, pages, strict=True))

    async def rows(self) -> list[Row]:
        """The endpoints as the running scheduler sees them; empty = no scheduler runs, or it has no such page."""
        examined: dict[str, Row] = {}  # a pod that several pools select is examined once
        for pool, page in (await self.each_pool("/debug/endpoints")).items() if self._admin else ():
            for row in rows_of(page):
                examined.setdefault(row.id, structs.replace(row, pool=pool))
        return list(examined.values())

    async def metric(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All series of one family on the scheduler's metrics page, which is fetched once for all checks."""
        return series(await tried(self.admin("/metrics")), name)

    async def metrics_now(self) -> Answer | Unreached:
        """The scheduler's metrics page, fetched again."""
        return await tried(self._admin_page(self._admin + "/metrics"))

    # ---------------------------------------------------------------- endpoints

    async def _find_endpoints(self) -> None:
        source = self.config.endpoints
        listed = source.static
        if source.file:
            listing = parse_endpoints_text(await asyncio.to_thread(read_bytes, Path(source.file)))
            listed, self.file_problems = listing.entries, tuple(map(str, listing.problems))
        if listed:
            resolved = await asyncio.gather(*map(self._resolved, listed))
            self.endpoints = [endpoint for endpoint in resolved if endpoint is not None]
            return
        listed_there = [Endpoint(row.id, row.address, row.labels, rank=row.rank) for row in await self.rows()]
        self.endpoints = [with_page(endpoint, self.config.metrics) for endpoint in listed_there]

    async def _resolved(self, entry: Listed) -> Endpoint | None:
        if entry.literal:
            return with_page(entry.endpoint, self.config.metrics)
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                address = preferred(await resolve_host(entry.host, entry.port))
        except (TimeoutError, IndexError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else "no address"
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        else:
            return with_page(entry.resolved(address), self.config.metrics)
        self.nameless[entry.endpoint.id] = f"{entry.host}: {reason}"
        return None

    def engine(self, endpoint: Endpoint) -> str:
        """The name of the engine whose metric names are used to read the endpoint's metrics page."""
        return engine_of(endpoint.labels, self.engines, self.config.metrics.default_engine)

    def specs(self, engine: str) -> EngineSpecs:
        return compile_engine(self.engines[engine])

    def fitting(self, page: Answer | Unreached) -> tuple[str, Sample]:
        """The first known engine whose metric names match a metrics page, and the page's content; empty = none."""
        if isinstance(page, Answer) and page.status == 200:
            for engine in self.engines:
                reading = read_page(page.body, self.specs(engine))
                if not reading.empty:
                    return engine, reading.sample
        return "", Sample()

    async def ask(self, endpoint: Endpoint, path: str) -> Answer:
        """A page of the model server itself. Raises `Unreached`; with trouble `tls` if it only speaks TLS."""
        return await self.once((endpoint.address, path), lambda: self._ask(endpoint, path))

    async def upstream_headers(self) -> dict[str, str]:
        """The token that model servers require; empty if none is configured, or it cannot be read."""
        try:
            return await self.upstream_token.headers()
        except (OSError, ValueError):
            return {}

    async def _ask(self, endpoint: Endpoint, path: str) -> Answer:
        try:
            return await self.client.get(f"http://{endpoint.address}{path}", await self.upstream_headers())
        except Unreached as error:
            if error.trouble == "not-http" and await self.is_tls(f"https://{endpoint.address}/"):
                raise Unreached("tls", "it answers with TLS where plain HTTP was expected") from None
            raise

    async def is_tls(self, url: str) -> bool:
        """Whether a TLS handshake succeeds at the URL's host and port."""
        try:
            address = page_address(url)
        except ValueError:
            return False
        return await self.once(
            ("tls", address.host, address.port), lambda: speaks_tls(address.host.strip("[]"), address.port)
        )

    async def page(self, endpoint: Endpoint) -> Answer:
        """The endpoint's metrics page, fetched as the scraper does. Raises `Unreached`."""
        return await self.once(("page", endpoint.scrape_url), lambda: self.client.scrape(endpoint.scrape_url))

    @staticmethod
    def own_page(endpoint: Endpoint) -> bool:
        """Whether the model server itself serves the metrics page, at the address that requests go to."""
        return endpoint.scrape_url.startswith(f"http://{endpoint.address}/")

    async def alone(self, ask: Callable[[], Awaitable[Answer]], before: Answer) -> Answer:
        """Repeat a request with no other repeated request in flight, since many answers at the same time arrive slowly.
        Returns `before`, the first answer, if it fails."""
        async with self._alone:
            retried = await tried(ask())
            return before if isinstance(retried, Unreached) else retried

    async def reading(self, endpoint: Endpoint) -> Reading | None:
        """The content of the endpoint's metrics page; `None` = there is no page."""
        page = await tried(self.page(endpoint))
        if isinstance(page, Unreached) or page.status != 200:
            return None
        return read_page(page.body, self.specs(self.engine(endpoint)))

    async def _listed(self, endpoint: Endpoint) -> ModelList:
        """The endpoint's list of models; empty = unknown."""
        try:
            answer = await self.ask(endpoint, "/v1/models")
            return read_model_list(answer.body) if answer.status == 200 else ModelList()
        except (Unreached, ValueError):
            return ModelList()

    async def served(self, endpoint: Endpoint) -> dict[str, bool]:
        """The names of the models that an endpoint serves, and whether each is an adapter; empty = unknown."""
        listed = await self._listed(endpoint)
        return {name: name in (listed.adapters or ()) for name in listed.entries}

    async def contexts(self, endpoint: Endpoint) -> Mapping[str, int]:
        """By base model, if it is known: how many tokens prompt and answer may have together."""
        return (await self._listed(endpoint)).base.contexts

    async def model(self, endpoint: Endpoint) -> str:
        """The base model of an endpoint; empty = unknown."""
        return next((name for name, adapter in (await self.served(endpoint)).items() if not adapter), "")

    async def tokeniser(self) -> PromptTokeniser:
        """Load the configured tokenisers: takes seconds for each large vocabulary."""
        return await self.once("tokeniser", lambda: asyncio.to_thread(load_tokeniser, self.config.tokens))
