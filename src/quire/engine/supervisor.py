"""`Supervisor`: an `EngineClient` that outlives its engine.

When the engine dies, the supervisor starts another (a bounded number of times, with a growing pause) and admits every
request in flight again from its prompt and output ids. Generation is exact, so the caller sees one uninterrupted
stream. When the restarts are used up, every open sample gets its terminal error event; after that `receive` raises
`EngineDeadError`.
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
from quire.engine.core import AbortRequest, AddRequest, FinishSample, Message, Reply
from quire.errors import EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.policy import PolicyChange
from quire.scheduler.slo import CONTROLLED

log = Log("supervisor")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a dead engine is replaced."""

    max_restarts: int = 3  # within any window_s
    window_s: float = 600.0
    backoff_s: float = 0.25  # before the second restart in a window; doubles with each
    max_deaths: int = 3  # a request that was in flight in this many deaths is failed, not admitted again


class Supervisor:
    """Wraps the client of a first engine and starts replacements for it; an `EngineClient` itself."""

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
        self._record = InFlight()
        self._lock = threading.Lock()  # guards the record and which client is current
        self._closed = threading.Event()
        self._restarts_s: deque[float] = deque()
        self._ended: list[TokenEvent] = []  # terminal events made here, for the next `receive`
        self._between = False  # one engine is dead and the next is not ready: messages are only recorded
        self._dead: EngineDeadError | None = None
        self.num_restarts = 0

    def wait_ready(self) -> EngineInfo:
        """As `EngineClient.wait_ready`. A first engine that cannot load is not replaced."""
        return self._client.wait_ready()

    def send(self, message: Message) -> None:
        """As `EngineClient.send`; a request that arrives between two engines goes to the next one."""
        with self._lock:
            if self._dead is None and not self._between:
                self._client.send(message)  # may fail: then the caller knows, and nothing was recorded
            self._record.sent(message)
            if self._dead is not None:
                self._ended += self._record.fail_all(str(self._dead))

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """As `EngineClient.receive`; blocks longer than ``timeout_s`` while an engine is being replaced."""
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
            self._record.received(events)
        return events

    def replies(self) -> list[Reply]:
        """As `EngineClient.replies`. A call to an engine that dies gets no reply."""
        with self._lock:
            replies = self._client.replies()
            self._record.answered(replies)
        return replies

    def stats(self) -> EngineStats:
        """As `EngineClient.stats`."""
        return self._client.stats()

    def close(self) -> None:
        """As `EngineClient.close`; also ends a restart in progress."""
        self._closed.set()
        with self._lock:
            client = self._client
        client.close()

    def _replace(self, error: EngineDeadError) -> list[TokenEvent]:
        """Start engines until one is ready; return the terminal events that the death caused."""
        with self._lock:
            self._between = True
            ended = self._record.count_death(self._policy.max_deaths)
        reason: QuireError = error
        while not self._closed.is_set():
            if not self._may_restart():
                return ended + self._give_up(reason)
            log.error("engine_died", error=reason, in_flight=len(self._record), restart=self.num_restarts)
            client = self._start()
            if client is None:
                break
            try:
                client.wait_ready()
            except QuireError as failure:
                reason = failure
                continue
            return ended + self._readmit(client)
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
        """Replace the dead client by a new one; None if closed meanwhile."""
        self._client.close()
        client = self._restart()
        with self._lock:
            if not self._closed.is_set():
                self._client = client  # before it is ready, so that `close` can reach it
                return client
        client.close()
        return None

    def _readmit(self, client: EngineClient) -> list[TokenEvent]:
        """Send what is in flight to the new engine. A request that cannot be sent fails alone: return its events."""
        failed: list[TokenEvent] = []
        with self._lock:
            for message in self._record.readmissions():
                try:
                    client.send(message)
                except Exception as error:  # recorded while there was no engine to send it to
                    log.exception("readmission_failed")
                    if isinstance(message, AddRequest):
                        text = f"The request cannot be sent to the engine: {type(error).__name__}: {error}"
                        failed += self._record.fail(message.request.request_id, text, "internal")
            self._between = False
        log.warning("engine_restarted", in_flight=len(self._record))
        return failed

    def _give_up(self, reason: QuireError) -> list[TokenEvent]:
        text = (
            f"The engine died and {len(self._restarts_s)} restarts did not help (max_restarts = "
            f"{self._policy.max_restarts}): {reason}"
        )
        with self._lock:
            self._dead = EngineDeadError(text)
            return self._record.fail_all(text)


@dataclass(slots=True)
class _Tracked:
    request: Request
    outputs: list[list[int]]  # per sample, as delivered
    finished: set[int] = field(default_factory=set)
    num_deaths: int = 0  # engines that died while this was in flight


class InFlight:
    """The requests in flight, in order of arrival, so that they can continue in another engine. Not thread-safe.

    A request is in the record from `AddRequest` until every sample has its terminal event, or until the client's side
    ended it. Only delivered tokens count: tokens that were lost with an engine are computed again and come out
    equal.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Tracked] = {}
        # Setting → a message that sets only this setting, to its latest value.
        self._policy: dict[str, PolicyChange] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def sent(self, message: Message) -> None:
        """Record a message to the core."""
        if isinstance(message, AddRequest):
            request = message.request
            before = request.output_token_ids or ((),) * request.sampling.num_samples
            self._requests[request.request_id] = _Tracked(
                request, [list(ids) for ids in before], set(request.finished_samples)
            )
        elif isinstance(message, AbortRequest):
            self._requests.pop(message.request_id, None)
        elif isinstance(message, FinishSample):
            self._finish(message.request_id, message.sample_index)
        elif isinstance(message, PolicyChange):
            self._record_policy({k: v for k, v in asdict(message).items() if v is not None})

    def received(self, events: list[TokenEvent]) -> None:
        """Record events that were delivered."""
        for event in events:
            tracked = self._requests.get(event.request_id)
            if tracked is None or event.sample_index in tracked.finished:
                continue
            tracked.outputs[event.sample_index].extend(event.token_ids)
            if event.finish_reason is not None:
                self._finish(event.request_id, event.sample_index)

    def answered(self, replies: list[Reply]) -> None:
        """Record what calls changed: only the engine knows whether it accepted a change."""
        for reply in replies:
            self._record_policy({k: v for k, v in reply.values.items() if reply.before.get(k, v) != v})
            if reply.pinned is not None:  # the other settings are the SLO controller's
                self._record_policy({name: reply.values[name] for name in reply.pinned})
                for name in CONTROLLED.keys() - set(reply.pinned):
                    self._policy.pop(name, None)

    def _record_policy(self, changes: dict[str, Any]) -> None:
        self._policy.update({name: PolicyChange(**{name: value}) for name, value in changes.items()})

    def count_death(self, max_deaths: int) -> list[TokenEvent]:
        """Count a death against every request; end those that were in flight in ``max_deaths`` deaths.

        Such a request may be what kills the engine, and the others can finish without it.
        """
        events = []
        for request_id, tracked in list(self._requests.items()):
            tracked.num_deaths += 1
            if tracked.num_deaths >= max_deaths:
                text = f"The engine died {tracked.num_deaths} times while this request ran: it is not tried again"
                events += self.fail(request_id, text, "internal")
        return events

    def fail_all(self, error: str) -> list[TokenEvent]:
        """End all requests: return the terminal event of every open sample."""
        return [
            event for request_id in list(self._requests) for event in self.fail(request_id, error, "dead")
        ]

    def readmissions(self) -> list[Message]:
        """Return the messages that bring a new engine to the state of the dead one."""
        requests = [
            AddRequest(
                replace(
                    tracked.request,
                    output_token_ids=tuple(tuple(ids) for ids in tracked.outputs),
                    finished_samples=tuple(sorted(tracked.finished)),
                )
            )
            for tracked in self._requests.values()
        ]
        return [*self._policy.values(), *requests]

    def _finish(self, request_id: str, sample_index: int) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.finished.add(sample_index)
            if len(tracked.finished) == tracked.request.sampling.num_samples:
                del self._requests[request_id]

    def fail(self, request_id: str, error: str, error_kind: str) -> list[TokenEvent]:
        """End a request: return the terminal event of each sample that is open."""
        tracked = self._requests.pop(request_id)
        return [
            TokenEvent(
                request_id, index, finish_reason=FinishReason.ERROR, error=error, error_kind=error_kind
            )
            for index in range(tracked.request.sampling.num_samples)
            if index not in tracked.finished
        ]
