"""`fairlead validate` without its command line."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fairlead.cli.basics import WRONG_INPUT, echo_json, without_collection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fairlead.config.endpoint_list import Listed
    from fairlead.config.problems import Place, Problem
    from fairlead.config.schema import Config
    from fairlead.core.models import ModelSet


def run_validate(file: Path, as_json: bool, workers: int = 1) -> int:
    """Print the problems of the file (`-` = standard input), or a summary of it. `workers`: as for `serve`. Returns the
    exit code. Raises `ConfigError`."""
    if str(file) == "-":
        file = Path("/dev/stdin")
    with without_collection():
        from fairlead.compat.load import examine

        config, report = examine(file)
    if config is not None and workers > 1:
        report.problems += _workers_problems(config, workers, report.line)
    names, wrong = _names(config) if config is not None else ("", [])
    keys = [*_keys_problems(config), *_file_problems(config)] if config is not None else []
    summary = _summary(config) if config is not None and not (report.problems or keys or wrong) else ""
    if as_json:
        named = [{"message": line} for line in (*wrong, *keys)]
        document = {"file": str(file), "valid": bool(summary), "problems": [*report.problems, *named]}
        echo_json(document | {"notes": report.notes, "summary": summary})
        return 0 if summary else WRONG_INPUT
    lines = [problem.render(str(file)) for problem in report.problems]
    lines += [f"note: {note.render(str(file))}" for note in report.notes]
    lines += [*keys, *wrong]
    problems = _counted(len(report.problems) + len(keys) + len(wrong), "problem")
    inside = f" ({report.path(())[2:]})" if report.path(()) != "$" else ""
    lines.append(f"{file}{inside}: valid. {summary}{names}" if summary else problems)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0 if summary else WRONG_INPUT


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _workers_problems(config: "Config", workers: int, line: "Callable[[Place], int]") -> "list[Problem]":
    from fairlead.cli.options import WORKERS_NEED
    from fairlead.config.problems import Problem
    from fairlead.core.errors import ConfigError
    from fairlead.server.embedded import check_workers

    if config.gateway.mode != "embedded":
        return [Problem("--workers", 0, WORKERS_NEED)]
    try:
        check_workers(config, workers)
    except ConfigError as error:
        return [Problem(error.path, line(tuple(error.path.split(".")[1:])), error.message)]
    return []


def _keys_problems(config: "Config") -> list[str]:
    from fairlead.core.errors import ConfigError

    if config.gateway.keys is None:
        return []
    from fairlead.gateway.envoy.authentication import read_keys

    try:
        read_keys(config.gateway.keys.file)
    except ConfigError as error:
        return [str(error)]
    return []


def _file_problems(config: "Config") -> list[str]:
    """What is wrong in certificates, authorities, tokens and keys. Notes name files that are missing here or that this
    user cannot read: Fairlead may run elsewhere, or as another user."""
    from fairlead.core.errors import ConfigError

    problems = []
    for place, read in _readers(config):
        try:
            read()
        except (ConfigError, OSError) as error:
            if isinstance(error.__context__, FileNotFoundError | NotADirectoryError | PermissionError):
                continue
            path, said = (error.path, error.message) if isinstance(error, ConfigError) else ("", str(error))
            problems.append(f"{place or path}: {said}")
    return problems


def _readers(config: "Config") -> "Iterator[tuple[str, Callable[[], object]]]":
    """What reads each file, as `serve` does, with the file's place; empty = its errors have it."""
    from fairlead.config.checks import sections
    from fairlead.config.problems import show
    from fairlead.plugins.params import camel

    jwt, token, curve = config.gateway.jwt, config.gateway.upstream_token_file, config.kv_events.curve
    if jwt is not None and jwt.jwks_file:
        from fairlead.gateway.envoy.authentication import read_jwt

        yield "", partial(read_jwt, jwt)
    if token:
        from fairlead.server.followed_files import read_upstream_token

        yield "", partial(read_upstream_token, token)
    if config.admin.token_file:
        from fairlead.server.admin import admin_access

        yield "", partial(admin_access, (), config.admin.token_file)
    if curve is not None and config.kv_events.enabled:
        from fairlead.pool.kv_events.keys import read_keys

        yield "", partial(read_keys, curve, bool(config.kv_events.bind))
    if config.kubernetes.kubeconfig:
        from fairlead.pool.kube.auth import read_kubeconfig

        yield "", partial(read_kubeconfig, Path(config.kubernetes.kubeconfig), config.kubernetes.context)
    for place, section in sections(config):
        if section is config.replicas and not config.replicas.via:
            continue
        for name, path in section:
            if path and name in ("cert_dir", "ca_file"):
                from fairlead.gateway.tls import ServerTls
                from fairlead.pool.authorities import trusting

                read = ServerTls.from_directory if name == "cert_dir" else trusting
                yield show((*place, camel(name))), partial(read, path)


def _names(config: "Config") -> tuple[str, list[str]]:
    """How many model names are defined, in words, and the problems in their definitions."""
    if not config.models.given:
        return "", []
    from fairlead.pool.models_file import check_models

    models, problems = check_models(config.models)
    if problems:
        return "", problems
    defined = f"{len(models.models)}, objectives: {len(models.objectives)}, rewrites: {len(models.rewrites)}"
    return f" Models: {defined}.{_refused(config, models)}", []


def _refused(config: "Config", models: "ModelSet") -> str:
    """A sentence on names that are not defined, if requests for them are refused. Labels tell some that are served."""
    from fairlead.core.endpoint import MODEL_LABEL
    from fairlead.core.models import Catalogue
    from fairlead.pool.models_file import rules_of

    catalogue = Catalogue(models, rules_of(config.models))
    labelled = [
        ({entry.endpoint.labels.get(MODEL_LABEL, "")} - {""}, entry.endpoint.promised) for entry in _listed(config)
    ]
    names = sorted({name for base, adapters in labelled for name in catalogue.undefined(base, adapters)})
    also = f", also for {', '.join(names[:5])}" if names else ""
    return f" Requests for other names get 404{also} (models.unmatched)." if catalogue.only_defined else ""


def _listed(config: "Config") -> "Sequence[Listed]":
    from fairlead.compat.load import read_bytes
    from fairlead.config.endpoint_list import parse_endpoints_text

    file = config.endpoints.file
    return parse_endpoints_text(read_bytes(Path(file))).entries if file else config.endpoints.static


def _summary(config: "Config") -> str:
    endpoints, policy = _listed(config), config.policy
    parts = _counted(len(policy.filters), "filter")
    if policy.picker is not None:
        parts += f", {_counted(len(policy.scorers), 'scorer')}, picker {policy.picker.name}"
    if policy.plugin is not None:
        parts += f", {policy.plugin.type}"
    return f"Policy {policy.name}: {parts}. Endpoints: {len(endpoints)}."
