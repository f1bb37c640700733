"""`Stage`: one optional part of the gateway on the way of a request; `quire_gateway.stages` lists which are on.

    enter      the body was read, and nothing of it has been judged
    model      which name stands for the one that the client sent
    admit      the model is known: reserve, or refuse
    serve      around all attempts, which ``await proceed()`` makes
    begun      a backend is about to get the request
    prepare    what goes to the backend
    open       around one attempt, which ``await proceed(placed)`` makes
    answered   the first event of a stream, or a whole answer, has come
    relayed    more of a stream has come
    after      the request has ended

A stage overrides what it needs; nothing else of it is called. What it keeps of one request is its own: a variable of
`serve`, an `AnswerStep`, or a table by exchange that `after` empties.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from quire_gateway.exchange import Exchange
from quire_gateway.placing import Placed
from quire_gateway.sending import Opened, Outgoing

Proceed = Callable[[], Awaitable[None]]
Open = Callable[[Placed], Awaitable[Opened]]


class Stage:
    """Does nothing of itself. ``paths``: the POST paths whose requests pass it; None: all."""

    paths: Collection[str] | None = None

    def start(self) -> None:
        """Called in the loop that serves, before there are requests. Raises `ConfigError` if the stage cannot work."""

    async def close(self) -> None:
        """The requests have ended."""

    def metrics(self) -> Iterable[Metric]:
        """Return the families of the stage, read at each scrape."""
        return ()

    async def enter(self, exchange: Exchange) -> None:
        """Raises `RequestError` or `HttpError` to refuse the request, as all that follow may."""

    async def model(self, exchange: Exchange, name: str | None) -> str | None:
        return name

    async def admit(self, exchange: Exchange, model: str) -> None:
        """``model``: the first to try; empty where the request names none that is known."""

    async def serve(self, exchange: Exchange, proceed: Proceed) -> None:
        await proceed()

    def begun(self, exchange: Exchange) -> None: ...

    def prepare(self, outgoing: Outgoing) -> None: ...

    async def open(self, exchange: Exchange, proceed: Open, placed: Placed) -> Opened:
        """Raises `BackendFailed`: there is no answer."""
        return await proceed(placed)

    def answered(self, exchange: Exchange, opened: Opened) -> None: ...

    def relayed(self, exchange: Exchange) -> None: ...

    async def after(self, exchange: Exchange, now: float) -> None: ...


class Pipeline:
    """The stages that the requests of one path pass, in order."""

    def __init__(self, stages: Iterable[Stage], path: str) -> None:
        on = [stage for stage in stages if stage.paths is None or path in stage.paths]
        self.relayed: Sequence[Callable[[Exchange], None]] = overriding(on, "relayed")
        self._enter = overriding(on, "enter")
        self._model = overriding(on, "model")
        self._admit = overriding(on, "admit")
        self._serve = overriding(on, "serve")[::-1]
        self._begun = overriding(on, "begun")
        self._prepare = overriding(on, "prepare")
        self._open = overriding(on, "open")[::-1]
        self._answered = overriding(on, "answered")
        self._after = overriding(on, "after")

    async def enter(self, exchange: Exchange) -> None:
        for enter in self._enter:
            await enter(exchange)

    async def model(self, exchange: Exchange, name: str | None) -> str | None:
        for model in self._model:
            name = await model(exchange, name)
        return name

    async def admit(self, exchange: Exchange, model: str) -> None:
        for admit in self._admit:
            await admit(exchange, model)

    async def serve(self, exchange: Exchange, proceed: Proceed) -> None:
        for serve in self._serve:
            proceed = partial(serve, exchange, proceed)
        await proceed()

    def begun(self, exchange: Exchange) -> None:
        for begun in self._begun:
            begun(exchange)

    def prepare(self, outgoing: Outgoing) -> None:
        for prepare in self._prepare:
            prepare(outgoing)

    async def open(self, exchange: Exchange, proceed: Open, placed: Placed) -> Opened:
        for open_ in self._open:
            proceed = partial(open_, exchange, proceed)
        return await proceed(placed)

    def answered(self, exchange: Exchange, opened: Opened) -> None:
        for answered in self._answered:
            answered(exchange, opened)

    async def after(self, exchange: Exchange, now: float) -> None:
        for after in self._after:
            await after(exchange, now)


def overriding(stages: Iterable[Stage], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the method ``name`` of each stage that has one of its own."""
    base = getattr(Stage, name)
    return tuple(getattr(stage, name) for stage in stages if getattr(type(stage), name) is not base)


def families(stages: Iterable[Stage]) -> Iterator[Metric]:
    """Yield the metrics of all stages."""
    for stage in stages:
        yield from stage.metrics()
