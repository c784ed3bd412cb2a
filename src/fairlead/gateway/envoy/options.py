"""Everything about the gateway that can be chosen. `config.build` turns it into Envoy's bootstrap."""

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from fairlead.core.errors import ConfigError

#: What may name a response header.
_HEADER = re.compile("x-[a-z0-9-]{1,62}", re.IGNORECASE)

#: RFC 3986, `path`, without what Envoy would change before it looks; `*` at the end stands for anything.
_PATH = re.compile(r"/(?:[A-Za-z0-9._~!$&'()+,;=:@{}-]+/?)*\*?")


class Address(Struct, frozen=True):
    """Where something listens: a host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def literal(self) -> bool:
        """Needs no name service."""
        try:
            ip_address(self.host)
        except ValueError:
            return bool(self.path)
        return True


class Tls(Struct, frozen=True, kw_only=True):
    """TLS toward the scheduler. Files are PEM."""

    #: Who signed the scheduler's certificate. Without it only `verify=False` is accepted: there is no public authority
    #: for a cluster's own names.
    ca_file: str = ""
    verify: bool = True
    #: Name to ask for (SNI) and to find in the certificate; empty = the address's host.
    server_name: str = ""
    #: Client certificate, for a scheduler that demands one.
    cert_file: str = ""
    key_file: str = ""


class Jwt(Struct, frozen=True, kw_only=True):
    """JSON Web Tokens that clients have to show (RFC 7519)."""

    issuer: str
    #: One of them must be the token's; empty = any.
    audiences: tuple[str, ...] = ()
    #: The issuer's keys (RFC 7517): where they are fetched, or else what they are.
    jwks_uri: str = ""
    jwks: str = ""
    #: For https: PEM file with whom to trust.
    ca_file: str = ""
    #: The claim that names the tenant; dots lead into nested ones.
    tenant_claim: str = "sub"
    #: Model servers get the token too.
    forward: bool = False


class Options(Struct, frozen=True, kw_only=True):
    """One gateway. Times in seconds, sizes in bytes. `check` tells what is wrong."""

    #: Where clients connect: a literal address; `::` takes IPv4 too.
    host: str = "127.0.0.1"
    port: int = 8080
    #: Envoy's admin page on 127.0.0.1; 0 = no TCP port.
    admin_port: int = 0
    #: Envoy's admin page on a Unix socket; the supervisor puts it into a directory that only its user can enter.
    admin_path: str = ""
    #: The scheduler: `127.0.0.1:9002`, `[::1]:9002`, `epp.example:9002` or `unix:/run/epp.sock`.
    ext_proc: str = "127.0.0.1:9002"
    #: The scheduler's access log service; empty = no log, then nobody tells the ends of requests that were left early.
    als: str = ""
    #: More schedulers that decide as one with that of `ext_proc`: whoever has the fewest requests is asked, and all are
    #: told the access log.
    peers: tuple[str, ...] = ()
    #: For `ext_proc` and `als`; `None` = plaintext.
    tls: Tls | None = None
    #: The pool, `ip:port`, for requests that nobody scheduled. Used when `endpoints_file` is empty.
    endpoints: tuple[str, ...] = ()
    #: A file as `endpoints_file.render` writes it. Envoy follows it without a restart.
    endpoints_file: str = ""
    #: `whole`: headers and the complete body in one read. `buffered`: headers first, the body when they are answered.
    request_mode: Literal["whole", "buffered"] = "whole"
    #: What the scheduler sees of responses. `none` and `first-chunk` cost nothing per token.
    response_mode: Literal["first-chunk", "headers", "none", "full"] = "first-chunk"
    #: Larger request bodies are answered 413.
    body_limit: int = 64 << 20
    #: A scheduler that is silent for longer is taken for hung, unless it asked for more time.
    message_timeout: float = 1.0
    #: The most time it may ask for: bounds how long a request can queue.
    queue_timeout: float = 600.0
    #: True: a dead or hung scheduler means round robin over the pool. False: 503.
    fail_open: bool = True
    #: ext_proc streams at once: requests that wait for a decision, plus those before their first chunk. More go past
    #: the scheduler (or get 503). Keeps a hung scheduler from holding every client.
    max_streams: int = 4096
    #: Client connections at once.
    max_connections: int = 20_000
    #: Large uploads are ended well below this heap size, the largest first; from 95 % on new requests get 503; 0 = no
    #: limit. A waiting request holds its body twice.
    max_heap: int = 4 << 30
    #: An upstream connection idle for longer is closed. Below uvicorn's 5 s, which vLLM uses: who closes an idle
    #: connection later than its peer loses requests to the race.
    upstream_idle_timeout: float = 4.0
    #: Model servers take cleartext HTTP/2, by prior knowledge: `appProtocol: kubernetes.io/h2c` of an InferencePool.
    upstream_http2: bool = False
    #: A request may be silent in both directions this long: non-streaming generations are.
    stream_idle_timeout: float = 86_400.0
    #: Of the heap limit, what unfinished request bodies from one address may hold, but `body_limit` at least; 1 = all.
    upload_share: float = 0.25
    #: A request body may pause this long while it is received.
    receive_idle: float = 15.0
    #: Paths that are let in besides those of inference (`routes`); `*` at the end stands for anything.
    paths: tuple[str, ...] = ()
    #: A file as `authentication.KeysFile` writes it, which Envoy follows: clients have to show a key. Empty = none. The
    #: supervisor takes it as relative to its directory.
    keys_file: str = ""
    #: Or what such a file says, for an Envoy that nobody writes files for.
    keys_script: str = ""
    #: Clients have to show a token, or a key where both are asked for.
    jwt: Jwt | None = None
    #: A file as `authentication.write_jwt` writes it, which Envoy follows, as `keys_file`; empty = it stays as it is.
    jwt_file: str = ""
    #: Seconds between messages of the access log service.
    als_interval: float = 0.05
    #: A JSON line per request into this file; `-` = stdout; empty = none.
    access_log: str = ""
    #: When a request is sent to its fallback endpoint: if no connection came about; also if the first endpoint broke
    #: off before the first byte of its answer; also if that is overdue, and then whoever answers first wins.
    retry: Literal["connect", "unanswered", "hedge"] = "hedge"
    #: Response header that tells clients the id of the decision; empty = none.
    decision_header: str = ""
    #: Worker threads; 0 = one per CPU. Not part of the bootstrap: Envoy takes it as an argument.
    concurrency: int = 1
    #: Processes behind the one port, for whom heap, connections and threads above are meant together. What one of them
    #: serves is all that its death costs.
    envoys: int = 1

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.keys_file or self.keys_script)

    def each(self, number: int, admin_path: str) -> "Options":
        """Of one of the processes; the first has number 0. `admin_path`: where its admin page is if not on a port."""
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
        """Raises `ConfigError` with a path such as `$.als` for what Envoy would refuse less clearly, or not at all."""
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
        for i, path in enumerate(self.paths):
            if _PATH.fullmatch(path) is None:
                raise ConfigError(f"is no path: /, then what URLs may have, got '{path}'", f"$.paths[{i}]")
        if self.queue_timeout < self.message_timeout:
            raise ConfigError("must not be below message_timeout", "$.queue_timeout")
        if self.decision_header and _HEADER.fullmatch(self.decision_header) is None:
            raise ConfigError("is no name for a header of ours: x- and letters, digits, hyphens", "$.decision_header")
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
    """`host:port`, `[v6]:port` or `unix:/path`. Raises `ConfigError` at `path`."""
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
    """A literal `ip:port`; Envoy dials endpoints without asking for names. Raises `ConfigError` at `path`."""
    address = parse_address(text, path)
    if address.path or not address.literal:
        raise ConfigError(f"expected a literal ip:port, got '{text}'", path)
    return address


def replace_watched(path: Path, text: str) -> None:
    """A new version of a file that Envoy watches: it looks only when one is moved there. Raises `OSError` when the disk
    does; then the old one stays."""
    aside = path.with_suffix(".new")
    aside.write_text(text)
    os.replace(aside, path)
