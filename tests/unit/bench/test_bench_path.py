"""The way of a request gets no longer: bytecodes, functions and files that a 1 KB chat costs (`bench/path.py`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "bench" / "path.py"

#: A little more than the present value. Lower them when it falls.
CEILINGS = {"bytecodes": 5_000, "functions": 77, "files": 23}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have other bytecodes")
def test_a_request_costs_no_more_than_it_did() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert {key: counted[key] for key in CEILINGS if counted[key] > CEILINGS[key]} == {}
    assert sum(counted["parts"].values()) == pytest.approx(counted["bytecodes"], rel=0.01)
