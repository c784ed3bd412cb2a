"""A gateway as the endpoint picker protocol has it, as small as can be: full duplex both ways, over grpc.aio."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, NamedTuple, Self

import grpc
import grpc.aio

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
DESTINATION = "x-gateway-destination-endpoint"
FULL_DUPLEX = 4
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Which way?"}]}).encode()
POST = ((":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json"))
#: Seconds for one answer.
PATIENCE = 10.0


class Violation(Exception):
    """The picker did something else than the protocol says."""


def hold(condition: object, otherwise: str) -> None:
    if not condition:
        raise Violation(otherwise)


class Pick(NamedTuple):
    """The answers to a whole request."""

    #: Of the header and of the metadata; empty = not set.
    header: str
    metadata: str
    body: bytes
    #: Sizes of the pieces in which the body came back, and whether the last one ended it.
    pieces: tuple[int, ...]
    ended: bool
    #: HTTP status of an answer to the client instead; 0 = there is none.
    refused: int


class Stream:
    """One request and its response."""

    def __init__(self, call: Any, pb: ModuleType) -> None:
        self._call, self._pb, self._first = call, pb, True

    async def send(self, announced: bool = True, **message: Any) -> None:
        """`announced`: the first message tells the modes."""
        made = self._pb.ProcessingRequest(**message)
        first, self._first = self._first, False
        if first and announced:
            made.protocol_config.request_body_mode = made.protocol_config.response_body_mode = FULL_DUPLEX
        await self._call.write(made)

    async def send_headers(
        self, fields: Sequence[tuple[str, str]], end: bool = False, metadata: Any = None, response: bool = False
    ) -> None:
        headers = self._pb.HttpHeaders(end_of_stream=end)
        for key, value in fields:
            headers.headers.headers.add(key=key, raw_value=value.encode())
        more = {"metadata_context": metadata} if metadata else {}
        await self.send(**{"response_headers" if response else "request_headers": headers}, **more)

    async def send_body(self, body: bytes, end: bool, response: bool = False) -> None:
        chunk = self._pb.HttpBody(body=body, end_of_stream=end)
        await self.send(**{"response_body" if response else "request_body": chunk})

    async def only_ask(self) -> None:
        """There will be no more messages."""
        await self._call.done_writing()

    async def ended(self) -> bool:
        """Whether the picker ends the stream, without an error, and says no more before."""
        async with asyncio.timeout(PATIENCE):
            return await self._call.read() is grpc.aio.EOF and await self._call.code() is grpc.StatusCode.OK

    async def answer(self, kind: str) -> Any:
        """The next answer, which must be of this kind, or one to the client instead."""
        try:
            answer = await asyncio.wait_for(self._call.read(), PATIENCE)
        except TimeoutError:
            raise Violation(f"no {kind} within {PATIENCE:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise Violation(f"gRPC {error.code().name} ({error.details()}) instead of {kind}") from None
        if answer is grpc.aio.EOF:
            code = await self._call.code()
            raise Violation(f"the stream ended ({code.name}) without {kind}")
        found = answer.WhichOneof("response")
        hold(found in (kind, "immediate_response"), f"{found} instead of {kind}")
        return answer

    async def pick(self, body: bool = True, trailers: bool = False) -> Pick:
        """Read the answers to a request that was sent to its end."""
        answer = await self.answer("request_headers")
        if answer.WhichOneof("response") == "immediate_response":
            return Pick("", "", b"", (), False, answer.immediate_response.status.code)
        mutation = answer.request_headers.response.header_mutation
        headers = {entry.header.key: entry.header for entry in mutation.set_headers}
        header = headers[DESTINATION].raw_value.decode() or headers[DESTINATION].value if DESTINATION in headers else ""
        fields = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
        metadata = fields[DESTINATION].string_value if DESTINATION in fields else ""
        back, sizes, ended = b"", [], False
        expected = len(CHAT) if body else 0
        while body and not ended and not (trailers and len(back) >= expected):
            piece = (await self.answer("request_body")).request_body.response.body_mutation.streamed_response
            back += piece.body
            sizes.append(len(piece.body))
            ended = piece.end_of_stream
        return Pick(header, metadata, back, tuple(sizes), ended, 0)


class Picker:
    """The picker under test."""

    def __init__(
        self, channel: grpc.aio.Channel, health: grpc.aio.Channel, pb: ModuleType, endpoints: Sequence[str] = ()
    ) -> None:
        """`endpoints`: of its pool; empty = not known."""
        self._channel, self._health, self.pb, self.endpoints = channel, health, pb, endpoints

    @classmethod
    def at(
        cls,
        address: str,
        pb: ModuleType,
        health: str = "",
        ca: bytes = b"",
        name: str = "",
        endpoints: Sequence[str] = (),
    ) -> Self:
        """`health`: where it is asked whether it serves, without TLS; empty = `address`. `ca`: PEM; with it TLS is
        spoken, to the name `name`."""
        if ca:
            options = [("grpc.ssl_target_name_override", name)] if name else []
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
        else:
            channel = grpc.aio.insecure_channel(address)
        return cls(channel, grpc.aio.insecure_channel(health) if health else channel, pb, endpoints)

    async def close(self) -> None:
        await self._channel.close()
        await self._health.close()

    @asynccontextmanager
    async def stream(self) -> Any:
        pb = self.pb
        method = self._channel.stream_stream(
            PROCESS, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )
        call = method()
        try:
            yield Stream(call, pb)
        finally:
            call.cancel()

    def subset(self, *addresses: str) -> Any:
        """Metadata that allows these endpoints."""
        made = self.pb.Metadata()
        made.filter_metadata["envoy.lb.subset_hint"].update({f"{DESTINATION}-subset": list(addresses)})
        return made

    async def ask(self, *more: tuple[str, str], metadata: Any = None, chunks: Sequence[bytes] = (CHAT,)) -> Pick:
        """One POST; the client is gone after the pick."""
        async with self.stream() as stream:
            await stream.send_headers([*POST, *more], metadata=metadata)
            for chunk in chunks:
                await stream.send_body(chunk, end=False)
            await stream.send_body(b"", end=True)
            return await stream.pick()

    async def health(self, service: str) -> int:
        """Status by number; -1 = the call failed."""
        check = self._health.unary_unary(CHECK)
        try:
            answer = await check(b"\x0a" + bytes([len(service)]) + service.encode(), timeout=PATIENCE)
        except grpc.aio.AioRpcError:
            return -1
        return answer[1] if answer[:1] == b"\x08" else 0
