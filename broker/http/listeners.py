"""Listening sockets of a gateway: one process alone on its port, or several that share it.

Processes that share a port each bind it with ``SO_REUSEPORT``, and the kernel spreads new connections over them by a hash of
both ends' addresses. It lets only processes of one user share. A connection stays with its process.
"""

from __future__ import annotations

import ipaddress
import socket

from subjects.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """``http://host:port``"""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket on ``host:port`` that does not listen yet; port 0 takes any free one. ``shared``: others may bind it too.

    Raises:
        ConfigError: there is no such address, or another process has the port.
    """
    try:
        family, _, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise ConfigError(f"--host {host}: is no address of this machine") from None
    # asyncio does not see that a socket without a named protocol is TCP, and leaves the 40 ms of Nagle's algorithm on.
    bound = socket.socket(family, socket.SOCK_STREAM, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {host}:{port} ({error.strerror}); take another one, or 0"
        ) from None
    bound.setblocking(False)
    return bound


def reserve(host: str, port: int) -> socket.socket:
    """Keeps a port for processes that will share it, as long as the socket is open. It takes no connections itself.

    Raises:
        ConfigError: there is no such address, or another process has the port, be it one that would share.
    """
    with bind(host, port) as alone:
        port = alone.getsockname()[1]
    return bind(host, port, shared=True)
