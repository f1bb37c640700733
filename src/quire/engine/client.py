"""`EngineClient`: how the API side talks to an engine; and `Calls`, for what the core answers.

    send(message)  ──>  inbox of the core           (never blocks)
    receive()      <──  token events, one step per call   (blocks)

The methods are synchronous. The offline API calls `receive` in its own loop, the asyncio frontend on one thread.
`send` may be called from any thread, `receive` from one thread at a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from quire.config import Determinism
from quire.engine.messages import CoreCall, Message, Reply
from quire.errors import CapacityError, ConfigError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.request import TokenEvent

LOADING = "the model is being loaded"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine reports once it is loaded."""

    num_kv_tokens: int  # tokens the block pool holds
    kv_bytes: int
    weight_bytes: int
    kernels: str  # in words: "native avx512 (2 threads)"
    determinism: Determinism
    load_s: float  # from the start of the load to ready
    pid: int


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What an engine does now, for probes. Only "ready" means that a new request would be computed at once."""

    status: Literal["ready", "loading", "restarting", "hung", "unsound", "dead"] = "ready"
    reason: str | None = None  # one line, unless it is ready
    overdue_s: float = 0.0  # how far the running step is beyond its predicted end
    num_restarts: int = 0
    retry_in_s: float = 0.0  # left until the next restart


class EngineClient(Protocol):
    """One engine: in this process, in a child process (`ProcessClient`), or either behind a `Supervisor`."""

    def wait_ready(self) -> EngineInfo:
        """Block until the model is loaded.

        Raises:
            ModelLoadError, ConfigError: the engine could not load; one line.
            EngineDeadError: the engine died while loading.
        """
        ...

    def send(self, message: Message) -> None:
        """Put a message into the core's inbox. After the engine's death the message is lost (see `receive`)."""
        ...

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Return the next events, or an empty list after ``timeout_s`` seconds or once closed.

        Raises:
            EngineDeadError: the engine has died; every later call raises it too.
        """
        ...

    def replies(self) -> list[Reply]:
        """Return the replies that arrived with the last `receive`, which also wakes for replies. Does not block."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's latest statistics, at most about a second old. Does not block."""
        ...

    def health(self) -> EngineHealth:
        """Return what the engine does now. Does not block."""
        ...

    def dump(self, *, is_last: bool = False) -> str:
        """Return the plans that are out and the stacks of the engine's threads, as far as it can still write them.

        Blocks for up to half a second. Empty where the engine is in this process, or cannot write. ``is_last``: the
        engine is killed next, so its stacks may be taken in a way that can crash it.
        """
        ...

    def close(self) -> None:
        """Stop the engine and wake a blocked `receive`. Requests in flight end without events."""
        ...


# An engine replies between two steps; one that died never does.
TIMEOUT_S = 30.0


class Calls:
    """Sends calls to the core and hands out the replies. ``send``: as in `EngineClient`. Belongs to one event loop."""

    def __init__(self, send: Callable[[Message], None], *, timeout_s: float = TIMEOUT_S) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._ids = itertools.count()

    async def ask(self, make: Callable[[str], CoreCall]) -> Reply:
        """Send the call that ``make`` builds with an id, and wait for its reply.

        Raises:
            ConfigError: the core rejected the call; `param` names the setting, and nothing has changed.
            CapacityError: no answer in time: the engine is being restarted, or one step takes very long (503).
        """
        call_id = str(next(self._ids))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._send(make(call_id))
            reply = await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            text = f"The engine did not answer within {self._timeout_s:g} s; whether the call took effect is not known."
            raise CapacityError(text, retryable=True) from None
        finally:
            del self._waiting[call_id]
        if reply.error is not None:
            raise ConfigError(reply.error, param=reply.param)
        return reply

    def answered(self, replies: list[Reply]) -> None:
        """Hand out replies. A reply whose caller has given up is dropped."""
        for reply in replies:
            future = self._waiting.get(reply.call_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def fail(self, error: QuireError) -> None:
        """Fail every waiting call: the engine is dead."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
