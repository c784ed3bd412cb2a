"""`make conformance` in its short form: one transport, no TLS; and that it finds what a picker does wrong."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from check_picker import held, judge, table
from own_pickers import ours
from picker_client import Picker
from protocol_cases import ALL

from fairlead.gateway import ext_proc
from fairlead.gateway.ext_proc import CONTINUE, DESTINATION, Incoming, Kind
from fairlead.gateway.h2_server import H2Server
from fairlead.gateway.health import EXT_PROC
from fairlead.gateway.stream import ServerStream


async def test_every_must_of_the_protocol_is_held(pb: ModuleType, tmp_path: Path) -> None:
    found = await ours(pb, tmp_path, transports=["http2"], tls=[False])
    assert len(found) == 4
    assert sum(map(len, found.values())) >= 27
    for title, results in found.items():
        assert not [one for one in results if one.broken], table(title, results)


class Wrong:
    """A picker that says one endpoint in the header and another in metadata, whatever it was asked."""

    def __init__(self, stream: ServerStream, metadata: Mapping[str, str]) -> None:
        self._stream = stream

    def on_message(self, data: bytes) -> None:
        message = Incoming(data)
        if message.kind is Kind.REQUEST_HEADERS:
            told = ext_proc.lb_metadata({DESTINATION: b"10.0.0.2:80"})
            self._stream.send(ext_proc.answer(message.kind, ext_proc.set_header(DESTINATION, b"10.0.0.1:80"), told))
        else:
            self._stream.send(CONTINUE[message.kind])
        if message.kind is Kind.REQUEST_TRAILERS or (message.kind is Kind.REQUEST_BODY and message.body()[1]):
            self._stream.finish()

    def on_half_close(self) -> None: ...

    def on_lost(self, why: str) -> None: ...


async def test_what_a_picker_does_wrong_is_found(pb: ModuleType) -> None:
    server = H2Server({f"/{EXT_PROC}/Process": Wrong})
    port = await server.listen("127.0.0.1", 0)
    try:
        results = await judge(Picker.at(f"127.0.0.1:{port}", pb), ALL)
    finally:
        await server.close()
    broken = [one.sentence for one in results if one.broken]
    assert not held(results)
    for part in ("two different values", "503", "liveness", "streaming mode", "specified list"):
        assert any(part in sentence for sentence in broken), part
    assert "headers alone are answered" not in " ".join(broken)
