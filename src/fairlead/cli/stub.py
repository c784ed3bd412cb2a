"""`fairlead stub`: model servers without a model or a GPU, for trying out and testing a gateway."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlead.cli.basics import WRONG_INPUT
from fairlead.cli.options import BlockSize, KvTokens, MaxModelLen, MaxNumSeqs, engine_option, examples, exits, given
from fairlead.cli.tune import engine_argument

if TYPE_CHECKING:
    from fairlead.lab.stub.kv_publisher import KvEventsConfig


class KvEncoding(StrEnum):
    """Encodings of KV events, and the fields of `lab.stub.kv_publisher.Encoding` that each changes. Several can be
    combined."""

    fields: dict[str, Any]

    def __new__(cls, name: str, fields: dict[str, Any]) -> "KvEncoding":
        made = str.__new__(cls, name)
        made._value_, made.fields = name, fields
        return made

    MAP = "map", {"events": "map"}
    ARRAY = "array", {"events": "array"}
    V0_9 = "v0.9", {"events": "array", "fields": 6}
    V0_11 = "v0.11", {"events": "array", "fields": 7}
    V0_16 = "v0.16", {"events": "array", "fields": 8}
    V0_18 = "v0.18", {"events": "array", "fields": 9}
    V0_20 = "v0.20", {"events": "array", "fields": 10}
    V0_23 = "v0.23", {"events": "array", "fields": 12}
    MAP_BATCH = "map-batch", {"batch": "map"}
    NO_RANK = "no-rank", {"rank": False}
    SIGNED = "signed", {"hashes": "signed"}
    BYTES = "bytes", {"hashes": "bytes"}
    BIN = "bin", {"wrapped": True}


#: vLLM's default port of KV events, and the number of batches that it keeps for replays.
_KV_PORT, _KV_BUFFER = 5557, 10_000

_Engine = Annotated[
    str,
    engine_option(
        "Model and GPU: a preset (`list` shows them), a FILE of `fairlead tune`, or an idle server to measure."
    ),
]
_EngineType = Annotated[
    str,
    typer.Option(
        "--engine-type",
        metavar="NAME",
        help="Engine whose metrics page it imitates, e.g. sglang (docs/engines.md).",
    ),
]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the first replica; the others follow. 0 = any.")]
_Model = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Served model; repeat for more names. Answers have the first.", show_default="the preset's"
    ),
]
_MaxLoras = Annotated[
    int, typer.Option(metavar="N", min=0, help="Adapters in one batch.", show_default="1 with --lora")
]
_OutputTokens = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Mean answer of requests without max_tokens; 0 = up to the model length."),
]
_KvEvents = Annotated[bool, typer.Option("--kv-events", help="Publish KV-cache events over ZMQ, as vLLM does.")]
_KvPort = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        min=0,
        max=65535,
        help="First port of KV events; each replica takes two. 0 = any.",
    ),
]
_KvConnect = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Connect to this subscriber, tcp://host:port, instead of listening.")
]
_KvEncoding = Annotated[
    list[KvEncoding] | None,
    typer.Option(
        metavar="NAME",
        help="Format of KV events; repeat to combine. map: vLLM since 0.24. array: before, and SGLang. v0.9, v0.11,"
        " v0.16, v0.18, v0.20, v0.23: as that vLLM. bin: as llm-d's storage back end. signed, bytes: the hashes."
        " map-batch, no-rank: the batch.",
        show_default="map",
    ),
]
_KvHash = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Block hashes of vLLM by sha256, sha256_cbor, xxhash or xxhash_cbor.",
        show_default=False,
    ),
]
_KvHashSeed = Annotated[str, typer.Option(metavar="SEED", help="PYTHONHASHSEED of the engine.")]
_KvBuffer = Annotated[int, typer.Option(metavar="N", min=0, help="Batches that each replica keeps for replays.")]
_Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the replicas' addresses to this endpoints file.")
]


@examples("""
Each replica batches, queues, caches prefixes and takes as long as the real server of the preset would, and has the
same metrics and errors. It answers /v1/chat/completions, /v1/completions, /v1/messages, /v1/responses, /tokenize and
/v1/models, but no embeddings, scores or media. With --engine-type only the metrics page is another engine's
(docs/engines.md). POST /fault and POST /fault/kv_events inject faults. Ctrl-C or SIGTERM stops it.

\b
Examples:
  fairlead stub --replicas 8 --out endpoints.yaml
  fairlead stub --engine llama-8b-l40s --time-ratio 20
  fairlead stub --engine-type sglang --out endpoints.yaml
  fairlead stub --lora sql --lora chat --max-loras 1
  curl localhost:8000/fault --json '{"slow_factor": 5}'
  fairlead stub --replicas 2 --kv-events
  curl localhost:8000/kv_event_sources
  curl localhost:8000/fault/kv_events --json '{"lose": 3}'
  curl localhost:8000/fault/kv_events --json '{"restart": true}'
  curl localhost:8000/fault/kv_events --json '{"offload": 8, "medium": "CPU"}'
""")
def stub(
    ctx: typer.Context,
    port: _Port = 8000,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Number of model servers.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: _Model = None,
    engine: _Engine = "qwen3-32b-h100",
    engine_type: _EngineType = "vllm",
    time_ratio: Annotated[float, typer.Option(metavar="N", help="How many times faster than real time.")] = 1.0,
    stream_interval: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per streamed event.")] = 1,
    max_num_seqs: MaxNumSeqs = 0,
    max_model_len: MaxModelLen = 0,
    kv_tokens: KvTokens = 0,
    block_size: BlockSize = 0,
    max_queued: Annotated[int, typer.Option(metavar="N", min=0, help="Waiting requests before 503; 0 = no limit.")] = 0,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Adapter loaded at start; repeat.")] = None,
    max_loras: _MaxLoras = 0,
    output_tokens: _OutputTokens = 256,
    identity_headers: Annotated[
        bool, typer.Option("--identity-headers", help="Send x-inference-pod and x-inference-port.")
    ] = False,
    request_id_headers: Annotated[bool, typer.Option("--request-id-headers", help="Send x-request-id.")] = False,
    api_key: Annotated[str, typer.Option(metavar="KEY", help="Refuse clients that do not send it.")] = "",
    kv_events: _KvEvents = False,
    kv_events_port: _KvPort = _KV_PORT,
    kv_events_connect: _KvConnect = "",
    kv_encoding: _KvEncoding = None,
    kv_buffer_steps: _KvBuffer = _KV_BUFFER,
    kv_hash: _KvHash = "",
    kv_hash_seed: _KvHashSeed = "",
    seed: Annotated[int, typer.Option(help="Seed of ids and random faults.")] = 0,
    out: _Out = None,
) -> None:
    """Serve stub model servers that speak and behave like vLLM 0.32."""
    import asyncio

    from fairlead.lab.stub.config import StubConfig
    from fairlead.lab.stub.pool import serve

    if engine == "list":
        _list_presets()
        return
    first, *aliases = model or [""]
    with exits(WRONG_INPUT, OSError):
        try:
            events = _events(kv_events, host, kv_events_port, kv_events_connect, kv_encoding or [], kv_buffer_steps)
            config = given(
                ctx,
                StubConfig,
                preset=engine_argument(engine),
                model=first,
                aliases=tuple(aliases),
                engine=None,  # the option `--engine` names a preset, not the field of the same name
                loras=tuple(lora or ()),
                natural_output=output_tokens,
                kv_events=_hashed(events, kv_hash, kv_hash_seed),
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    asyncio.run(serve(config, replicas, host, port, out, typer.echo))


def _events(
    on: bool, host: str, port: int, connect: str, encodings: list[KvEncoding], buffer_steps: int
) -> "KvEventsConfig | None":
    if not on:
        if encodings or connect or (port, buffer_steps) != (_KV_PORT, _KV_BUFFER):
            raise typer.BadParameter("options of KV events need --kv-events too")
        return None
    from fairlead.lab.stub.kv_publisher import Encoding, KvEventsConfig

    host = f"[{host}]" if ":" in host else host
    changes: dict[str, Any] = {}
    for encoding in encodings:
        changes |= encoding.fields
    return KvEventsConfig(
        events=connect or f"tcp://{host}:{port or '*'}",
        replay=f"tcp://{host}:{port + 1 if port else '*'}",
        connect=bool(connect),
        buffer_steps=buffer_steps,
        # Replays have the topic since vLLM 0.26.
        replay_topic=not any(encoding.startswith("v0.") for encoding in encodings),
        encoding=Encoding(**changes),
    )


def _hashed(events: "KvEventsConfig | None", algorithm: str, seed: str) -> "KvEventsConfig | None":
    if not algorithm and not seed:
        return events
    if events is None:
        raise typer.BadParameter("--kv-hash needs --kv-events too")
    from msgspec.structs import replace

    from fairlead.core.kv.hashing import EngineHasher

    try:
        EngineHasher(algorithm, seed or None)
    except ValueError as error:
        raise typer.BadParameter(f"--kv-hash: {error}") from None
    return replace(events, hashes=algorithm, hash_seed=seed)


def _list_presets() -> None:
    from fairlead.lab.engine.presets import PRESETS

    for name, entry in PRESETS.items():
        typer.echo(f"{name:20} {entry.model:34} KV cache {entry.kv_tokens:>9,} tokens")
