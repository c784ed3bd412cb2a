"""The table of commands with their modules, and the text of `fairlead --help`. Imports almost nothing, to be fast."""

from typing import NamedTuple


class Command(NamedTuple):
    """The module and function of a command, and its one line of help."""

    module: str
    function: str
    help: str
    #: Whether it parses its flags by itself.
    raw: bool = False


#: The words after `fairlead` → the command.
COMMANDS: dict[str, Command] = {
    "demo": Command("fairlead.cli.demo", "demo", "Compare Fairlead with round robin on simulated servers."),
    "init": Command("fairlead.cli.init", "init", "Write a configuration for your model servers."),
    "validate": Command("fairlead.cli.config", "validate", "Check a configuration and print every problem."),
    "config show": Command("fairlead.cli.config", "show", "Print every value in effect and where it comes from."),
    "config explain": Command("fairlead.cli.config", "explain", "Print the reference of a field, section or plugin."),
    "config schema": Command("fairlead.cli.config", "schema", "Print the JSON Schema of the configuration."),
    "key": Command("fairlead.cli.key", "key", "Create an API key for a client of the gateway."),
    "serve": Command("fairlead.cli.serve", "serve", "Run the scheduler and its embedded gateway."),
    "epp": Command("fairlead.cli.epp", "epp", "Serve with the reference endpoint picker's flags.", raw=True),
    "envoy config": Command("fairlead.cli.envoy_config", "envoy_config", "Print the Envoy configuration."),
    "indexer": Command("fairlead.cli.indexer", "indexer", "Run the prefix index alone, as an HTTP service."),
    "scheduler serve": Command("fairlead.cli.scheduler", "serve", "Serve a policy to gateways over gRPC."),
    "scheduler check": Command("fairlead.cli.scheduler", "check", "Check that a scheduler keeps the contract."),
    "scheduler proto": Command("fairlead.cli.scheduler", "proto", "Print the contract, a .proto file."),
    "top": Command("fairlead.cli.top", "top", "Watch a running scheduler: endpoints, traffic, warnings."),
    "explain": Command("fairlead.cli.explain", "explain", "Show why a request went to its endpoint."),
    "doctor": Command("fairlead.cli.doctor", "doctor", "Find out what is wrong with an installation."),
    "journal replay": Command("fairlead.cli.journal", "replay", "Run recorded events through the scheduler again."),
    "journal capture": Command("fairlead.cli.journal", "capture", "Turn a journal into an anonymous workload."),
    "bench": Command("fairlead.cli.bench", "bench", "Send load to an OpenAI endpoint and measure it."),
    "stub": Command("fairlead.cli.stub", "stub", "Run stub model servers: real API and metrics, no GPU."),
    "sim run": Command("fairlead.cli.simulate", "simulate", "Simulate one policy on one workload."),
    "sim compare": Command("fairlead.cli.compare", "compare", "Simulate policies × workloads × loads; write a report."),
    "sim quality": Command("fairlead.cli.quality", "quality", "Simulate policies on every scenario; print regrets."),
    "sim workload show": Command("fairlead.cli.workload", "show", "Describe a workload file."),
    "sim workload convert": Command("fairlead.cli.workload", "convert", "Convert a workload to another format."),
    "sim workload generate": Command("fairlead.cli.workload", "generate", "Generate a workload."),
    "sim workload kinds": Command("fairlead.cli.workload", "kinds", "List the kinds and formats."),
    "plan": Command("fairlead.cli.plan", "plan", "Find the least number of replicas that holds an objective."),
    "tune": Command("fairlead.cli.tune", "tune", "Measure a model server and fit a preset to it."),
}

GROUPS = {
    "config": "Show, explain and describe the configuration.",
    "envoy": "Configure an Envoy that you run yourself.",
    "scheduler": "Serve or check a scheduler in its own process.",
    "journal": "Replay a journal, or turn it into a workload.",
    "sim": "Simulate policies and workloads in virtual time.",
    "sim workload": "Inspect, convert and generate workloads.",
}

#: The sections of `fairlead --help`.
SECTIONS = {
    "Set up": ("demo", "init", "validate", "config", "key"),
    "Run": ("serve", "epp", "envoy", "indexer", "scheduler"),
    "Observe": ("top", "explain", "doctor", "journal"),
    "Measure and plan": ("bench", "stub", "sim", "plan", "tune"),
}

#: Names of commands in 0.1, which work until 0.3 → their present names.
RENAMED = {
    "schema": "config schema",
    "envoy-config": "envoy config",
    "replay": "journal replay",
    "capture": "journal capture",
    "simulate": "sim run",
    "compare": "sim compare",
    "workload": "sim workload",
}


def members(group: str) -> list[str]:
    """Commands and groups directly inside a group; "" = of `fairlead` itself."""
    inside = [path.removeprefix(group).split() for path in COMMANDS if not group or path.startswith(f"{group} ")]
    return list(dict.fromkeys(words[0] for words in inside))


def overview() -> str:
    """The text of `fairlead --help`: at most 80 columns."""
    lines = ["Usage: fairlead COMMAND [OPTIONS]", "", "  " + ABOUT]
    for title, names in SECTIONS.items():
        known = [name for name in names if name in members("")]
        lines += ["", f"{title}:", *(f"  {name:<9}  {GROUPS.get(name) or COMMANDS[name].help}" for name in known)]
    return "\n".join([*lines, "", _OPTIONS])


ABOUT = "Schedules LLM requests over model-server replicas, behind Envoy."
_OPTIONS = """\
Options:
  --version             Print the version.
  --install-completion  Install completion for this shell.
  --show-completion     Print what that would install.
  --help                Print this; after a command, its options and examples.

Start with: fairlead demo
Exit codes: 0 success, 1 failed, 2 wrong usage or configuration."""
