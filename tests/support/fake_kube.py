"""An API server for tests: real HTTP, the few verbs that Fairlead uses, and faults on demand.

Objects are plain values; versions count up over everything. Lists have pages, watches have bookmarks, old versions are
gone after `compact()` (410, as an answer or within a stream), writes check versions, and status has its own path.
Resources of groups that are not in `GROUPS` are answered with 404, as where a CRD is not installed."""

import asyncio
import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]


class Selector:
    """Namespace (empty: all), `labelSelector` (equality only) and `fieldSelector` (name only)."""

    def __init__(self, namespace: str, labels: dict[str, str], name: str) -> None:
        self._namespace, self._labels, self._name = namespace, labels, name

    def __call__(self, value: Object) -> bool:
        meta = value["metadata"]
        own = meta.get("labels") or {}
        return (
            self._namespace in ("", meta["namespace"])
            and all(own.get(key) == wanted for key, wanted in self._labels.items())
            and self._name in ("", meta["name"])
        )


def selector_of(namespace: str, query: Mapping[str, str]) -> Selector:
    pairs = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return Selector(namespace, dict(pairs), name)


def shown_as(kind: str, now: bool, before: bool) -> str:
    """As what a change shows through a selector."""
    if kind == "DELETED":
        return kind if now else ""
    if now:
        return "MODIFIED" if before else "ADDED"
    return "DELETED" if before else ""


def key_of(value: Object) -> str:
    meta = value["metadata"]
    return f"{meta.get('namespace', 'default')}/{meta['name']}"


def event_line(kind: str, value: Object) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode() + b"\n"


def merge(into: Object, patch: Object) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            inner = into.get(key)
            into[key] = inner if isinstance(inner, dict) else {}
            merge(into[key], value)
        else:
            into[key] = value


def apply(into: Object, patch: Object) -> None:
    """Server-side apply, as far as conditions go: a list that is a map by `type`."""
    for key, value in patch.items():
        if key == "conditions":
            merged = {item["type"]: item for item in into.get(key, [])}
            merged |= {item["type"]: item for item in value}
            into[key] = list(merged.values())
        elif isinstance(value, dict):
            apply(into.setdefault(key, {}), value)
        else:
            into[key] = value


#: Plurals by group and version, unless told otherwise.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "v1": ("pods", "events", "services"),
    "coordination.k8s.io/v1": ("leases",),
    "discovery.k8s.io/v1": ("endpointslices",),
    "inference.networking.k8s.io/v1": ("inferencepools",),
    "inference.networking.x-k8s.io/v1alpha2": (
        "inferencepools", "inferencemodels", "inferenceobjectives", "inferencemodelrewrites",
    ),
    "llm-d.ai/v1alpha2": ("inferenceobjectives", "inferencemodelrewrites"),
}  # fmt: skip
_KINDS = {
    "pods": "Pod", "events": "Event", "leases": "Lease", "inferencepools": "InferencePool",
    "services": "Service", "endpointslices": "EndpointSlice",
    "inferencemodels": "InferenceModel", "inferenceobjectives": "InferenceObjective",
    "inferencemodelrewrites": "InferenceModelRewrite",
}  # fmt: skip
#: Group and version, plural.
_Resource = tuple[str, str]


class Refused(Exception):
    """Becomes a `Status`."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        said = {"code": self.code, "reason": self.reason, "message": str(self)}
        return {"kind": "Status", "apiVersion": "v1", "status": "Failure", **said}


class FakeKube:
    """`await start()`, then `url`; `await stop()` and `await start()` again keep objects and the port."""

    def __init__(self, groups: Mapping[str, Iterable[str]] = GROUPS, bookmark_s: float = 60.0) -> None:
        self.groups = {version: tuple(plurals) for version, plurals in groups.items()}
        self.objects: dict[_Resource, dict[str, Object]] = {}
        #: Accepted bearer tokens; empty = everybody.
        self.tokens: set[str] = set()
        #: (verb, plural or plural/part) that are not allowed; lists also by namespace/plural.
        self.forbidden: set[tuple[str, str]] = set()
        #: The message of a 403; empty = that of missing rights.
        self.why_forbidden = ""
        #: (method, path) of every request.
        self.requests: list[tuple[str, str]] = []
        self.port = 0
        #: Seconds of silence before a watch gets a bookmark, and how many were sent.
        self.bookmark_s = bookmark_s
        self.bookmarks = 0
        self._version = 100
        self._log: list[tuple[int, _Resource, str, Object, Object | None]] = []
        self._oldest = 0
        self._watches: set[asyncio.Event] = set()
        self._uid = 0
        self._runner: web.AppRunner | None = None
        self._stopping = False

    # ---- the server ----

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write_kubeconfig(self, directory: Path, **context: str) -> Path:
        """With a token. `context`: more of its context, e.g. the namespace."""
        document = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", **context}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        file = directory / "kubeconfig"
        file.write_text(json.dumps(document))
        return file

    async def start(self) -> None:
        self._stopping = False
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Gone, with all connections."""
        self._stopping = True
        self._wake()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def watching(self) -> int:
        """Watches that are open."""
        return len(self._watches)

    def compact(self) -> None:
        """Forget all changes so far; who watches from before gets 410."""
        self._log.clear()
        self._oldest = self._version

    def cut(self) -> None:
        """End all watches."""
        for watch in list(self._watches):
            watch.set()
            self._watches.discard(watch)

    def _wake(self) -> None:
        for watch in self._watches:
            watch.set()

    # ---- objects ----

    def put(self, version: str, plural: str, value: Object) -> Object:
        """Create or replace, as somebody with all rights. `version`: `v1`, `group/version`."""
        key, resource = key_of(value), (version, plural)
        table = self.objects.setdefault(resource, {})
        old = table.get(key)
        new = copy.deepcopy(value)
        meta = new.setdefault("metadata", {})
        meta.setdefault("namespace", "default")
        before = old["metadata"] if old else {}
        self._version += 1
        if not old:
            self._uid += 1
        meta["uid"] = meta.get("uid") or before.get("uid") or f"uid-{self._uid}"
        stamp = f"2026-01-01T00:{self._uid // 60 % 60:02d}:{self._uid % 60:02d}Z"
        meta["creationTimestamp"] = meta.get("creationTimestamp") or before.get("creationTimestamp") or stamp
        same = old is not None and old.get("spec") == new.get("spec")
        meta["generation"] = before.get("generation", 0) + (0 if same else 1)
        meta["resourceVersion"] = str(self._version)
        new.setdefault("apiVersion", version)
        new.setdefault("kind", _KINDS[plural])
        table[key] = new
        self._note(resource, "MODIFIED" if old else "ADDED", new, old)
        return new

    def patch(self, version: str, plural: str, name: str, change: Object, namespace: str = "default") -> Object:
        """A merge patch, status included."""
        new = copy.deepcopy(self.objects[version, plural][f"{namespace}/{name}"])
        merge(new, change)
        return self.put(version, plural, new)

    def drop(self, version: str, plural: str, name: str, namespace: str = "default") -> None:
        gone = self.objects.get((version, plural), {}).pop(f"{namespace}/{name}", None)
        if gone is None:
            raise Refused(404, "NotFound", f"{plural} {name!r} not found")
        self._version += 1
        gone = copy.deepcopy(gone)
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._note((version, plural), "DELETED", gone, gone)

    def _note(self, resource: _Resource, kind: str, value: Object, old: Object | None) -> None:
        self._log.append((self._version, resource, kind, copy.deepcopy(value), copy.deepcopy(old)))
        self._wake()

    # ---- requests ----

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        try:
            self._authenticate(request)
            return await self._route(request)
        except Refused as refused:
            return web.json_response(refused.status(), status=refused.code)

    def _authenticate(self, request: web.Request) -> None:
        if self.tokens and request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise Refused(401, "Unauthorized", "Unauthorized")

    async def _route(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        parts = parts[1:] if parts[0] == "api" else parts
        if parts[0] == "apis":
            parts = ["/".join(parts[1:3]), *parts[3:]]
        version, *path = parts
        if version not in self.groups:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if not path:
            resources = [{"name": plural} for plural in self.groups[version]]
            return web.json_response({"kind": "APIResourceList", "resources": resources})
        if len(path) == 1:
            path = ["namespaces", "", path[0]]
        if len(path) < 3 or path[0] != "namespaces" or path[2] not in self.groups[version]:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace, plural, names = path[1], path[2], path[3:]
        if not names:
            return await self._collection(request, (version, plural), namespace)
        return await self._one(request, (version, plural), namespace, names[0], names[1] if names[1:] else "")

    def _allow(self, verb: str, resource: _Resource, part: str = "", namespace: str = "") -> None:
        plural = f"{resource[1]}/{part}" if part else resource[1]
        names = plural, f"{namespace}/{plural}", f"{plural}.{resource[0].partition('/')[0]}"
        if any((verb, name) in self.forbidden for name in names):
            message = f'{plural} is forbidden: User "somebody" cannot {verb} resource "{plural}"'
            raise Refused(403, "Forbidden", self.why_forbidden or message)

    async def _collection(self, request: web.Request, resource: _Resource, namespace: str) -> web.StreamResponse:
        if request.method == "POST":
            self._allow("create", resource)
            value = json.loads(await request.read())
            value.setdefault("metadata", {})["namespace"] = namespace
            if key_of(value) in self.objects.get(resource, {}):
                raise Refused(409, "AlreadyExists", f"{value['metadata']['name']} already exists")
            return web.json_response(self.put(*resource, value), status=201)
        if request.method == "DELETE":
            raise Refused(405, "MethodNotAllowed", "not here")
        wanted = selector_of(namespace, request.query)
        if request.query.get("watch") in ("1", "true"):
            self._allow("watch", resource)
            return await self._watch(request, resource, wanted)
        self._allow("list", resource, namespace=namespace)
        return web.json_response(self._list(request, resource, wanted))

    def _list(self, request: web.Request, resource: _Resource, wanted: Selector) -> Object:
        matching = [item for _, item in sorted(self.objects.get(resource, {}).items()) if wanted(item)]
        limit = int(request.query.get("limit", "0")) or len(matching) or 1
        start, version = 0, self._version
        if token := request.query.get("continue"):
            start, version = map(int, token.split("-"))
            if version < self._oldest:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
        metadata: Object = {"resourceVersion": str(version)}
        if start + limit < len(matching):
            metadata["continue"] = f"{start + limit}-{version}"
        return {"kind": "List", "metadata": metadata, "items": matching[start : start + limit]}

    async def _watch(self, request: web.Request, resource: _Resource, wanted: Selector) -> web.StreamResponse:
        at = int(request.query.get("resourceVersion") or self._version)
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        if at < self._oldest:
            gone = Refused(410, "Expired", f"too old resource version: {at} ({self._oldest})")
            await response.write(event_line("ERROR", gone.status()))
            return response
        woken = asyncio.Event()
        self._watches.add(woken)
        try:
            await self._send(response, resource, wanted, at, woken)
        finally:
            self._watches.discard(woken)
        return response

    async def _send(
        self, response: web.StreamResponse, resource: _Resource, wanted: Selector, at: int, woken: asyncio.Event
    ) -> None:
        while not self._stopping:
            woken.clear()
            for version, of, kind, value, old in [entry for entry in self._log if entry[0] > at]:
                at = version
                shown = shown_as(kind, wanted(value), old is not None and wanted(old)) if of == resource else ""
                if shown:
                    await response.write(event_line(shown, value))
            try:
                async with asyncio.timeout(self.bookmark_s):
                    await woken.wait()
            except TimeoutError:
                mark = {"kind": _KINDS[resource[1]], "metadata": {"resourceVersion": str(max(at, self._version))}}
                await response.write(event_line("BOOKMARK", mark))
                self.bookmarks += 1
            if woken not in self._watches:
                return

    async def _one(
        self, request: web.Request, resource: _Resource, namespace: str, name: str, part: str
    ) -> web.StreamResponse:
        verbs = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        self._allow(verbs.get(request.method, "?"), resource, part)
        stored = self.objects.get(resource, {}).get(f"{namespace}/{name}")
        if stored is None:
            raise Refused(404, "NotFound", f"{resource[1]} {name!r} not found")
        if request.method == "DELETE":
            self.drop(*resource, name, namespace)
            return web.json_response({"kind": "Status", "status": "Success"})
        if request.method == "PUT":
            value = json.loads(await request.read())
            said = value["metadata"].get("resourceVersion")
            if said and said != stored["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", "the object has been modified")
            value["metadata"]["namespace"] = namespace
            stored = self.put(*resource, value)
        elif request.method == "PATCH":
            stored = self._patch(request.content_type, stored, json.loads(await request.read()), resource, part)
        return web.json_response(stored)

    def _patch(self, content: str, stored: Object, patch: Object, resource: _Resource, part: str) -> Object:
        new = copy.deepcopy(stored)
        said = patch.get("metadata", {}).get("resourceVersion")
        if said and said != stored["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified")
        if part == "status":
            patch = {"status": patch.get("status", {})}
        if content == "application/apply-patch+yaml":
            apply(new, patch)
        else:
            merge(new, patch)
        return self.put(*resource, new) if new != stored else stored
