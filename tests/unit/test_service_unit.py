"""deploy/fairlead.service runs a command that exists, and gives it the time and the limits it needs."""

from configparser import ConfigParser
from pathlib import Path

from fairlead.cli.basics import WRONG_INPUT
from fairlead.cli.commands import COMMANDS
from fairlead.server.supervise import DRAIN_SECONDS

ROOT = Path(__file__).parents[2]


def test_the_systemd_unit_fits_the_program() -> None:
    unit = ConfigParser(strict=True, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((ROOT / "deploy" / "fairlead.service").read_text())
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    assert unit["Unit"]["StartLimitIntervalSec"] == "0", "systemd gives up after five quick failures otherwise"
    assert service["OOMPolicy"] == "continue", "systemd ends Envoy with the scheduler otherwise"
    program, command, file = service["ExecStart"].split()
    assert (Path(program).name, command in COMMANDS, Path(file).name) == ("fairlead", True, "fairlead.yaml")
    assert int(service["RestartPreventExitStatus"]) == WRONG_INPUT
    assert float(service["TimeoutStopSec"]) > 2 * DRAIN_SECONDS + 5.0, "the gateway drains, then the scheduler"
    assert service["KillMode"] == "mixed", "only the parent is told to end: it ends its children in order"
    assert service["Environment"] == f"TMPDIR=/run/{service['RuntimeDirectory']}", "nobody cleans up there"
    page = (ROOT / "docs" / "vms.md").read_text()
    assert f"PATH={Path(program).parent}:" in page and file.rpartition("/")[0] in page
    assert f"/var/lib/{service['StateDirectory']}/" in page
