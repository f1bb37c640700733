"""`FullQueue`: while the engine rejects requests, further ones ask for a place before they are looked at.

A request that the engine rejects in full costs half a millisecond: it is parsed, tokenized, sent and answered. A
request that asks for a place costs a hash of its body and a share of one message
(`quire.engine.messages.AskPlaces`); the engine lets it come, or tells it when to, and holds a place for it either way
(`quire.scheduler.queue.Promises`). So every ``Retry-After`` is the engine's own, however many requests come.

    no rejection for `MEMORY_S`                        goes to the engine in full
    comes when it was told to                          goes to the engine in full: a place is held for it
    more than `MOST_ASKED` wait for an answer          is refused before its body is read, with the latest time
    else, also where it comes earlier                  asks; goes to the engine in full, or is told when to come
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from quire.engine.messages import AskPlaces, CoreCall, Reply
from quire.errors import QuireError
from quire.http.call import Call
from quire.http.refusals import HttpError, Refusal, busy
from quire.metrics.log import Log

_KEY_BYTES = 2**16  # of a body that it is known by, beside its length
_MAX_TOLD = 16_384
_EARLY_S, _GRACE_S = 0.25, 2.0  # around the time told, as the engine has them
_WEIGHT = 1 / 32  # of the newest request in the mean of bytes per token
log = Log("api")


class FullQueue:
    """What the API knows of the engine's rejections. Belongs to one event loop."""

    MEMORY_S = 1.0  # after a rejection by the engine
    BATCH_S = 0.005  # requests that ask within it share a message
    ANSWER_S = 2.0  # a request that got no answer by then goes to the engine in full
    MOST_ASKED = 1024

    def __init__(
        self, call: Callable[[Callable[[str], CoreCall]], Awaitable[Reply]], now: Callable[[], float]
    ) -> None:
        """``call``: as `Frontend.call`."""
        self._call = call
        self._now = now
        self._until_s = -math.inf
        self._refusal: Refusal | None = None  # the latest
        self._told: dict[int, list[float]] = {}  # body → when clients with it are to come back, ascending
        self._asking: list[tuple[Call, asyncio.Future[Refusal | None]]] = []  # the next message
        self._messages: set[asyncio.Task[None]] = set()
        self._num_asked = 0  # without an answer
        self._token_bytes = 5.0  # of a body

    def rejected(self, call: Call, refusal: Refusal, after_s: float = 0.0) -> None:
        """The engine has no room for a request, which gets ``refusal`` and may come ``after_s`` later."""
        self._note(call.body_key, refusal, after_s)

    def refusal(self) -> Refusal | None:
        """Return the answer to a new request if it is refused unread."""
        return self._refusal if self._num_asked >= self.MOST_ASKED else None

    @staticmethod
    def read(call: Call, pieces: Sequence[bytes]) -> Call:
        """Return the call of a request whose body was read."""
        num_bytes = sum(map(len, pieces))
        key = hash((pieces[0][:_KEY_BYTES] if pieces else b"", num_bytes, call.tenant))
        return replace(call, body_key=key % 2**62 or 1, num_body_bytes=num_bytes)

    def tokenized(self, call: Call, num_tokens: int) -> None:
        """A request has so many tokens."""
        num_bytes = call.num_body_bytes
        if num_bytes and num_tokens:
            self._token_bytes += (num_bytes / num_tokens - self._token_bytes) * _WEIGHT

    async def check(self, call: Call) -> None:
        """Return where a request whose body was read goes to the engine in full.

        Raises:
            HttpError: the engine has no room for it.
        """
        now_s = self._now()
        if now_s >= self._until_s:
            return
        dues = self._told.get(call.body_key, [])
        while dues and dues[0] + _GRACE_S < now_s:
            del dues[0]
        if dues and now_s >= dues[0] - _EARLY_S:
            del dues[0]
            return
        # One that comes earlier may as well be a new request with an equal body: it gets a place and a time of its own.
        refusal = await self._ask(call)
        if refusal is not None:
            raise HttpError(refusal)

    def _note(self, key: int, refusal: Refusal, after_s: float) -> None:
        now_s = self._now()
        if now_s >= self._until_s:
            log.warning("queue_full", error=refusal.message)
        self._until_s = now_s + self.MEMORY_S
        self._refusal = refusal
        if len(self._told) >= _MAX_TOLD:
            self._told = {k: dues for k, dues in self._told.items() if dues and dues[-1] + _GRACE_S > now_s}
        if len(self._told) < _MAX_TOLD and len(dues := self._told.setdefault(key, [])) < _MAX_TOLD:
            insort(dues, now_s + after_s)

    def _ask(self, call: Call) -> asyncio.Future[Refusal | None]:
        loop = asyncio.get_running_loop()
        if not self._asking:
            loop.call_later(self.BATCH_S, self._send)
        future: asyncio.Future[Refusal | None] = loop.create_future()
        self._asking.append((call, future))
        self._num_asked += 1
        return future

    def _send(self) -> None:
        asking, self._asking = self._asking, []
        task = asyncio.get_running_loop().create_task(self._answer(asking))
        self._messages.add(task)
        task.add_done_callback(self._messages.discard)

    async def _answer(self, asking: list[tuple[Call, asyncio.Future[Refusal | None]]]) -> None:
        """Ask the engine for places, and hand out its answers."""
        asked = tuple(
            (each.body_key, math.ceil(each.num_body_bytes / self._token_bytes)) for each, _ in asking
        )
        waits_s, why = [0.0] * len(asking), ""
        try:
            async with asyncio.timeout(self.ANSWER_S):
                reply = await self._call(lambda call_id: AskPlaces(call_id, asked))
            waits_s, why = reply.values["waits_s"], reply.values["why"]
        except (QuireError, TimeoutError):
            pass  # the engine is being replaced, or a step takes long: the request finds out itself
        finally:
            self._num_asked -= len(asking)
            made: dict[int, Refusal] = {}
            for (call, future), wait_s in zip(asking, waits_s, strict=True):
                after_s, refusal = math.ceil(wait_s), None
                if after_s:
                    refusal = made.get(after_s)
                    if refusal is None:
                        text = f"{why} Try again in {after_s} s."
                        refusal = made[after_s] = busy(text, "queue_full", after_s)
                    self._note(call.body_key, refusal, after_s)
                if not future.done():
                    future.set_result(refusal)
