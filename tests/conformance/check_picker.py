"""Does an endpoint picker hold what its protocol says? A table; exit code 1 where a MUST is broken.

    python tests/conformance/check_picker.py              Fairlead: both transports, with and without TLS, behind Envoy
    python tests/conformance/check_picker.py HOST:PORT    any picker, without TLS; two or more endpoints in its pool
    python tests/conformance/check_picker.py HOST:PORT --health HOST:PORT --empty HOST:PORT --busy HOST:PORT
    python tests/conformance/check_picker.py HOST:PORT --endpoints 10.0.0.1:8000,10.0.0.2:8000
    python tests/conformance/check_picker.py HOST:PORT --ca tls.crt --name localhost

`--endpoints`: all that the pool has; without it any that the picker names is believed to be one.
`--empty`: the same picker without any endpoint. `--busy`: with one, where one running request is all that may be sent.
Without them their cases are not run. Needs grpcio, grpcio-tools and protobuf.
"""

import argparse
import asyncio
import importlib.util
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from picker_client import Picker, Violation
from protocol_cases import ALL, BUSY, EMPTY, Case

PROTO = Path(__file__).parents[1] / "protos" / "ext_proc_subset.proto"


class Result(NamedTuple):
    level: str
    sentence: str
    #: Empty = held.
    broken: str


def messages(directory: Path) -> ModuleType:
    """The protocol's messages, compiled."""
    from grpc_tools import protoc

    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO.parent}",
            f"-I{Path(protoc.__file__).parent / '_proto'}",
            f"--python_out={directory}",
            str(PROTO),
        ]
    )
    assert code == 0, "protoc failed"
    path = directory / f"{PROTO.stem}_pb2.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def judge(picker: Picker, cases: Sequence[Case]) -> list[Result]:
    """Each case by itself, whatever became of the ones before."""
    found = []
    for case in cases:
        broken = ""
        try:
            await case.check(picker)
        except Violation as error:
            broken = str(error)
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
        found.append(Result(case.level, case.sentence, broken))
    await picker.close()
    return found


def table(title: str, results: Sequence[Result]) -> str:
    lines = [f"\n{title}", "-" * len(title)]
    lines += [f"{one.level:9}{'broken: ' + one.broken if one.broken else 'held':10}  {one.sentence}" for one in results]
    return "\n".join(lines)


def held(results: Sequence[Result]) -> bool:
    return not any(one.broken for one in results if one.level.startswith("MUST"))


async def theirs(arguments: argparse.Namespace, pb: ModuleType) -> dict[str, list[Result]]:
    """A picker that somebody else runs."""
    ca = Path(arguments.ca).read_bytes() if arguments.ca else b""
    found = {}
    pickers = ("", arguments.picker, ALL), ("empty", arguments.empty, EMPTY), ("busy", arguments.busy, BUSY)
    for kind, address, cases in pickers:
        if address:
            health = arguments.health if not kind else ""
            known = tuple(arguments.endpoints.split(",")) if arguments.endpoints else ()
            picker = Picker.at(address, pb, health, ca, arguments.name, known)
            found[f"{kind} {address}".strip()] = await judge(picker, cases)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picker", nargs="?", metavar="HOST:PORT", help="none = Fairlead, which is started")
    for name, what in (
        ("health", "of its gRPC health service, without TLS"),
        ("empty", "one without endpoints"),
        ("busy", "one whose endpoints are full after one request"),
    ):
        parser.add_argument(f"--{name}", metavar="HOST:PORT", default="", help=what)
    parser.add_argument("--endpoints", metavar="IP:PORT,...", default="", help="of the pool")
    parser.add_argument("--ca", metavar="PEM", default="", help="speak TLS; who vouches for its certificate")
    parser.add_argument("--name", default="", help="the name in its certificate")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pb = messages(Path(directory))
        if arguments.picker:
            results = asyncio.run(theirs(arguments, pb))
        else:
            from own_pickers import ours

            logging.disable()  # of what is refused on purpose
            results = asyncio.run(ours(pb, Path(directory)))
    for title, found in results.items():
        print(table(title, found))
    broken = sum(not held(found) for found in results.values())
    print(f"\n{'every MUST is held' if not broken else 'broken'}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
