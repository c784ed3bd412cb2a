"""Rules and dashboards are there once: in the chart, since Helm reads no file outside of it. `deploy/` has links.
The health check of the compose file asks the gateway itself."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

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


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_asks_the_gateway_whatever_proxy_is_set(status: int) -> None:
    """Docker sets HTTP_PROXY in containers of users whose configuration has `proxies`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    _, program, *arguments = compose["services"]["gateway"]["healthcheck"]["test"]
    assert program == "python" and "127.0.0.1:9090/" in arguments[-1]
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        arguments[-1] = arguments[-1].replace(":9090/", f":{server.server_port}/")
        check = subprocess.run([sys.executable, *arguments], env={"http_proxy": "http://127.0.0.1:9"})
    assert (check.returncode == 0) == (status == 200)
