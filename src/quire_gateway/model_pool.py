"""`ModelPool`: several models share the memory of one machine; requests load them, and idle ones make room.

    unloaded ── a request, or load() ──▶ loading ──▶ loaded ── room for another, keep-alive, unload() ──▶ unloading ──┐
        ▲                                                                                                             │
        └─────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Models that wait for memory get it in the order in which they were first asked for. The least recently used ones make
room, idle ones first. A model is never unloaded while requests use it: one that has to make room takes no new requests,
which wait, and is unloaded when its last one has ended. Pinned models are loaded at the start and stay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ModelLoadError, NotFoundError, clip, nearest
from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log
from quire.units import GIB
from quire_gateway.exchange import Exchange
from quire_gateway.stage import Proceed, Stage

log = Log("gateway")
_RETRY_S = 10.0  # after a load that failed, in which requests get the same error at once


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model of the pool."""

    name: str
    num_bytes: int  # weights, KV cache, a step and the process
    is_pinned: bool = False
    keep_alive_s: float | None = None  # unloaded after this time without a request; None: never
    state: Literal["unloaded", "loading", "loaded", "unloading"] = "unloaded"
    used_s: float = 0.0  # of the clock: the end of the last request
    num_users: int = 0  # requests that use it
    num_waiting: int = 0  # requests that wait for it to be loaded
    is_leaving: bool = False  # takes no new requests: another model waits for its memory
    failure: str = ""  # of the last load
    failed_s: float = -math.inf
    task: asyncio.Task[None] | None = None  # loads or unloads it
    timer: asyncio.TimerHandle | None = None  # of keep_alive_s

    @property
    def is_usable(self) -> bool:
        return self.state == "loaded" and not self.is_leaving

    def card(self) -> dict[str, Any]:
        """Return what ``/v1/models`` says of it, beside its name."""
        return {"loaded": self.state == "loaded", "state": self.state, "pinned": self.is_pinned,
                "memory_bytes": self.num_bytes, "requests": self.num_users}  # fmt: skip


class _Room:
    """The memory that the models share, and which of them leave it for another one."""

    def __init__(
        self, models: Sequence[PooledModel], num_bytes: int, unload: Callable[[str], Awaitable[None]]
    ) -> None:
        self._models = models
        self._num_bytes = num_bytes
        self._unload = unload
        self._event = asyncio.Event()  # set, and replaced, whenever a model's state changes

    def notify(self) -> None:
        """A model's state has changed."""
        self._event.set()
        self._event = asyncio.Event()

    async def change(self) -> None:
        """Wait until a model's state changes."""
        await self._event.wait()

    async def make(self, model: PooledModel) -> bool:
        """Unload others until the model fits; False: no request waits for it any more."""
        try:
            while model.num_waiting or model.num_users or model.is_pinned:
                used = sum(m.num_bytes for m in self._models if m.state != "unloaded")
                lacking = used + model.num_bytes - self._num_bytes
                if lacking <= 0:
                    return True
                self._choose_leavers(lacking)
                idle = [m for m in self._models if m.is_leaving and self.unload_if_idle(m)]
                if not idle:
                    await self.change()
            return False
        finally:
            self._choose_leavers(0)
            self.notify()

    def _choose_leavers(self, lacking: int) -> None:
        """Let the least recently used models leave until ``lacking`` bytes are free, idle ones first.

        A model that has just been loaded serves those that wait for it before it leaves.
        """
        lacking -= sum(m.num_bytes for m in self._models if m.state == "unloading")
        able = [
            m
            for m in self._models
            if m.state == "loaded" and not m.is_pinned and (m.is_leaving or not m.num_waiting)
        ]
        for model in sorted(able, key=lambda m: (m.num_users > 0, m.used_s)):
            model.is_leaving = lacking > 0
            lacking -= model.num_bytes

    def unload_if_idle(self, model: PooledModel) -> bool:
        """Begin to unload a model that no request uses; return whether that is so."""
        waits = model.num_waiting and not model.is_leaving
        if model.state != "loaded" or model.num_users or waits:
            return False
        model.state = "unloading"
        model.task = asyncio.create_task(self._send_off(model))
        return True

    async def _send_off(self, model: PooledModel) -> None:
        try:
            await self._unload(model.name)
            log.info("model_unloaded", model=model.name)
        finally:
            model.state, model.is_leaving, model.task = "unloaded", False, None
            self.notify()


class ModelPool(Stage):
    """Made before the event loop, used in it. ``load`` and ``unload`` start and end the server of one model.

    ``load`` returns once requests can be sent to the server, and raises `ModelLoadError` where that cannot be.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        memory_bytes: int,
        load: Callable[[str], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        now: Callable[[], float],
        *,
        load_timeout_s: float,
    ) -> None:
        self._models = {model.name: model for model in models}
        self.memory_bytes = memory_bytes
        self._load = load
        self._room = _Room(tuple(self._models.values()), memory_bytes, unload)
        self._now = now
        self._timeout_s = load_timeout_s
        self._turn = asyncio.Lock()  # of models that wait for memory
        self._pinning: list[asyncio.Task[None]] = []
        # Of load and unload: keys that may call them; none, and not closed: no key is needed.
        self.keys: tuple[str, ...] = ()
        self.is_closed = False

    def __iter__(self) -> Iterator[PooledModel]:
        return iter(self._models.values())

    def named(self, name: str) -> PooledModel:
        """Raises `NotFoundError`, which lists the models."""
        if name not in self._models:
            known = ", ".join(map(repr, self._models))
            text = f"The model {clip(name)} is not served here{nearest(name, self._models)}. Served: {known}."
            raise NotFoundError(text, param="model", code="model_not_found")
        return self._models[name]

    def start(self) -> None:
        """Load the pinned models."""
        self._pinning = [asyncio.create_task(self._pin(model)) for model in self if model.is_pinned]

    async def close(self) -> None:
        """Stop loading and unloading. The servers are their owner's to end."""
        tasks = [*self._pinning, *(model.task for model in self if model.task is not None)]
        for model in self:
            if model.timer is not None:
                model.timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, exchange: Exchange, proceed: Proceed) -> None:
        """Keep the request's model in memory while it runs. Raises `HttpError` as `use` does."""
        assert exchange.request is not None
        async with self.use(exchange.targets[0].model, exchange.request.deadline_s):
            await proceed()

    @asynccontextmanager
    async def use(self, name: str, limit_s: float | None = None) -> AsyncGenerator[None, None]:
        """Keep a model loaded while the block runs; load it first if need be.

        Raises:
            HttpError: 503, it cannot be loaded, or is not within ``limit_s`` (and the pool's own limit).
        """
        model = self.named(name)
        await self._wait(model, limit_s)
        model.num_users += 1
        try:
            yield
        finally:
            model.num_users -= 1
            self._is_idle(model)

    async def load(self, name: str) -> PooledModel:
        """Load a model without a request.

        Raises:
            NotFoundError, HttpError: as of `use`.
        """
        async with self.use(name):
            return self.named(name)

    async def unload(self, name: str) -> PooledModel:
        """Unload a model as soon as it is idle.

        Raises:
            NotFoundError: it is not of the pool.
            HttpError: 409, it is in use all the time.
        """
        model = self.named(name)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while model.state != "unloaded":
                    if not self._room.unload_if_idle(model):
                        await self._room.change()
        if model.state != "unloaded":
            text = f"The model {name!r} is in use by {model.num_users} requests and was not unloaded."
            raise HttpError(Refusal(409, text, code="model_in_use"))
        return model

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """Unload a model after ``seconds`` without a request from now on; None: never; 0: as soon as it is idle.

        Raises:
            NotFoundError: it is not of the pool.
        """
        model = self.named(name)
        model.keep_alive_s = seconds
        self._is_idle(model)

    def died(self, name: str) -> None:
        """The server of a loaded model has ended by itself. It is loaded again at once if requests use it."""
        model = self._models[name]
        if model.state == "loaded":
            model.state, model.is_leaving = "unloaded", False
            if model.num_users or model.is_pinned:
                self._start_loading(model)
            self._room.notify()

    async def _pin(self, model: PooledModel) -> None:
        with suppress(HttpError):  # it was logged, and the first request tries again
            await self.load(model.name)

    async def _wait(self, model: PooledModel, limit_s: float | None) -> None:
        """Return once the model is loaded; nothing else runs between that and the caller's next line."""
        model.num_waiting += 1
        try:
            async with asyncio.timeout(min(self._timeout_s, math.inf if limit_s is None else limit_s)):
                while not model.is_usable:
                    if self._now() - model.failed_s < _RETRY_S:
                        text = f"The model {model.name!r} cannot be loaded: {model.failure}"
                        raise HttpError(_refusal(text, "model_load_failed", _RETRY_S))
                    self._start_loading(model)
                    await self._room.change()
        except TimeoutError:
            raise HttpError(_refusal(_why_late(model, self), "model_loading", 1.0)) from None
        finally:
            model.num_waiting -= 1
            self._room.notify()

    def _start_loading(self, model: PooledModel) -> None:
        if model.task is None and model.state == "unloaded":
            model.task = asyncio.create_task(self._bring(model))

    async def _bring(self, model: PooledModel) -> None:
        begin_s = self._now()
        try:
            async with self._turn:
                if not await self._room.make(model):
                    return
                model.state = "loading"
            log.info("model_loading", model=model.name, gib=round(model.num_bytes / GIB, 2))
            await self._load(model.name)
            model.state, model.failure, model.failed_s = "loaded", "", -math.inf
            log.info("model_loaded", model=model.name, seconds=round(self._now() - begin_s, 1))
        except (ModelLoadError, OSError) as error:
            model.failure, model.failed_s = str(error), self._now()
            log.error("model_load_failed", model=model.name, error=str(error))
        finally:
            if model.state == "loading":
                model.state = "unloaded"
            model.task = None
            self._is_idle(model)

    def _is_idle(self, model: PooledModel) -> None:
        """A request has ended, or the time to keep the model has changed."""
        model.used_s = self._now()
        if model.timer is not None:
            model.timer.cancel()
        if model.keep_alive_s is not None and not model.num_users and not model.is_pinned:
            model.timer = asyncio.get_running_loop().call_later(
                model.keep_alive_s, self._room.unload_if_idle, model
            )
        self._room.notify()


def _why_late(model: PooledModel, pool: ModelPool) -> str:
    if model.state == "loading":
        return f"The model {model.name!r} is still being loaded: try again."
    others = ", ".join(f"{m.name!r} ({m.num_users} requests)" for m in pool if m.state != "unloaded")
    gib = [round(num / GIB, 2) for num in (model.num_bytes, pool.memory_bytes)]
    return (
        f"The model {model.name!r} needs {gib[0]} GiB of the {gib[1]} GiB of model_memory, and the models that "
        f"hold it are in use: {others}. Try again."
    )


def _refusal(text: str, code: str, retry_after_s: float) -> Refusal:
    return Refusal(
        503, text, param="model", code=code, headers=((b"retry-after", b"%d" % math.ceil(retry_after_s)),)
    )
