"""`Poller`: asks every backend whether it takes requests, and which models it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from quire.gateway.fleet import Backend, Fleet
from quire.gateway.upstream import BackendFailed, Upstream, Whole

_PATHS = ("/readyz", "/health", "/v1/models")  # Quire, vLLM and others, any
_JITTER = 0.25  # of the interval, either way, so that gateways do not poll in step
_MISSES = 2  # polls in a row that fail before a ready backend is not
_LIST_EVERY = 10  # polls


class _Card(msgspec.Struct):
    id: str
    fingerprint: Any = None  # of replicas of Quire


class _Models(msgspec.Struct):
    data: list[_Card]


class Poller:
    """One task for each backend, as long as the backend is in the fleet."""

    def __init__(self, fleet: Fleet, random: Random, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._random = random
        self._now = now
        self._upstream: Upstream | None = None
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    def start(self, upstream: Upstream) -> None:
        """Poll from now on."""
        self._upstream = upstream
        self.sync()

    def sync(self) -> None:
        """Poll the backends that the fleet has now, and no others."""
        if self._upstream is None:
            return
        present = set(self._fleet)
        for backend in present - self._tasks.keys():
            self._tasks[backend] = asyncio.create_task(self._watch(backend))
        for backend in self._tasks.keys() - present:
            self._tasks.pop(backend).cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self, backend: Backend) -> None:
        misses = polls = 0
        interval_s = self._fleet.health.interval_s
        while True:
            why, is_silent = await self.poll(backend, lists=not backend.is_ready or polls % _LIST_EVERY == 0)
            misses = misses + 1 if why else 0
            if not why or misses >= _MISSES or not backend.is_ready:
                self._fleet.set_ready(backend, not why, why, self._now(), is_silent=is_silent)
            polls += 1
            await asyncio.sleep(interval_s * self._random.uniform(1 - _JITTER, 1 + _JITTER))

    async def poll(self, backend: Backend, *, lists: bool) -> tuple[str, bool]:
        """Return why the backend takes no requests (an empty text: it does), and whether it gave no answer in time.

        ``lists``: ask for its models, too.
        """
        try:
            path = await self._probe(backend)
            if lists and (not backend.args.models or backend.source == "registered"):
                cards = await self._models(backend)
                if not backend.args.models:
                    self._fleet.serves(backend, [card.id for card in cards])
                self._fleet.fingerprinted(
                    backend,
                    {card.id: card.fingerprint for card in cards if isinstance(card.fingerprint, str)},
                )
            if not backend.models:
                return "it serves no model", False
        except BackendFailed as error:
            if error.kind == "room" and backend.is_ready:
                return "", False  # nothing is known of the backend: it stays what it was
            return str(error), error.timed_out
        return "" if path else "none of its probes answers 200", False

    async def _probe(self, backend: Backend) -> str:
        """Return the path that answered 200, or an empty text. A path that a backend lacks is not asked again."""
        paths = (backend.args.health_path,) if backend.args.health_path else _PATHS
        for path in paths[backend.probe :] if len(paths) > 1 else paths:
            answer = await self._get(backend, path)
            if answer.status == 200:
                return path
            if answer.status != 404:
                raise BackendFailed("status", f"{path} answered {answer.status}.")
            backend.probe += len(paths) > 1 and backend.probe < len(paths) - 1
        return ""

    async def _models(self, backend: Backend) -> list[_Card]:
        answer = await self._get(backend, "/v1/models")
        try:
            return msgspec.json.decode(answer.body, type=_Models).data
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BackendFailed("garbage", f"/v1/models is not a list of models: {error}.") from error

    async def _get(self, backend: Backend, path: str) -> Whole:
        assert self._upstream is not None
        timeout_s = self._fleet.health.timeout_s
        return await self._upstream.get(f"{backend.url}{path}", timeout_s, backend.args.api_key)
