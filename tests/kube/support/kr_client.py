"""A plain HTTP client for the API server, independent of the product's own."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Refused(AssertionError):
    """The API server answered with an error."""

    def __init__(self, status: int, what: str, answer: Object) -> None:
        super().__init__(f"{what}: {status} {answer.get('reason', '')}: {answer.get('message', answer)}")
        self.status = status
        self.answer = answer


class Client:
    """One bearer token. Every request has its own connection, so a restart of the server costs nothing."""

    def __init__(self, url: str, authority: Path, token: str) -> None:
        self.url = url
        self.token = token
        self._host = urlsplit(url).netloc
        self._tls = ssl.create_default_context(cafile=str(authority))
        self._kinds: dict[tuple[str, str], tuple[str, bool]] = {}

    def request(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json", **query: str
    ) -> tuple[int, Any]:
        """(status, answer). JSON is decoded; of a watch the lines are given. `OSError` when nobody answers in 40 s."""
        connection = http.client.HTTPSConnection(self._host, timeout=40, context=self._tls)
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json", "Content-Type": kind}
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if "watch" in query and response.status == 200:
            return response.status, [json.loads(line) for line in data.splitlines()]
        is_json = (response.getheader("Content-Type") or "").startswith("application/json")
        return response.status, json.loads(data) if is_json else data.decode()

    def must(self, method: str, path: str, body: Object | None = None, **options: str) -> Any:
        """As `request`; anything but 2xx raises `Refused`."""
        status, answer = self.request(method, path, body, **options)
        if not 200 <= status < 300:
            raise Refused(status, f"{method} {path}", answer if isinstance(answer, dict) else {"message": answer})
        return answer

    def path(self, thing: Object, namespace: str | None = None, name: str | None = None) -> str:
        """Of an object (`name` given) or of its collection."""
        version = thing["apiVersion"]
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        plural, namespaced = self._kind(root, thing["kind"])
        space = namespace or thing["metadata"].get("namespace") or "default"
        folder = f"{root}/namespaces/{space}/{plural}" if namespaced else f"{root}/{plural}"
        return f"{folder}/{name}" if name else folder

    def _kind(self, root: str, kind: str) -> tuple[str, bool]:
        if (root, kind) not in self._kinds:
            for one in self.must("GET", root)["resources"]:
                if "/" not in one["name"]:
                    self._kinds[root, one["kind"]] = (one["name"], one["namespaced"])
        if (root, kind) not in self._kinds:
            raise AssertionError(f"the API server knows no {kind} in {root}")
        return self._kinds[root, kind]

    def create(self, thing: Object, namespace: str | None = None) -> Object:
        created: Object = self.must("POST", self.path(thing, namespace), thing)
        return created

    def apply(self, thing: Object, namespace: str | None = None, **options: str) -> Object:
        """Server-side apply. Unknown and doubled fields are errors, as with `kubectl apply --validate=strict`."""
        query = {"fieldManager": "tests", "fieldValidation": "Strict", "force": "true", **options}
        path = self.path(thing, namespace, thing["metadata"]["name"])
        applied: Object = self.must("PATCH", path, thing, kind=APPLY, **query)
        return applied

    def get(self, thing: Object, namespace: str | None = None) -> Object:
        found: Object = self.must("GET", self.path(thing, namespace, thing["metadata"]["name"]))
        return found

    def patch(self, thing: Object, change: Object, namespace: str | None = None, subresource: str = "") -> Object:
        """A merge patch of an object, or of its `/status`."""
        path = self.path(thing, namespace, thing["metadata"]["name"]) + (f"/{subresource}" if subresource else "")
        patched: Object = self.must("PATCH", path, change, kind=MERGE)
        return patched

    def delete(self, thing: Object, namespace: str | None = None, grace: int = 0) -> None:
        """A pod with `grace` > 0 stays, terminating: nobody plays its kubelet."""
        path = self.path(thing, namespace, thing["metadata"]["name"])
        self.must("DELETE", path, gracePeriodSeconds=str(grace))
