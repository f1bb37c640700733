"""`quire cockpit`, and the page of ``quire serve --cockpit``."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError
from quire.http.listen import bind, is_loopback, url_of

FORMS = ("plan", "simulate")
HIDDEN = {"help", "help_all", "config", "json", "jsonl", "html", "beside"}  # of a terminal, or they write files


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
    commands = commands_of(local=is_loopback(sock.getsockname()[0]))
    process = PageProcess(url_of(sock, secure=secure), admin_url, commands)
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
        listen = Listen(host=host, port=port)
        return serve_page(address, admin_url, listen, commands_of(local=is_loopback(host)))


def commands_of(*, local: bool) -> bytes:
    """Return the flags of the commands that the page has forms of, as JSON (`quire.cockpit.forms.Commands`)."""
    import typer

    from quire.args import EngineArgs, ServerArgs, settings_of
    from quire.bench.args import ServeBenchArgs, SimulateArgs
    from quire.cli import app
    from quire.cli.flags import PlanArgs
    from quire.plan.hardware import hardware_table
    from quire.plan.presets import presets

    choices: dict[str, tuple[str, ...]] = {}
    for kind in (ServerArgs, EngineArgs, ServeBenchArgs, SimulateArgs, PlanArgs):
        choices |= {name: each.choices for name, each in settings_of(kind).items()}  # type: ignore[arg-type]

    suggested = {"gpu": (*hardware_table(),), "hardware": (*hardware_table(),), "model": ("quill", *presets())}
    group: Any = typer.main.get_command(app)
    found: dict[str, list[dict[str, Any]]] = {}
    for command in FORMS:
        found[command] = [
            {
                "name": each.name,
                "flag": each.opts[0] if each.opts[0].startswith("-") else "",
                "help": each.help or "",
                "panel": getattr(each, "rich_help_panel", None) or "Model",
                "kind": "bool" if getattr(each, "is_flag", False) else "choice" if choices.get(each.name) else "text",
                "choices": choices.get(each.name, ()),
                "suggested": suggested.get(each.name, ()),
                "negative": each.secondary_opts[0] if each.secondary_opts and "(on" in each.help else "",
            }
            for each in group.commands[command].params
            if each.name not in HIDDEN
        ]
    return msgspec.json.encode({"flags": found, "local": local})
