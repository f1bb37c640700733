"""Where the admin surface listens: a port or a unix socket of its own, beside the API in the same event loop."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Generator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from quire.api.listen import UVICORN, bind
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdminListener:
    """The admin app (`create_admin_app`) and its bound socket; ``path`` of a unix socket is removed at the end."""

    app: FastAPI
    sock: socket.socket
    path: str | None = None


def bind_admin(
    *, host: str, port: int | None, path: str | None, has_key: bool
) -> tuple[socket.socket, str | None] | None:
    """Return the socket (and its path, where it is a file), or None where neither port nor path is asked for.

    Raises:
        ConfigError: both are, the address cannot be had, or it would be open to other machines without a key.
    """
    if port is not None and path is not None:
        raise ConfigError(
            "--admin-port and --admin-socket both say where the admin surface is: give one of them."
        )
    if path is not None:
        return bind_unix(path), path
    if port is None:
        return None
    if not has_key and not _is_loopback(host):
        raise ConfigError(
            f"--admin-host {host} opens the admin surface to other machines: give it an --admin-key, or leave it at "
            "127.0.0.1."
        )
    return bind(host, port), None


def bind_unix(path: str) -> socket.socket:
    """Return a bound unix socket that only this user may use; a file that a dead server left is replaced.

    Raises:
        ConfigError: another server listens there, or the path cannot be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--admin-socket {path} cannot be used: {error.strerror or error}.") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(
            f"--admin-socket {path} is a file that is there already, and no socket: give another path."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"--admin-socket {path}: another server listens there; give another path.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AdminServer(uvicorn.Server):
    """Leaves the signals to the API's server, and ends when it is told to."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def admin_server(listener: AdminListener) -> AdminServer:
    return AdminServer(uvicorn.Config(listener.app, **UVICORN, timeout_graceful_shutdown=1))
