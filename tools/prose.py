"""Checks the English of the documentation with Vale, by the rules in `styles/Fairlead`.

    python tools/prose.py                 all pages
    python tools/prose.py README.md ...   only these
    python tools/prose.py --build         only build Vale, if need be

Vale is $FAIRLEAD_VALE, or `vale` on the path, or is built once by Go into ~/.cache/fairlead/vale ($XDG_CACHE_HOME),
which takes a minute and a C compiler. Without Vale and Go the check is skipped with a reason, or fails where
FAIRLEAD_REQUIRE_ALL is set.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import readability

ROOT = readability.ROOT
#: The newest version under a module path that Go's proxy has whole.
MODULE = "github.com/errata-ai/vale/v3/cmd/vale@v3.15.2"
#: Optimisation takes longer than it saves.
C_COMPILER = "-O0"
NOTES = ROOT / "bench" / "NOTES.md"
FIND_GO = ROOT / "tests" / "kube" / "support" / "kr_build.py"
sys.path.insert(0, str(FIND_GO.parent))

from kr_build import COMPILER  # noqa: E402 - the same, so that Go compiles once what both need


class NoVale(Exception):
    """Vale is not here and cannot be built; the text says how to get it."""


def find_vale() -> str:
    given = os.environ.get("FAIRLEAD_VALE")
    on_path = shutil.which(given or "vale")
    if on_path:
        return on_path
    if given:
        raise NoVale(f"FAIRLEAD_VALE={given} is no program")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead" / "vale"
    binary = cache / MODULE.rpartition("@")[2] / "vale"
    return str(binary if binary.is_file() else build(binary))


def build(binary: Path) -> Path:
    found = subprocess.run([sys.executable, FIND_GO, "--find-go"], capture_output=True, text=True)
    advice = "install Vale (https://vale.sh/docs/install) or set FAIRLEAD_VALE to it"
    if found.returncode != 0:
        raise NoVale(f"Vale is not on the path, and there is no Go (`pip install -e '.[kube]'`) to build it; {advice}")
    binary.parent.mkdir(parents=True, exist_ok=True)
    with open(binary.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if binary.is_file():
            return binary
        print(f"==> building Vale, once ({binary.parent})", file=sys.stderr, flush=True)
        environment = {
            **os.environ,
            "CGO_CFLAGS": C_COMPILER,
            "GOBIN": str(binary.parent),
            "GOFLAGS": "",
            "GOTOOLCHAIN": "auto",
        }
        command = [found.stdout.strip(), "install", "-p", "2", "-trimpath", COMPILER, "-ldflags=-s -w", MODULE]
        go = subprocess.run(command, env=environment, capture_output=True, text=True)
    if go.returncode != 0:
        raise NoVale(f"`go install {MODULE}` failed: {go.stderr.strip().splitlines()[-1]}; {advice}")
    return binary


def main(arguments: Sequence[str]) -> int:
    pages = [str(page.relative_to(ROOT)) for page in [*readability.pages(), NOTES]]
    try:
        vale = find_vale()
    except NoVale as reason:
        required = bool(os.environ.get("FAIRLEAD_REQUIRE_ALL"))
        print(f"{'error' if required else 'skipped: the English of the documentation'}: {reason}", file=sys.stderr)
        return int(required)
    if arguments == ["--build"]:
        return 0
    return subprocess.run([vale, "--no-wrap", *(arguments or pages)], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
