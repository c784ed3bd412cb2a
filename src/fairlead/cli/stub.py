"""`fairlead stub`: model servers that cost nothing, for trying and testing a gateway."""

from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer

_EXAMPLES = """
\b
Examples:
  fairlead stub --replicas 8 --write-endpoints endpoints.yaml
  fairlead stub --preset llama-8b-l40s --time-ratio 20
  fairlead stub --lora sql --lora chat --max-loras 1
  curl localhost:8000/fault --json '{"slow_factor": 5}'
"""


_Preset = Annotated[str, typer.Option(help="Model and GPU whose speed and memory are imitated; `list` shows them.")]
_MaxModelLen = Annotated[
    int, typer.Option(min=0, help="Prompt plus output tokens. [default: the preset's]", show_default=False)
]
_KvTokens = Annotated[
    int, typer.Option(min=0, help="Size of the KV cache in tokens. [default: the preset's]", show_default=False)
]
_MaxLoras = Annotated[
    int, typer.Option(min=0, help="Adapters in one batch. [default: 1 with --lora, else off]", show_default=False)
]
_OutputTokens = Annotated[
    int, typer.Option(min=0, help="Mean answer length when the client sets no limit; 0 = up to the model length.")
]
_WriteEndpoints = Annotated[
    Path | None, typer.Option(help="Write the replicas as a YAML endpoints file.", dir_okay=False)
]


def stub(
    port: Annotated[int, typer.Option(help="First port; replicas take this one and those after it. 0 = any.")] = 8000,
    replicas: Annotated[int, typer.Option(min=1, max=1000, help="Model servers in this process.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Served model name. [default: the preset's]", show_default=False)] = "",
    preset: _Preset = ("qwen3-32b-h100"),
    time_ratio: Annotated[float, typer.Option(help="1 = as slow as the real one, 20 = twenty times faster.")] = 1.0,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens per streamed event.")] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests in one batch.")] = 256,
    max_model_len: _MaxModelLen = 0,
    kv_tokens: _KvTokens = 0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    max_queued: Annotated[int, typer.Option(min=0, help="Waiting requests before 503; 0 = no limit.")] = 0,
    lora: Annotated[list[str] | None, typer.Option(help="Adapter loaded at start; can be repeated.")] = None,
    max_loras: _MaxLoras = 0,
    output_tokens: _OutputTokens = 256,
    identity_headers: Annotated[bool, typer.Option(help="Send x-inference-pod and x-inference-port.")] = False,
    request_id_headers: Annotated[bool, typer.Option(help="Send x-request-id.")] = False,
    seed: Annotated[int, typer.Option(help="Of ids and of random faults.")] = 0,
    write_endpoints: _WriteEndpoints = None,
) -> None:
    """Serve stub model servers that speak and behave like vLLM 0.32.

    Each replica batches, queues, caches prefixes and takes its time as the real server of the chosen preset would, and
    exposes the same API, metrics and errors. Faults are set at run time through POST /fault. Ctrl-C or SIGTERM ends it.
    """
    from fairlead.stub.config import StubConfig
    from fairlead.stub.run import run

    if preset == "list":
        _list_presets()
        return
    try:
        config = StubConfig(
            preset=preset,
            model=model,
            time_ratio=time_ratio,
            stream_interval=stream_interval,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kv_tokens=kv_tokens,
            block_size=block_size,
            max_queued=max_queued,
            loras=tuple(lora or ()),
            max_loras=max_loras,
            natural_output=output_tokens,
            identity_headers=identity_headers,
            request_id_headers=request_id_headers,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    problem = run(config, replicas, host, port, write_endpoints, typer.echo)
    if problem:
        typer.echo(f"fairlead stub: {problem}", err=True)
        raise typer.Exit(1)


def _list_presets() -> None:
    from fairlead.engine.presets import PRESETS

    for name, entry in PRESETS.items():
        typer.echo(f"{name:20} {entry.model:34} KV cache {entry.kv_tokens:>9,} tokens")


stub.__doc__ = f"{cleandoc(stub.__doc__ or '')}\n{_EXAMPLES}"
