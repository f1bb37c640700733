"""`Supervisor`: an `EngineClient` that outlives its engine.

When the engine dies, another is started (a bounded number of times, with a growing pause), and every request in flight
is admitted again from (prompt ids, output ids). Generation is exact, so the caller sees one uninterrupted stream. When
the restarts are used up, every open sample gets its terminal error event, and then `receive` raises `EngineDeadError`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.clock import Clock
from quire.engine.build import EngineInfo
from quire.engine.client import EngineClient
from quire.engine.inbox import AbortRequest, AddRequest, FinishSample, Message, Reply
from quire.errors import EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.policy import PolicyChange
from quire.scheduler.slo import CONTROLLED

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


@dataclass(slots=True)
class _Entry:
    request: Request
    outputs: list[list[int]]  # per sample, as delivered
    finished: set[int] = field(default_factory=set)
    num_deaths: int = 0  # engines that died while this was in flight


class InFlight:
    """The book of requests in flight, in order of arrival. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._policy: dict[str, PolicyChange] = {}  # setting → the message that last changed it alone

    def __len__(self) -> int:
        return len(self._entries)

    def sent(self, message: Message) -> None:
        """Note a message on its way to the core."""
        if isinstance(message, AddRequest):
            request = message.request
            before = request.output_token_ids or ((),) * request.sampling.num_samples
            self._entries[request.request_id] = _Entry(
                request, [list(ids) for ids in before], set(request.finished_samples)
            )
        elif isinstance(message, AbortRequest):
            self._entries.pop(message.request_id, None)
        elif isinstance(message, FinishSample):
            self._finish(message.request_id, message.sample_index)
        elif isinstance(message, PolicyChange):
            self._note_policy({k: v for k, v in asdict(message).items() if v is not None})

    def received(self, events: list[TokenEvent]) -> None:
        """Note events that were delivered."""
        for event in events:
            entry = self._entries.get(event.request_id)
            if entry is None or event.sample_index in entry.finished:
                continue
            entry.outputs[event.sample_index].extend(event.token_ids)
            if event.finish_reason is not None:
                self._finish(event.request_id, event.sample_index)

    def answered(self, replies: list[Reply]) -> None:
        """Note what calls changed: only the engine knows whether it took the change."""
        for reply in replies:
            self._note_policy({k: v for k, v in reply.values.items() if reply.before.get(k, v) != v})
            if reply.pinned is not None:  # an SLO's controller has what a person does not
                self._note_policy({name: reply.values[name] for name in reply.pinned})
                for name in CONTROLLED.keys() - set(reply.pinned):
                    self._policy.pop(name, None)

    def _note_policy(self, changes: dict[str, Any]) -> None:
        self._policy.update({name: PolicyChange(**{name: value}) for name, value in changes.items()})

    def count_death(self, max_deaths: int) -> list[TokenEvent]:
        """Count a death against every request; end those that were there each of ``max_deaths`` times.

        Such a request may be what kills the engine; without it the others live.
        """
        events = []
        for request_id, entry in list(self._entries.items()):
            entry.num_deaths += 1
            if entry.num_deaths >= max_deaths:
                text = f"The engine died {entry.num_deaths} times while this request was running: it is not tried again"
                events += self._fail(request_id, text, "internal")
        return events

    def fail_all(self, error: str) -> list[TokenEvent]:
        """End everything: return the terminal event of every open sample."""
        return [
            event for request_id in list(self._entries) for event in self._fail(request_id, error, "dead")
        ]

    def readmissions(self) -> list[Message]:
        """Return the messages that bring a fresh engine to where the dead one was."""
        requests = [
            AddRequest(
                replace(
                    entry.request,
                    output_token_ids=tuple(tuple(ids) for ids in entry.outputs),
                    finished_samples=tuple(sorted(entry.finished)),
                )
            )
            for entry in self._entries.values()
        ]
        return [*self._policy.values(), *requests]

    def _finish(self, request_id: str, sample_index: int) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.finished.add(sample_index)
            if len(entry.finished) == entry.request.sampling.num_samples:
                del self._entries[request_id]

    def _fail(self, request_id: str, error: str, error_kind: str) -> list[TokenEvent]:
        entry = self._entries.pop(request_id)
        return [
            TokenEvent(
                request_id, index, finish_reason=FinishReason.ERROR, error=error, error_kind=error_kind
            )
            for index in range(entry.request.sampling.num_samples)
            if index not in entry.finished
        ]
