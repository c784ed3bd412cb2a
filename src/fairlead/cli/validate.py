"""`fairlead validate` without its command line."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fairlead.cli.basics import WRONG_INPUT, echo_json, without_collection

if TYPE_CHECKING:
    from fairlead.config.problems import Report
    from fairlead.config.schema import Config


def run_validate(file: Path, as_json: bool) -> int:
    """Print the file's problems, or a summary of it. Returns the exit code. Raises `ConfigError`."""
    with without_collection():
        from fairlead.compat.load import examine

        config, report = examine(file)
    if as_json:
        return _as_json(file, config, report)
    lines = [problem.render(str(file)) for problem in report.problems]
    lines += [f"note: {note.render(str(file))}" for note in report.notes]
    wrong, names = list[str](), ""
    if config is None:
        wrong = [_counted(len(report.problems), "problem")]
    else:
        names, wrong = _names(config)
        wrong = [*_keys_problems(config), *wrong]
        wrong += [_counted(len(wrong), "problem")] * bool(wrong)
    if config is not None and not wrong:
        lines.append(f"{file}: valid. {_summary(config)}{names}")
    sys.stdout.write("".join(f"{line}\n" for line in (*lines, *wrong)))
    return WRONG_INPUT if wrong else 0


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _as_json(file: Path, config: "Config | None", report: "Report") -> int:
    from fairlead.pool.models_file import check_models

    named = check_models(config.models)[1] if config is not None and config.models.given else []
    named += _keys_problems(config) if config is not None else []
    valid = config is not None and not named
    document = {
        "file": str(file),
        "valid": valid,
        "problems": [*report.problems, *({"message": line} for line in named)],
        "notes": report.notes,
        "summary": _summary(config) if config is not None and valid else "",
    }
    echo_json(document)
    return 0 if valid else WRONG_INPUT


def _keys_problems(config: "Config") -> list[str]:
    """The problems in the file of API keys."""
    from fairlead.core.errors import ConfigError

    if config.gateway.keys is None:
        return []
    from fairlead.gateway.envoy.authentication import read_keys

    try:
        read_keys(config.gateway.keys.file)
    except ConfigError as error:
        return [str(error)]
    return []


def _names(config: "Config") -> tuple[str, list[str]]:
    """How many model names are defined, in words, and the problems in their definitions."""
    if not config.models.given:
        return "", []
    from fairlead.pool.models_file import check_models

    models, problems = check_models(config.models)
    if problems:
        return "", problems
    defined = f"{len(models.models)}, objectives: {len(models.objectives)}, rewrites: {len(models.rewrites)}"
    return f" Models: {defined}.", []


def _summary(config: "Config") -> str:
    from fairlead.compat.load import read_bytes
    from fairlead.config.endpoint_list import parse_endpoints_text

    endpoints = config.endpoints.static
    if config.endpoints.file:
        endpoints = parse_endpoints_text(read_bytes(Path(config.endpoints.file))).entries
    policy = config.policy
    parts = _counted(len(policy.filters), "filter")
    if policy.picker is not None:
        parts += f", {_counted(len(policy.scorers), 'scorer')}, picker {policy.picker.name}"
    if policy.plugin is not None:
        parts += f", {policy.plugin.type}"
    return f"Policy {policy.name}: {parts}. Endpoints: {len(endpoints)}."
