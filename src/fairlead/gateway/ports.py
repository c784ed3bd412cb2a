"""TCP ports: check that a port is free before a server is started, and open listening sockets."""

import contextlib
import socket
from ipaddress import ip_address

#: Every address of the machine, IPv4 and IPv6; only IPv4 on a machine without IPv6.
EVERYWHERE = "::"


def obstacle(host: str, port: int) -> OSError | None:
    """Why no server can listen on a port; `None` = it is free. `host` is an IP address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A server that just ended leaves connections in TIME_WAIT, which do not matter with this option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def bindable(host: str) -> str:
    """The address for a server that does not do without IPv6 by itself."""
    return "0.0.0.0" if host == EVERYWHERE and not socket.has_dualstack_ipv6() else host


def dialled(host: str) -> str:
    """Where this machine reaches who listens on `host`."""
    with contextlib.suppress(ValueError):  # a name
        return "127.0.0.1" if ip_address(host).is_unspecified else host
    return "127.0.0.1" if host == "localhost" else host


def listen_address(text: str) -> tuple[str, int]:
    """The host and port of `HOST:PORT`, where 0 = any free port, or of `:PORT`. Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536):
        raise ValueError("expected HOST:PORT, or :PORT for every address, and a port up to 65535")
    return host.strip("[]") or EVERYWHERE, int(port)


def listening_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """One socket per address of `host` (empty = `EVERYWHERE`), all on the same port, also when `port` is 0.

    Raises `OSError` if the port is taken or the host has no address.
    """
    if host in ("", EVERYWHERE):
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be compiled in but disabled
                everywhere = ("", port)
                return [
                    _prompt(
                        socket.create_server(everywhere, family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
                    )
                ]
        return [_prompt(socket.create_server(("", port), backlog=backlog))]
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((info[0], info[4][0]) for info in infos):
            sockets.append(_prompt(socket.create_server((str(address), port), family=family, backlog=backlog)))
            port = sockets[0].getsockname()[1]
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _prompt(listener: socket.socket) -> socket.socket:
    """Set TCP_NODELAY, which accepted sockets inherit. asyncio sets it only on sockets with TCP's protocol number, but
    `socket.create_server` uses 0. Then small writes would wait up to 40 ms for the peer's delayed ACK."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
