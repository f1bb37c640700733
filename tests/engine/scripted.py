"""An `EngineClient` whose engine is a function: for the supervisor and the frontend without a core."""

from __future__ import annotations

import queue
from collections.abc import Callable

from quire.engine.client import EngineHealth, EngineInfo
from quire.engine.messages import AbortRequest, Message, Reply
from quire.errors import EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.request import FinishReason, Request, TokenEvent

INFO = EngineInfo(64, 1, 1, "scripted", "exact", 0.0, 0)


def token_of(request: Request, index: int, position: int) -> int:
    """Return the token of a sample at an output position: a pure function, as in the real engine."""
    seed = request.sampling.seed or 0
    return 97 + (seed * 7 + index * 5 + position * position) % 26


class ScriptedClient:
    """Returns one token per request and `receive`; dies after ``die_after`` of them, or of certain requests."""

    def __init__(
        self,
        *,
        die_after: int | None = None,
        dies_of: Callable[[set[str]], bool] = lambda running: False,
        load_error: QuireError | None = None,
    ) -> None:
        self.sent: list[Message] = []
        self.closed = False
        self.most_running = 0
        self.now_health = EngineHealth()
        self._aborted: list[TokenEvent] = []
        self._dies_of = dies_of
        self._die_after = die_after
        self._load_error = load_error
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._running: dict[str, tuple[Request, list[int]]] = {}

    def wait_ready(self) -> EngineInfo:
        if self._load_error is not None:
            raise self._load_error
        return INFO

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self._queue.put(message)

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        if self.closed:
            return []
        if self._die_after == 0:
            raise EngineDeadError("The engine process was killed by SIGKILL.")
        if not self._running and not self._aborted:
            try:
                self._take(self._queue.get(timeout=timeout_s))
            except queue.Empty:
                return []
        while not self._queue.empty():
            self._take(self._queue.get())
        self.most_running = max(self.most_running, len(self._running))
        if self._dies_of(set(self._running)):
            self._die_after = 0
            raise EngineDeadError("The engine process was killed by SIGSEGV.")
        if self._die_after is not None:
            self._die_after -= 1
        return self._step()

    def replies(self) -> list[Reply]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats()

    def health(self) -> EngineHealth:
        return self.now_health

    def dump(self, *, is_last: bool = False) -> str:
        return ""

    def close(self) -> None:
        self.closed = True
        self._queue.put(None)

    def _take(self, message: Message | None) -> None:
        if isinstance(message, Request):
            request = message
            done = request.output_token_ids or ((),) * request.sampling.n
            self._running[request.request_id] = (request, [len(ids) for ids in done])
        elif isinstance(message, AbortRequest) and message.request_id in self._running:
            request, _ = self._running.pop(message.request_id)
            self._aborted += [
                TokenEvent(message.request_id, i, finish_reason=FinishReason.ABORT)
                for i in range(request.sampling.n)
                if i not in request.finished_samples
            ]

    def _step(self) -> list[TokenEvent]:
        events, self._aborted = self._aborted, []
        for name, (request, done) in list(self._running.items()):
            limit = request.sampling.max_tokens
            assert limit is not None
            for index in range(request.sampling.n):
                if index not in request.finished_samples and done[index] < limit:
                    token = token_of(request, index, done[index])
                    done[index] += 1
                    end = FinishReason.LENGTH if done[index] == limit else None
                    events.append(TokenEvent(name, index, (token,), None, end))
            open_ = [i for i in range(request.sampling.n) if i not in request.finished_samples]
            if all(done[i] >= limit for i in open_):
                del self._running[name]
        return events


def clients(*made: ScriptedClient) -> Callable[[], ScriptedClient]:
    """Return a factory that returns these one after the other."""
    waiting = list(made)
    return lambda: waiting.pop(0)
