"""`Promises`: a request that comes back when its `Retry-After` said goes to the backend that said so.

A full replica of Quire holds a place for the request that it refused (`quire.api.full_queue`); another one does not
know of it. A request is known by its path, tenant and body. Those that are equal share the times told, earliest first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable

from quire_gateway.asked import Asked

EARLY_S, GRACE_S = 0.25, 2.0  # around the time told, as replicas have them
MAX_PROMISES = 1 << 16
_KEY_BYTES = 1 << 16  # of a body, beside its length


class Promises:
    """What backends have told clients. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._dues: dict[Hashable, list[tuple[float, str]]] = {}  # (time, name of the backend), ascending
        self._num = 0

    def told(self, asked: Asked, tenant: str, backend: str, after_s: float) -> None:
        """``backend`` has told a request to come back in ``after_s`` seconds."""
        if self._num >= MAX_PROMISES:
            self._forget()
        if self._num < MAX_PROMISES:
            insort(self._dues.setdefault(_key(asked, tenant), []), (self._now() + after_s, backend))
            self._num += 1

    def backend_of(self, asked: Asked, tenant: str) -> str | None:
        """Return the backend that a request comes back to, and count it as back; None if it is told of by none."""
        if not self._dues:
            return None
        key, now = _key(asked, tenant), self._now()
        dues = self._dues.get(key, [])
        while dues and dues[0][0] + GRACE_S < now:
            del dues[0]
            self._num -= 1
        found = None
        if dues and now >= dues[0][0] - EARLY_S:
            found = dues.pop(0)[1]
            self._num -= 1
        if not dues:
            self._dues.pop(key, None)
        return found

    def _forget(self) -> None:
        """Drop the promises whose time is over."""
        oldest = self._now() - GRACE_S
        self._dues = {
            key: left for key, dues in self._dues.items() if (left := [d for d in dues if d[0] >= oldest])
        }
        self._num = sum(map(len, self._dues.values()))


def _key(asked: Asked, tenant: str) -> Hashable:
    return hash(asked.raw[:_KEY_BYTES]), len(asked.raw), asked.path, tenant
