"""`Supervisor`: an `EngineClient` that outlives its engine.

When the engine dies, another is started (a bounded number of times, with a growing pause), and every request in flight
is admitted again from (prompt ids, output ids). Generation is exact, so the caller sees one uninterrupted stream. When
the restarts are used up, every open sample gets its terminal error event, and then `receive` raises `EngineDeadError`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.clock import Clock
from quire.engine.client import EngineClient, EngineInfo
from quire.engine.in_flight import InFlight
from quire.engine.inbox import Message, Reply
from quire.errors import EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import TokenEvent

log = Log("supervisor")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often an engine is started again."""

    max_restarts: int = 3  # within any window_s
    window_s: float = 600.0
    backoff_s: float = 0.25  # before the second restart in a window; doubles with each
    max_deaths: int = 3  # a request in flight in this many deaths is failed, not admitted again


class Supervisor:
    """Wraps the client of a first engine and starts others like it; an `EngineClient` itself."""

    def __init__(
        self,
        first: EngineClient,
        restart: Callable[[], EngineClient],
        clock: Clock,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._client = first
        self._restart = restart
        self._clock = clock
        self._policy = policy or RestartPolicy()
        self._book = InFlight()
        self._lock = threading.Lock()  # guards the book and which client is the current one
        self._closed = threading.Event()
        self._restarts_s: deque[float] = deque()
        self._ended: list[TokenEvent] = []  # terminal events made here, to be received next
        self._between = False  # one engine is dead and the next not ready: the book alone takes messages
        self._dead: EngineDeadError | None = None
        self.num_restarts = 0

    def wait_ready(self) -> EngineInfo:
        """As `EngineClient.wait_ready`. An engine that cannot load at first is not started again."""
        return self._client.wait_ready()

    def send(self, message: Message) -> None:
        """As `EngineClient.send`; a request that comes between two engines goes to the next one."""
        with self._lock:
            self._book.sent(message)
            if self._dead is not None:
                self._ended += self._book.fail_all(str(self._dead))
            elif not self._between:
                self._client.send(message)

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """As `EngineClient.receive`; blocks longer than ``timeout_s`` while an engine is being restarted."""
        with self._lock:
            if self._ended:
                events, self._ended = self._ended, []
                return events
            if self._dead is not None:
                raise self._dead
        try:
            events = self._client.receive(timeout_s)
        except EngineDeadError as error:
            if self._closed.is_set():
                return []
            return self._replace(error)
        with self._lock:
            self._book.received(events)
        return events

    def replies(self) -> list[Reply]:
        """As `EngineClient.replies`. What is asked of an engine that dies is not answered."""
        with self._lock:
            replies = self._client.replies()
            self._book.answered(replies)
        return replies

    def stats(self) -> EngineStats:
        """As `EngineClient.stats`."""
        return self._client.stats()

    def close(self) -> None:
        """As `EngineClient.close`; also ends a restart that is under way."""
        self._closed.set()
        with self._lock:
            client = self._client
        client.close()

    def _replace(self, error: EngineDeadError) -> list[TokenEvent]:
        """Start engines until one is ready; return the terminal events that the death caused."""
        with self._lock:
            self._between = True
            ended = self._book.count_death(self._policy.max_deaths)
        reason: QuireError = error
        while not self._closed.is_set():
            if not self._may_restart():
                return ended + self._give_up(reason)
            log.error("engine_died", error=reason, in_flight=len(self._book), restart=self.num_restarts)
            client = self._start()
            if client is None:
                break
            try:
                client.wait_ready()
            except QuireError as failure:
                reason = failure
                continue
            self._readmit(client)
            return ended
        return ended

    def _may_restart(self) -> bool:
        now_s = self._clock.now()
        while self._restarts_s and now_s - self._restarts_s[0] > self._policy.window_s:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self._policy.max_restarts:
            return False
        if self._restarts_s:
            self._closed.wait(self._policy.backoff_s * 2 ** (len(self._restarts_s) - 1))
        self._restarts_s.append(now_s)
        self.num_restarts += 1
        return True

    def _start(self) -> EngineClient | None:
        """Put a new client in the place of the dead one; None when closed meanwhile."""
        self._client.close()
        client = self._restart()
        with self._lock:
            if not self._closed.is_set():
                self._client = client  # before it is ready, so that `close` reaches it
                return client
        client.close()
        return None

    def _readmit(self, client: EngineClient) -> None:
        with self._lock:
            for message in self._book.readmissions():
                client.send(message)
            self._between = False
        log.warning("engine_restarted", in_flight=len(self._book))

    def _give_up(self, reason: QuireError) -> list[TokenEvent]:
        text = (
            f"The engine died and {len(self._restarts_s)} restarts did not help (max_restarts = "
            f"{self._policy.max_restarts}): {reason}"
        )
        with self._lock:
            self._dead = EngineDeadError(text)
            return self._book.fail_all(text)
