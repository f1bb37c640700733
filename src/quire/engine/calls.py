"""`Calls`: questions to the core that are waiting for their `Reply`. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from quire.engine.inbox import Call, Message, Reply
from quire.errors import CapacityError, ConfigError, QuireError

TIMEOUT_S = 30.0  # an engine answers between two steps; one that died never does


class Calls:
    """Sends calls and hands out their answers. ``send`` as in `EngineClient`."""

    def __init__(self, send: Callable[[Message], None], *, timeout_s: float = TIMEOUT_S) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._ids = itertools.count()

    async def ask(self, make: Callable[[str], Call]) -> Reply:
        """Send the call that ``make`` builds around an id, and wait for its answer.

        Raises:
            ConfigError: the core refused; `param` names the setting, and nothing has changed.
            CapacityError: no answer in time: the engine is being restarted, or one step takes very long (503).
        """
        call_id = str(next(self._ids))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._send(make(call_id))
            reply = await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            text = f"The engine did not answer within {self._timeout_s:g} s; whether it obeyed is not known."
            raise CapacityError(text, retryable=True) from None
        finally:
            del self._waiting[call_id]
        if reply.error is not None:
            raise ConfigError(reply.error, param=reply.param)
        return reply

    def answered(self, replies: list[Reply]) -> None:
        """Hand out answers; those that nobody waits for any more are dropped."""
        for reply in replies:
            future = self._waiting.get(reply.call_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def fail(self, error: QuireError) -> None:
        """The engine is dead: nobody will answer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
