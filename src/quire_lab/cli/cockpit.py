"""`quire cockpit`, and the page of ``quire serve --cockpit``."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import tempfile
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from quire.args import EngineArgs, ServerArgs, comma_list, settings_of
from quire.cli.flags import PlanArgs, command_with
from quire.cost.hardware import hardware_table
from quire.cost.presets import presets
from quire.errors import ConfigError
from quire.http.browser_guard import BrowserRules, allowed_hosts, open_note
from quire.http.listen import bind, is_loopback, url_of
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.cli.measure import simulate
from quire_lab.sim.scenario import SCENARIOS

# Flags that belong to a terminal or write files.
PLANNED_MODEL = "A preset or hub id, a local folder, or 'quill'."
HIDDEN = {
    "help",
    "help_all",
    "config",
    "json",
    "jsonl",
    "html",
    "beside",
    "versus",
    "draws",
}


def start_page(app: Any, sock: socket.socket, admin: Any, *, secure: bool) -> Any:
    """Start the page's process and put it at ``/`` of ``app``; the caller closes it.

    Raises:
        ConfigError: the extra `cockpit` is missing.
    """
    from starlette.middleware import Middleware

    from quire.http.browser_guard import BrowserGuard, BrowserRules
    from quire_lab.cockpit.process import PageProcess, PageProxy

    admin_url = None
    if admin is not None:
        admin_url = f"unix:{admin.path}" if admin.path is not None else url_of(admin.sock)
    commands = commands_of(local=is_loopback(sock.getsockname()[0]))
    process = PageProcess(url_of(sock, secure=secure), admin_url, commands)
    settings = app.state.quire.settings
    rules = BrowserRules(settings.cors_origins, settings.allowed_hosts)
    app.user_middleware[:0] = [Middleware(BrowserGuard, rules=rules), Middleware(PageProxy, process=process)]
    return process


def cockpit(url: str, host: str, port: int, admin_url: str | None, hosts: str | None = None) -> int:
    """Serve the page over a running server until a signal; return the exit status.

    Raises:
        ConfigError: the extra `cockpit` is missing, or the address is none.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000.")
    sock = bind(host, port)
    address, names = sock.getsockname()[0], comma_list(hosts)
    sock.close()
    rules = BrowserRules(hosts=allowed_hosts(address, names))
    with tempfile.TemporaryDirectory(prefix="quire-page-") as folder:
        os.environ["NICEGUI_STORAGE_PATH"] = folder
        from quire_lab.cockpit.app import Listen, serve_page

        server = parts.geturl().removesuffix("/v1").removesuffix("/v1/")
        print(f"cockpit  of {server} on http://{host}:{port}", file=sys.stderr, flush=True)
        note = open_note(address, names, has_keys=False, option="those of the server that it shows")
        if note is not None:
            print(note, file=sys.stderr, flush=True)
        listen = Listen(host=host, port=port, rules=rules)
        return serve_page(server, admin_url, listen, commands_of(local=is_loopback(host)))


def commands_of(*, local: bool) -> bytes:
    """Return the flags of the commands that the page has forms of, as JSON (`quire_lab.cockpit.forms.Commands`)."""
    suggested = {
        "gpu": (*hardware_table(),),
        "hardware": (*hardware_table(),),
        "model": ("quill", *presets()),
        "scenario": SCENARIOS,
    }
    choices: dict[str, tuple[str, ...]] = {}
    for kind in (ServerArgs, EngineArgs, ServeBenchArgs, SimulateArgs, PlanArgs):
        choices |= {name: setting.choices for name, setting in settings_of(kind).items()}
    model = {
        "name": "model",
        "flag": "",
        "help": PLANNED_MODEL,
        "panel": "Model",
        "suggested": suggested["model"],
    }
    commands = {"plan": command_with(PlanArgs, skip=("model",))(_plan), "simulate": simulate}
    by_command: dict[str, list[dict[str, Any]]] = {"plan": [model], "simulate": []}
    for command, function in commands.items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in HIDDEN:
                python_type, option = get_args(parameter.annotation)
                name, _, negative = str(option.default).partition("/")
                is_bool = bool in get_args(python_type)
                by_command[command].append(
                    {
                        "name": parameter.name,
                        "flag": name,
                        "help": option.help,
                        "panel": option.rich_help_panel,
                        "kind": "bool" if is_bool else "choice" if choices.get(parameter.name) else "text",
                        "choices": choices.get(parameter.name, ()),
                        "suggested": suggested.get(parameter.name, ()),
                        "negative": negative if "(on" in option.help else "",
                    }
                )
    return msgspec.json.encode({"flags": by_command, "local": local})


def _plan(*, settings: dict[str, Any]) -> None:
    """Has the flags of `quire plan`."""
