"""`quire cockpit`, and the page of ``quire serve --cockpit``."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.http.listen import bind, url_of


def check_installed() -> None:
    """Raise ConfigError where the extra `cockpit` is missing."""
    if importlib.util.find_spec("nicegui") is None:
        raise ConfigError("The cockpit needs NiceGUI: pip install 'quire[cockpit]'.", param="cockpit")


def page_of(app: Any, sock: socket.socket, admin: Any, *, secure: bool) -> Any:
    """Start the page's process and put it at ``/`` of ``app``; the caller closes it."""
    check_installed()
    from quire.cockpit.process import PageProcess, PageProxy

    admin_url = None
    if admin is not None:
        admin_url = f"unix:{admin.path}" if admin.path is not None else url_of(admin.sock)
    process = PageProcess(url_of(sock, secure=secure), admin_url)
    app.add_middleware(PageProxy, process=process)
    return process


def cockpit(url: str, host: str, port: int, admin_url: str | None) -> int:
    """Serve the page over a running server until a signal; return the exit status."""
    check_installed()
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000.")
    bind(host, port).close()
    with tempfile.TemporaryDirectory(prefix="quire-page-") as folder:
        os.environ["NICEGUI_STORAGE_PATH"] = folder
        from quire.cockpit.app import Listen, serve_page

        address = parts.geturl().removesuffix("/v1").removesuffix("/v1/")
        print(f"cockpit  of {address} on http://{host}:{port}", file=sys.stderr, flush=True)
        return serve_page(address, admin_url, Listen(host=host, port=port))
