"""`FullQueue`: refuses requests cheaply while the engine rejects others, so that a burst costs little.

A rejection by the engine costs the API process half a millisecond: the request is parsed, tokenized, sent and answered.
What the engine rejects has a place held for it when it returns (`quire.scheduler.promises`), so the engine has to see
some of the new requests and all that return as they were told. Everything else is refused here, with the engine's
latest text and time, or with what is left of the time that it was told before:

    more than `SLACK` above the fewest that were open at a rejection     before the body is read
    beyond `RATE` per second, and not one that returns as it was told    after it
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace

from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log

_KEY_BYTES = 2**16  # of a body that it is known by, beside its length
_MAX_TOLD = 16_384
_EARLY_S, _GRACE_S = 0.25, 2.0  # around the time told, as the engine has them
_BODY: ContextVar[int] = ContextVar("quire.body_key", default=0)  # of the request that a task serves
log = Log("api")


class FullQueue:
    """What the API knows of the engine's rejections. Belongs to one event loop."""

    SLACK = 64
    MEMORY_S = 1.0  # after a rejection by the engine
    RATE = 64.0  # new requests per second that the engine may reject, and as many at once

    def __init__(self, num_open: Callable[[], int], now: Callable[[], float]) -> None:
        """``num_open`` returns how many requests are with the engine, rejected or not."""
        self._num_open = num_open
        self._now = now
        self._level = 0  # the fewest that were open at a rejection
        self._until_s = -math.inf
        self._refusal: Refusal | None = None  # the latest
        self._told: dict[int, list[float]] = {}  # body → when clients with it are to come back, ascending
        self._allowed = self.RATE  # rejections that the engine may make now
        self._allowed_s = -math.inf  # as of then

    def rejected(self, refusal: Refusal, after_s: float = 0.0) -> None:
        """The engine's queue was full for a request, which gets ``refusal`` and may come back ``after_s`` later."""
        now_s, num_open = self._now(), self._num_open()
        if now_s >= self._until_s:
            log.warning("queue_full", open=num_open, error=refusal.message)
            self._level = num_open
        self._level = min(self._level, num_open)
        self._until_s = now_s + self.MEMORY_S
        self._refusal = refusal
        if len(self._told) >= _MAX_TOLD:
            self._told = {k: dues for k, dues in self._told.items() if dues and dues[-1] + _GRACE_S > now_s}
        if len(self._told) < _MAX_TOLD:
            insort(self._told.setdefault(_BODY.get(), []), now_s + after_s)

    def refusal(self) -> Refusal | None:
        """Return the answer to a new request if it is refused unread."""
        if self._now() >= self._until_s or self._num_open() < self._level + self.SLACK:
            return None
        return self._refusal

    @staticmethod
    def read(pieces: Sequence[bytes]) -> None:
        """The body of the task's request was read."""
        _BODY.set(hash((pieces[0][:_KEY_BYTES] if pieces else b"", sum(map(len, pieces)))))

    def check(self) -> None:
        """Raise `HttpError` where the task's request is refused before it is looked at."""
        now_s = self._now()
        if now_s >= self._until_s or self._refusal is None:
            return
        dues = self._told.get(_BODY.get(), [])
        while dues and dues[0] + _GRACE_S < now_s:
            del dues[0]
        if dues and now_s >= dues[0] - _EARLY_S:
            del dues[0]
            return  # a place may be held for it
        self._allowed = min(self.RATE, self._allowed + (now_s - self._allowed_s) * self.RATE)
        self._allowed_s = now_s
        if self._allowed >= 1.0:
            self._allowed -= 1.0
        elif dues:
            after = str(math.ceil(dues[0] - now_s)).encode()
            raise HttpError(replace(self._refusal, headers=((b"retry-after", after),)))
        else:
            self._told.pop(_BODY.get(), None)
            raise HttpError(self._refusal)
