"""`fairlead tune`: fits a preset to a server's speed, and suggests parameters from it. Also reads every --engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlead.cli.basics import FAILED, INTERRUPTED, WRONG_INPUT, echo_json
from fairlead.cli.options import Header, bar, complain, examples, exits, json_object, pairs
from fairlead.server.files import write_output

if TYPE_CHECKING:
    from fairlead.lab.engine.presets import Preset
    from fairlead.lab.load.tune import Advice, Facts, Fitted, Measured, Observation
    from fairlead.lab.load.tune_probe import Ask

_Url = Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT of one idle model server.")]
_Observations = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON lines to fit: prompt_tokens, cached_tokens, completion_tokens, ttft_ms, e2e_ms, batch or clients.",
        dir_okay=False,
    ),
]
_Neighbour = Annotated[
    str, typer.Option(metavar="URL", help="Keep this server of the same machine busy, to see what that costs.")
]
_HitRate = Annotated[
    float,
    typer.Option(
        metavar="SHARE", min=-1, max=1, help="Share of your prompt tokens that are cached.", show_default="as seen"
    ),
]
_MaxNumSeqs = Annotated[
    int, typer.Option(metavar="N", min=0, help="Requests in one batch.", show_default="as seen, or 256")
]
_Save = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the observations to this file.", dir_okay=False)
]
_PRESET_FILES = (".yaml", ".yml", ".json")
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the preset to this file.", dir_okay=False)]
_OutputTokens = Annotated[
    float,
    typer.Option(
        metavar="N", min=0, help="Mean answer length of your traffic, in tokens.", show_default="as seen, or 300"
    ),
]
_PromptTokens = Annotated[
    float,
    typer.Option(
        metavar="N", min=0, help="Mean prompt length of your traffic, in tokens.", show_default="as seen, or 4000"
    ),
]


@examples("""
\b
Examples:
  fairlead tune http://localhost:8000 --out mine.yaml
  fairlead tune http://localhost:8000 --neighbour http://localhost:8001
  fairlead tune --observations answers.jsonl --json
  fairlead sim run agents --engine mine.yaml
""")
def tune(
    url: _Url = "",
    observations: _Observations = None,
    save: _Save = None,
    out: _Out = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model to ask for.", show_default="the first of /v1/models")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the preset.")] = "fitted",
    neighbour: _Neighbour = "",
    seconds: Annotated[float, typer.Option(min=1, help="Stop probing after this long.")] = 180.0,
    time_ratio: Annotated[
        float, typer.Option(metavar="N", min=0.001, max=1e6, help="The stub's --time-ratio, if the server is a stub.")
    ] = 1.0,
    header: Header = None,
    extra: Annotated[str, typer.Option(metavar="JSON", help="More fields for every request.")] = '{"ignore_eos": true}',
    seed: Annotated[int, typer.Option(help="Seed of the prompts; a new seed misses all caches.")] = 0,
    prompt_tokens: _PromptTokens = 0,
    output_tokens: _OutputTokens = 0,
    hit_rate: _HitRate = -1,
    slo_ttft_ms: Annotated[float, typer.Option(metavar="MS", min=1, max=1e9, help="Objective of TTFT.")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(metavar="MS", min=1, max=1e9, help="Objective of TPOT.")] = 50.0,
    max_num_seqs: _MaxNumSeqs = 0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure a model server with about 300 short requests, fit a preset to it, and suggest parameters.

    The simulator and the stub take the preset (--engine FILE). Probe one idle server, not the gateway: other traffic
    looks like slowness. Ctrl-C stops the probing and fits what was seen. The default policy does not need this; it
    learns while it serves.
    """
    from msgspec.structs import replace

    from fairlead.lab.load.tune import Facts, Measured, Traffic, advise, traffic_of

    with exits(WRONG_INPUT, ValueError, OSError):
        if bool(url) == (observations is not None):
            raise ValueError("give the URL of a server, or --observations FILE")
        if observations is not None:
            measured, code = Measured(Facts(model=model, max_num_seqs=max_num_seqs), _read(observations)), 0
            seen = traffic_of(measured.observations)
        else:
            fields, headers = json_object(extra), pairs(header, "--header")
            ask = _ask(url, neighbour, model, max_num_seqs, headers)
            ask = replace(ask, extra=fields, seed=seed, time_ratio=time_ratio, seconds=seconds)
            measured, code = _probe(ask, save)
            seen = Traffic(hit_rate=measured.facts.hit_rate)
        fitted = measured.fit()
    traffic = Traffic(
        prompt_tokens=prompt_tokens or seen.prompt_tokens,
        output_tokens=output_tokens or seen.output_tokens,
        hit_rate=hit_rate if hit_rate >= 0 else seen.hit_rate,
        ttft_ms=slo_ttft_ms,
        tpot_ms=slo_tpot_ms,
    )
    preset = measured.preset(fitted, name)
    _deliver(out, json, preset, fitted, measured, advise(fitted, measured.facts, traffic))
    raise typer.Exit(code)


def engine_argument(value: str) -> str:
    """What `--engine VALUE` means: a preset's name unchanged, or the text of the preset in the file, or of the measured
    server, that `value` names. Raises `ValueError` or `OSError`."""
    path = Path(value)
    if "://" in value or (":" in value and path.suffix not in _PRESET_FILES):
        return preset_like(value)
    if path.suffix not in _PRESET_FILES:
        return value
    from fairlead.lab.engine.presets import read_preset

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{value}: the text is not valid UTF-8") from None
    read_preset(text, value)
    return text + "\n"


def preset_like(url: str) -> str:
    """The preset of a running server as text; the measurements go to stderr. Takes a minute."""
    from msgspec.structs import replace

    from fairlead.lab.engine.presets import write_preset

    with exits(WRONG_INPUT, ValueError, OSError):
        measured, _ = _probe(replace(_ask(url, "", "", 0, {}), seconds=60.0), None)
        fitted = measured.fit()
    preset = measured.preset(fitted, url)
    typer.echo(_text(preset, fitted), err=True)
    return write_preset(preset)


def _ask(url: str, neighbour: str, model: str, max_num_seqs: int, headers: dict[str, str]) -> "Ask":
    from msgspec.structs import replace

    from fairlead.lab.load.probe import NoAnswer, ask_models, normal_target
    from fairlead.lab.load.tune import ask_facts
    from fairlead.lab.load.tune_probe import Ask

    target = normal_target(url)
    status, names = ask_models(target, headers)
    if not names and not model:
        raise NoAnswer(f"{target}/v1/models: {status} and no model; name it with --model, credentials with --header")
    facts = ask_facts(target, headers, model)
    beside = normal_target(neighbour) if neighbour else ""
    if beside:
        ask_models(beside, headers)  # raises if it does not answer
    return Ask(
        target=target,
        neighbour=beside,
        facts=replace(facts, max_num_seqs=max_num_seqs or facts.max_num_seqs),
        headers=headers,
    )


def _probe(ask: "Ask", save: Path | None) -> "tuple[Measured, int]":
    """Probe the server until the end, or until Ctrl-C or a failed request. Returns the observations and the exit code.
    Raises `TooLittle` if there are none."""
    import asyncio

    import msgspec

    from fairlead.lab.load.tune import Measured, TooLittle
    from fairlead.lab.load.tune_probe import probe

    measured, code = Measured(ask.facts), 0
    if save is not None:
        save.write_bytes(b"")

    def keep(more: "list[Observation]", facts: "Facts") -> None:
        measured.observations += more
        measured.facts = facts
        if save is not None:
            with save.open("ab") as file:
                file.writelines(msgspec.json.encode(observation) + b"\n" for observation in more)

    try:
        with bar("probing", 1) as update:

            def step(done: int, total: int, what: str) -> None:
                update(completed=done, total=total, description=what)

            asyncio.run(probe(ask, keep, step))
    except KeyboardInterrupt:
        code = INTERRUPTED
        complain("stopped")
    except TooLittle as error:
        if not measured.observations:
            raise
        code = FAILED
        complain(error)
    if code:
        complain(f"what follows is fitted from {len(measured.observations)} observations")
    return measured, code


def _read(path: Path) -> "list[Observation]":
    import msgspec

    from fairlead.lab.load.tune import Observation

    observations = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            seen = msgspec.json.decode(line, type=Observation)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if problem := seen.problem():
            raise ValueError(f"{path}:{number}: {problem}")
        observations.append(seen)
    if unused := sum(not seen.used for seen in observations):
        typer.echo(
            f"note: {unused} of {len(observations)} observations lack times or a batch and are not used", err=True
        )
    return observations


def _text(preset: "Preset", fitted: "Fitted") -> str:
    """The preset, after comments on how well it fits."""
    from msgspec.structs import asdict

    from fairlead.lab.engine.presets import write_preset

    latency, unknown = asdict(fitted.latency), [term.removesuffix("_ms") for term in fitted.unknown]
    times = {
        term: latency[term] for term in ("c_pf_us", "c_attn_ns", "c_seq_us", "c_kv_ns") if term[:-3] not in unknown
    }
    comments = (
        f"# {fitted.prefills} prefills, median error {fitted.prefill_error:.1%}; {fitted.decodes} answers, "
        f"{fitted.decode_error:.1%}",
        *(f"# {residual}" for residual in fitted.residuals),
        *(f"# {term}: the observations cannot separate it from the other terms" for term in fitted.unknown),
        *(f"# {term}: no time was found; measure longer, without other work" for term in times if not times[term]),
        "# kv_bytes, per token, for handing prompts over, was not measured",
    )
    return "\n".join([*comments, write_preset(preset)])


def _deliver(
    out: Path | None, as_json: bool, preset: "Preset", fitted: "Fitted", measured: "Measured", advice: "list[Advice]"
) -> None:
    """Write the preset and show the results, each also if the other fails: measuring took minutes."""
    try:
        if out is not None:
            with exits(WRONG_INPUT, OSError):
                write_output(out, _text(preset, fitted))
    finally:
        _show(as_json, preset, fitted, measured, advice)


def _show(as_json: bool, preset: "Preset", fitted: "Fitted", measured: "Measured", advice: "list[Advice]") -> None:
    if as_json:
        seen = len(measured.observations)
        echo_json({"preset": preset, "fit": fitted, "server": measured.facts, "advice": advice, "observations": seen})
        return
    typer.echo(_text(preset, fitted))
    typer.echo("# For profiles, flow control and the reference's configurations (the default policy needs none):")
    for item in advice:
        typer.echo(f"#   {item.parameter}: {item.value}")
        typer.echo(f"#     {item.reason}")
