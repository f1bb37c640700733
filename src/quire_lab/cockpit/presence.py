"""`Presence`: whether the watched server answers, what it says of itself, and since when that is so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from quire.clock import BEAT_S
from quire_lab.cockpit.watched import Failed, Watched

GONE = "gone"
_SAID = {
    "ready": "",
    "alive": "",
    "starting": "is starting",
    "loading": "is loading its model",
    "restarting": "starts its engine again",
    "draining": "takes no new requests",
    "hung": "does not compute",
    "unsound": "gives wrong answers",
    "dead": "has no engine any more",
}


@dataclass(frozen=True, slots=True)
class State:
    """``status`` is what ``/readyz`` says, or `GONE`; ``since`` is in seconds since 1970."""

    status: str
    since: float
    text: str = ""

    @property
    def is_gone(self) -> bool:
        return self.status == GONE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Presence:
    """Asks for all pages of this process together, at most once in `BEAT_S`."""

    def __init__(self, watched: Watched, now: Callable[[], float]) -> None:
        """``now`` returns the seconds since 1970."""
        self._watched, self._now = watched, now
        self._lock = asyncio.Lock()
        self._looked = float("-inf")
        self._answered: float | None = None  # when it did last
        self.state = State("starting", now())

    async def look(self) -> State:
        """Return the state of now."""
        async with self._lock:
            if self._now() - self._looked >= BEAT_S:
                self._take(*await self._ask())
                self._looked = self._now()
            return self.state

    async def _ask(self) -> tuple[str, str]:
        """Return the status and what is wrong."""
        try:
            answer = await self._watched.ready()
        except Failed as error:
            return GONE, str(error)
        status, reason = str(answer.get("status", "ready")), answer.get("reason") or ""
        text = _SAID.get(status, f"is {status}")
        return status, f"{text}: {reason}" if text and reason else text

    def _take(self, status: str, text: str) -> None:
        now = self._now()
        if status != GONE:
            self._answered = now
        if status != self.state.status:
            # A server is gone since its last answer, not since the first question without one.
            since = self._answered if status == GONE and self._answered is not None else now
            self.state = State(status, since, text)
        else:
            self.state = State(status, self.state.since, text)
