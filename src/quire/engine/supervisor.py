"""`Supervisor`: an `EngineClient` that outlives its engine.

When the engine dies, the supervisor starts another (a bounded number of times, with a growing pause) and admits every
request in flight again from its prompt and output ids. Generation is exact, so the caller sees one uninterrupted
stream. An engine whose loop makes no progress for too long is killed first. When the restarts are used up, every open
sample gets its terminal error event; after that `receive` raises `EngineDeadError`.

A request that was in flight in several deaths may be their cause. It has to prove itself: the new engine runs it alone
for its first tokens, before the next such request and before all others. One that kills the engine then fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.args import ServerArgs, defaults
from quire.clock import Clock
from quire.engine.client import EngineClient, EngineHealth, EngineInfo
from quire.engine.messages import AbortRequest, FinishSample, Message, Reply
from quire.engine.restarts import Restarts
from quire.errors import EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.settings import CONTROLLED, PolicyChange

if TYPE_CHECKING:
    from quire.engine.guard import EngineGuard, GoldenPrompt

log = Log("supervisor")
_SERVER = defaults(ServerArgs)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When an engine is replaced, and how often."""

    max_restarts: int = _SERVER["max_restarts"]  # within any window_s
    window_s: float = 600.0
    backoff_s: float = 0.25  # before the second restart in a window; doubles with each
    max_backoff_s: float = 30.0
    start_retry_s: float = 1.0  # where the machine can start no process at all
    # A request that was in flight in this many deaths has to run alone first.
    suspect_deaths: int = 2
    # An engine that is so far beyond the predicted end of its step is killed; 0: never.
    hang_timeout_s: float = _SERVER["hang_timeout_s"]
    watches_hangs: bool = True  # False: whether the engine makes progress is not looked at


class Supervisor:
    """Wraps the client of a first engine and starts replacements for it; an `EngineClient` itself."""

    def __init__(
        self,
        first: EngineClient,
        restart: Callable[[], EngineClient],
        clock: Clock,
        policy: RestartPolicy | None = None,
        golden: GoldenPrompt | None = None,
    ) -> None:
        """``golden``: a check of each engine's answers at its start, and while it is idle."""
        self.client = first
        self._restart = restart
        self._clock = clock
        self._policy = policy or RestartPolicy()
        self.record = InFlight()
        self._lock = threading.Lock()  # guards the record and which client is current
        self._closed = threading.Event()
        self._restarts = Restarts(self._policy.window_s, self._policy.backoff_s, self._policy.max_backoff_s)
        self._ended: list[TokenEvent] = []  # terminal events made here, for the next `receive`
        # One engine is dead and the next is not ready: messages are only recorded.
        self._between = False
        self._reason: QuireError | None = None  # why the last engine died
        self._retry_at_s = 0.0  # end of the pause before a restart
        self._trials = import_module("quire.engine.quarantine")
        self._guard: EngineGuard | None = None  # None: nothing is looked at
        if self._policy.watches_hangs or golden is not None:
            self._guard = import_module("quire.engine.guard").EngineGuard(self._policy.hang_timeout_s, golden)
        self._dead: EngineDeadError | None = None
        # Called with what was in flight when an engine died: what is left where the engine itself could save nothing.
        self.on_death: Callable[[list[Request]], object] | None = None
        self.num_restarts = 0

    def wait_ready(self) -> EngineInfo:
        """As `EngineClient.wait_ready`. A first engine that cannot load is not replaced; one that errs is."""
        info = self.client.wait_ready()
        try:
            self._check(self.client)
        except EngineDeadError as error:
            self._replace(error)
            if self._dead is not None:
                raise self._dead from error
        return info

    def send(self, message: Message) -> None:
        """As `EngineClient.send`; a request that arrives between two engines goes to the next one."""
        with self._lock:
            if self._dead is None and not self._between:
                self.client.send(message)  # may fail: then the caller knows, and nothing was recorded
            self.record.sent(message)
            if self._dead is not None:
                self._ended += self.record.fail_all(str(self._dead))

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """As `EngineClient.receive`, but an empty list may come early.

        Blocks longer than ``timeout_s`` while an engine is being replaced.
        """
        with self._lock:
            if self._ended:
                events, self._ended = self._ended, []
                return events
            if self._dead is not None:
                raise self._dead
        try:
            events = self._receive(self.client, timeout_s)
        except EngineDeadError as error:
            if self._closed.is_set():
                return []
            return self._replace(error)
        with self._lock:
            self.record.received(events)
        return events

    def replies(self) -> list[Reply]:
        """As `EngineClient.replies`. A call to an engine that dies gets no reply."""
        with self._lock:
            replies = self.client.replies()
            self.record.answered(replies)
        return replies

    def stats(self) -> EngineStats:
        return self.client.stats()

    def health(self) -> EngineHealth:
        """As `EngineClient.health`."""
        with self._lock:
            if self._dead is not None:
                return EngineHealth("dead", str(self._dead), num_restarts=self.num_restarts)
            if self._between:
                left_s = max(0.0, self._retry_at_s - self._clock.now())
                return EngineHealth(
                    "restarting", str(self._reason), num_restarts=self.num_restarts, retry_in_s=left_s
                )
            client = self.client
        health = client.health()
        problem = None if self._guard is None else self._guard.problem
        if health.status == "ready" and problem is not None:
            health = EngineHealth("unsound", problem)
        return replace(health, num_restarts=self.num_restarts)

    def dump(self, *, is_last: bool = False) -> str:
        """As `EngineClient.dump`."""
        return self.client.dump(is_last=is_last)

    def close(self) -> None:
        """As `EngineClient.close`; also ends a restart in progress."""
        self._closed.set()
        with self._lock:
            client = self.client
        client.close()

    def _receive(self, client: EngineClient, timeout_s: float | None) -> list[TokenEvent]:
        guard = self._guard
        return client.receive(timeout_s) if guard is None else guard.receive(client, timeout_s)

    def _check(self, client: EngineClient) -> None:
        if self._guard is not None:
            self._guard.check(client)

    def _replace(self, error: EngineDeadError) -> list[TokenEvent]:
        """Start engines until one is ready; return the terminal events that the death caused."""
        with self._lock:
            self._between = True
            self._reason = error
            self.record.count_death()
            in_flight = [request for request in self.record.readmissions() if isinstance(request, Request)]
        self._tell_death(in_flight)
        events: list[TokenEvent] = []
        while not self._closed.is_set():
            if not self._may_restart():
                return events + self._give_up(self._reason)
            log.error(
                "engine_died", error=self._reason, in_flight=len(self.record), restart=self.num_restarts
            )
            client = self._start()
            if client is None:
                break
            try:
                client.wait_ready()
                self._check(client)
                quarantine = self._trials.Quarantine(
                    client, self.record, self._lock, self._receive, self._closed.is_set
                )
                quarantine.run(self._policy.suspect_deaths, events)
            except QuireError as failure:
                self._reason = failure
                continue
            return events + self._readmit(client)
        return events

    def _tell_death(self, in_flight: list[Request]) -> None:
        if self.on_death is not None and in_flight:
            try:
                log.warning("requests_saved", file=self.on_death(in_flight), requests=len(in_flight))
            except Exception as error:  # a full disk, as a rule; the engine is to be replaced anyway
                log.error("requests_not_saved", error=error)

    def _may_restart(self) -> bool:
        now_s = self._clock.now()
        if self._restarts.count(now_s) >= self._policy.max_restarts:
            return False
        if pause_s := self._restarts.pause_s(now_s):
            self._retry_at_s = now_s + pause_s
            self._closed.wait(pause_s)
        self._restarts.add(now_s)
        self.num_restarts += 1
        return True

    def _start(self) -> EngineClient | None:
        """Replace the dead client by a new one; None if closed meanwhile.

        While the machine has no disk, memory or file for another process, try again each second: no engine has died
        then, so these attempts are not restarts.
        """
        self.client.close()
        while not self._closed.is_set():
            try:
                client = self._restart()
            except OSError as error:
                log.error("engine_cannot_start", error=error)
                self._reason = EngineDeadError(f"No engine can be started now: {error}")
                self._retry_at_s = self._clock.now() + self._policy.start_retry_s
                self._closed.wait(self._policy.start_retry_s)
                continue
            with self._lock:
                if not self._closed.is_set():
                    self.client = client  # before it is ready, so that `close` can reach it
                    return client
            client.close()
        return None

    def _readmit(self, client: EngineClient) -> list[TokenEvent]:
        """Send what is in flight to the new engine. A request that cannot be sent fails alone: return its events."""
        failed: list[TokenEvent] = []
        with self._lock:
            for message in self.record.readmissions():
                failed += self._trials.send_again(client, message, self.record)
            self._between = False
        log.warning("engine_restarted", in_flight=len(self.record))
        return failed

    def _give_up(self, reason: QuireError | None) -> list[TokenEvent]:
        text = (
            f"The engine died and {self._restarts.count(self._clock.now())} restarts did not help (max_restarts = "
            f"{self._policy.max_restarts}): {reason}"
        )
        with self._lock:
            self._dead = EngineDeadError(text)
            return self.record.fail_all(text)


@dataclass(slots=True)
class _Tracked:
    request: Request
    outputs: list[list[int]]  # per sample, as delivered
    finished: set[int] = field(default_factory=set)
    num_deaths: int = 0  # engines that died while this was in flight


class InFlight:
    """The requests in flight, in order of arrival, so that they can continue in another engine. Not thread-safe.

    A request is in the record from its `Request` until every sample has its terminal event, or until the client's side
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
        if isinstance(message, Request):
            before = message.output_token_ids or ((),) * message.sampling.num_samples
            self._requests[message.request_id] = _Tracked(
                message, [list(ids) for ids in before], set(message.finished_samples)
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
                for name in set(CONTROLLED) - set(reply.pinned):
                    self._policy.pop(name, None)

    def _record_policy(self, changes: dict[str, Any]) -> None:
        self._policy.update({name: PolicyChange(**{name: value}) for name, value in changes.items()})

    def count_death(self) -> None:
        """Count a death against every request: one of them may be what killed the engine."""
        for tracked in self._requests.values():
            tracked.num_deaths += 1

    def suspects(self, num_deaths: int) -> list[str]:
        """Return the requests that were in flight in so many deaths."""
        return [name for name, tracked in self._requests.items() if tracked.num_deaths >= num_deaths]

    def open_samples(self, request_id: str) -> set[int]:
        """Return the samples of a request that have not ended; none of one that is over."""
        tracked = self._requests.get(request_id)
        return (
            set() if tracked is None else set(range(tracked.request.sampling.num_samples)) - tracked.finished
        )

    def fail_all(self, error: str) -> list[TokenEvent]:
        """End all requests: return the terminal event of every open sample."""
        return [
            event for request_id in list(self._requests) for event in self.fail(request_id, error, "dead")
        ]

    def settings(self) -> list[Message]:
        """Return the messages that give a new engine the live settings of the dead one."""
        return list(self._policy.values())

    def readmissions(self) -> list[Message]:
        """Return the messages that bring a new engine to the state of the dead one, requests in order of arrival."""
        return [*self.settings(), *map(self.readmission, self._requests)]

    def readmission(self, request_id: str) -> Request:
        """Return the message that lets a request continue after what was delivered of it."""
        tracked = self._requests[request_id]
        return replace(
            tracked.request,
            output_token_ids=tuple(tuple(ids) for ids in tracked.outputs),
            finished_samples=tuple(sorted(tracked.finished)),
        )

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
