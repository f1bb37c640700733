"""`run`: the API under uvicorn, from bind to drain.

bind → listen (livez 200, readyz 503) ─ frontend.start() → ready (readyz 200)
frontend.start() → take over the sockets of a running server → listen, ready
another server takes over → answers what it has begun → exit 0
SIGTERM or SIGINT → draining (readyz and new requests 503) → running requests end, or the grace time → exit 0
a second signal → exit at once
SIGUSR2 → a recording of the last steps (`quire.executor.recorder`)
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from starlette.applications import Starlette

from quire.api.health import Probes
from quire.api.state import ApiState
from quire.clock import LOOK_S
from quire.engine.client import EngineInfo
from quire.engine.messages import SaveRecording
from quire.errors import ConfigError, QuireError
from quire.http.drain import DrainingServer, SideApp, served_beside
from quire.http.extension import Work
from quire.http.handover import HandoverPoint, Sides
from quire.http.listen import Tls, bind, url_of
from quire.metrics.log import Log

if TYPE_CHECKING:  # loaded with `--handover` alone
    from quire.http.takeover import Takeover

log = Log("server")
ReadyHook = Callable[[str, EngineInfo], None]  # (base URL, what the engine says of itself)


def run(
    app: Starlette,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout_s: float = 30.0,
    on_ready: ReadyHook | None = None,
    sock: socket.socket | None = None,
    admin: SideApp | None = None,
    tls: Tls | None = None,
    takeover: Takeover | None = None,
    on_leave: Callable[[], None] = lambda: None,
    probe_process: bool = True,
) -> int:
    """Serve ``app`` until a signal; return the exit status: 0 after a drain, 1 when the engine could not start.

    ``sock`` is an already bound socket, instead of ``host`` and ``port``. The frontend is started and closed here, in
    the loop that serves. ``admin`` is served beside it, from before the engine is ready until after the drain.
    ``takeover``: of the running server that ``sock`` comes from; it serves until the engine is ready. ``on_leave`` is
    called when another server has taken over from this one. ``probe_process``: see `quire.http.front`.
    """
    sock = sock if sock is not None else bind(host, port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            _Service(app, sock, admin, drain_timeout_s, on_ready, on_leave, tls, probe_process).serve(
                takeover
            )
        )


@dataclass(eq=False)
class _Service:
    """One run of the server."""

    _app: Starlette
    _sock: socket.socket
    _admin: SideApp | None
    _drain_timeout_s: float
    _on_ready: ReadyHook | None
    _on_leave: Callable[[], None]
    _tls: Tls | None
    _has_front: bool

    def __post_init__(self) -> None:
        self._state: ApiState = self._app.state.quire
        self._frontend = self._state.frontend
        self._work: Work | None = self._app.state.work
        self._open = asyncio.Event()  # set when it listens
        self._left_s: float | None = None  # when another server took over
        self._idle_sockets: list[socket.socket] = []
        self._point: HandoverPoint | None = None  # where another server asks for the sockets
        self._leave_admin: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()  # recordings

    async def serve(self, takeover: Takeover | None) -> int:
        """Serve to the end; return the exit status."""
        probes = Probes(self._state)
        self._server = DrainingServer(
            self._app,
            self._drain,
            on_cut=self._on_cut,
            ask=probes.answers if self._has_front else None,
            tls=self._tls,
        )
        self._starting = asyncio.create_task(self._start(announces=takeover is None))
        self._watch_recording_signal()
        journal = self._app.state.journal
        sweeping = asyncio.create_task(journal.run()) if journal is not None else None
        try:
            if takeover is not None and (status := await self._take(takeover)):
                return status
            async with served_beside(self._admin) as self._leave_admin:
                self._server.on_listening = partial(self._listening, takeover)
                try:
                    # A task of its own, so that this method does not run with each turn of the server.
                    await asyncio.create_task(self._server.serve([self._sock]))
                finally:
                    if self._point is not None:
                        self._point.close()
            if not self._starting.done():
                self._starting.cancel()
                return 0
            return self._starting.result()
        except asyncio.CancelledError:
            return 0
        finally:
            self._state.bodies.close()
            await self._frontend.close()
            if sweeping is not None and journal is not None:
                sweeping.cancel()
                await journal.close()

    def _watch_recording_signal(self) -> None:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR2, lambda: self._tasks.add(loop.create_task(self._record())))

    async def _record(self) -> None:
        """Save a recording, which the engine logs."""
        try:
            await self._frontend.call(SaveRecording)
        except QuireError as error:
            log.error("recording_not_saved", error=str(error))

    async def _start(self, *, announces: bool) -> int:
        try:
            await self._frontend.start()
        except QuireError as error:
            log.error("start_failed", error=str(error))
            self._server.should_exit = True
            return 1
        if announces:
            await self._open.wait()
            await self._server.refresh_probes()
            self._announce()
        prepare = getattr(self._frontend, "prepare_grammars", None)
        if prepare is not None:
            prepare()
        return 0

    def _announce(self) -> None:
        url, model = url_of(self._sock, secure=self._tls is not None), self._frontend.model
        log.info("ready", url=url, model=model.names[0], context=model.max_model_len)
        if self._on_ready is not None:
            assert self._frontend.info is not None
            self._on_ready(url, self._frontend.info)

    async def _take(self, takeover: Takeover) -> int:
        """Take over from the running server once the engine is ready; return the exit status, 0 to go on."""
        if await self._starting:
            takeover.close()
            return 1
        try:
            state = msgspec.msgpack.decode(await asyncio.to_thread(takeover.take))
        except ConfigError as error:
            log.error("start_failed", error=str(error))
            return 1
        self._state.responses.restore(state["responses"])
        if self._work is not None:
            self._work.adopt(state["work"])
        return 0

    def _listening(self, takeover: Takeover | None) -> None:
        self._open.set()
        if takeover is not None:
            takeover.serving(partial(self._server.connect, is_moved=True))
            self._announce()
        sides = Sides(self._about, self._sockets, self._stop, self._go_on, self._leave)
        self._point = HandoverPoint.open(self._sock.getsockname()[:2], sides)

    def _about(self) -> dict[str, Any]:
        info = self._frontend.info
        planned = 0 if info is None else info.weight_bytes + info.kv_bytes
        return {"engine_bytes": planned}

    def _sockets(self) -> dict[str, socket.socket]:
        return {"api": self._sock} | ({} if self._admin is None else {"admin": self._admin.sock})

    async def _stop(self) -> bytes:
        self._idle_sockets = await self._server.accept_no_more()
        work = await self._work.stop() if self._work is not None else []
        return msgspec.msgpack.encode({"responses": self._state.responses.entries(), "work": work})

    def _go_on(self) -> None:
        self._server.accept()
        for sock in self._idle_sockets:
            self._server.connect(sock)
        if self._work is not None:
            self._work.start(self._app)

    def _leave(self, give: Callable[[socket.socket], None]) -> None:
        self._left_s = self._state.now()
        self._leave_admin()
        self._on_leave()
        for sock in self._idle_sockets:
            give(sock)
        self._server.leave(give, self._drain_timeout_s)

    async def _drain(self) -> None:
        used_s = 0.0 if self._left_s is None else self._state.now() - self._left_s
        grace_s = max(0.0, self._drain_timeout_s - used_s)
        log.info("draining", requests=self._frontend.num_requests, grace_s=round(grace_s, 1))
        if (
            self._work is not None and self._work.is_on_disk
        ):  # the next server goes on with what has not ended
            self._frontend.stop_admitting()
            until_s = self._state.now() + grace_s
            while self._frontend.num_requests and self._state.now() < until_s:
                await asyncio.sleep(LOOK_S)
            await self._work.stop()
            grace_s = 0.0
        await self._frontend.drain(grace_s)

    def _on_cut(self, reason: str) -> None:
        self._state.metrics.counters[f"quire:http_{reason}s"] += 1
