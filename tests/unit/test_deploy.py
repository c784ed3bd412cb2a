"""Rules and dashboards are there once: in the chart, since Helm reads no file outside of it. `deploy/` has links."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "fairlead"
FOLDERS = ("alerts", "grafana")


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_the_chart_ships_is_what_deploy_shows(folder: str) -> None:
    shipped = {path.name: path for path in (CHART / "files" / folder).iterdir()}
    shown = {path.name: path for path in (ROOT / "deploy" / folder).iterdir() if not path.stem.endswith("_test")}
    assert shipped and set(shown) == set(shipped)
    for name, path in shown.items():
        # Where a checkout knows no links, a file holds the link's text; then the chart's file alone is right.
        target = path.readlink() if path.is_symlink() else Path(path.read_text())
        assert not target.is_absolute()
        assert (path.parent / target).resolve() == shipped[name]


def test_the_chart_has_no_links() -> None:
    """A chart whose directory is copied alone would lose them, and Argo CD refuses those that lead out of it."""
    assert [path for path in CHART.rglob("*") if path.is_symlink()] == []
