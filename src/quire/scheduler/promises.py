"""`Promises`: the places in the queue that rejected requests were told to come back for.

A rejected request is promised a place behind the queue and behind the requests promised before it, and told when that
place comes free. A request without a promise does not take it: otherwise new arrivals would take every place under
sustained overload, and the time told would mean nothing. A request is known by its prompt when it returns. The share of
promises that clients keep is measured, so that clients that give up, or that try again at once, hold few places.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from quire.request import Request

GRACE_S = 2.0  # a place is held for so long after the time told
EARLY_S = 0.25  # a client's clock may be ahead by so much
MAX_PROMISES = 16_384
_WEIGHT = 1 / 32  # of the newest promise in the share that is kept
_LEAST_SHARE = 1 / 32


class Promise(NamedTuple):
    """A place from ``due_s`` on, for the request that ``key`` stands for."""

    due_s: float
    serial: int
    key: int
    num_tokens: int  # of its prompt


class Promises:
    """The promises in order of time."""

    def __init__(self) -> None:
        self._line: list[Promise] = []
        self._by_key: dict[int, list[Promise]] = {}
        self._next = 0
        self.share = 1.0  # of the promises that clients come back for

    def __len__(self) -> int:
        return len(self._line)

    def expected(self, until_s: float = math.inf) -> tuple[int, int]:
        """Return (sequences, prompt tokens) that are expected to come back until then."""
        due = self._line[: bisect_right(self._line, until_s, key=lambda promise: promise.due_s)]
        num_tokens = sum(promise.num_tokens for promise in due)
        return math.ceil(len(due) * self.share), math.ceil(num_tokens * self.share)

    def make(self, request: Request, due_s: float) -> None:
        """Hold a place for a rejected request; beyond `MAX_PROMISES` nothing is held."""
        if len(self._line) >= MAX_PROMISES:
            return
        promise = Promise(due_s, self._next, _key(request), len(request.prompt_token_ids))
        self._next += 1
        insort(self._line, promise)
        self._by_key.setdefault(promise.key, []).append(promise)

    def redeem(self, request: Request, now: float) -> bool:
        """Take back the promise of a request that returns; False if it has none that is due."""
        while self._line and self._line[0].due_s < now - GRACE_S:
            self._drop(self._line[0], kept=False)
        if not self._line:
            return False
        mine = min(self._by_key.get(_key(request), ()), default=None)
        if mine is None or mine.due_s > now + EARLY_S:
            return False
        self._drop(mine, kept=True)
        return True

    def _drop(self, promise: Promise, *, kept: bool) -> None:
        del self._line[bisect_left(self._line, promise)]
        same = self._by_key[promise.key]
        same.remove(promise)
        if not same:
            del self._by_key[promise.key]
        self.share = max(_LEAST_SHARE, self.share + (kept - self.share) * _WEIGHT)


def _key(request: Request) -> int:
    """Return what a request is known by when it comes again; its id, and a seed that was chosen for it, differ then."""
    return hash((request.prompt_token_ids, request.tenant, request.sampling.max_tokens))
