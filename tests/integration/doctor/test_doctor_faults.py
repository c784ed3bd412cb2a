"""Each fault is really there, in a real stub, and is named; the same installation without it gives no finding."""

import asyncio
import gzip
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from certificates_made import make_pair
from ports import free_ports
from tcp import TcpServer

from fairlead.core.endpoint import ROLE_LABEL
from fairlead.doctor import site
from fairlead.doctor.run import Examination, Severity

Json = dict[str, Any]
Listed = Callable[..., list[Json]]


def codes(examination: Examination) -> set[str]:
    """Without what `fairlead validate` notes of the configuration as well."""
    return {one.code for one in examination.findings} - {"configuration.noted"}


def places(examination: Examination, code: str) -> tuple[str, ...]:
    return next(one.where for one in examination.findings if one.code == code)


async def test_a_pool_that_is_well_gives_no_finding(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs())}
    found = await world.examined(config, probe=True)
    assert (found.findings, found.well) == ((), True)
    ran = {one.check for one in found.outcomes if one.state == "well"}
    assert {"endpoints", "metrics", "freshness", "models", "roles", "tls", "limits", "clock"} <= ran
    assert {one.check for one in found.outcomes if one.state == "skipped"} >= {"scheduler", "headers", "asking"}


async def test_a_wrong_port_is_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs()
    await world.pool.stop(1)
    found = await world.examined({"endpoints": pool_of(addresses)})
    assert codes(found) == {"endpoints.unreachable"}
    assert places(found, "endpoints.unreachable") == ("default/e1",)
    assert found.findings[0].severity is Severity.CRITICAL
    assert addresses[1] in found.findings[0].evidence and "refused" in found.findings[0].evidence
    assert not found.well


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (TimeoutError(), "no answer"),
        ([], "no address"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
    ],
)
async def test_why_a_name_has_no_address_is_said(
    world: Any, pool_of: Listed, monkeypatch: pytest.MonkeyPatch, answer: Any, reason: str
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    monkeypatch.setattr(site, "resolve_host", resolve)
    found = await world.examined({"endpoints": pool_of(["gpu.example:8000"])})
    assert codes(found) >= {"endpoints.no-address"}
    assert found.findings[0].evidence == f"gpu.example: {reason}"


async def test_a_port_of_something_else_is_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(1)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\0\0\0\0\0\0\0\1\x7f")  # how ZMQ begins
        await asyncio.sleep(0.05)

    async with TcpServer(talk) as server:
        found = await world.examined({"endpoints": pool_of([*addresses, server.address])})
    assert codes(found) == {"endpoints.no-model-server"}
    assert places(found, "endpoints.no-model-server") == ("default/e1",)


@pytest.mark.parametrize(
    ("more", "locked"),
    [({"keys": {"file": "keys.txt"}}, True), ({"keys": {"file": "keys.txt", "forward": True}}, False),
     ({"keys": {"file": "keys.txt"}, "upstreamTokenFile": "right.txt"}, False),
     ({"upstreamTokenFile": "right.txt"}, False),
     ({"upstreamTokenFile": "wrong.txt"}, True), ({}, False)],
)  # fmt: skip
async def test_an_engine_that_requires_another_key_is_named(world: Any, more: Json, locked: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = b"401 No" if head.startswith(b"GET /v1/") and b"Bearer right" not in head else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: 28\r\n\r\nvllm:num_requests_waiting 0\n" % status)

    (world.directory / "keys.txt").write_text(f"{'0' * 64} a\n")
    for name in ("right", "wrong"):
        (world.directory / f"{name}.txt").write_text(f"{name}\n")
    async with TcpServer(answer) as server:
        found = await world.examined({"endpoints": [server.address], "gateway": more}, only=("endpoints",))
    assert codes(found) == ({"endpoints.locked"} if locked else set())


async def test_an_engine_that_died_is_named(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs())}
    world.pool.set_faults(0, engine_dead=True)
    assert codes(await world.examined(config)) == {"endpoints.sick"}


async def test_stale_metrics_are_named(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs())}
    world.pool.set_faults(0, metrics_frozen=True)
    found = await world.examined(config)
    assert codes(found) == {"freshness.frozen"}
    assert places(found, "freshness.frozen") == ("default/e0",)
    world.pool.set_faults(0, metrics_frozen=False)
    assert (await world.examined(config)).well


async def test_metrics_that_fail_or_are_late_are_named(world: Any, pool_of: Listed) -> None:
    config: Json = {"endpoints": pool_of(await world.stubs()), "metrics": {"timeout": "100ms"}}
    world.pool.set_faults(0, metrics_status=500)
    world.pool.set_faults(1, metrics_delay_s=0.3)
    found = await world.examined(config)
    assert codes(found) == {"metrics.refused", "metrics.slow"}


async def test_a_compressed_page_is_named(world: Any, pool_of: Listed) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\nconnection: close\r\n\r\n"
        writer.write(head + gzip.compress(b"vllm:num_requests_waiting 0\n"))

    async with TcpServer(talk) as server:
        (entry,) = pool_of(await world.stubs(1))
        url = f"http://{server.address}/metrics"
        found = await world.examined({"endpoints": [entry | {"metricsUrl": url}]})
    assert codes(found) == {"metrics.refused"}
    assert found.findings[0].evidence == f"{url}: compressed (gzip), which was not asked for"


async def test_a_login_page_in_place_of_metrics_is_named(world: Any, pool_of: Listed) -> None:
    body = b"\n<!DOCTYPE html>\n<title>Sign in</title>"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    async with TcpServer(talk) as server:
        (entry,) = pool_of(await world.stubs(1))
        url = f"http://{server.address}/metrics"
        found = await world.examined({"endpoints": [entry | {"metricsUrl": url}]})
    assert codes(found) == {"metrics.refused"}
    seen = found.findings[0].evidence
    assert seen == f"{url}: an HTML page came instead of metrics: <!DOCTYPE html> <title>Sign in</title>"


async def test_a_wrong_engine_is_named_with_the_right_one(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs(1), **{"llm-d.ai/engine-type": "sglang"})}
    found = await world.examined(config)
    assert codes(found) == {"metrics.engine"}
    assert found.findings[0].fix == "label the endpoint with llm-d.ai/engine-type: vllm"


async def test_the_page_of_trtllm_serve_is_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(1, engine_type="trtllm-serve"))
    url = f"http://{endpoints[0]['address']}/prometheus/metrics"
    (finding,) = (await world.examined({"endpoints": endpoints})).findings
    assert (finding.code, finding.evidence) == (
        "metrics.engine",
        "it is read for vllm; it is one of no known engine",
    )
    assert finding.fix.startswith(f"set the label llm-d.ai/engine-type: trtllm-serve; its page is {url}")
    endpoints[0]["labels"]["llm-d.ai/engine-type"] = "trtllm-serve"
    assert (await world.examined({"endpoints": endpoints})).findings == (), "the label alone says where the page is"


async def test_an_engine_that_nobody_knows_is_named(world: Any, pool_of: Listed) -> None:
    config = {"endpoints": pool_of(await world.stubs(1), **{"llm-d.ai/engine-type": "mystery"})}
    found = await world.examined(config)
    assert codes(found) == {"metrics.unknown-engine"}
    assert found.findings[0].severity is Severity.WARNING
    assert "'mystery'; it is read for vllm; known: llamacpp, lmdeploy, sglang" in found.findings[0].evidence


async def test_a_wrong_model_label_is_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs())
    endpoints[1]["labels"]["model-id"] = "tinny"
    found = await world.examined({"endpoints": endpoints})
    assert codes(found) == {"models.label"}
    assert places(found, "models.label") == ("default/e1",)
    assert found.findings[0].evidence == "model-id: tinny; /v1/models lists tiny"


async def test_adapters_that_nobody_knows_of_are_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(loras=("sql", "chat")))
    endpoints[1]["labels"]["lora-adapters"] = "chat, sql"
    found = await world.examined({"endpoints": endpoints})
    assert codes(found) == {"models.unlabelled-adapters"}
    assert places(found, "models.unlabelled-adapters") == ("default/e0",)
    assert found.findings[0].evidence == "/v1/models lists chat, sql"
    assert found.well
    unread = await world.examined({"endpoints": endpoints, "metrics": {"modelsInterval": 0}})
    assert codes(unread) == {"models.unknown-adapters"}


async def test_promised_adapters_that_are_not_loaded_are_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(loras=("sql",)), **{"lora-adapters": "sql"})
    assert codes(await world.examined({"endpoints": endpoints})) == set()
    endpoints[1]["labels"]["lora-adapters"] = "sql, poet"
    found = await world.examined({"endpoints": endpoints})
    assert codes(found) == {"models.unloaded-adapters"}
    assert places(found, "models.unloaded-adapters") == ("default/e1",)
    assert found.findings[0].evidence == "/v1/models does not list poet"


async def test_missing_roles_are_named(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs()
    config: Json = {"policy": "prefill-decode", "endpoints": pool_of(addresses)}
    assert codes(await world.examined(config)) == {"roles.no-prefill"}
    config["endpoints"][0]["labels"][ROLE_LABEL] = "prefill"
    config["endpoints"][1]["labels"][ROLE_LABEL] = "decode"
    assert (await world.examined(config)).well
    config["endpoints"][1]["labels"][ROLE_LABEL] = "prefill"
    assert "roles.nobody" in codes(await world.examined(config))
    config["endpoints"][1]["labels"][ROLE_LABEL] = "decoder"
    assert codes(await world.examined(config)) == {"roles.unknown", "roles.nobody"}


async def test_roles_are_looked_at_by_model(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of([*await world.stubs(1), *await world.stubs(2, model="large")])
    for endpoint, role in zip(endpoints, ("prefill", "decode", "encode"), strict=True):
        endpoint["labels"] = {ROLE_LABEL: role}
    found = await world.examined({"policy": "prefill-decode", "endpoints": endpoints, "gateway": "none"})
    said = {(one.code, one.where, one.evidence) for one in found.findings if one.code.startswith("roles.")}
    assert said == {
        ("roles.nobody", ("decode",), "roles for tiny: prefill"),
        ("roles.no-prefill", (), "roles for large: decode, encode"),
        ("roles.idle", ("default/e2",), f"{ROLE_LABEL}: encode"),
    }


async def test_a_role_that_the_policy_never_uses_is_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs())
    endpoints[0]["labels"][ROLE_LABEL] = "prefill"
    found = await world.examined({"endpoints": endpoints})
    assert codes(found) == {"roles.idle"}
    assert found.findings[0].severity is Severity.WARNING


async def test_clock_skew_is_named(world: Any, pool_of: Listed, later_stub: Callable[[float], Awaitable[str]]) -> None:
    addresses = [*await world.stubs(1), await later_stub(90.0)]
    found = await world.examined({"endpoints": pool_of(addresses)})
    assert codes(found) == {"clock.skew"}
    assert places(found, "clock.skew") == ("default/e1",)
    assert found.findings[0].evidence in [f"it is at least {seconds} s ahead of us" for seconds in (88, 89, 90)]


async def _secured(address: str, certificate: tuple[str, str]) -> asyncio.Server:
    """TLS in front of a stub."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, back), copy(there, writer))

    return await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)


async def test_tls_where_the_other_end_speaks_plaintext_is_named(world: Any, pool_of: Listed) -> None:
    endpoints = pool_of(await world.stubs(1))
    endpoints[0]["metricsUrl"] = f"https://{endpoints[0]['address']}/metrics"
    found = await world.examined({"endpoints": endpoints})
    assert codes(found) == {"tls.https-to-http"}


async def test_plaintext_where_the_other_end_speaks_tls_is_named(
    world: Any, pool_of: Listed, certificate: tuple[str, str]
) -> None:
    addresses = await world.stubs(2)
    async with await _secured(addresses[0], certificate) as server:
        port = server.sockets[0].getsockname()[1]
        endpoints = pool_of(addresses)
        endpoints[0]["metricsUrl"] = f"http://127.0.0.1:{port}/metrics"
        assert codes(await world.examined({"endpoints": endpoints})) == {"tls.http-to-https"}
        endpoints[0]["metricsUrl"] = f"https://127.0.0.1:{port}/metrics"
        assert codes(await world.examined({"endpoints": endpoints})) == {"tls.untrusted"}
        believed = {"tls": {"verify": False}}
        assert codes(await world.examined({"endpoints": endpoints, "metrics": believed})) == {"exposure.unverified"}
        endpoints = pool_of([f"127.0.0.1:{port}", addresses[1]])
        found = await world.examined({"endpoints": endpoints})
        assert codes(found) == {"endpoints.tls"}


async def test_a_certificate_of_our_own_that_cannot_be_used_is_named(world: Any, pool_of: Listed) -> None:
    config: Json = {"endpoints": pool_of(await world.stubs(1)), "extProc": {"tls": {"certDir": str(world.directory)}}}
    assert codes(await world.examined(config)) == {"tls.files"}


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    """A directory with a certificate that has expired."""
    make_pair(tmp_path, "20200101000000Z", "20210101000000Z")
    return tmp_path


@pytest.mark.parametrize("port", ["extProc", "admin"])
async def test_a_certificate_of_our_own_that_has_expired_is_named(
    world: Any, pool_of: Listed, expired: Path, port: str
) -> None:
    config: Json = {"endpoints": pool_of(await world.stubs(1)), port: {"tls": {"certDir": str(expired)}}}
    assert codes(await world.examined(config)) == {"tls.expiry"}


@pytest.mark.parametrize(("ends", "skipped"), [("20990101000000Z", False), ("20210101000000Z", True)])
async def test_an_admin_port_with_a_certificate_of_its_own_is_examined(
    world: Any, pool_of: Listed, tmp_path: Path, ends: str, skipped: bool
) -> None:
    """Nobody has signed the certificate, and it names no host. Only one that is not valid is not accepted."""
    make_pair(tmp_path, "20200101000000Z", ends)
    (tmp_path / "tokens").write_text("# for the doctor\nsecret\n")
    admin = {"port": free_ports(1)[0], "tls": {"certDir": str(tmp_path)}, "tokenFile": str(tmp_path / "tokens")}
    config = {"endpoints": pool_of(await world.stubs(1)), "admin": admin}
    await world.serve(config)
    scheduler = (await world.examined(config, only=("scheduler",))).outcomes[0]
    assert (scheduler.state == "skipped") == skipped
    assert ("certificate of the admin port is not accepted" in scheduler.detail) == skipped


async def test_limits_that_do_not_fit_are_named(world: Any, pool_of: Listed) -> None:
    config: Json = {
        "endpoints": pool_of(await world.stubs(1)),
        "gateway": {"mode": "embedded", "bodyLimit": "2MiB", "maxHeap": "4096Ti"},
        "parsing": {"maxBodyBytes": "1MiB"},
        "metrics": {"maxRate": 0.1, "staleness": "3s"},
        "ledger": {"leaseTtl": "5s"},
    }
    found = await world.examined(config, only=("limits",))
    assert codes(found) == {"limits.body", "limits.heap", "limits.scrape-rate", "limits.lease"}


async def test_few_open_files_are_named(world: Any, pool_of: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Json = {"endpoints": pool_of(await world.stubs(1)), "gateway": "embedded"}
    for hard, named in ((256, {"limits.open-files"}), (1024, {"limits.open-files"}), (4096, set())):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (256, hard))
        found = await world.examined(config, only=("limits",))
        assert codes(found) & {"limits.open-files"} == named


async def test_endpoints_of_several_models_without_labels_are_named(world: Any, pool_of: Listed) -> None:
    addresses = [*await world.stubs(1), *await world.stubs(1, model="large")]
    endpoints = [{"name": f"e{at}", "address": address} for at, address in enumerate(addresses)]
    found = await world.examined({"endpoints": endpoints})
    assert codes(found) == {"models.several"}
    found = await world.examined({"endpoints": endpoints, "metrics": {"modelsInterval": 0}})
    assert codes(found) == {"models.mixed"}
    for endpoint, name in zip(endpoints, ("tiny", "large"), strict=True):
        endpoint["labels"] = {"model-id": name}
    assert (await world.examined({"endpoints": endpoints})).well


async def test_unlike_contexts_of_one_model_are_named(world: Any, pool_of: Listed) -> None:
    addresses = [*await world.stubs(1, max_model_len=512), *await world.stubs(1, max_model_len=2048)]
    found = await world.examined({"endpoints": pool_of(addresses)})
    assert codes(found) == {"models.contexts"}
    assert found.findings[0].evidence == "tiny: max_model_len is 512, 2048"


async def test_a_name_that_leads_nowhere_is_named(world: Any, pool_of: Listed) -> None:
    rewrite = (
        "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\nmetadata: {{name: r}}\n"
        "spec:\n  poolRef: {{name: pool}}\n"
        "  rules: [{{matches: [{{model: {{value: chat}}}}], targets: [{{modelRewrite: {}}}]}}]\n"
    )
    config = {"endpoints": pool_of(await world.stubs(1)), "models": {"file": "names.yaml"}}
    (world.directory / "names.yaml").write_text(rewrite.format("huge"))
    found = await world.examined(config)
    assert codes(found) == {"models.unserved"}
    assert found.findings[0].evidence == "chat leads to huge"
    (world.directory / "names.yaml").write_text(rewrite.format("tiny"))
    assert (await world.examined(config)).well


async def test_each_name_that_leads_nowhere_is_named_and_no_target_without_traffic(world: Any, pool_of: Listed) -> None:
    names = {
        "early": {"gone": 1},
        "late": {"gone": 50, "tiny": 50},
        "ready": {"tiny": 100, "next": 0},
        "reserved": {"nope": 0},
        "bare": {},
    }
    models = [{"name": name, "targets": targets} for name, targets in names.items()]
    found = await world.examined({"endpoints": pool_of(await world.stubs(1)), "models": models})
    assert [finding.where for finding in found.findings] == [("bare", "early", "late")]


async def test_a_target_that_only_a_server_without_a_list_may_have_is_named(world: Any, pool_of: Listed) -> None:
    async def no_list(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = b"404 Not Found" if b"/v1/models" in head else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)

    async with TcpServer(no_list) as server:
        endpoints = pool_of([*await world.stubs(1), server.address])
        config: Json = {"endpoints": endpoints, "models": [{"name": "chat", "targets": {"tiny": 1, "gone": 1}}]}
        endpoints[1]["labels"] = {}
        found = await world.examined(config, only=("models",))
        assert [each.evidence for each in found.findings] == ["chat leads to gone; no list: default/e1"]
        assert codes(found) == {"models.unlisted"}
        endpoints[1]["labels"] = {"model-id": "gone"}
        assert (await world.examined(config, only=("models",))).well


async def test_served_models_that_no_request_may_name_are_noted(world: Any, pool_of: Listed) -> None:
    config: Json = {"endpoints": pool_of(await world.stubs(1, loras=("mine",))), "models": [{"name": "tiny"}]}
    found = await world.examined(config)
    assert ("models.undefined", "/v1/models lists mine") in {(each.code, each.evidence) for each in found.findings}
    config["models"] = {"list": config["models"], "unmatched": "pass"}
    assert "models.undefined" not in codes(await world.examined(config))


async def test_a_metrics_page_that_lacks_something_is_named(world: Any, pool_of: Listed) -> None:
    config: Json = {
        "endpoints": pool_of(await world.stubs(1)),
        "metrics": {"engines": {"vllm": {"waiting": "renamed"}}},
    }
    found = await world.examined(config)
    assert codes(found) == {"metrics.incomplete"}
    assert "renamed is not on the page" in found.findings[0].evidence


async def test_pages_of_any_bytes_break_no_check(world: Any, pool_of: Listed) -> None:
    addresses = await world.stubs(1)
    bodies = [b"", b"[" * 100_000, b'{"data": [1]}', b'{"data": {}}', b"\xff\0", b'{"data": [{"id": null}]}']

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = bodies[0]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))

    async with TcpServer(talk) as server:
        config = {"endpoints": pool_of([*addresses, server.address]), "kvEvents": {"enabled": True}}
        while bodies:
            found = await world.examined(config, probe=True)
            assert "kv-events.off" in codes(found)
            assert codes(found) & {"metrics.engine", "metrics.refused"}
            bodies.pop(0)


async def test_more_models_than_have_metrics_are_named(
    world: Any, pool_of: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead.doctor.checks.metrics.MOST_DECLARED", 1)
    pool = {"endpoints": pool_of(await world.stubs(1))}
    assert "limits.models" not in codes(await world.examined(pool, only=("limits",)))
    alias = {"models": {"list": [{"name": "alias", "targets": {"tiny": 1}}]}}
    assert "limits.models" in codes(await world.examined(pool | alias, only=("limits",)))


@pytest.mark.parametrize(("gateway", "warned"), [({}, True), ({"failOpen": True}, False), ({"failOpen": False}, False)])
async def test_names_that_get_404_without_the_scheduler_are_named(
    world: Any, pool_of: Listed, gateway: Json, warned: bool
) -> None:
    """The gateway fails open, and a server does not know a name that clients use. `failOpen: true` confirms."""
    addresses = [*await world.stubs(1, aliases=("chat",)), *await world.stubs(1)]
    models = [{"name": "chat", "targets": {"tiny": 1}}, {"name": "tiny"}]
    config: Json = {"endpoints": pool_of(addresses), "models": models}
    found = await world.examined({**config, "gateway": gateway}, only=("models",))
    assert codes(found) == ({"models.without-scheduler"} if warned else set())
    if warned:
        assert places(found, "models.without-scheduler") == ("chat",)
        assert found.findings[0].evidence == "/v1/models does not list chat at default/e1"


@pytest.mark.parametrize("cached", [True, False])
async def test_an_engine_without_prefix_caching_is_named(world: Any, cached: bool) -> None:
    async def metrics(request: web.Request) -> web.Response:
        lines = [f"vllm:num_requests_{name} 0" for name in ("running", "waiting")]
        lines += [f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{cached}"}} 1']
        return web.Response(text="\n".join(lines) + "\n")

    address = await world.server(web.get("/metrics", metrics))
    config = {"endpoints": [address]}
    found = (await world.examined(config, ("metrics",))).findings
    evidence = [one.evidence for one in found if one.code == "metrics.no-prefix-cache"]
    assert evidence == ([] if cached else ['vllm:cache_config_info has enable_prefix_caching="False"'])


@pytest.mark.parametrize("key", ["", "wrong", "a key"])
async def test_a_gateway_gets_a_key_and_a_name_that_clients_use(world: Any, pool_of: Listed, key: str) -> None:
    """It asks for keys, and only the name that it lists may be used. Without the key nothing of it can be checked."""

    def allowed(request: web.Request) -> bool:
        return request.headers.get("Authorization") == "Bearer a key"

    async def listed(request: web.Request) -> web.Response:
        names = {"object": "list", "data": [{"id": "chat", "object": "model"}]}
        return web.json_response(names) if allowed(request) else web.Response(status=401)

    async def chat(request: web.Request) -> web.Response:
        named = (await request.json())["model"] == "chat"
        return web.json_response({}, status=(200 if named else 404) if allowed(request) else 401)

    address = await world.server(web.get("/v1/models", listed), web.post("/v1/chat/completions", chat))
    config = {"endpoints": pool_of(await world.stubs(1))}
    url = f"http://{f':{quote(key)}@' * bool(key)}{address}"
    found = await world.examined(config, gateway=url, only=("asking", "headers"))
    given = key == "a key"
    assert codes(found) == (set() if given else {"asking.not-allowed"})
    assert {one.check: one.state for one in found.outcomes} == (
        {"asking": "well", "headers": "well"} if given else {"asking": "found", "headers": "skipped"}
    )
