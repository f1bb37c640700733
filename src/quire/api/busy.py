"""`Busy`: while the engine rejects requests, most of the further ones are refused unread.

A request that the engine rejects in full costs half a millisecond: it is parsed, tokenized, sent and answered. While it
rejects, `PER_WINDOW` requests of each `WINDOW_S` still go to the engine in full, so that one that there is room for
again gets in; the others get the engine's latest answer, at the cost of reading their heads.
"""

from __future__ import annotations

import math

from quire.clock import RETRY_S
from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log

WINDOW_S = 0.05
PER_WINDOW = 32
log = Log("api")


class Busy:
    """What the API knows of the engine's rejections. Belongs to one event loop."""

    def __init__(self) -> None:
        self.until_s = -math.inf  # before it, `refusal` is to be asked
        self._refusal: Refusal | None = None  # the latest
        self._window_end_s = -math.inf
        self._num_passed = 0  # in this window

    def rejected(self, refusal: Refusal, now_s: float) -> None:
        """The engine has no room for a request, which gets ``refusal``."""
        if now_s >= self.until_s:
            log.warning("queue_full", error=refusal.message)
        self.until_s = now_s + RETRY_S
        self._refusal = refusal

    def check(self, now_s: float) -> None:
        """Raise `HttpError` unless a new request goes to the engine in full."""
        refusal = self.refusal(now_s)
        if refusal is not None:
            raise HttpError(refusal)

    def refusal(self, now_s: float) -> Refusal | None:
        """Return the answer to a new request; None: it goes to the engine in full."""
        if now_s >= self._window_end_s:
            self._window_end_s = now_s + WINDOW_S
            self._num_passed = 0
        if self._num_passed >= PER_WINDOW:
            return self._refusal
        self._num_passed += 1
        return None
