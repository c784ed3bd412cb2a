"""Replicas tell each other their facts through a real Valkey, whatever becomes of it."""

import asyncio
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from ports import free_port
from tcp import TcpServer
from tellers import LEASE, PATIENCE, Teller, agree, running, until
from valkey import Valkey as SyncValkey
from valkey.asyncio import Valkey
from valkey.exceptions import OutOfMemoryError
from valkey_server import ValkeyServer

from fairlead.core.events import Event, PeerHeard, PeerLost
from fairlead.server import replicas_valkey as module
from fairlead.server.observe.log import RepeatFilter
from fairlead.server.replicas import MOST_CHANGES


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    started = ValkeyServer(tmp_path).start()
    yield started
    started.kill()


async def test_each_hears_what_the_others_say(server: ValkeyServer) -> None:
    tellers = [Teller(name, server.url) for name in "abc"]
    async with running(*tellers):
        for number in range(200):
            for teller in tellers:
                teller.say(f"{teller.replicas.origin}{number}")
            await asyncio.sleep(0)
        await until(lambda: agree(*tellers))
        assert not any(teller.replicas.trouble() for teller in tellers)
        assert tellers[0].replicas.counts.sent < 200  # what happens at nearly the same time is told together
        await until(lambda: tellers[0].replicas.lag_s)  # it reads its own words last
        assert 0 < tellers[0].replicas.lag_s < PATIENCE


async def test_nothing_is_written_while_nothing_happens(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        async with Valkey.from_url(server.url) as client:
            await until(lambda: not one.replicas.missing and not other.replicas.missing)
            before = await client.xlen("{fairlead:pool}:told")
            heard = other.replicas.peers["a"].heard_at
            one.say("once")
            await until(lambda: other.replicas.peers["a"].heard_at > heard)
            assert await client.xlen("{fairlead:pool}:told") == before + 1


async def test_the_last_to_leave_removes_what_was_told(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with Valkey.from_url(server.url) as client:
        async with running(one):
            async with running(other):
                one.say("word")
                await until(lambda: other.known == {"a": ["word"]})
            assert await client.exists("{fairlead:pool}:told"), "one is left"
        assert [key for key in await client.keys() if b"snapshot" not in key] == []


async def test_a_joiner_gets_what_was_said_before(server: ValkeyServer) -> None:
    one = Teller("a", server.url)
    async with running(one):
        for number in range(50):
            one.say(f"before{number}")
        await until(lambda: one.replicas.counts.sent)
        joiner = Teller("b", server.url)
        async with running(joiner):
            one.say("after")
            await until(lambda: agree(one, joiner))
            assert joiner.snapshots == 1


async def test_one_that_leaves_is_gone_at_once_and_its_last_words_are_heard(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one):
        async with running(other):
            await until(lambda: agree(one, other) and "b" in one.replicas.peers)
            other.say("farewell")
            assert one.replicas.unheard_s == 0.0
            assert one.counted == [2]
        await until(lambda: PeerLost("b") in one.fed)
        assert one.counted == [2, 1]
        assert one.replicas.unheard_s > 0.0
        last, lost = one.fed[-2:]
        assert isinstance(last, PeerHeard) and last.payload == b"0 farewell" and lost == PeerLost("b")


async def test_one_that_is_met_before_its_first_lease_has_not_left(server: ValkeyServer) -> None:
    one = Teller("a", server.url)
    async with running(one), Valkey.from_url(server.url) as client:
        await asyncio.sleep(LEASE * 1.1)  # for a lease after joining it would keep all others
        await client.xadd("{fairlead:pool}:told", {module.ORIGIN: b"b", module.WANTED: b""})
        await until(lambda: "b" in one.replicas.peers)
        await asyncio.sleep(LEASE * 0.6)  # it renews its lease, and looks for those of others, every third of a lease
        assert one.lost == []
        await until(lambda: one.lost == ["b"])


class Cable:
    """A TCP connection to the server that can be cut."""

    def __init__(self, server: ValkeyServer, context: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._context = context
        self.port = 0
        self.cut = False

    async def __aenter__(self) -> "Cable":
        self._listener = await TcpServer(self._connected, ssl=self._context).start()
        self.port = self._listener.port
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            await asyncio.gather(self._carry(reader, there[1]), self._carry(there[0], writer))
        finally:
            there[1].transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                if not self.cut:  # what is sent meanwhile is lost, and nobody is told
                    sink.write(data)
        sink.transport.abort()


async def test_a_network_that_is_cut_loses_a_replica_and_brings_it_back(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 1.2)
    async with Cable(server) as cable:
        one, other = Teller("a", server.url), Teller("b", f"valkey://127.0.0.1:{cable.port}")
        async with running(one, other):
            one.say("before")
            await until(lambda: agree(one, other))
            cable.cut = True
            one.say("meanwhile")
            other.say("also")
            await until(lambda: one.lost == ["b"] and other.replicas.trouble())
            assert not one.replicas.trouble()
            cable.cut = False
            await until(lambda: agree(one, other))


def make_localhost_pair(directory: Path) -> None:
    """Write a self-signed pair to `tls.crt` and `tls.key`."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    files = ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_tls_is_verified(server: ValkeyServer, tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    await asyncio.to_thread(make_localhost_pair, tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with Cable(server, context) as cable:
        url = f"valkeys://localhost:{cable.port}"
        trusting, doubting = Teller("a", url, ca_file=str(certificate)), Teller("b", url)
        async with running(trusting, doubting):
            # Time that runs out on a busy machine is a problem, too, until the next try.
            await until(lambda: "certificate" in doubting.replicas.problem.lower() and not trusting.replicas.problem)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    async with Cable(server, context) as cable:
        unproven = Teller("a", f"valkeys://localhost:{cable.port}", ca_file=str(certificate))
        async with running(unproven):
            await until(lambda: "see replicas.certDir" in unproven.replicas.trouble())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_a_server_that_demands_client_certificates_gets_the_newest_one(
    server: ValkeyServer, tmp_path: Path
) -> None:
    """The wheel's Valkey has no TLS: the cable demands them in its place."""
    known, strange = tmp_path / "known", tmp_path / "strange"
    for directory in known, strange:
        directory.mkdir()
        await asyncio.to_thread(make_localhost_pair, directory)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=known / "tls.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(known / "tls.crt", known / "tls.key")
    async with Cable(server, context) as cable:
        where = {"url": f"valkeys://localhost:{cable.port}", "ca_file": str(known / "tls.crt")}
        without, proven = Teller("a", **where), Teller("b", **where, cert_dir=str(known))
        rotated = Teller("c", **where, cert_dir=str(strange))
        async with running(without, proven, rotated):
            proven.say("word")
            await until(lambda: without.replicas.problem and rotated.replicas.problem)
            assert not proven.replicas.problem
            for name in "tls.crt", "tls.key":
                shutil.copy(known / name, strange / name)
            await until(lambda: agree(proven, rotated))
            assert without.replicas.problem


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("fault", ["no key", "no PEM", "another's key", "encrypted key"])
async def test_a_client_certificate_that_cannot_be_used_is_named(tmp_path: Path, fault: str) -> None:
    await asyncio.to_thread(make_localhost_pair, tmp_path)
    key, named = tmp_path / "tls.key", f"tls.crt and tls.key in {tmp_path}"
    if fault == "no key":
        key.unlink()
        named = str(key)
    elif fault == "no PEM":
        key.write_text("no PEM")
    elif fault == "encrypted key":
        command = ["openssl", "ec", "-in", str(key), "-out", str(key), "-aes128", "-passout", "pass:secret"]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=60)
    else:
        (other := tmp_path / "other").mkdir()
        await asyncio.to_thread(make_localhost_pair, other)
        shutil.copy(other / "tls.key", key)
    one = Teller("a", "valkeys://localhost:1", cert_dir=str(tmp_path))
    async with running(one):
        assert named in one.replicas.trouble()


@pytest.mark.parametrize("text", [None, "no PEM"])
async def test_a_bundle_of_authorities_that_cannot_be_used_is_named(tmp_path: Path, text: str | None) -> None:
    """The client's own error reads as if the server were the problem."""
    bundle = tmp_path / "ca.crt"
    if text is not None:
        bundle.write_text(text)
    one = Teller("a", "valkeys://localhost:1", ca_file=str(bundle))
    async with running(one):
        assert f"certificate authorities in {bundle}" in one.replicas.trouble()


@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_each_goes_on_alone_and_catches_up(
    server: ValkeyServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 1.2)
    tellers = [Teller(name, server.url) for name in "abc"]
    async with running(*tellers):
        for teller in tellers:
            teller.say("before")
        await until(lambda: agree(*tellers))
        server.kill() if how == "killed" else server.signal(signal.SIGSTOP)
        for teller in tellers:
            teller.say("meanwhile")
        await until(lambda: all(teller.replicas.trouble() for teller in tellers))
        assert all("alone" in teller.replicas.trouble() for teller in tellers)
        server.start() if how == "killed" else server.signal(signal.SIGCONT)
        await until(lambda: agree(*tellers))
        assert not any(teller.replicas.trouble() for teller in tellers)
        assert all(teller.replicas.counts.outages == 1 for teller in tellers)
        assert not any(teller.lost for teller in tellers)  # nothing was forgotten in between


async def test_each_reason_of_an_outage_is_logged_once(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    one = Teller("a", server.url)
    async with running(one):
        await until(lambda: not one.replicas.trouble())
        server.kill()
        await until(lambda: "Error 111" in one.replicas.trouble())
        server.start("--requirepass", "geheim")
        await until(lambda: "Authentication required" in one.replicas.trouble())
    passes = RepeatFilter()
    lines = [str(vars(each)["fields"]) for each in caplog.records if "lost" in each.message and passes.filter(each)]
    assert [sum(reason in line for line in lines) for reason in ("Error 111", "Authentication required")] == [1, 1]
    assert one.replicas.counts.outages == 1


async def test_others_are_lost_while_the_server_is_away_for_longer_than_a_lease(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        other.say("word")
        await until(lambda: agree(one, other))
        server.kill()
        await until(lambda: one.lost == ["b"] and other.lost == ["a"])
        server.start()
        await until(lambda: agree(one, other))
        assert one.known == {"b": ["word"]}


async def test_more_than_can_be_kept_becomes_a_snapshot(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_UNSENT", 10_000)
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        await until(lambda: agree(one, other))
        server.kill()
        await until(lambda: one.replicas.trouble())
        for number in range(100):
            one.say(f"{number}" * 200)
            await asyncio.sleep(0.006)
        await until(lambda: one.replicas.counts.dropped)
        server.start()
        await until(lambda: agree(one, other))


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_a_full_server_is_said_and_reading_goes_on_afterwards(server: ValkeyServer, policy: str) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        one.say("before")
        await until(lambda: agree(one, other) and other.known)
        async with Valkey.from_url(server.url) as client:
            await client.config_set("maxmemory-policy", policy)
            await client.config_set("maxmemory", "1")
            one.say("meanwhile")
            await until(lambda: one.replicas.trouble())
            assert "maxmemory" in one.replicas.trouble()
            # What was told is evicted or deleted, and leases and places in the stream may be lost with it.
            async with asyncio.timeout(PATIENCE):
                while await client.exists("{fairlead:pool}:told"):
                    await asyncio.sleep(0.01)
            await client.config_set("maxmemory", "0")
        await until(lambda: agree(one, other))


async def test_a_primary_that_becomes_a_replica_is_said_and_back_again(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        one.say("before")
        await until(lambda: agree(one, other) and other.known)
        async with Valkey.from_url(server.url) as client:
            await client.execute_command("REPLICAOF", "127.0.0.1", "1")
            one.say("meanwhile")
            # A command that waits ends first, with other words.
            await until(lambda: "this is a replica: name the primary, its sentinels, or" in one.replicas.trouble())
            await client.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: agree(one, other))


async def test_a_server_that_the_stream_has_filled_is_emptied(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other), Valkey.from_url(server.url) as client:
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", str((await client.info("memory"))["used_memory"] + 500_000))
        entries, before = 1, 0
        async with asyncio.timeout(PATIENCE):
            while entries > before // 2:  # until it is deleted
                before = entries
                with suppress(OutOfMemoryError):
                    await client.xadd("{fairlead:pool}:told", {b"x": b"x" * 10_000})
                one.say("word")
                await asyncio.sleep(0.005)
                entries = await client.xlen("{fairlead:pool}:told")
        await until(lambda: agree(one, other) and other.known and not one.replicas.problem)


async def test_a_stream_to_which_nothing_can_be_added_begins_again(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other), Valkey.from_url(server.url) as client:
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        last = 2**64 - 1
        await client.xadd("{fairlead:pool}:told", {b"x": b""}, id=f"{last}-{last}")
        one.say("word")
        other.say("other")
        await until(lambda: agree(one, other) and not one.replicas.problem and not other.replicas.problem)
        assert not {"a", "b"} & {*one.lost, *other.lost}


async def test_a_set_with_too_many_names_is_deleted_and_nobody_is_lost(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    members = "{fairlead:pool}:replicas"
    async with running(one, other), Valkey.from_url(server.url) as client:
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        names = [f"name{number}" for number in range(2000)]
        await client.mset({f"{{fairlead:pool}}:alive:{name}": 1 for name in names})
        await client.sadd(members, *names)
        async with asyncio.timeout(PATIENCE):
            while set(await client.smembers(members)) != {b"a", b"b"}:
                await asyncio.sleep(0.01)
        await asyncio.sleep(LEASE)
        one.say("word")
        await until(lambda: agree(one, other))
        assert one.lost == other.lost == []


async def test_a_server_that_is_slow_to_send_the_set_is_relieved_of_it(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    members = "{fairlead:pool}:replicas"
    async with running(one, other), Valkey.from_url(server.url) as client:
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        await client.sadd(members, "name")
        await client.set("{fairlead:pool}:alive:name", 0)
        await until(lambda: "name" in one.replicas.peers)
        await client.execute_command("CLIENT", "PAUSE", str(int(1.5 * module.TIMEOUT_S * 1000)), "ALL")
        await until(lambda: one.replicas.problem)
        await until(lambda: not one.replicas.problem and not other.replicas.problem)
        one.say("word")
        await until(lambda: other.known.get("a") == ["word"])
        assert b"name" not in await client.smembers(members)


@pytest.mark.parametrize("key", ["told", "replicas", "snapshot:"])
async def test_a_key_of_another_type_is_replaced(server: ValkeyServer, key: str) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other), Valkey.from_url(server.url) as client:
        await until(lambda: agree(one, other) and {"a", "b"} == {*one.replicas.peers, *other.replicas.peers})
        async with client.pipeline(transaction=True) as pipe:
            pipe.delete(f"{{fairlead:pool}}:{key}")
            pipe.hset(f"{{fairlead:pool}}:{key}", "field", "value")
            await pipe.execute()
        if key != "snapshot:":  # used only by who connects
            await until(lambda: one.replicas.counts.outages or other.replicas.counts.outages)
        joiner = Teller("c", server.url)
        async with running(joiner):
            one.say("word")
            await until(lambda: agree(one, other, joiner) and joiner.known["a"] == other.known["a"] == ["word"])
            assert not any(teller.replicas.problem for teller in (one, other, joiner))


async def test_a_snapshot_of_another_type_does_not_end_the_connection(server: ValkeyServer) -> None:
    one = Teller("a", server.url)
    async with running(one), Valkey.from_url(server.url) as client:
        await client.hset("{fairlead:pool}:snapshot:b", "field", "value")
        await client.xadd("{fairlead:pool}:told", {module.ORIGIN: b"b", module.WANTED: b""})
        await until(lambda: one.replicas.missing == ["b"])
        await client.xadd("{fairlead:pool}:told", {module.ORIGIN: b"b", module.SNAPSHOT: b""})
        await client.xadd("{fairlead:pool}:told", {module.ORIGIN: b"b", module.GONE: b""})
        await until(lambda: one.lost == ["b"])
        assert not one.replicas.counts.outages


async def test_a_name_that_is_too_long_is_no_replica(server: ValkeyServer) -> None:
    one = Teller("a", server.url)
    async with running(one), Valkey.from_url(server.url) as client:
        for name in (b"x" * 257, b"x" * 256):
            await client.xadd("{fairlead:pool}:told", {module.ORIGIN: name, module.WANTED: b"ab a b"})
        await until(lambda: one.replicas.peers and one.replicas.counts.snapshots_sent)
        assert [len(name) for name in one.replicas.peers] == [256]


async def test_forged_joins_and_leaves_do_not_fill_the_log(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fairlead.replicas")
    one = Teller("a", server.url)
    async with running(one), Valkey.from_url(server.url) as client:
        for _ in range(MOST_CHANGES):
            for kind in (module.WANTED, module.GONE):
                await client.xadd("{fairlead:pool}:told", {module.ORIGIN: b"b", kind: b""})
        await until(lambda: len(one.lost) == MOST_CHANGES)
    assert sum("a replica" in each.getMessage() for each in caplog.records) == MOST_CHANGES
    assert sum("so often" in each.getMessage() for each in caplog.records) == 1


class Slow(Teller):
    """Takes long to take in what others say."""

    def feed(self, event: Event) -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        super().feed(event)


async def test_others_get_as_much_time_as_entries_that_take_long(server: ValkeyServer) -> None:
    one, held = Slow("a", server.url), list[float]()
    async with running(one), Valkey.from_url(server.url) as client:
        for _ in range(50):
            await client.xadd("{fairlead:pool}:told", {module.ORIGIN: b"b", module.BATCH: b"0 word"})
        async with asyncio.timeout(PATIENCE):
            while sum(isinstance(event, PeerHeard) for event in one.fed) < 50:
                began = time.thread_time()
                await asyncio.sleep(0)
                held.append(time.thread_time() - began)
    assert max(held) < 0.05


#: Milliseconds since 1970 in the year 2100: positions of a stream after the server's clock was set back.
AHEAD = 4_102_444_800_000


@pytest.mark.parametrize("ms", [1, AHEAD])
async def test_the_stream_keeps_a_few_leases(server: ValkeyServer, ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while all new positions have the same time, because the server's clock was set back."""
    monkeypatch.setattr(module, "LEASES_KEPT", 1)  # faster
    one = Teller("a", server.url)
    async with Valkey.from_url(server.url) as client:
        for number in range(1, 500):
            await client.xadd("{fairlead:pool}:told", {b"x": b""}, id=f"{ms}-{number}")
        async with running(one), asyncio.timeout(PATIENCE):
            while await client.xlen("{fairlead:pool}:told") > 400:
                one.say("word")
                await asyncio.sleep(0.01)


async def test_a_stream_that_begins_again_at_earlier_times_is_read(server: ValkeyServer) -> None:
    """The server's clock was set back, and then the stream was deleted."""
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other), Valkey.from_url(server.url) as client:
        await client.xadd("{fairlead:pool}:told", {b"x": b""}, id=f"{AHEAD}-0")
        one.say("before")
        await until(lambda: agree(one, other) and other.known)
        await client.flushall()
        for number in range(3):
            received = other.replicas.counts.received
            one.say(f"after{number}")
            await until(lambda: agree(one, other))
        assert other.replicas.counts.received > received, "not by a snapshot"
        assert not one.replicas.counts.outages and not other.replicas.counts.outages


@pytest.mark.parametrize("right", ["xread", "xadd"])
async def test_who_may_not_read_or_write_loses_the_others(server: ValkeyServer, right: str) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with Valkey.from_url(server.url) as client, running(one, other):
        await until(lambda: agree(one, other) and "b" in one.replicas.peers)
        await client.execute_command("ACL", "SETUSER", "default", f"-{right}")
        one.say("word")
        await until(lambda: one.lost)
        before = (await client.info("commandstats"))[f"cmdstat_{right}"]["rejected_calls"]
        async with asyncio.timeout(PATIENCE):
            while (await client.info("commandstats"))[f"cmdstat_{right}"]["rejected_calls"] < before + 4:
                await asyncio.sleep(0.02)
        assert right in one.replicas.trouble() and one.replicas.counts.outages == 1
        assert one.lost == ["b"], "once"
        await client.execute_command("ACL", "SETUSER", "default", f"+{right}")
        one.say("word")
        await until(lambda: agree(one, other) and bool(other.known) and not one.replicas.trouble())


@pytest.mark.parametrize("right", ["get", "del", "srem"])
async def test_a_right_that_is_needed_later_is_missed_at_once(server: ValkeyServer, right: str) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with Valkey.from_url(server.url) as client:
        await client.execute_command("ACL", "SETUSER", "default", f"-{right}")
        async with running(one, other):
            rejected = 0
            async with asyncio.timeout(PATIENCE):
                while rejected < 8:
                    stats = await client.info("commandstats")
                    rejected = stats.get(f"cmdstat_{right}", {}).get("rejected_calls", 0)
                    await asyncio.sleep(0.02)
            assert f"'{right}'" in one.replicas.trouble()
            assert not one.replicas.counts.outages, "it has never joined"
            await client.execute_command("ACL", "SETUSER", "default", f"+{right}")
            one.say("word")
            await until(lambda: agree(one, other) and bool(other.known) and not one.replicas.trouble())


async def test_keys_that_are_evicted_again_and_again_end_in_agreement(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other), Valkey.from_url(server.url) as client:
        await until(lambda: agree(one, other) and "b" in one.replicas.peers)
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await client.config_set("maxmemory", str((await client.info("memory"))["used_memory"] + 20_000))
        number = 0
        async with asyncio.timeout(PATIENCE):
            while (await client.info("stats"))["evicted_keys"] < 5:
                one.say(f"{number}" * 200)
                number += 1
                await asyncio.sleep(0.001)
        await client.config_set("maxmemory", "0")
        await until(lambda: agree(one, other))


async def test_a_password_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    # What docs/replicas.md says.
    writes, reads = "+xadd +set +del +sadd +srem", "+xread +xrange +xrevrange +get +mget +smembers +select"
    allowed = ("on", ">geheim", "~{fairlead:*}:*", "-@all", *writes.split(), *reads.split())
    admin = ("--user", "admin", "on", "nopass", "+acl", "+client|setinfo")
    server = ValkeyServer(tmp_path).start("--user", "default", "off", "--user", "fairlead", *allowed, *admin)
    secret = tmp_path / "password"
    secret.write_text("wrong\n")
    url = server.url.replace("//", "//fairlead@") + "/1"
    one, other = (Teller(name, url, password_file=str(secret)) for name in "ab")
    try:
        async with running(one, other):
            assert "alone" in one.replicas.trouble()
            assert "invalid username-password" in one.replicas.trouble()
            secret.write_text("geheim\n")
            one.say("word")
            await until(lambda: agree(one, other) and other.known)
            assert one.replicas.where == f"{server.url}/1"
        async with Valkey.from_url(server.url.replace("//", "//admin@"), password="-") as client:
            denied = await client.acl_log()
        assert not [each for each in denied if each["reason"] != "auth"]
    finally:
        server.kill()


async def test_what_was_lost_is_missed_before_anything_else_is_said(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        one.say("before")
        await until(lambda: agree(one, other) and other.known)
        one.say("lost")
        one.told()  # nobody is told what it returned
        await until(lambda: agree(one, other))


async def test_what_somebody_else_adds_to_the_stream_does_no_harm(server: ValkeyServer) -> None:
    one, other = Teller("a", server.url), Teller("b", server.url)
    async with running(one, other):
        await until(lambda: agree(one, other))
        async with Valkey.from_url(server.url) as client:
            for entry in ({b"x": b""}, {module.ORIGIN: b"\xff"}, {module.WANTED: b"\xff"}, {b"snapshot": b"1"}):
                await client.xadd("{fairlead:pool}:told", entry)
            await client.sadd("{fairlead:pool}:replicas", b"\xff\xfe", b"")
        one.say("word")
        await until(lambda: agree(one, other))


class Sentinels:
    """A primary, its replica, and three sentinels that follow them. `password`: of the sentinels; empty = none."""

    def __init__(self, directory: Path, password: str) -> None:
        self.servers = [ValkeyServer(_made(directory / f"v{i}")) for i in range(2)]
        primary, replica = self.servers
        primary.start("--requirepass", "geheim", "--masterauth", "geheim")
        followed = ("--replicaof", f"127.0.0.1 {primary.port}", "--repl-diskless-sync-delay", "0")
        replica.start("--requirepass", "geheim", "--masterauth", "geheim", *followed)
        self.sentinels = [ValkeyServer(_made(directory / f"s{i}")) for i in range(3)]
        for i, sentinel in enumerate(self.sentinels):
            file = directory / f"s{i}" / "sentinel.conf"
            lines = [f"monitor known 127.0.0.1 {primary.port} 2", "auth-pass known geheim"]
            lines += ["down-after-milliseconds known 1000", "failover-timeout known 3000"]
            own = [f"requirepass {password}", f"sentinel sentinel-pass {password}"] if password else []
            file.write_text("".join(f"{line}\n" for line in [*(f"sentinel {line}" for line in lines), *own]))
            sentinel.start(file=file, sentinel=True)

    @property
    def url(self) -> str:
        return f"valkey+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self.sentinels)}/known/1"

    def kill(self) -> None:
        for each in (*self.sentinels, *self.servers):
            each.kill()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize("password", ["", "geheim"])
async def test_sentinels_name_the_primary_also_after_it_died(tmp_path: Path, password: str) -> None:
    site, secret = Sentinels(tmp_path, password), tmp_path / "password"
    secret.write_text("geheim\n")
    one, other = (Teller(name, site.url, password_file=str(secret)) for name in "ab")
    lonely = Teller("c", site.url.replace("/known/", "/other/"), password_file=str(secret))
    replica = Teller("d", f"valkey://127.0.0.1:{site.servers[1].port}/1", password_file=str(secret))
    try:
        async with running(one, other, lonely, replica):
            one.say("before")
            await until(lambda: agree(one, other) and other.known)
            assert "no sentinel names a primary other" in lonely.replicas.trouble()
            assert "this is a replica: name the primary, its sentinels, or" in replica.replicas.trouble()
            site.sentinels[0].kill()  # two of three suffice
            await until(lambda: _replicates(site.servers[0].port))
            site.servers[0].kill()
            await until(lambda: one.replicas.problem and other.replicas.problem)
            down, up = (f"127.0.0.1:{each.port}" for each in site.sentinels[:2])
            said = lonely.replicas.trouble()
            assert f"{down}: " in said and f"; {up} knows no such primary" in said
            assert "geheim" not in one.replicas.trouble()
            one.say("meanwhile")
            await until(lambda: agree(one, other) and not one.replicas.problem and not other.replicas.problem)
            assert "meanwhile" in other.known["a"]
    finally:
        site.kill()


@asynccontextmanager
async def pretending(*ports: int, silent: bool = False) -> AsyncIterator[str]:
    """The URL of sentinels that name these ports. `silent`: one more accepts connections and never answers."""

    async def answer(said: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            if said:
                writer.write(b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(said)), said))
        writer.close()

    servers = [await asyncio.start_server(partial(answer, port), "127.0.0.1", 0) for port in (*ports, *[0] * silent)]
    try:
        places = (f"127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers)
        yield f"valkey+sentinel://{','.join(places)}/known"
    finally:
        for each in servers:
            each.close()


async def test_of_two_primaries_that_as_many_sentinels_name_each_is_tried(server: ValkeyServer) -> None:
    for ports in ((free_port(), server.port), (server.port, free_port())):
        async with pretending(*ports) as url, running(one := Teller("a", url)):
            await until(lambda one=one: not one.replicas.problem)


async def test_a_sentinel_that_hangs_keeps_nobody_from_saying_goodbye(server: ValkeyServer) -> None:
    other = Teller("b", server.url)
    async with pretending(server.port, server.port, silent=True) as url, running(other):
        async with running(Teller("a", url)):
            await until(lambda: "a" in other.replicas.peers)
        async with Valkey.from_url(server.url) as client:
            assert not await client.exists("{fairlead:pool}:alive:a")


def _replicates(port: int) -> bool:
    """Whether a replica is in sync with the server, and may be promoted."""
    with SyncValkey(port=port, password="geheim") as client:
        return "state=online" in str(client.info("replication").get("slave0", "")).replace("': '", "=")


async def test_one_that_hears_of_nobody_says_so(server: ValkeyServer) -> None:
    """Its own messages come back, so it is connected and their lag says nothing of others."""
    one, elsewhere = Teller("a", server.url), Teller("b", f"{server.url}/1")
    async with running(one, elsewhere):
        one.say("word")
        assert (one.replicas.trouble(), one.replicas.note()[:28]) == ("", "no other scheduler heard for")
        async with running(Teller("c", server.url)):
            await until(lambda: one.replicas.peers)
            assert one.replicas.note().startswith("1 other, heard ")
        await until(lambda: not one.replicas.peers)
        assert one.replicas.note().startswith("no other scheduler heard for 0 s")
