"""Model names through the real Envoy: targets, splits, names mapped back, errors, and what reaches a model server."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "support"))

from gw_http1 import Http1
from gw_live import running
from gw_messages import JSON, Ask, Got
from gw_modes import FULL_DUPLEX, Pair, bootstrap
from gw_processes import Envoy, require_envoy, sees_the_scheduler
from tcp import TcpServer

from fairlead.core.headers import CONTROL_HEADERS, STEERING_HEADERS
from fairlead.gateway.envoy.routes import LARGE
from fairlead.lab.stub.config import StubConfig
from fairlead.lab.stub.pool import StubPool
from fairlead.server.live import Live

pytestmark = pytest.mark.envoy

EMBEDDED = Pair("whole", "first-chunk")
GATEWAYS = [
    EMBEDDED,
    Pair("whole", "full", log=False),
    Pair("buffered", "first-chunk"),
    Pair("buffered", "headers"),
    Pair(FULL_DUPLEX, FULL_DUPLEX),
    Pair(FULL_DUPLEX, FULL_DUPLEX, log=False),
    Pair(FULL_DUPLEX, "STREAMED"),
]
#: Responses are not shown, or their bodies are not.
UNMAPPED = ("headers",)


def model(name: str, *targets: tuple[str, int], criticality: str = "Standard") -> str:
    spec = {
        "modelName": name,
        "criticality": criticality,
        "poolRef": {"name": "pool"},
        "targetModels": [{"name": target, "weight": weight} for target, weight in targets],
    }
    return manifest("inference.networking.x-k8s.io/v1alpha2", "InferenceModel", name.lower(), spec)


def manifest(version: str, kind: str, name: str, spec: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}) + "\n---\n"


OBJECTIVE = manifest("llm-d.ai/v1alpha2", "InferenceObjective", "urgent", {"priority": 7, "poolRef": {"name": "pool"}})
REWRITE = manifest(
    "llm-d.ai/v1alpha2",
    "InferenceModelRewrite",
    "old-names",
    {
        "poolRef": {"name": "pool"},
        "rules": [{"matches": [{"model": {"value": "gpt-old"}}], "targets": [{"modelRewrite": "base"}]}],
    },
)
NAMES = model("chat", ("base", 90), ("a-much-longer-target/tuned", 10), criticality="Critical") + OBJECTIVE + REWRITE


class Server:
    """A model server that answers with the name it was asked for: JSON, or a stream cut at odd places."""

    def __init__(self) -> None:
        self.models: Counter[str] = Counter()
        self.bodies: list[bytes] = []
        self.heads: list[dict[str, str]] = []

    async def __aenter__(self) -> "Server":
        self._server = await TcpServer(self._serve, limit=1 << 24).start()
        self.address = self._server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            head = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await _body(reader, head)
            self._answer(lines[0], head, body, writer)

    def _answer(self, first: str, head: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if first.startswith("GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n")
            return
        asked = json.loads(body)
        self.models[asked["model"]] += 1
        self.bodies.append(body)
        self.heads.append(head)
        answer = answer_of(asked["model"])
        if asked.get("stream"):
            stream = b"data: " + answer + b"\n\ndata: " + answer + b"\n\ndata: [DONE]\n\n"
            cut = len(answer) // 4
            pieces = [stream[i : i + cut] for i in range(0, len(stream), cut)]
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
            kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + chunks + b"0\r\n\r\n")
        else:
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + answer)


async def _body(reader: asyncio.StreamReader, head: dict[str, str]) -> bytes:
    if "transfer-encoding" not in head:
        return await reader.readexactly(int(head.get("content-length", 0)))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


def answer_of(name: str) -> bytes:
    text = 'so "model":"base" it said'
    choices = [{"message": {"content": text, "model": name}, "delta": {"content": text}}]
    return json.dumps({"id": "x", "model": name, "choices": choices, "usage": {"prompt_tokens": 3}}).encode()


class World:
    def __init__(self, live: Live, port: int, servers: Sequence[Server], names: Path) -> None:
        self.live, self.port, self.servers, self.names = live, port, servers, names

    async def post(self, body: bytes, *fields: tuple[str, str], path: str = "/v1/chat/completions") -> Got:
        async with Http1(self.port) as client:
            return await client.ask(Ask("POST", path, [JSON, *fields], [body]))

    async def get(self, path: str) -> Got:
        async with Http1(self.port) as client:
            return await client.ask(Ask("GET", path))

    def asked_for(self) -> Counter[str]:
        return sum((server.models for server in self.servers), Counter[str]())


@asynccontextmanager
async def world(
    pair: Pair, tmp: Path, names: str = NAMES, endpoints: Sequence[Any] | None = None, **config: Any
) -> AsyncIterator[World]:
    require_envoy()
    file = tmp / "names.yaml"
    file.write_text(names)
    async with AsyncExitStack() as stack:
        servers = [] if endpoints else [await stack.enter_async_context(Server()) for _ in range(2)]
        known = list(endpoints or [server.address for server in servers])
        settings = {"endpoints": known, "policy": "round-robin", "models": {"file": str(file)}, "seed": 1, **config}
        live, _ = await stack.enter_async_context(running(settings, tmp))
        (port,) = free_ports(1)
        gateway = Envoy(tmp, f"envoy-{port}")
        stack.callback(gateway.end)
        addresses = [one["address"] if isinstance(one, dict) else one for one in known]
        built = bootstrap(pair, port, f"127.0.0.1:{live.config.ext_proc.port}", addresses, message_timeout=10.0)
        await asyncio.to_thread(gateway.start, built)
        await sees_the_scheduler(gateway.admin)
        yield World(live, port, servers, file)


def chat(name: str | None, stream: bool = False, size: int = 5) -> bytes:
    asked: dict[str, Any] = {"big": 12345678901234567890, "messages": [{"role": "user", "content": "é" * size}]}
    if name is not None:
        asked["model"] = name
    if stream:
        asked["stream"] = True
    return json.dumps(asked, ensure_ascii=False, indent=1).encode()


def error(got: Got) -> dict[str, Any]:
    assert got.field("content-type") == "application/json"
    return dict(json.loads(got.body)["error"])


@pytest.mark.parametrize("pair", GATEWAYS, ids=lambda pair: pair.name)
async def test_names_there_and_back(pair: Pair, tmp_path: Path) -> None:
    names = model("chat", ("a-much-longer-target/tuned", 1)) + model("short-is-the-other-way-round", ("t", 1))
    async with world(pair, tmp_path, names + model("same", ("same", 1))) as w:
        for name, target in (
            ("chat", "a-much-longer-target/tuned"),
            ("short-is-the-other-way-round", "t"),
            ("same",) * 2,
        ):
            for stream in (False, True):
                for size in (5, 60_000, 600_000):
                    body = chat(name, stream, size)
                    got = await w.post(body)
                    assert got.status == 200, got
                    (server,) = (server for server in w.servers if server.bodies)
                    assert server.bodies.pop() == body.replace(f'"{name}"'.encode(), f'"{target}"'.encode())
                    answer = answer_of(target if pair.response in UNMAPPED else name)
                    # Deeper down a name is not the response's.
                    answer = answer.replace(f'", "model": "{name}"}}'.encode(), f'", "model": "{target}"}}'.encode())
                    wanted = b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (answer, answer) if stream else answer
                    assert got.body == wanted
        async with asyncio.timeout(10):
            while len(w.live.fleet.ledger):
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_requests_are_split_as_said(tmp_path: Path) -> None:
    async with world(EMBEDDED, tmp_path) as w:

        async def client(count: int) -> None:
            async with Http1(w.port) as connection:
                for _ in range(count):
                    got = await connection.ask(Ask("POST", "/v1/chat/completions", [JSON], [chat("chat")]))
                    assert got.status == 200
                    assert b'"model": "chat"' in got.body

        await asyncio.gather(*(client(250) for _ in range(16)))
        counts = w.asked_for()
        assert counts.total() == 4_000
        assert abs(counts["base"] / 4_000 - 0.9) < 0.02
        assert counts["base"] + counts["a-much-longer-target/tuned"] == 4_000
        async with asyncio.timeout(10):
            while len(w.live.fleet.ledger):
                await asyncio.sleep(0.05)
        page = b"".join(w.live.watch.exposition()).decode()
        for name, count in counts.items():
            line = f'inference_model_request_total{{model_name="chat",target_model_name="{name}"}} {count}'
            assert line in page


async def test_sessions_keep_their_target(tmp_path: Path) -> None:
    names = {"file": str(tmp_path / "names.yaml"), "sticky": "session"}
    async with world(EMBEDDED, tmp_path, model("chat", ("a", 1), ("b", 1)), models=names) as w:
        for session in range(12):
            before = w.asked_for()
            for _ in range(4):
                await w.post(chat("chat"), ("x-session-id", f"s{session}"))
            assert len(w.asked_for() - before) == 1
        assert set(w.asked_for()) == {"a", "b"}


@pytest.mark.parametrize("api", ["chat/completions", "messages", "responses"])
async def test_conversations_without_a_session_keep_their_target(tmp_path: Path, api: str) -> None:
    """From the first turn on, which no other has been seen before."""
    names = {"file": str(tmp_path / "names.yaml"), "sticky": "session"}
    async with world(EMBEDDED, tmp_path, model("chat", ("a", 1), ("b", 1)), models=names) as w:
        for number in range(12):
            before, turns = w.asked_for(), [{"role": "user", "content": f"question {number}"}]
            for answer in ("first", "second", "third"):
                member: Any = turns if api != "responses" or len(turns) > 1 else turns[0]["content"]
                body = {"model": "chat", "input" if api == "responses" else "messages": member, "max_tokens": 5}
                got = await w.post(json.dumps(body).encode(), path=f"/v1/{api}")
                assert got.status == 200
                turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
            assert len(w.asked_for() - before) == 1
        assert set(w.asked_for()) == {"a", "b"}


async def test_a_target_without_servers_is_called_by_its_clients_name(tmp_path: Path) -> None:
    """With the sessions whose target it is, and after which time they may ask again."""
    names = model("chat", ("v1", 1), ("v2", 1))
    async with Server() as server:
        endpoint = {"address": server.address, "labels": {"model-id": "v1"}}
        models = {"file": str(tmp_path / "names.yaml"), "sticky": "session"}
        async with world(EMBEDDED, tmp_path, names, [endpoint], models=models, policy="default") as w:
            answers = [await w.post(chat("chat"), ("x-session-id", f"s{number % 8}")) for number in range(16)]
    assert [got.status for got in answers[:8]] == [got.status for got in answers[8:]]
    refused = [got for got in answers if got.status == 503]
    assert len({got.status for got in answers}) == 2 and server.models["v1"] + len(refused) == len(answers)
    assert {error(got)["message"] for got in refused} == {"no endpoint serves the model `chat` now"}
    assert {got.field("retry-after") for got in refused} == {"1"}


async def test_errors(tmp_path: Path) -> None:
    async with world(EMBEDDED, tmp_path) as w:
        got = await w.post(chat("nope"))
        assert got.status == 404
        assert error(got) == {
            "message": "The model `nope` does not exist. Known models: chat, gpt-old.",
            "type": "NotFoundError",
            "param": "model",
            "code": "model_not_found",
        }
        assert not got.field("x-llm-d-request-dropped-reason")
        got = await w.post(chat(None))
        assert (got.status, error(got)["param"]) == (400, "model")
        async with Http1(w.port) as client:
            for _ in range(3):
                assert (await client.ask(Ask("POST", "/v1/chat/completions", [JSON], [chat(None)]))).status == 400
            assert client.opened == 1, "the connection goes on"
        got = await w.post(chat("chat"), ("x-llm-d-model-name-rewrite", "secret"))
        assert (got.status, error(got)["code"]) == (404, "model_not_found")
        got = await w.post(
            b'{"model":"nope","max_tokens":5,"messages":[{"role":"user","content":"x"}]}', path="/v1/messages"
        )
        assert got.status == 404
        assert b"nope" in got.body
        assert not w.asked_for()


async def test_names_may_pass(tmp_path: Path) -> None:
    names = {"file": str(tmp_path / "names.yaml"), "unmatched": "pass"}
    async with world(EMBEDDED, tmp_path, models=names) as w:
        got = await w.post(chat("nope"))
        assert json.loads(got.body)["model"] == "nope"
        assert (await w.post(chat("gpt-old"))).status == 200
        assert w.asked_for() == {"nope": 1, "base": 1}


async def test_the_list_of_models(tmp_path: Path) -> None:
    async with world(EMBEDDED, tmp_path) as w:
        listed = json.loads((await w.get("/v1/models")).body)
        assert listed["object"] == "list"
        assert [one["id"] for one in listed["data"]] == ["chat", "gpt-old"]
        assert json.loads((await w.get("/v1/models/chat?x=1")).body)["id"] == "chat"
        assert (await w.get("/v1/models/base")).status == 404
        w.names.write_text(OBJECTIVE)
        async with asyncio.timeout(10):
            while (await w.get("/v1/models")).body:  # now it is the model server's
                await asyncio.sleep(0.1)


async def test_the_list_of_models_of_a_mixed_pool(tmp_path: Path) -> None:
    """Two servers with unlike models: the list has both, whichever of them would have answered."""
    one = StubPool(StubConfig(model="one", loras=("adapter",), time_ratio=20.0), 1)
    other = StubPool(StubConfig(model="other", time_ratio=20.0), 1)
    pass_ = {"unmatched": "pass", "list": [{"name": "chat", "targets": {"one": 1}}]}
    async with one as first, other as second:
        endpoints = [*first.addresses, *second.addresses]
        for models, names in (({}, ["adapter", "one", "other"]), (pass_, ["adapter", "chat", "one", "other"])):
            async with world(EMBEDDED, tmp_path, "", endpoints, models=models, policy="default") as w:
                async with asyncio.timeout(10):  # until both were asked
                    while len(json.loads((await w.get("/v1/models")).body)["data"]) < len(names):
                        await asyncio.sleep(0.05)
                for _ in range(4):
                    listed = json.loads((await w.get("/v1/models")).body)
                    assert [model["id"] for model in listed["data"]] == names
                for name in names:
                    assert json.loads((await w.get(f"/v1/models/{name}")).body)["id"] == name
                assert (await w.get("/v1/models/nope")).status == 404
        listed_only = [{"name": "chat", "targets": {"one": 1}}]
        async with world(EMBEDDED, tmp_path, "", endpoints, models=listed_only, policy="default") as w:
            assert [model["id"] for model in json.loads((await w.get("/v1/models")).body)["data"]] == ["chat"]
            assert (await w.post(chat("one"))).status == 404


async def test_definitions_change_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(EMBEDDED, tmp_path, model("chat", ("one", 1))) as w:
        await w.post(chat("chat"))
        w.names.write_text(model("chat", ("two", 1)) + "kind: [\n")
        async with asyncio.timeout(10):
            while "problem in a model definition" not in caplog.text:
                await asyncio.sleep(0.05)
        await w.post(chat("chat"))
        assert w.asked_for() == {"one": 2}
        w.names.write_text(model("chat", ("two", 1)))
        async with asyncio.timeout(10):
            while not w.asked_for()["two"]:
                assert (await w.post(chat("chat"))).status == 200


async def test_a_rewrite_counts_before_the_list_and_the_list_before_other_manifests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "models.yaml").write_text(model("gpt-old", ("of-a-model", 1)))
    (manifests / "rewrites.yaml").write_text(REWRITE)
    names = {"list": [{"name": "gpt-old", "targets": {"listed": 1}}], "file": str(manifests)}
    async with world(EMBEDDED, tmp_path, models=names) as w:
        assert (await w.post(chat("gpt-old"))).status == 200
        assert w.asked_for() == {"base": 1}
        told = [record.fields for record in caplog.records if record.getMessage().startswith("a rewrite decides")]
        assert {"model": "gpt-old", "rewrite": "default/old-names"} in told
        (manifests / "rewrites.yaml").unlink()
        async with asyncio.timeout(10):
            while not w.asked_for()["listed"]:
                assert (await w.post(chat("gpt-old"))).status == 200
        assert not w.asked_for()["of-a-model"]


async def test_priority_comes_from_criticality_and_objective(tmp_path: Path) -> None:
    async with world(EMBEDDED, tmp_path) as w:
        await w.post(chat("chat"))
        await w.post(chat("chat"), ("x-llm-d-inference-objective", "urgent"))
        await w.post(chat("gpt-old"), ("x-gateway-inference-objective", "unknown"))
        shown = [(d["model"], d["priority"], d["rewritten_by"]) for d in reversed(w.live.watch.decisions(3))]
        assert shown == [("chat", 10, None), ("chat", 7, None), ("gpt-old", 0, "default/old-names")]


SPOOFED = [(name, "10.66.66.66:6") for name in sorted(CONTROL_HEADERS | STEERING_HEADERS)]


@pytest.mark.parametrize("pair", [EMBEDDED, Pair(FULL_DUPLEX, FULL_DUPLEX)], ids=lambda pair: pair.name)
@pytest.mark.parametrize("trust", [[], ["objective", "fairness", "slo", "session"]])
async def test_no_steering_header_reaches_a_model_server(pair: Pair, trust: list[str], tmp_path: Path) -> None:
    names = model("chat", ("base", 1)) + model("plain")
    async with world(pair, tmp_path, names, headers={"trust": trust}) as w:
        for name, size in (("chat", 5), ("plain", 5), ("plain", LARGE)):
            got = await w.post(
                chat(name, size=size), *SPOOFED, ("x-request-id", "mine"), ("x-session-id", "s"), ("x-other", "o")
            )
            assert got.status == 200, got
            (head,) = [head for server in w.servers for head in server.heads]
            for server in w.servers:
                server.heads.clear()
            assert "10.66.66.66:6" not in head.values()
            # The destination is the scheduler's own, where the gateway routes by it.
            assert not (CONTROL_HEADERS | STEERING_HEADERS) & head.keys() - {"x-gateway-destination-endpoint"}
            assert not [name for name in head if "fairlead" in name]
            assert (head["x-request-id"], head["x-session-id"], head["x-other"]) == ("mine", "s", "o")
            assert not (CONTROL_HEADERS | STEERING_HEADERS) & dict(got.fields).keys()


async def test_hints_of_large_uploads_are_heard(tmp_path: Path) -> None:
    """They take another way inside Envoy, and once lost their headers there."""
    async with world(EMBEDDED, tmp_path) as w:
        hints = ("x-llm-d-inference-fairness-id", "tenant"), ("x-llm-d-inference-objective", "urgent")
        assert (await w.post(chat("gpt-old", size=LARGE), *hints)).status == 200
        (decision,) = w.live.watch.decisions(1)
    assert (decision["fairness_id"], decision["priority"]) == ("tenant", 7)


async def test_header_targets_count_only_if_trusted(tmp_path: Path) -> None:
    names = model("chat", ("base", 1)) + model("other", ("canary", 1))
    for trust, target in ((["model-rewrite"], "canary"), ([], "base")):
        async with world(EMBEDDED, tmp_path, names, headers={"trust": trust}) as w:
            got = await w.post(chat("chat"), ("x-llm-d-model-name-rewrite", "canary"))
            assert json.loads(got.body)["model"] == "chat"
            assert w.asked_for() == {target: 1}


async def test_with_the_stub(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A base model and an adapter, at a server with the real one's answers: they have its first name."""
    names = model("chat", ("base", 1)) + model("tuned", ("adapter", 1)) + model("broken", ("missing", 1))
    prompts = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
    }
    config = StubConfig(model="first", aliases=("base",), loras=("adapter", "other"), time_ratio=20.0)
    stub = StubPool(config, 2)
    async with stub as pool, world(EMBEDDED, tmp_path, names, pool.addresses, policy="default") as w:
        for name in ("chat", "tuned"):
            for path, prompt in prompts.items():
                asked = {"model": name, "max_tokens": 5, **prompt}
                got = await w.post(json.dumps(asked).encode(), path=path)
                assert (got.status, json.loads(got.body)["model"]) == (200, name)
                got = await w.post(json.dumps({**asked, "stream": True}).encode(), path=path)
                events = [line[6:] for line in got.body.split(b"\n\n") if line.startswith(b"data: {")]
                assert {json.loads(event)["model"] for event in events} == {name}
                assert got.body.endswith(b"data: [DONE]\n\n")
        got = await w.post(json.dumps({"model": "broken", "prompt": "x"}).encode(), path="/v1/completions")
        assert got.status == 404
        async with asyncio.timeout(10):
            while "requests for served models get 404" not in caplog.text:
                await asyncio.sleep(0.05)
    told = [record.fields for record in caplog.records if record.getMessage().startswith("requests for served")]
    assert [fields["models"] for fields in told] == ["other"]
    told = [record.fields for record in caplog.records if record.getMessage().startswith("no server lists a target")]
    assert [(fields["model"], fields["target"]) for fields in told] == [("broken", "missing")]
