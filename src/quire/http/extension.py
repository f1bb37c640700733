"""`Extension`: what another package adds to an application, and `Work`: what it does by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from quire.http.wire import Body


@dataclass(frozen=True, slots=True)
class Extension:
    """What another package adds to an application."""

    routes: Sequence[Route] = ()
    # (path, what wraps the application of each of the application's own routes at that path and below it)
    around: tuple[str, Callable[[ASGIApp], ASGIApp]] | None = None
    lifespan: Lifespan[Starlette] | None = None  # runs beside the application
    bodies: Mapping[str, Body] = field(default_factory=dict)  # path → body of a route
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What an extension does by itself, and another server can go on with."""

    start: Callable[[Starlette], None]  # with the application that it calls
    stop: Callable[[], Awaitable[list[Any]]]  # returns what is not on disk
    adopt: Callable[[list[Any]], None]  # before the start: what another server has returned
    is_on_disk: bool  # a server that starts later goes on with it, too
