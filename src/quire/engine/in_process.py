"""`InProcessClient`: an engine in this process, as an `EngineClient`."""

from __future__ import annotations

import threading

from quire.clock import Clock
from quire.config import EngineConfig
from quire.engine.build import build_core, describe
from quire.engine.client import LOADING, EngineHealth, EngineInfo
from quire.engine.core import EngineCore
from quire.engine.messages import Message, Reply
from quire.errors import EngineDeadError
from quire.metrics.engine_stats import EngineStats
from quire.request import TokenEvent
from quire.scheduler.scheduler import Sleep, Wait


class InProcessClient:
    """An `EngineClient` that owns an `EngineCore` and steps it in `receive`. Needs neither ZeroMQ nor msgspec."""

    def __init__(self, config: EngineConfig, clock: Clock, *, executor: str = "local") -> None:
        self._config = config
        self._clock = clock
        self._executor = executor
        self._core: EngineCore | None = None
        self._early: list[Message] = []  # sent before the core was loaded
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def core(self) -> EngineCore:
        """The core, once it is loaded."""
        assert self._core is not None, "call wait_ready first"
        return self._core

    def wait_ready(self) -> EngineInfo:
        """As `EngineClient.wait_ready`; loads the model in the calling thread."""
        start_s = self._clock.now()
        core = build_core(self._config, self._executor, self._clock)
        with self._lock:
            for message in self._early:
                core.put(message)
            self._core = core
        return describe(self._config, self._executor, self._clock.now() - start_s, core.ranks)

    def send(self, message: Message) -> None:
        with self._lock:
            if self._core is None:
                self._early.append(message)
            else:
                self._core.put(message)
        self._arrived.set()

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """As `EngineClient.receive`; runs at most one step. A step without events also returns an empty list."""
        core = self.core
        # Before `rest` is read, so that a message that arrives in between is not missed.
        self._arrived.clear()
        rest = core.rest
        if rest is not None and not self._closed:
            pause_s = max(0.0, rest.until_s - self._clock.now()) if isinstance(rest, Sleep) else None
            times_s = [time_s for time_s in (pause_s, timeout_s) if time_s is not None]
            self._arrived.wait(min(times_s, default=None))
        if self._closed or isinstance(core.rest, Wait):
            return []
        try:
            return core.step()
        except Exception as error:
            raise EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}") from error

    def replies(self) -> list[Reply]:
        replies, self.core.replies = self.core.replies, []
        return replies

    def stats(self) -> EngineStats:
        return EngineStats() if self._core is None else self._core.stats()

    def health(self) -> EngineHealth:
        """As `EngineClient.health`; it cannot hang without its caller."""
        return EngineHealth() if self._core is not None else EngineHealth("loading", LOADING)

    def dump(self, *, is_last: bool = False) -> str:
        """As `EngineClient.dump`."""
        return ""

    def close(self) -> None:
        self._closed = True
        self._arrived.set()
        if self._core is not None:
            self._core.executor.close()
