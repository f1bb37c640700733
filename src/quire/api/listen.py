"""Binding the sockets of the API, and how uvicorn serves them."""

from __future__ import annotations

import socket
from typing import Any

from quire.errors import ConfigError

UVICORN: dict[str, Any] = {
    "http": "httptools",
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
}


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be had, with what to change.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be used: {error}. Try 127.0.0.1 or 0.0.0.0.") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port (0 takes a free one)."
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Return ``http://host:port`` as a client on this machine would type it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"
