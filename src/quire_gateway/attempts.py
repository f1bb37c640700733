"""`Attempts`: which backends have had one request, what came of it, and what it may still try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire_gateway.catalog import Target
from quire_gateway.config import Cause
from quire_gateway.fleet import Backend
from quire_gateway.upstream import BackendFailed


@dataclass(slots=True, eq=False)
class Attempts:
    """`Retrying` and `Placing` decide by it; hedging adds to it."""

    num: int = 0
    tried: set[tuple[int, str]] = field(default_factory=set)  # (life of a backend, model)
    num_deaths: int = 0  # backends that died or hung under the request
    failures: Counter[str] = field(default_factory=Counter)  # attempts by model that a retry is paid for
    owed: set[str] = field(default_factory=set)  # models whose next attempt is paid from the retry budget
    closed: set[str] = field(default_factory=set)  # models that get no further attempt
    causes: set[Cause] = field(default_factory=set)  # of the attempts that failed
    failure: BackendFailed | None = None  # of the last attempt
    backend: Backend | None = None  # of the last attempt
    target: Target | None = None
    # The one backend that can take the request, since it holds what the request goes on with.
    holder: str | None = None
    chain: Sequence[bytes] = ()  # digests of the prompt's pieces
    running: list[Backend] = field(default_factory=list)  # two if hedged
    on_lost: Callable[[], None] | None = None  # called when a running one is found lost
    is_reading: bool = False  # waits for the backend, and all that it sent has been relayed

    def watch(self, backend: Backend) -> None:
        """An attempt begins at a backend."""
        self.running.append(backend)
        if self.on_lost is not None:
            backend.watchers.add(self.on_lost)

    def unwatch(self, backend: Backend) -> None:
        """It has ended."""
        self.running.remove(backend)
        if self.on_lost is not None:
            backend.watchers.discard(self.on_lost)
