"""What a release is made of, and by whom.

python tools/release.py lock          write deploy/locks/*.txt anew: every package with its version and hashes
python tools/release.py provenance    write out/provenance.json for what lies in out/dist
"""

import hashlib
import json
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "locks"
OUT = ROOT / "out"
HEAD = "# Written by `make lock` from pyproject.toml; change that, not this.\n"


def wanted() -> dict[str, list[str]]:
    """Requirements by lock: those of the tests, of building, of the image, and of `make sbom` and others."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    extras = project["optional-dependencies"]
    image = [*project["dependencies"], *extras["replicas"], *extras["tracing"]]
    tests = [one for name in ("report", "cluster", "docs", "replicas", "tracing") for one in extras[name]]
    tests += [one for one in extras["dev"] if not one.startswith("fairlead[")]
    return {
        "ci": [*project["dependencies"], *tests],
        "build": document["build-system"]["requires"],
        "image": image,
        "kube": extras["kube"],
        "release": extras["release"],
    }


def lock() -> None:
    """For every Python that the project supports, on every machine; what is tested is what the image gets. Hosts of
    indexes do not get into the files."""
    compile_all = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--python-version", "3.11"]
    compile_all += ["--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header", "--quiet", "-"]
    for name, requirements in wanted().items():
        print(f"==> deploy/locks/{name}.txt")
        constrained = ["--constraint", str(LOCKS / "ci.txt")] if name in ("build", "image") else []
        text = "\n".join(requirements)
        done = subprocess.run([*compile_all, *constrained], input=text, stdout=subprocess.PIPE, text=True, check=True)
        (LOCKS / f"{name}.txt").write_text(HEAD + done.stdout)


def digest(path: Path) -> dict[str, str]:
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def provenance() -> None:
    """An in-toto statement with SLSA's predicate, unsigned: sign it with what your registry asks for."""
    built = sorted((OUT / "dist").glob("fairlead-*"))
    if not built:
        sys.exit("out/dist is empty: make dist")
    commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": digest(path)} for path in built],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://packaging.python.org/en/latest/specifications/pyproject-toml/",
                "externalParameters": {"command": "make dist", "changed": bool(changed)},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    *({"name": f"deploy/locks/{p.name}", "digest": digest(p)} for p in sorted(LOCKS.glob("*.txt"))),
                ],
            },
            "runDetails": {"builder": {"id": f"python {platform.python_version()} on {platform.platform()}"}},
        },
    }
    file = OUT / "provenance.json"
    file.write_text(json.dumps(statement, indent=1) + "\n")
    print(file.relative_to(ROOT))


if __name__ == "__main__":
    tasks = {"lock": lock, "provenance": provenance}
    if len(sys.argv) != 2 or sys.argv[1] not in tasks:
        sys.exit(__doc__)
    tasks[sys.argv[1]]()
