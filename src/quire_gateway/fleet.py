"""`Fleet`: the backends, what each serves, and which of them may get a request now."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from quire.errors import NotFoundError, clip, nearest
from quire.metrics.log import Log
from quire_gateway.breaker import Breaker
from quire_gateway.config import BackendArgs, HealthArgs
from quire_gateway.routing import Router

FLEET_LOOK_S = 0.25  # between two looks which backends are ready
log = Log("gateway")
Source = Literal["config", "dns", "file", "registered"]


@dataclass(slots=True, eq=False)
class Backend:
    """One server that answers requests."""

    name: str
    url: str
    args: BackendArgs
    source: Source
    number: int  # in the router
    breaker: Breaker
    models: frozenset[str] = frozenset()
    # Of replicas of Quire, by model: where equal, one can continue a stream of the other.
    fingerprints: dict[str, str] = field(default_factory=dict)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)  # of its list of models, by name
    takes_salt: bool | None = None  # reads ``cache_salt``; None: not polled yet
    is_ready: bool = False  # by the last polls
    was_ready: bool = False  # at any time before
    is_silent: bool = False  # was ready until its polls timed out: it may be the network, or this process
    is_lost: bool = False  # not ready, and not because it drains: requests at it may go elsewhere
    has_died: bool = False  # lost, and not silent: what is ready next is another process
    is_suspect: bool = False  # a connection has broken, and no poll has said since whether the backend lives
    answered_s: float = -math.inf  # of the clock: its last poll that was good
    missed_s: float = -math.inf  # when the first of the polls was sent that have failed since then
    life: int = 0  # another number each time it becomes ready; no two backends have the same one
    is_draining: bool = False  # by an operator
    failure: str = "not polled yet"  # of the last poll or request
    about: dict[str, object] = field(default_factory=dict)  # what it said of itself when it registered
    probe: int = 0  # which of the usual probes it answers
    watchers: set[Callable[[], None]] = field(
        default_factory=set
    )  # called each time that a poll finds it lost


class Fleet:
    """All backends by name."""

    def __init__(
        self, router: Router, health: HealthArgs, random: Random, on_demand: Collection[str] = ()
    ) -> None:
        """``on_demand``: models that are served, whether a backend has them now or not."""
        self.router = router
        self._on_demand = on_demand
        self.health = health
        self._random = random
        self._backends: dict[str, Backend] = {}
        self._by_model: dict[str, list[Backend]] = {}
        self._free_numbers: list[int] = []
        self._num_lives = 0

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._backends.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._backends

    @property
    def models(self) -> list[str]:
        """The names that backends serve, in the order in which they came, behind those on demand."""
        return list(dict.fromkeys((*self._on_demand, *self._by_model)))

    def named(self, name: str) -> Backend:
        """Raises `NotFoundError`, which lists the backends."""
        if name not in self._backends:
            known = ", ".join(map(repr, self._backends)) or "none"
            text = f"There is no backend {clip(name)}{nearest(name, self._backends)}. Backends: {known}."
            raise NotFoundError(text, code="backend_not_found")
        return self._backends[name]

    def add(self, name: str, url: str, args: BackendArgs, source: Source) -> Backend:
        """Add a backend, which is not ready until it has been polled."""
        assert name not in self._backends, name
        if self._free_numbers:
            number = self._free_numbers.pop()
            self.router.revive(number)
        else:
            number = self.router.add_replica()
        backend = Backend(name, url, args, source, number, Breaker(self.health))
        self._backends[name] = backend
        self._begin_life(backend)
        self.serves(backend, args.models)
        log.info("backend_added", backend=name, url=url, source=source)
        return backend

    def remove(self, backend: Backend) -> None:
        """Send it no more requests; those in flight go on."""
        del self._backends[backend.name]
        backend.is_ready = False
        self.serves(backend, ())
        self.router.lose(backend.number)
        self._free_numbers.append(backend.number)
        log.info("backend_removed", backend=backend.name, url=backend.url)

    def serves(self, backend: Backend, models: Collection[str]) -> None:
        """``backend`` serves these models from now on."""
        if backend.models == frozenset(models):
            return
        backend.models = frozenset(models)
        self._by_model = {}
        for other in self._backends.values():
            for model in sorted(other.models):
                self._by_model.setdefault(model, []).append(other)

    def fingerprinted(self, backend: Backend, fingerprints: dict[str, str]) -> None:
        """``backend`` says what its streams depend on: weights, quantization, template, by model."""
        if backend.fingerprints == fingerprints:
            return
        backend.fingerprints = fingerprints
        for model, own in fingerprints.items():
            others = [b.name for b in self.serving(model) if b.fingerprints.get(model, own) != own]
            if others:
                log.warning("fingerprints_differ", model=model, backend=backend.name, others=",".join(others))

    def set_ready(
        self,
        backend: Backend,
        ready: bool,
        why: str,
        now: float,
        *,
        is_silent: bool = False,
        is_lost: bool = False,
    ) -> None:
        """A poll, or a refused connection, says whether the backend takes requests.

        ``is_silent``: the polls of a backend that was ready got no answer in time, which does not tell why.
        ``is_lost``: it is dead or hung, so that requests in flight there had better go elsewhere.
        """
        backend.failure = "" if ready else why
        backend.is_silent = is_silent and not ready and (backend.is_ready or backend.is_silent)
        backend.is_lost = is_lost and not ready
        backend.has_died |= backend.is_lost and not is_silent
        backend.is_suspect = False
        backend.answered_s = now if ready else backend.answered_s
        if backend.is_ready != ready:
            self._turn(backend, ready, why, now)
        if backend.is_lost:
            for look in tuple(backend.watchers):
                look()

    def _turn(self, backend: Backend, ready: bool, why: str, now: float) -> None:
        backend.is_ready = ready
        if ready:
            self._begin_life(backend)
        if ready and backend.was_ready:
            if backend.has_died:
                backend.breaker.close(now)
            backend.breaker.recover(now)
        backend.has_died &= not ready
        backend.was_ready |= ready
        if ready:
            log.info("backend_ready", backend=backend.name, models=",".join(sorted(backend.models)))
        else:
            log.warning("backend_unready", backend=backend.name, why=why)

    def _begin_life(self, backend: Backend) -> None:
        self._num_lives += 1
        backend.life = self._num_lives

    def serving(self, model: str) -> list[Backend]:
        """Return the backends that serve a model, whatever their state."""
        return self._by_model.get(model, [])

    def base_of(self, model: str) -> str:
        """Return the name of the model that a served name is a further name or an adapter of, by its card."""
        for backend in self.serving(model):
            card = backend.cards.get(model, {})
            base = card.get("parent") or card.get("root")
            if isinstance(base, str) and base in backend.models:
                return base
        return model

    def candidates(
        self, model: str, now: float, tried: Collection[tuple[int, str]] = (), only: str | None = None
    ) -> list[Backend]:
        """Return the backends that may get a request for ``model`` now, in order of their numbers.

        Backends whose breaker is open, and those that answer no polls, are left out, unless most are: then that tells
        more of the load or the network than of the backends, and all are used; but those whose breaker is open, too,
        only where nothing else is left. A recovered backend is left out at random as its share says.

        ``tried``: (life, model) of the attempts that the request has had; ``only``: the one backend that can take it.
        """
        known = [b for b in self.serving(model) if (b.is_ready or b.is_silent) and not b.is_draining]
        allowed = [b for b in known if b.is_ready and b.breaker.allows(now)]
        if len(allowed) < self.health.panic_share * len(known):
            allowed = [b for b in known if b.is_ready or b.breaker.allows(now)] or known
        loads = self.router.loads
        free = [
            b
            for b in allowed
            if (b.life, model) not in tried
            and only in (None, b.name)
            and (b.args.max_requests is None or loads[b.number].requests < b.args.max_requests)
        ]
        warm = [b for b in free if (share := b.breaker.share(now)) == 1.0 or self._random.random() < share]
        return warm or free
