"""Binding the sockets of a server: TCP, or a unix socket; taking connections that another process sends."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError

LEAST_FILES = 128  # a server that is idle needs about half of them


def raise_file_limit(wanted: int) -> str | None:
    """Raise the soft limit of open files to the hard one; return a warning where ``wanted`` files cannot be open.

    Raises:
        ConfigError: the hard limit is below `LEAST_FILES`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 2**20
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if hard < LEAST_FILES:
        raise ConfigError(
            f"This process may open {hard} files (ulimit -n); a server needs {LEAST_FILES} at the least."
        )
    if hard >= wanted:
        return None
    return f"at most {hard} files may be open (ulimit -n), and as many requests as may run and wait need {wanted}"


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used, with what to change.
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


def resolved(host: str, port: int) -> tuple[str, int]:
    """Return the address that `bind` binds, as the socket's name has it.

    Raises:
        ConfigError: the host is not known.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be used: {error}. Try 127.0.0.1 or 0.0.0.0.") from error
    return str(address[0]), int(address[1])


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate chain and private key, as paths of PEM files."""

    cert: str
    key: str


def load_tls(cert: str | None, key: str | None) -> Tls | None:
    """Return the TLS settings of ``--tls-cert`` and ``--tls-key``; None without both.

    Raises:
        ConfigError: one is missing, or they cannot be loaded.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key (PEM files).", param="tls_cert")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used: {error}.", param="tls_cert"
        ) from None
    return Tls(cert, key)


def url_of(sock: socket.socket, *, secure: bool = False) -> str:
    """Return ``http://host:port`` as a client on this machine would type it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if secure else 'http'}://{host}:{port}"


def bind_admin(
    *, host: str, port: int | None, path: str | None, has_key: bool, taken: socket.socket | None = None
) -> tuple[socket.socket, str | None] | None:
    """Return the socket of an admin surface (and its path, for a unix socket), or None without port and path.

    ``taken``: the listening one of a server that ends; it is returned if it has the address that is asked for.

    Raises:
        ConfigError: both are given, the address cannot be used, or other machines could reach it without a key.
    """
    if port is not None and path is not None:
        raise ConfigError(
            "--admin-port and --admin-socket both say where the admin surface is: give one of them."
        )
    if path is not None:
        return (taken if taken is not None and _is_at(taken, path) else bind_unix(path)), path
    if port is None:
        return None
    if not has_key and not is_loopback(host):
        raise ConfigError(
            f"--admin-host {host} opens the admin surface to other machines: give it an --admin-key, or leave it at "
            "127.0.0.1."
        )
    if taken is not None and port and _is_at(taken, resolved(host, port)):
        return taken, None
    return bind(host, port), None


def _is_at(sock: socket.socket, address: str | tuple[str, int]) -> bool:
    name = sock.getsockname()
    return bool((name if isinstance(name, str) else name[:2]) == address)


def bind_unix(path: str) -> socket.socket:
    """Return a bound unix socket that only this user may use; the file of a dead server is replaced.

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
            f"--admin-socket {path} is a file that exists already, and no socket: give another path."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"--admin-socket {path}: another server listens there; give another path.")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def take_connections(
    sock: socket.socket, max_bytes: int, max_fds: int, serve: Callable[[socket.socket], None]
) -> bool:
    """Give ``serve`` each connection that another process has sent through ``sock``, which does not block.

    Returns False if that process has ended.
    """
    try:
        data, fds, _, _ = socket.recv_fds(sock, max_bytes, max_fds)
    except BlockingIOError:
        return True
    except OSError:
        return False
    for fd in fds:
        serve(socket.socket(fileno=fd))
    return bool(data)
