"""TCP ports: whether one is free before something is started that needs it, and the sockets that listen on one."""

import contextlib
import socket


def obstacle(host: str, port: int) -> OSError | None:
    """Why nobody can listen there; `None` = somebody can. `host` is an IP address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A server that has just ended leaves connections in TIME_WAIT, which hinder nobody that sets this option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def listening_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """One socket per address of `host` (empty = all, IPv4 and IPv6), all on the same port, also when `port` is 0.

    Raises `OSError` when the port is taken or the host has no address.
    """
    if not host:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be compiled in and switched off
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
    """With TCP_NODELAY, which accepted sockets inherit. asyncio sets it only on sockets whose protocol number is TCP's;
    `socket.create_server` gives 0, and then small writes wait up to 40 ms for the peer's delayed ACK."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
