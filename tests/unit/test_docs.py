"""What the documents say can be done: their commands, links, files, configurations, pages and metrics exist."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fairlead.apis.tokens import PromptTokeniser
from fairlead.cli.app import load_command
from fairlead.cli.commands import COMMANDS, GROUPS
from fairlead.compat.command_line import parse
from fairlead.compat.load import FIELDS, load
from fairlead.config.endpoint_list import parse_endpoints_text
from fairlead.config.plugins import build_policy
from fairlead.core.beginnings import Beginnings
from fairlead.core.exact import ExactKnowledge
from fairlead.core.fleet import Fleet
from fairlead.core.kv.index import KvIndex
from fairlead.gateway.h2_limits import ByteBudget
from fairlead.server.admin import Admin, AdminSources
from fairlead.server.indexer.server import IndexServer, IndexSources
from fairlead.server.indexer.service import IndexService
from fairlead.server.journal.recorder import Counts
from fairlead.server.observe.component_metrics import (
    GatewayMetrics,
    TokenMetrics,
    WarmingCounts,
    show_budget,
    show_journal,
    show_replicas,
    show_spans,
    show_state,
    show_unheard,
    show_warming,
)
from fairlead.server.observe.exposition import Registry
from fairlead.server.observe.history import History
from fairlead.server.observe.kv_metrics import KvMetrics, show_indexer, show_questions
from fairlead.server.observe.watch import Watch
from fairlead.server.state import StateCounts

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
#: The reference ends with the names of the version before, which nothing else may use.
FORMER = "\n## Names of 0.1\n"
TEXTS = {str(page.relative_to(ROOT)): page.read_text().partition(FORMER)[0] for page in PAGES}
BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def blocks(text: str, kind: str) -> list[str]:
    return [block["body"] for block in BLOCK.finditer(text) if block["kind"].split(" ")[0] == kind]


def help_of(name: str) -> str:
    return str(load_command(name, COMMANDS[name]).help)


def lines() -> Iterator[tuple[str, str]]:
    """(where, a line that somebody may type)."""
    for where, text in TEXTS.items():
        for block in (block for kind in ("sh", "bash", "console", "shell") for block in blocks(text, kind)):
            yield from ((where, line) for line in block.replace("\\\n", " ").splitlines())
        yield from ((where, code) for code in CODE.findall(BLOCK.sub("", text)))
    for name in COMMANDS:
        yield from ((f"fairlead {name} --help", line.partition("  (")[0]) for line in help_of(name).splitlines())
    for target, recipe in MAKE.items():
        yield from ((f"make {target}", line.lstrip("\t@").replace("$(BIN)/", "")) for line in recipe)


def make_targets() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    recipe: list[str] = []
    for line in (ROOT / "Makefile").read_text().splitlines():
        named = re.match(r"([a-z0-9-]+):(?!=)", line)
        if named:
            recipe = found.setdefault(named[1], [])
        elif line.startswith("\t"):
            recipe.append(line)
        else:
            recipe = []
    return found


MAKE = make_targets()


def commands(program: str) -> list[Any]:
    """(where, arguments) of every time the documents run a program."""
    found = []
    for where, line in lines():
        for part in re.split(r"&&|\|\|?|;|\s#\s", line):
            try:
                words = shlex.split(part.removeprefix("$ "), comments=True)
            except ValueError:
                continue
            if len(words) > 1 and words[0].rpartition("/")[2] == program:
                found.append(pytest.param(words[1:], id=f"{where}: {' '.join(words)}"))
    return found


@pytest.mark.parametrize("words", commands("fairlead"))
def test_every_fairlead_command_exists(words: list[str]) -> None:
    name = words[0]
    if name == "COMMAND" or name.startswith("--"):
        assert name in ("COMMAND", "--help", "--version", "--install-completion", "--show-completion")
        return
    paths = [path for path in (*COMMANDS, *GROUPS) if path.split() == words[: len(path.split())]]
    assert paths, f"fairlead {name} is no command, or an old name of one"
    path = max(paths, key=len)
    arguments = words[len(path.split()) :]
    if path in GROUPS:
        assert arguments == []
        return
    if COMMANDS[path].raw:
        parse(arguments)
        return
    parameters = load_command(path, COMMANDS[path]).params
    known = {"-", "--help", *(option for one in parameters for option in (*one.opts, *one.secondary_opts))}
    assert [word for word in arguments if word.startswith("-") and word.partition("=")[0] not in known] == []
    takes_file = any(one.param_type_name == "argument" for one in parameters)
    files = [word for word in arguments if word.startswith("examples/")]
    assert takes_file or not files
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("words", commands("make"))
def test_every_make_target_exists(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word and not word.startswith("-")]
    assert targets and set(targets) <= {*MAKE}


def test_commands_were_found() -> None:
    assert len(commands("fairlead")) > 15
    assert len(commands("make")) > 4


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for text in TEXTS.values() for extra in re.findall(r"fairlead\[([a-z,]+)\]", text)]
    assert {extra for group in named for extra in group.split(",")} <= {*extras}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def anchors(page: Path) -> list[str]:
    return [slug(heading) for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("where", TEXTS)
def test_a_link_says_the_name_of_the_file_it_leads_to(where: str) -> None:
    links = re.findall(r"\[`?([\w./]+\.py)`?\]\(([^)#\s]+)", TEXTS[where])
    assert [(name, target) for name, target in links if not target.endswith(name)] == []


@pytest.mark.parametrize("where", TEXTS)
def test_every_file_that_is_named_exists(where: str) -> None:
    named = re.findall(r"\b(?:src|tests|bench|examples|docs)/[\w./-]*\w", CODE.sub(r" \1 ", TEXTS[where]))
    assert [name for name in named if not (ROOT / name).exists()] == []


def yaml_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{where} {i}")
        for where, text in TEXTS.items()
        for i, block in enumerate(blocks(text, "yaml"))
    ]


@pytest.mark.parametrize("block", yaml_blocks())
def test_every_configuration_loads(block: str) -> None:
    """A block with one of our fields is a configuration; with `endpoints`, a whole one."""
    fields = {*yaml.safe_load(block)}
    if fields & {*FIELDS}:
        build_policy(load(block, need_endpoints="endpoints" in fields))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_example_loads(example: Path) -> None:
    if example.name == "endpoints.yaml":
        listing = parse_endpoints_text(example.read_bytes())
        assert (listing.ok, listing.problems) == (True, ())
        return
    config = load(example)
    build_policy(config)
    assert config.endpoints.static or Path(config.endpoints.file).is_file()


def admin_routes() -> set[str]:
    sources = AdminSources(metrics=list, unready=list, endpoints=list, decisions=lambda count: [])
    index = IndexSources(metrics=list, unready=list, snapshot=list)
    service = IndexService(ExactKnowledge(), list, PromptTokeniser)
    apps = Admin(sources).make_app(), IndexServer(service, index, "", 0).make_app()
    return {resource.canonical for app in apps for resource in app.router.resources()}


def test_every_admin_page_that_is_named_exists() -> None:
    everything = "\n".join([*TEXTS.values(), *map(help_of, COMMANDS)])
    named = {*re.findall(r"(?:127\.0\.0\.1|localhost):9090(/[\w/-]*(?:\.json)?)", everything)}
    named |= {*re.findall(r"`(/(?:debug/[\w/-]*|healthz|readyz|metrics|openapi\.json))", everything)}
    assert named, "the documents name some"
    assert named <= admin_routes()


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
def test_every_name_of_the_python_page_exists(name: str) -> None:
    assert resolve_name(name)


def test_every_metric_that_is_named_exists() -> None:
    watch = Watch(Fleet(), lambda: 0.0)
    KvMetrics(watch.metrics.registry, ExactKnowledge(), list, list, lambda: 0, {})
    show_journal(watch.metrics.registry, Counts())
    show_state(watch.metrics.registry, StateCounts())
    show_warming(watch.metrics.registry, WarmingCounts(Beginnings()))
    History(watch, 0.0, lambda: 0.0)
    GatewayMetrics(watch.metrics.registry, None, 1, lambda: 0.0)
    show_replicas(watch.metrics.registry, None)
    show_spans(watch.metrics.registry, lambda: 0)
    show_unheard(watch.metrics.registry, dict)
    show_budget(watch.metrics.registry, ByteBudget(1, lambda: 0.0))
    asker = SimpleNamespace(up=True, ends={})
    show_questions(watch.metrics.registry, lambda: asker)
    indexer = Registry()  # of another process
    show_indexer(indexer, KvIndex(), lambda: SimpleNamespace(looked_up=0, hit=0, questions=0, refused={}))
    TokenMetrics(watch.metrics.registry, PromptTokeniser, dict, {})
    page = (b"".join(watch.exposition()) + indexer.render()).decode()
    known = {*re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)}
    prefixes = r"fairlead_|llm_d_epp_|inference_(?:objective|pool|extension)_"
    named = {name for text in TEXTS.values() for name in re.findall(rf"`((?:{prefixes})\w+)`", text)}
    assert named <= known
