"""Single requests outside a load run: whether an OpenAI API answers at an address, and which models it serves."""

from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from fairlead.core.errors import ADMIN_PORT, ConfigError, FairleadError
from fairlead.core.models import ModelCard
from fairlead.core.text import plain
from fairlead.pool.served_models import read_model_list

MODELS_PATH = "/v1/models"
#: Most bytes of a response that are read: metrics pages are the largest.
_MOST_BYTES = 8 << 20
_CURES = (
    "check that the server runs and listens on this host and port (curl {target}{path}), that no firewall stands "
    "between, and that the port is the gateway's, not the one of its metrics or of ext_proc"
)


class NoAnswer(FairleadError):
    """No HTTP server answers at the target."""


def normal_target(url: str) -> str:
    """`http://host:port` from user input, which may lack the scheme or end in a slash or `/v1`. Raises ConfigError."""
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(address)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}", "URL") from None
    if parts.scheme == "https":
        raise ConfigError("https is not supported: give the gateway's plain HTTP port, or that of a TLS proxy", "URL")
    if parts.scheme != "http" or not usable or parts.path or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{url!r} is not http://HOST:PORT; give no path, it is added", "URL")
    return address


def exchanged(
    target: str, path: str, headers: Mapping[str, str], body: bytes | None = None, timeout_s: float = 10.0
) -> tuple[int, bytes]:
    """Send a request, GET, or POST if there is a `body`; returns (status, content). Raises `OSError`, `HTTPException`,
    or `ValueError` for a header that cannot be sent."""
    parts = urlsplit(target)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        connection.close()


def ask_models(target: str, headers: Mapping[str, str]) -> tuple[int, list[str]]:
    """(status, names) of `GET /v1/models`; no names if the answer is not a list of models. Raises NoAnswer."""
    try:
        status, body = exchanged(target, MODELS_PATH, headers)
    except (OSError, HTTPException) as error:
        said = (error.strerror if isinstance(error, OSError) else "") or str(error)
        what = plain(said[:200]) or type(error).__name__
        cures = _CURES.format(target=target, path=MODELS_PATH)
        raise NoAnswer(f"{target} does not answer: {what}\n{cures}") from None
    except ValueError as error:
        raise ConfigError(str(error), "--header") from None
    if body.startswith(ADMIN_PORT.encode()):
        raise NoAnswer(f"{ADMIN_PORT}: {target}. Point it at the gateway instead (gateway.port, default 8080)")
    if not 200 <= status < 300:
        return status, []
    return status, [*models_of(body)]


def models_of(page: bytes) -> Mapping[str, ModelCard]:
    """Model name → its entry in a list of models; empty if the page is not such a list."""
    try:
        return read_model_list(page).entries
    except ValueError:
        return {}
