"""All options of the gateway, for `config.build`; reading addresses, and replacing files that Envoy watches."""

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from fairlead.core.errors import ConfigError

#: Valid names of a response header.
_HEADER = re.compile("x-[a-z0-9-]{1,62}", re.IGNORECASE)


class Address(Struct, frozen=True):
    """The address of a listener: a host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def literal(self) -> bool:
        """Whether no name has to be resolved."""
        try:
            ip_address(self.host)
        except ValueError:
            return bool(self.path)
        return True


class Tls(Struct, frozen=True, kw_only=True):
    """TLS toward the scheduler. Files are PEM."""

    #: The authorities that may have signed the scheduler's certificate. Without it, only `verify=False` is accepted,
    #: because no public authority signs a cluster's own names.
    ca_file: str = ""
    verify: bool = True
    #: The server name to send (SNI) and to expect in the certificate; empty = the address's host.
    server_name: str = ""
    #: Client certificate, for a scheduler that requires one.
    cert_file: str = ""
    key_file: str = ""


class Jwt(Struct, frozen=True, kw_only=True):
    """JSON Web Tokens that clients have to send (RFC 7519)."""

    issuer: str
    #: The token must have one of them; empty = any.
    audiences: tuple[str, ...] = ()
    #: The issuer's keys (RFC 7517): the address to fetch them from, or the keys themselves.
    jwks_uri: str = ""
    jwks: str = ""
    #: For https: PEM file with the trusted authorities.
    ca_file: str = ""
    #: The claim with the tenant's name; dots lead into nested claims.
    tenant_claim: str = "sub"
    #: Whether model servers get the token too.
    forward: bool = False


class Options(Struct, frozen=True, kw_only=True):
    """The options of one gateway. Times in seconds, sizes in bytes. `check` reports errors."""

    #: The address that clients connect to, which must be literal; `::` accepts IPv4 too.
    host: str = "127.0.0.1"
    port: int = 8080
    #: Envoy's admin page on 127.0.0.1; 0 = no TCP port.
    admin_port: int = 0
    #: Envoy's admin page on a Unix socket, in a directory that only the user of the supervisor can access.
    admin_path: str = ""
    #: The scheduler: `127.0.0.1:9002`, `[::1]:9002`, `epp.example:9002` or `unix:/run/epp.sock`.
    ext_proc: str = "127.0.0.1:9002"
    #: The scheduler's access log service; empty = no log, and ends of requests that were left early are unknown.
    als: str = ""
    #: Further schedulers that decide as one with that of `ext_proc`. The scheduler with the fewest requests is queried,
    #: and all receive the access log.
    peers: tuple[str, ...] = ()
    #: For `ext_proc` and `als`; `None` = plaintext.
    tls: Tls | None = None
    #: The pool, `ip:port`, for unscheduled requests. Used if `endpoints_file` is empty.
    endpoints: tuple[str, ...] = ()
    #: A file in the format of `clusters.render`. Envoy follows it without a restart.
    endpoints_file: str = ""
    #: `whole`: headers and the complete body in one read. `buffered`: headers first, the body after they are answered.
    request_mode: Literal["whole", "buffered"] = "whole"
    #: What the scheduler sees of responses. `none` and `first-chunk` cost nothing per token.
    response_mode: Literal["first-chunk", "headers", "none", "full"] = "first-chunk"
    #: Larger request bodies are answered with 413.
    body_limit: int = 64 << 20
    #: A scheduler that does not answer for longer counts as hung, unless it requested more time.
    message_timeout: float = 1.0
    #: The longest time that a scheduler may request, and so the longest time that a request can queue.
    queue_timeout: float = 600.0
    #: True: if the scheduler is dead or hung, requests go round robin over the pool. False: they get 503.
    fail_open: bool = True
    #: Concurrent ext_proc streams: requests that wait for a decision, plus those before their first chunk. Further
    #: requests bypass the scheduler (or get 503), so that a hung scheduler cannot hold every client. Enough for three
    #: full bands of flow control: what bypasses it goes before all that wait, and to any endpoint under any name.
    max_streams: int = 20_000
    #: Concurrent client connections.
    max_connections: int = 20_000
    #: Large uploads are ended well below this heap size, the largest first; from 95 % on, new requests get 503; 0 = no
    #: limit. A waiting request holds its body twice.
    max_heap: int = 4 << 30
    #: An upstream connection that is idle for longer is closed. Below the 5 s of uvicorn, which vLLM uses: if the peer
    #: closes an idle connection first, requests may be lost in the race.
    upstream_idle_timeout: float = 4.0
    #: Model servers accept cleartext HTTP/2 by prior knowledge: `appProtocol: kubernetes.io/h2c` of an InferencePool.
    upstream_http2: bool = False
    #: How long a request may be silent in both directions, as non-streaming generations are.
    stream_idle_timeout: float = 86_400.0
    #: The share of the heap limit for unfinished request bodies from one address, at least `body_limit`; 1 = all.
    upload_share: float = 0.25
    #: How long a request body may pause while it is received.
    receive_idle: float = 15.0
    #: Allowed paths in addition to those of inference (`routes`); `*` at the end stands for anything.
    paths: tuple[str, ...] = ()
    #: Origins whose pages may use the gateway (`config.cors`), `*` = all. Empty: the model servers decide.
    allowed_origins: tuple[str, ...] = ()
    #: A file written by `authentication.write_keys`, which Envoy follows: clients have to send a key. Empty = none. The
    #: supervisor interprets the path relative to its directory.
    keys_file: str = ""
    #: The script itself instead of a file, for an Envoy without a supervisor that writes files.
    keys_script: str = ""
    #: Clients have to send a token, or a key if both are required.
    jwt: Jwt | None = None
    #: A file written by `authentication.write_jwt`, which Envoy follows, like `keys_file`; empty = the filter is fixed.
    jwt_file: str = ""
    #: A file written by `authentication.write_authorities`, which Envoy follows, like `keys_file`: what the issuer's
    #: server is checked by. Empty = `jwt.ca_file`, as it was at the start.
    jwks_ca_file: str = ""
    #: A file written by `authentication.write_upstream_token`, which Envoy follows, like `keys_file`: model servers get
    #: this token instead of the client's. Empty = they get what the client sent, unless clients have to authenticate.
    upstream_token_file: str = ""
    #: The variable in Envoy's environment that has the token, instead of a file.
    upstream_token_variable: str = ""
    #: Seconds between messages of the access log service.
    als_interval: float = 0.05
    #: A JSON line per request into this file; `-` = stdout; empty = none.
    access_log: str = ""
    #: When a request is sent to its fallback endpoint. `connect`: if no connection was made. `unanswered`: also if the
    #: first endpoint broke off before the first byte of its answer. `hedge`: also if that byte is overdue; the first
    #: answer then counts.
    retry: Literal["connect", "unanswered", "hedge"] = "hedge"
    #: Response header that contains the id of the decision for clients; empty = none.
    decision_header: str = ""
    #: Worker threads; 0 = one per CPU. Not part of the bootstrap, because Envoy takes it as an argument.
    concurrency: int = 1
    #: Processes behind one port, over which heap, connections and threads above are divided. If one of them dies, only
    #: its own requests are lost.
    envoys: int = 1

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.keys_file or self.keys_script)

    def each(self, number: int, admin_path: str) -> "Options":
        """The options of one of the processes, numbered from 0. `admin_path`: its admin page, if not on a port."""
        several = self.envoys
        return replace(
            self,
            admin_path=admin_path,
            admin_port=self.admin_port and self.admin_port + number,
            max_heap=self.max_heap // several,
            max_connections=-(-self.max_connections // several),
            concurrency=-(-(self.concurrency or os.cpu_count() or 1) // several),
        )

    def check(self) -> None:
        """Raise `ConfigError` with a path such as `$.als` for what Envoy would not refuse, or not as clearly."""
        _check_listener(self)
        parse_address(self.ext_proc, "$.ext_proc")
        if self.als:
            parse_address(self.als, "$.als")
        for i, peer in enumerate(self.peers):
            parse_endpoint(peer, f"$.peers[{i}]")
        for i, endpoint in enumerate(self.endpoints):
            parse_endpoint(endpoint, f"$.endpoints[{i}]")
        positive = ("message_timeout", "queue_timeout", "upstream_idle_timeout", "stream_idle_timeout", "receive_idle")
        values = asdict(self)
        for name in (*positive, "als_interval", "body_limit", "max_streams", "max_connections", "envoys"):
            if not values[name] > 0:
                raise ConfigError("must be above 0", f"$.{name}")
        if not 0 < self.upload_share <= 1:
            raise ConfigError("must be above 0 and at most 1", "$.upload_share")
        if self.body_limit >= 1 << 32:
            raise ConfigError("must be below 4 GiB: Envoy counts in 32 bits", "$.body_limit")
        if self.queue_timeout < self.message_timeout:
            raise ConfigError("must not be below message_timeout", "$.queue_timeout")
        if self.decision_header and _HEADER.fullmatch(self.decision_header) is None:
            raise ConfigError("expected a header name: x-, then letters, digits and hyphens", "$.decision_header")
        if self.tls is not None:
            _check_tls(self.tls)


def _check_listener(options: Options) -> None:
    try:
        ip_address(options.host)
    except ValueError:
        cure = "; write 127.0.0.1" if options.host == "localhost" else ""
        raise ConfigError(f"expected an IP address, got '{options.host}'{cure}", "$.host") from None
    last = options.admin_port and options.admin_port + options.envoys - 1
    for name, port in (("port", options.port), ("admin_port", options.admin_port), ("admin_port", last)):
        if not 0 <= port <= 65535:
            raise ConfigError("expected a port from 0 to 65535", f"$.{name}")
    if options.port and options.admin_port <= options.port <= last:
        raise ConfigError("is the port of the gateway itself", "$.admin_port")
    if options.envoys > 1 and not options.port:
        raise ConfigError("several Envoys need a port that they share: name one", "$.port")


def _check_tls(tls: Tls) -> None:
    if tls.verify and not tls.ca_file:
        raise ConfigError("verification needs a ca_file; without one set verify to false", "$.tls.ca_file")
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ConfigError("a client certificate needs both cert_file and key_file", "$.tls")


def parse_address(text: str, path: str = "$") -> Address:
    """Parse `host:port`, `[v6]:port` or `unix:/path`. Raises `ConfigError` at `path`."""
    if text.startswith("unix:"):
        socket = text.removeprefix("unix:")
        if not socket.startswith("/") or len(socket.encode()) > 107:  # sun_path, unix(7)
            raise ConfigError(f"expected unix: and an absolute path of at most 107 bytes, got '{text}'", path)
        return Address(path=socket)
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed) or any(c.isspace() or c == "/" for c in host):
        raise ConfigError(f"expected host:port, [IPv6]:port or unix:/path, got '{text}'", path)
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 1 <= int(port) <= 65535):
        raise ConfigError(f"expected a port from 1 to 65535 at the end of '{text}'", path)
    return Address(host, int(port))


def parse_endpoint(text: str, path: str = "$") -> Address:
    """Parse a literal `ip:port`, because Envoy does not resolve names of endpoints. Raises `ConfigError` at `path`."""
    address = parse_address(text, path)
    if address.path or not address.literal:
        raise ConfigError(f"expected a literal ip:port, got '{text}'", path)
    return address


def replace_watched(path: Path, text: str) -> None:
    """Write a new version of a file that Envoy watches, by moving a file there, which is all that Envoy notices.
    Several processes may do so. Raises `OSError` on disk errors; the old version then stays."""
    aside = path.with_suffix(f".{os.getpid()}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
