import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead.gateway.memory import memory_limit

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "0::/kubepods/pod1/c1\n"
V1 = "5:devices:/\n4:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/\n"
NONE = 9223372036854771712  # what v1 says where nothing is limited


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (V2, {"memory.max": "1048576\n"}, 1 << 20),  # the container sees its own cgroup as the root
        (V2, {"kubepods/pod1/c1/memory.max": "max\n", "kubepods/pod1/memory.max": "2097152\n"}, 2 << 20),
        (V2, {"kubepods/pod1/c1/memory.max": "3145728", "kubepods/memory.max": "4194304"}, 3 << 20),
        (V2, {"memory.max": "max\n"}, MACHINE),
        (V1, {"memory/memory.limit_in_bytes": "1048576\n"}, 1 << 20),
        (
            V1,
            {"memory/docker/abc/memory.limit_in_bytes": "5242880", "memory/memory.limit_in_bytes": f"{NONE}"},
            5 << 20,
        ),
        (V1, {"memory/memory.limit_in_bytes": f"{NONE}"}, MACHINE),
        (V2, {"memory.max": "garbage"}, MACHINE),
        ("", {}, MACHINE),
    ],
)
def test_the_least_limit_counts(own: str, files: dict[str, str], limit: int, tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def test_without_any_cgroup_it_is_the_machine(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == MACHINE


@pytest.mark.parametrize(("before", "after"), [("256:1000", "1000"), ("256:256", "256"), ("700:700", "700")])
def test_as_many_files_as_allowed(before: str, after: str) -> None:
    soft, hard = before.split(":")
    code = "from fairlead.gateway.memory import raise_file_limit; print(raise_file_limit())"
    shell = f"ulimit -Sn {soft}; ulimit -Hn {hard}; exec {sys.executable} -c '{code}'"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == after
