"""The endpoint picker protocol (Gateway API Inference Extension, proposal 004, v1.0.0), sentence by sentence.

`ALL` has what any picker can be asked. `EMPTY` wants one that knows no endpoint, `BUSY` one whose endpoints are full.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from picker_client import CHAT, DESTINATION, POST, Pick, Picker, hold

SERVING, NOT_SERVING = 1, 2
ENDPOINT = r"(?:\d+(?:\.\d+){3}|\[[0-9a-fA-F:]+\]):\d+"
ENDPOINTS = re.compile(f"{ENDPOINT}(?:,{ENDPOINT})*")
NOBODY = "192.0.2.1:1"
EVENTS = [b'data: {"n": %d}\n\n' % number for number in range(5)] + [b"data: [DONE]\n\n"]
#: Nobody may send larger pieces to Envoy (64 KiB, with their framing).
LARGEST_PIECE = 64 << 10


class Case(NamedTuple):
    level: str
    sentence: str
    check: Callable[[Picker], Awaitable[None]]


ALL: list[Case] = []
EMPTY: list[Case] = []
BUSY: list[Case] = []


def case(level: str, sentence: str, among: list[Case] = ALL) -> Callable[[Any], Any]:
    def add(check: Callable[[Picker], Awaitable[None]]) -> Any:
        among.append(Case(level, sentence, check))
        return check

    return add


# ---- the external processing service ----


@case("MUST", "implement the Envoy external processing service protocol: headers alone are answered")
async def get(picker: Picker) -> None:
    async with picker.stream() as stream:
        await stream.send_headers([(":method", "GET"), (":path", "/v1/models")], end=True)
        await stream.pick(body=False)


@case(
    "MUST", "support streaming mode for requests: a body in pieces comes back whole, behind the answer to the headers"
)
async def pieces(picker: Picker) -> None:
    pick = await picker.ask(chunks=[CHAT[:7], CHAT[7:8], b"", CHAT[8:]])
    hold(pick.body == CHAT and pick.ended, f"{len(pick.body)} of {len(CHAT)} bytes came back, ended: {pick.ended}")


@case("MUST", "support streaming mode for requests: large bodies come back in pieces that Envoy takes")
async def large(picker: Picker) -> None:
    body = CHAT.replace(b"Which", b"x" * 700_000)
    pick = await picker.ask(chunks=[body[at : at + 60_000] for at in range(0, len(body), 60_000)])
    hold(pick.body == body and pick.ended, f"{len(pick.body)} of {len(body)} bytes came back")
    hold(max(pick.pieces) <= LARGEST_PIECE, f"a piece of {max(pick.pieces)} bytes")


@case("MUST", "support streaming mode for requests: one that ends with trailers is answered")
async def trailers(picker: Picker) -> None:
    async with picker.stream() as stream:
        await stream.send_headers(POST)
        await stream.send_body(CHAT, end=False)
        await stream.send(request_trailers=picker.pb.HttpTrailers())
        pick = await stream.pick(trailers=True)
        hold(pick.body == CHAT and not pick.ended, "the body did not come back without an end of its own")
        await stream.answer("request_trailers")


@case("MUST", "support streaming mode for responses: each token is handed on before the next one comes")
async def events(picker: Picker) -> None:
    async with picker.stream() as stream:
        await stream.send_headers(POST)
        await stream.send_body(CHAT, end=True)
        await stream.pick()
        await _response(stream)


async def _response(stream: Any, metadata: Any = None) -> None:
    fields = [(":status", "200"), ("content-type", "text/event-stream")]
    await stream.send_headers(fields, metadata=metadata, response=True)
    await stream.answer("response_headers")
    for event in EVENTS:
        await stream.send_body(event, end=event is EVENTS[-1], response=True)
        piece = (await stream.answer("response_body")).response_body.response.body_mutation.streamed_response
        hold(piece.body == event, f"{piece.body!r} instead of {event!r}")
        hold(piece.end_of_stream == (event is EVENTS[-1]), "the end of the stream is another one")


@case("MUST", "implement the Envoy external processing service protocol: a local reply before the pick goes through")
async def local_reply(picker: Picker) -> None:
    for shown in (False, True):
        async with picker.stream() as stream:
            if shown:
                await stream.send_headers(POST)
            await stream.send_headers([(":status", "408")], response=True)
            await stream.answer("response_headers")
            await stream.send_body(b"request timeout", end=True, response=True)
            piece = (await stream.answer("response_body")).response_body.response.body_mutation.streamed_response
            hold(piece.body == b"request timeout" and piece.end_of_stream, "its body did not come back")


@case("SHOULD", "a gateway that asks and sends no more is answered (NGINX Gateway Fabric: no modes, no :path, no end)")
async def only_asked(picker: Picker) -> None:
    pick = await _only_ask(picker)
    hold(pick.header, f"{pick.refused or 'no'} pick")


async def _only_ask(picker: Picker) -> Pick:
    async with picker.stream() as stream:
        headers = picker.pb.HttpHeaders()
        headers.headers.headers.add(key="Content-Type", value="application/json")
        await stream.send(announced=False, request_headers=headers)
        await stream.send_body(CHAT, end=True)
        await stream.only_ask()
        pick: Pick = await stream.pick()
        hold(await stream.ended(), "the stream does not end")
        return pick


# ---- endpoint subset ----


@case("MUST", "only select endpoints from the specified list")
async def subset(picker: Picker) -> None:
    known = await pool(picker)
    for allowed in [*((one,) for one in known), tuple(known), (NOBODY, known[0])]:
        pick = await picker.ask(metadata=picker.subset(*allowed))
        picked = pick.header.split(",")
        hold(set(picked) <= set(allowed), f"{pick.header or pick.refused} although only {allowed} are allowed")


@case("MUST", "if none of the endpoints in the list is eligible, return 503")
async def not_eligible(picker: Picker) -> None:
    pick = await picker.ask(metadata=picker.subset(NOBODY))
    hold(pick.refused == 503, f"{pick.refused or pick.header} instead of 503")


@case("MUST", "if the list is empty, return 503")
async def empty_list(picker: Picker) -> None:
    pick = await picker.ask(metadata=picker.subset())
    hold(pick.refused == 503, f"{pick.refused or pick.header} instead of 503")


@case("MUST", "if the subset is not set, select from the set defined by the InferencePool selector")
async def no_subset(picker: Picker) -> None:
    picked = await pool(picker)
    hold(set(picked) <= set(picker.endpoints or picked), f"{picked} of {picker.endpoints}")


async def pool(picker: Picker) -> list[str]:
    """The endpoints, as many as eight picks show."""
    picks = [await picker.ask() for _ in range(8)]
    hold(all(pick.header for pick in picks), f"no pick, but {[pick.refused for pick in picks]}")
    return sorted({address for pick in picks for address in pick.header.split(",")})


# ---- destination endpoint ----


@case("MUST", "set the header x-gateway-destination-endpoint")
async def header(picker: Picker) -> None:
    hold((await picker.ask()).header, "it is not set")


@case("MUST", "set the key x-gateway-destination-endpoint in dynamic metadata, namespace envoy.lb")
async def metadata(picker: Picker) -> None:
    hold((await picker.ask()).metadata, "it is not set")


@case("MUST", "contain at least one endpoint in <ip:port> format, several separated by commas")
async def form(picker: Picker) -> None:
    pick = await picker.ask()
    hold(ENDPOINTS.fullmatch(pick.header), f"{pick.header!r}")


@case("MUST NOT", "set two different values in the header and the metadata")
async def same(picker: Picker) -> None:
    for pick in [await picker.ask() for _ in range(8)]:
        hold(pick.header == pick.metadata, f"{pick.header} and {pick.metadata}")


@case("SHOULD", "a client cannot choose: its own x-gateway-destination-endpoint is replaced")
async def spoofed(picker: Picker) -> None:
    pick = await picker.ask((DESTINATION, NOBODY))
    hold(pick.header and pick.header != NOBODY, f"{pick.header!r}")


@case("MUST", "return 503 if there are no ready endpoints", EMPTY)
async def nobody_is_ready(picker: Picker) -> None:
    pick = await picker.ask()
    hold(pick.refused == 503, f"{pick.refused or pick.header} instead of 503")


@case("MUST", "return 429 if the request should be dropped", BUSY)
async def dropped(picker: Picker) -> None:
    async with picker.stream() as running:
        await running.send_headers(POST)
        await running.send_body(CHAT, end=True)
        await running.pick()
        pick = await picker.ask()
        hold(pick.refused == 429, f"{pick.refused or pick.header} instead of 429")
        pick = await _only_ask(picker)
        hold(pick.refused == 429, f"{pick.refused or pick.header} instead of 429 for a gateway that sends no more")


# ---- destination endpoint served ----


@case("MUST", "be told who served, in response metadata envoy.lb x-gateway-destination-endpoint-served")
async def served(picker: Picker) -> None:
    async with picker.stream() as stream:
        await stream.send_headers(POST)
        await stream.send_body(CHAT, end=True)
        pick = await stream.pick()
        told = picker.pb.Metadata()
        told.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": pick.header.split(",")[0]})
        await _response(stream, told)


# ---- health ----


@case("MUST", "implement health checking: liveness is SERVING while the process answers")
async def liveness(picker: Picker) -> None:
    hold(await picker.health("liveness") == SERVING, "it is not")


@case("MUST", "implement health checking: readiness is SERVING once requests can be served")
async def readiness(picker: Picker) -> None:
    hold(await picker.health("readiness") == SERVING, "it is not")


@case("MUST", "implement health checking: the ext_proc service is what readiness is")
async def ext_proc(picker: Picker) -> None:
    both = [await picker.health(name) for name in ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")]
    hold(both == [SERVING, SERVING], f"readiness is {both[0]}, the service {both[1]}")
