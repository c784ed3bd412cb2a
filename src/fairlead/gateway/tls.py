"""TLS for servers: a certificate and its key from files, which are read again when they change.

Kubernetes replaces a mounted secret by moving a symbolic link, so a change is visible in the files' identity (inode,
modification time, size). A new pair is loaded into a new context. If loading fails, because the pair is half-written,
cannot be read, does not match or has expired, the old pair stays unless that has expired too, the problem is logged
once, and each check tries again. Handshakes take the current context in the SNI callback, which OpenSSL calls for every
handshake. Open connections are not affected.
"""

import asyncio
import logging
import os
import re
import resource
import select
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import cast

from fairlead.core.errors import ConfigError

log = logging.getLogger(__name__)

#: RFC 9113, 9.2.2 forbids the other suites of TLS 1.2. All suites of TLS 1.3 are allowed.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

#: A certificate that expires is reported so many seconds before, or in the last twentieth of its life if that is later.
_SOON_S = 7 * 86400.0

#: On one port: handshakes at once, each of which takes 300 KiB; connections that wait for their handshake; and those
#: that have sent nothing yet, with two descriptors each. The latter two are fewer if the process may open few files: an
#: eighth and a sixteenth of them. Beyond that the oldest makes room. A handshake also makes room for waiting ones after
#: `AGED_S` seconds; an honest one takes milliseconds.
MOST_HANDSHAKES, MOST_WAITING, MOST_SILENT, AGED_S = 64, 1024, 512, 1.0

_Identity = tuple[tuple[int, int, int], ...]


class ServerTls:
    """A reloadable certificate. `context` is for asyncio's servers and stays valid after reloads."""

    def __init__(
        self,
        certificate: str | Path,
        key: str | Path,
        *,
        check_interval: float = 5.0,
        protocol: str = "h2",
        required: bool = True,
        today: Callable[[], float] = time.time,
    ) -> None:
        """The files are PEM. `protocol`: ALPN name. `today`: seconds since 1970. Times are in seconds. If the files
        cannot be used, raise `ConfigError` if they are `required`; else all handshakes fail until they can be.
        """
        self._certificate = str(certificate)
        self._key = str(key)
        self._interval = check_interval
        self._protocol = protocol
        self._today = today
        self._checked = float("-inf")
        #: Successful reloads.
        self.reloads = 0
        #: Why the newest files cannot be used, and why there are none; empty = they are in use. Files that are missing
        #: only once are just being replaced.
        self._unusable = self._missing = ""
        self._missed = False
        #: The PEM texts in use, for servers that take no context: key, certificate chain.
        self.pem: tuple[bytes, bytes]
        self._identity: _Identity = ()
        #: From when to when the certificate in use is valid, and what was last logged about that.
        self._valid, self._logged = (-inf, inf), ""
        try:
            identity = self._identify()
            self.context = self._current = self._load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            if required:
                raise ConfigError(f"TLS files {self._certificate}, {self._key}: {error}") from error
            self.context = self._current = self._empty()
        else:
            self._identity = identity
        self.context.sni_callback = self._choose

    @classmethod
    def from_directory(cls, directory: str | Path, *, protocol: str = "h2", required: bool = True) -> "ServerTls":
        """Load `tls.crt` and `tls.key`, the files of a mounted Kubernetes TLS secret."""
        base = Path(directory)
        return cls(base / "tls.crt", base / "tls.key", protocol=protocol, required=required)

    def refresh(self, now: float) -> bool:
        """Check the files, at most every `check_interval` seconds of `now`. Return whether a new pair is in use."""
        if now - self._checked < self._interval:
            return False
        self._checked = now
        changed, expiry = self.reload(), self.expiry()
        if expiry and expiry != self._logged:
            log.warning("%s", expiry)
        self._logged = expiry
        return changed

    def trouble(self, now: float) -> str:
        """Check the files as `refresh` does. Return why they cannot be used, or not for long; empty = nothing."""
        self.refresh(now)
        problem, expiry = self._missing or self._unusable, self.expiry()
        now_used = "the certificate read before stays in use" if self._identity else "nobody can connect"
        return "; ".join(([problem, now_used] if problem else []) + ([expiry] if expiry else []))

    def expiry(self) -> str:
        """Why clients refuse the certificate in use, or soon will, for its age; empty = it is valid for some time."""
        (begins, ends), now = self._valid, self._today()
        name = f"TLS certificate {self._certificate}"
        if now >= ends:
            return f"{name} expired on {_day(ends)}: clients that check it refuse it"
        if now < begins:
            return f"{name} is not valid before {_day(begins)}: clients that check it refuse it"
        return f"{name} expires on {_day(ends)}" if ends - now < min(_SOON_S, (ends - begins) / 20) else ""

    def reload(self) -> bool:
        """Check the files now. Return whether a new pair is in use. Never raises."""
        try:
            identity = self._identify()
        except OSError as error:
            self._missing = f"{error.filename}: {error.strerror}" if self._missed else ""
            self._missed = True
            return False
        self._missing, self._missed = "", False
        if identity == self._identity:
            self._unusable = ""
            return False
        try:
            self._current = self._load()
        except (OSError, ValueError) as error:
            problem = f"TLS files {self._certificate} and {self._key} cannot be used: {error}"
            if problem != self._unusable:
                stays = "the old one stays" if self._identity else "nobody can connect"
                log.warning("cannot load a certificate, %s: %s", stays, problem)
            self._unusable = problem
            return False
        self._identity, self._unusable = identity, ""
        self.reloads += 1
        log.info("TLS certificate %s reloaded", self._certificate)
        return True

    def _identify(self) -> _Identity:
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in map(os.stat, (self._certificate, self._key)))

    def _load(self) -> ssl.SSLContext:
        context = self._empty()
        # Without it OpenSSL would ask at the terminal for the password of an encrypted key.
        context.load_cert_chain(self._certificate, self._key, password=_no_password)
        pem = (Path(self._key).read_bytes(), Path(self._certificate).read_bytes())
        valid = validity(pem[1])
        if self._identity and valid[1] <= self._today() < self._valid[1]:
            raise ValueError(f"the new certificate expired on {_day(valid[1])}")
        self.pem, self._valid = pem, valid
        return context

    def _empty(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols([self._protocol])
        return context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current


def _day(seconds: float) -> str:
    """A time in seconds since 1970 as a text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _no_password() -> str:
    raise ValueError("the key is encrypted")


class Handshakes:
    """The TLS handshakes of a port's new connections, which asyncio's own servers do not limit. A handshake begins with
    the client's first byte, and waits for its turn if `MOST_HANDSHAKES` are in progress."""

    def __init__(
        self,
        context: ssl.SSLContext,
        timeout_s: float,
        connect: Callable[[asyncio.Transport], asyncio.BaseProtocol | None],
    ) -> None:
        """`connect` gives a connection whose handshake is over its protocol, and returns it; `None` = it was closed.
        `timeout_s`: for the first byte, and for the handshake."""
        self._context, self._timeout_s, self._connect = context, timeout_s, connect
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_waiting, self._most_silent = min(MOST_WAITING, files // 8), min(MOST_SILENT, files // 16)
        #: Oldest first: connections without a byte, each with a descriptor to wait on and its timeout; those that wait
        #: for their turn; handshakes, each with the clock seconds of its beginning.
        self._silent: dict[asyncio.Transport, tuple[int, asyncio.TimerHandle]] = {}
        self._waiting: dict[asyncio.Transport, _Handshake] = {}
        self._open: dict[asyncio.Transport, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.TimerHandle | None = None
        #: Whether the newest was the last to get its turn.
        self._newest = False

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a connection that was just accepted, for a server without TLS."""
        return _Handshake(self._await_byte)

    def close(self) -> None:
        """Break off those that are not over."""
        for transport in list(self._silent):
            self._give_up(transport)
        for transport in (*self._waiting, *self._open):
            transport.abort()
        self._waiting.clear()
        if self._looking is not None:
            self._looking.cancel()

    def _await_byte(self, handshake: "_Handshake", transport: asyncio.Transport) -> None:
        transport.pause_reading()  # what comes first is the handshake's
        loop = asyncio.get_running_loop()
        try:
            waiting = os.dup(transport.get_extra_info("socket").fileno())  # the transport has its own to itself
        except OSError:
            transport.abort()
            return
        poll = select.poll()
        poll.register(waiting, select.POLLIN)
        if poll.poll(0):
            os.close(waiting)
            self._enqueue(handshake, transport)
            return
        if len(self._silent) >= self._most_silent:
            self._give_up(next(iter(self._silent)))
        self._silent[transport] = waiting, loop.call_later(self._timeout_s, self._give_up, transport)
        loop.add_reader(waiting, self._on_byte, handshake, transport)

    def _on_byte(self, handshake: "_Handshake", transport: asyncio.Transport) -> None:
        self._unwatch(transport)
        self._enqueue(handshake, transport)

    def _unwatch(self, transport: asyncio.Transport) -> None:
        waiting, timer = self._silent.pop(transport)
        timer.cancel()
        asyncio.get_running_loop().remove_reader(waiting)
        os.close(waiting)

    def _give_up(self, transport: asyncio.Transport) -> None:
        self._unwatch(transport)
        transport.abort()

    def _enqueue(self, handshake: "_Handshake", transport: asyncio.Transport) -> None:
        if len(self._waiting) >= self._most_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[transport] = handshake
        self._begin()

    def _begin(self) -> None:
        """Begin the handshakes whose turn it is: in turn the newest and the oldest one that waits, so that nobody waits
        behind all who only hold a place. If others wait, end those that are aged."""
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._open) < MOST_HANDSHAKES:
            self._newest = not self._newest
            transport = next(reversed(self._waiting) if self._newest else iter(self._waiting))
            handshake = self._waiting.pop(transport)
            if transport.is_closing():
                continue
            self._open[transport] = loop.time()
            task = loop.create_task(self._shake(handshake, transport))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._waiting and self._looking is None:
            self._looking = loop.call_later(AGED_S / 4, self._look)

    def _look(self) -> None:
        self._looking = None
        aged = asyncio.get_running_loop().time() - AGED_S
        for transport in [transport for transport, begun in self._open.items() if begun <= aged]:
            transport.abort()
        self._begin()

    async def _shake(self, handshake: "_Handshake", transport: asyncio.Transport) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, handshake, self._context, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # ssl.SSLError is one, and so are timeouts and aborts
            transport.abort()
            return
        finally:
            self._open.pop(transport, None)
            self._begin()
        if secured is None or handshake.lost:
            return
        try:
            protocol = self._connect(secured)
        except Exception:
            secured.abort()
            log.exception("cannot serve a connection whose handshake is over")
            return
        if protocol is not None:
            handshake.hand_over(protocol)


class _Handshake(asyncio.Protocol):
    """The protocol of a connection until its handshake is over. Keeps what arrives in between."""

    def __init__(self, begin: "Callable[[_Handshake, asyncio.Transport], None]") -> None:
        self._begin = begin
        self._data = bytearray()
        self._ended = self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._begin(self, cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._data += data

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def hand_over(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the protocol what has arrived already."""
        data = memoryview(bytes(self._data))
        if isinstance(protocol, asyncio.BufferedProtocol):
            while data:
                buffer = memoryview(protocol.get_buffer(-1))
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                protocol.buffer_updated(size)
                data = data[size:]
        elif isinstance(protocol, asyncio.Protocol) and data:
            protocol.data_received(bytes(data))
        if self._ended and isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol):
            protocol.eof_received()


# From when to when a certificate is valid. Python's `ssl` tells that only of certificates that a peer has shown.

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
#: Tags of DER: the version of a certificate, and a time whose year has two digits (RFC 5280, 4.1).
_VERSION, _UTC_TIME = 0xA0, 0x17


def validity(pem: bytes) -> tuple[float, float]:
    """From when to when the first certificate of a PEM text is valid, in seconds since 1970. What cannot be read is
    valid for ever."""
    block = _BLOCK.search(pem)
    if block is None:
        return -inf, inf
    try:
        der = ssl.PEM_cert_to_DER_cert(block[0].decode())
        position, _ = _content(der, 0)  # the certificate's first part
        position, _ = _content(der, position)
        if der[position] == _VERSION:
            _, position = _content(der, position)
        for _ in range(3):  # serial number, algorithm, issuer
            _, position = _content(der, position)
        position, _ = _content(der, position)
        return _time(der, position), _time(der, _content(der, position)[1])
    except (ValueError, IndexError, OverflowError):
        return -inf, inf


def _content(der: bytes, position: int) -> tuple[int, int]:
    """The first and the last offset, exclusive, of the content of the value at this offset."""
    length, start = der[position + 1], position + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    return start, start + length


def _time(der: bytes, position: int) -> float:
    start, end = _content(der, position)
    text = der[start:end].decode("ascii")
    if der[position] == _UTC_TIME:
        text = ("20" if text < "5" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
