"""`serve_page`: the page's process, NiceGUI under uvicorn. It loads nothing from elsewhere and writes no file."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvicorn
from fastapi import FastAPI
from nicegui import app as page_app
from nicegui import binding, ui
from setproctitle import setproctitle

from quire.http.browser_guard import BrowserGuard, BrowserRules
from quire.http.connections import WatchedProtocol
from quire_lab.cockpit.bodies import PlainBodies
from quire_lab.cockpit.forms import Commands
from quire_lab.cockpit.frame import show_frame
from quire_lab.cockpit.presence import Presence
from quire_lab.cockpit.visitors import Visitors
from quire_lab.cockpit.watched import Watched

STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the page is served: a unix socket with the life of another process, or an address."""

    uds: str | None = None
    life_fd: int | None = None
    host: str = "127.0.0.1"
    port: int = 8500
    rules: BrowserRules | None = None  # None: the server in front has judged them


def page_application(watched: Watched, rules: BrowserRules | None = None) -> FastAPI:
    """Return the page over one server or gateway; ``rules`` None: a server in front keeps foreign pages out."""
    visitors, presence = Visitors(), Presence(watched, lambda: datetime.now(UTC).timestamp())
    binding.MAX_PROPAGATION_TIME = 1.0  # seconds; it would warn on any busy machine

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await watched.close()

    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    page_app.add_static_files("/cockpit/static", STATIC)

    async def show() -> None:
        await show_frame(watched, presence, visitors.of(str(page_app.storage.browser["id"])))

    ui.page("/")(show)
    ui.page("/cockpit/{rest:path}")(show)
    ui.run_with(
        application,
        title="Quire",
        favicon=STATIC / "quire.svg",
        dark=None,
        language="en-US",
        tailwind=False,
        binding_refresh_interval=0.25,
        storage_secret=secrets.token_hex(),
        reconnect_timeout=10.0,
        show_welcome_message=False,
    )
    application.add_middleware(PlainBodies)
    if rules is not None:
        application.add_middleware(BrowserGuard, rules=rules)
    return application


def serve_page(url: str, admin_url: str | None, listen: Listen, commands: bytes) -> int:
    """Serve the page over the server at ``url`` until a signal, or the end of the process that started it.

    ``commands``: a `Commands` as JSON.
    """
    setproctitle("quire: cockpit")
    known = msgspec.json.decode(commands, type=Commands)
    watched = Watched(url, admin_url, is_own=listen.uds is not None, commands=known)
    application = page_application(watched, listen.rules)
    config = uvicorn.Config(
        application,
        host=listen.host,
        port=listen.port,
        uds=listen.uds,
        http=WatchedProtocol,
        log_level="warning",
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=16 << 20,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        if listen.life_fd is not None:
            life = socket.socket(fileno=listen.life_fd)
            asyncio.get_running_loop().add_reader(life, lambda: setattr(server, "should_exit", True))
        await server.serve()

    asyncio.run(run())
    return 0 if server.started else 1
