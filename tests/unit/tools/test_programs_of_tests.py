"""`make conformance` and `make extension-suite` run without pytest, whose `conftest.py` adds the folders that tests
import from."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["conformance/own_pickers.py", "kube/extension_suite.py"])
def test_a_program_finds_all_that_it_imports(program: str) -> None:
    file = TESTS / program
    started = subprocess.run(
        [sys.executable, "-c", f"import {file.stem}"], cwd=file.parent, capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stderr
