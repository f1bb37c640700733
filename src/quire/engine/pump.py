"""`EventPump`: the thread that waits for an engine's events and hands them to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from quire.engine.client import EngineClient, EngineInfo
from quire.engine.inbox import Reply
from quire.errors import EngineDeadError, QuireError
from quire.metrics.log import Log
from quire.request import TokenEvent

log = Log("frontend")


class EventPump:
    """Calls ``on_ready`` once, ``on_events`` for each step, ``on_replies`` where calls were answered, ``on_death`` at
    most once, but not after `stop`.

    All calls are made in the loop's thread.
    """

    def __init__(
        self,
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,
        *,
        on_ready: Callable[[EngineInfo], None],
        on_events: Callable[[list[TokenEvent]], None],
        on_replies: Callable[[list[Reply]], None],
        on_death: Callable[[QuireError], None],
    ) -> None:
        self._client = client
        self._loop = loop
        self._on_ready = on_ready
        self._on_events = on_events
        self._on_replies = on_replies
        self._on_death = on_death
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Close the client, which wakes the thread, and wait for the thread's end."""
        self._stopping = True
        await asyncio.to_thread(self._client.close)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._post(self._on_ready, self._client.wait_ready())
            while not self._stopping:
                events = self._client.receive()
                if events:
                    self._post(self._on_events, events)
                if replies := self._client.replies():
                    self._post(self._on_replies, replies)
        except QuireError as error:
            self._die(error)
        except Exception as error:  # a bug; the streams have to end all the same
            log.exception("pump_failed")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _die(self, error: QuireError) -> None:
        if not self._stopping:
            self._post(self._on_death, error)

    def _post(self, call: Callable[..., None], argument: object) -> None:
        # A loop that was closed meanwhile has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)
