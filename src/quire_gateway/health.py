"""`Poller`: asks every backend whether it takes requests, and which models it serves.

A poll without an answer is repeated at once. After two of them the backend is not ready, so that one that hangs is
found within the interval and twice the time of a poll. A refused connection is believed at once, and a connection that
breaks under a request is followed by a poll at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from quire_gateway.fleet import Backend, Fleet
from quire_gateway.upstream import BackendFailed, Reply, Upstream

_PATHS = ("/readyz", "/health", "/v1/models")  # Quire, vLLM and others, any
_JITTER = 0.25  # of the interval, either way, so that gateways do not poll in step
_MISSES = 2  # polls in a row that fail before a ready backend is not
_LIST_EVERY = 10  # polls
_LEAVING = "draining"  # what a replica of Quire says that ends its requests and takes no new ones


class _Status(msgspec.Struct):
    status: str = ""


_Card = dict[str, Any]  # of Quire: with a fingerprint


class _Models(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class PollFailure:
    """Why a backend takes no requests."""

    why: str
    is_silent: bool = False  # it gave no answer in time
    is_sure: bool = False  # no second poll is needed
    is_leaving: bool = False  # it ends the requests that it has, so these stay


class Poller:
    """One task for each backend, as long as the backend is in the fleet."""

    def __init__(self, fleet: Fleet, random: Random, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._random = random
        self._now = now
        self._upstream: Upstream | None = None
        # Told what the cards of a backend's models say of the server, if it cares.
        self.on_owners: Callable[[Backend, Collection[str]], None] = lambda backend, owners: None
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._hurried: dict[Backend, asyncio.Event] = {}

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

    def hurry(self, backend: Backend) -> None:
        """A request at ``backend`` ended in a way that may mean its death: poll it now."""
        backend.is_suspect = True
        if backend in self._hurried:
            self._hurried[backend].set()

    async def _watch(self, backend: Backend) -> None:
        misses = polls = 0
        interval_s = self._fleet.health.interval_s
        hurried = self._hurried[backend] = asyncio.Event()
        try:
            while True:
                hurried.clear()
                begin_s = self._now()
                failure = await self.poll(backend, lists=not backend.is_ready or polls % _LIST_EVERY == 0)
                backend.missed_s = begin_s if misses == 0 else backend.missed_s
                misses = misses + 1 if failure is not None else 0
                if failure is None:
                    self._fleet.set_ready(backend, True, "", self._now())
                elif misses >= _MISSES or not backend.is_ready or failure.is_sure:
                    self._fleet.set_ready(backend, False, failure.why, self._now(),
                                          is_silent=failure.is_silent, is_lost=not failure.is_leaving)  # fmt: skip
                polls += 1
                if failure is not None and backend.is_ready:
                    continue  # once more, at once
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s * self._random.uniform(1 - _JITTER, 1 + _JITTER)):
                        await hurried.wait()
        finally:
            del self._hurried[backend]

    async def poll(self, backend: Backend, *, lists: bool) -> PollFailure | None:
        """Return why the backend takes no requests; None: it does.

        ``lists``: ask for its models, too.
        """
        try:
            path = await self._probe(backend)
            if lists:
                await self._list(backend)
            if not backend.models:
                return PollFailure("it serves no model")
        except BackendFailed as error:
            if error.kind == "room" and backend.is_ready:
                return None  # nothing is known of the backend: it stays what it was
            is_sure = error.kind == "connect" and not error.timed_out
            return PollFailure(str(error), error.timed_out, is_sure, _is_leaving(error.answer))
        return None if path else PollFailure("none of its probes answers 200")

    async def _list(self, backend: Backend) -> None:
        """Ask what the backend serves. Where the configuration says it, a backend need not have the list."""
        cards: list[_Card] = []
        if not backend.args.models or backend.source == "registered":
            cards = await self._models(backend)
            if not backend.args.models:
                self._fleet.serves(backend, [card["id"] for card in cards])
            self._fleet.fingerprinted(
                backend,
                {c["id"]: c["fingerprint"] for c in cards if isinstance(c.get("fingerprint"), str)},
            )
        else:
            with suppress(BackendFailed):
                cards = await self._models(backend)
            cards = cards or list(backend.cards.values())
        backend.cards = {card["id"]: card for card in cards}
        self.on_owners(backend, [c["owned_by"] for c in cards if isinstance(c.get("owned_by"), str)])

    async def _probe(self, backend: Backend) -> str:
        """Return the path that answered 200, or an empty text. A path that a backend lacks is not asked again."""
        paths = (backend.args.health_path,) if backend.args.health_path else _PATHS
        for path in paths[backend.probe :] if len(paths) > 1 else paths:
            answer = await self._get(backend, path)
            if answer.status == 200:
                return path
            if answer.status != 404:
                raise BackendFailed("status", f"{path} answered {answer.status}.", answer)
            backend.probe += len(paths) > 1 and backend.probe < len(paths) - 1
        return ""

    async def _models(self, backend: Backend) -> list[_Card]:
        answer = await self._get(backend, "/v1/models")
        try:
            cards = msgspec.json.decode(answer.body, type=_Models).data
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BackendFailed("garbage", f"/v1/models is not a list of models: {error}.") from error
        if any(not isinstance(card.get("id"), str) for card in cards):
            raise BackendFailed("garbage", "/v1/models is not a list of models: one has no id.")
        return cards

    async def _get(self, backend: Backend, path: str) -> Reply:
        assert self._upstream is not None
        timeout_s = self._fleet.health.timeout_s
        return await self._upstream.get(f"{backend.url}{path}", timeout_s, backend.args.api_key)


def _is_leaving(answer: Reply | None) -> bool:
    if answer is None:
        return False
    try:
        return msgspec.json.decode(answer.body, type=_Status).status == _LEAVING
    except (msgspec.DecodeError, UnicodeError):
        return False
