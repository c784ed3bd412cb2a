"""`fairlead tune`: a server's speed as a preset, and what it means for the parameters that people set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlead.cli.options import FAILED, WRONG_INPUT, echo_json, examples, exits, json_object, pairs

if TYPE_CHECKING:
    from fairlead.lab.engine.presets import Preset
    from fairlead.lab.load.tune import Advice, Facts, Fitted, Observation

_Url = Annotated[
    str, typer.Argument(metavar="URL", help="http://HOST:PORT of one model server that has nothing else to do.")
]
_Observations = Annotated[
    Path | None,
    typer.Option(
        help="Fit JSON lines instead: prompt_tokens, cached_tokens, completion_tokens, ttft_ms, e2e_ms, batch.",
        dir_okay=False,
    ),
]
_Header = Annotated[
    list[str] | None, typer.Option("--header", "-H", help="NAME=VALUE, sent with every request; repeat.", metavar="K=V")
]


@examples("""
\b
Examples:
  fairlead tune http://localhost:8000 --out mine.yaml
  fairlead tune --observations answers.jsonl --json
  fairlead simulate agents --preset mine.yaml
""")
def tune(
    url: _Url = "",
    observations: _Observations = None,
    save: Annotated[Path | None, typer.Option(help="Write the observations as JSON lines.", dir_okay=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the preset to this file.", dir_okay=False)] = None,
    model: Annotated[str, typer.Option(help="Default: the first of /v1/models.")] = "",
    name: Annotated[str, typer.Option(help="Of the preset.")] = "fitted",
    seconds: Annotated[float, typer.Option(min=1, help="No probe begins after so many seconds.")] = 180.0,
    time_ratio: Annotated[float, typer.Option(min=0.001, help="Of a stub: model seconds per second.")] = 1.0,
    header: _Header = None,
    extra: Annotated[str, typer.Option(help="JSON object of further fields of each request.")] = '{"ignore_eos": true}',
    seed: Annotated[int, typer.Option(help="Of the prompts; another seed asks what no cache holds.")] = 0,
    prompt_tokens: Annotated[float, typer.Option(min=0, help="Your traffic: mean prompt. 0 = as FILE, or 4000.")] = 0,
    output_tokens: Annotated[float, typer.Option(min=0, help="Your traffic: mean answer. 0 = as FILE, or 300.")] = 0,
    hit_rate: Annotated[
        float,
        typer.Option(min=-1, max=1, help="Your traffic: share of prompt tokens in caches. -1 = as FILE or server."),
    ] = -1,
    slo_ttft_ms: Annotated[float, typer.Option(min=1, help="Wanted time to the first token.")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(min=1, help="Wanted time per further token.")] = 50.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The engine's limit of requests in one batch.")] = 256,
    json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Fit a server's step times from some 300 short requests, and suggest parameters.

    The preset goes into the simulator and the stub: --preset FILE. Probe one idle server, not the gateway: other
    traffic is measured as slowness. The default policy needs none of this; it learns while it works.
    """
    from fairlead.core.errors import ConfigError
    from fairlead.lab.load.tune import Facts, TooLittle, Traffic, advise, fit, traffic_of

    with exits(FAILED, TooLittle), exits(WRONG_INPUT, ConfigError, ValueError, OSError):
        if bool(url) == (observations is not None):
            raise ValueError("give the URL of a server, or --observations FILE")
        if observations is not None:
            facts, made = Facts(model=model), _read(observations)
        else:
            facts, made = _probe(url, model, pairs(header, "--header"), json_object(extra), seed, time_ratio, seconds)
        if save is not None:
            _save(save, made)
        fitted = fit(made)
    seen = traffic_of(made) if observations is not None else Traffic(hit_rate=facts.hit_rate)
    traffic = Traffic(
        prompt_tokens=prompt_tokens or seen.prompt_tokens,
        output_tokens=output_tokens or seen.output_tokens,
        hit_rate=hit_rate if hit_rate >= 0 else seen.hit_rate,
        ttft_ms=slo_ttft_ms,
        tpot_ms=slo_tpot_ms,
        max_num_seqs=max_num_seqs,
    )
    preset = _preset(name, fitted, facts)
    if out is not None:
        _write(out, preset, fitted)
    _show(json, preset, fitted, facts, advise(fitted, facts, traffic), len(made))


def _probe(
    url: str, model: str, headers: dict[str, str], extra: dict[str, Any], seed: int, ratio: float, seconds: float
) -> "tuple[Facts, list[Observation]]":
    import asyncio

    from fairlead.lab.load.probe import ask_models, normal_target
    from fairlead.lab.load.tune import ask_facts
    from fairlead.lab.load.tune_probe import Ask, probe

    target = normal_target(url)
    ask_models(target, headers)
    facts = ask_facts(target, headers, model)
    ask = Ask(
        target=target,
        model=facts.model or model or "default",
        max_model_len=facts.max_model_len or 8192,
        seed=seed,
        time_ratio=ratio,
        headers=headers,
        extra=extra,
        seconds=seconds,
    )
    with _progress() as step:
        return facts, asyncio.run(probe(ask, step))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("probing")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _read(path: Path) -> "list[Observation]":
    import msgspec

    from fairlead.lab.load.tune import Observation

    observations = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            observations.append(msgspec.json.decode(line, type=Observation))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return observations


def _save(path: Path, observations: "list[Observation]") -> None:
    import msgspec

    path.write_bytes(b"".join(msgspec.json.encode(observation) + b"\n" for observation in observations))


def _preset(name: str, fitted: "Fitted", facts: "Facts") -> "Preset":
    from fairlead.lab.engine.presets import Preset

    return Preset(
        name=name,
        model=facts.model or "fitted",
        latency=fitted.latency,
        kv_tokens=facts.kv_tokens or 270_000,
        max_model_len=facts.max_model_len or 40_960,
    )


def _comments(preset: "Preset", fitted: "Fitted") -> list[str]:
    lines = [
        f"# {fitted.prefills} prefills, median error {fitted.prefill_error:.1%}; {fitted.decodes} answers, "
        f"{fitted.decode_error:.1%}",
        f"# besides its steps a request takes {fitted.overhead_ms:.1f} ms",
        "# kv_bytes, of a token, for handing prompts over, was not measured",
    ]
    lines += [f"# {term}: the observations do not tell it from the others" for term in fitted.unknown]
    return lines


def _write(path: Path, preset: "Preset", fitted: "Fitted") -> None:
    from fairlead.lab.engine.presets import write_preset

    path.write_text("\n".join([*_comments(preset, fitted), write_preset(preset)]), encoding="utf-8")


def _show(
    as_json: bool, preset: "Preset", fitted: "Fitted", facts: "Facts", advice: "list[Advice]", observed: int
) -> None:

    from fairlead.lab.engine.presets import write_preset

    if as_json:
        document = {"preset": preset, "fit": fitted, "server": facts, "advice": advice, "observations": observed}
        echo_json(document)
        return
    for line in _comments(preset, fitted):
        typer.echo(line)
    typer.echo(write_preset(preset))
    typer.echo("# For profiles, flow control and the reference's configurations (the default policy needs none):")
    for item in advice:
        typer.echo(f"#   {item.parameter}: {item.value}")
        typer.echo(f"#     {item.reason}")
