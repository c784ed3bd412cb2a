"""Runs a command in this process as `fairlead` does, with its errors as lines and exit codes."""

import sys
from typing import NamedTuple

from typer.testing import CliRunner

from fairlead.cli.main import main


class Done(NamedTuple):
    exit_code: int
    #: Of stdout and stderr.
    output: str
    stdout: str
    stderr: str


def fairlead(*arguments: object, columns: int = 80) -> Done:
    with CliRunner(env={"COLUMNS": str(columns)}).isolation() as outputs:
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        stdout, stderr, output = (written.getvalue().decode() for written in outputs)
        return Done(code, output, stdout, stderr)
