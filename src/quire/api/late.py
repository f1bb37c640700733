"""`Late`: a function of the API that is imported with its first call; `LateHandler`: the same for a class's handler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from quire.api.state import ApiState


class Late:
    """The asynchronous function at ``place``, as "module:name"."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._function: Any = None

    def load(self) -> Any:
        """Return the function."""
        if self._function is None:
            module, _, name = self.place.partition(":")
            self._function = getattr(import_module(module), name)
        return self._function

    async def __call__(self, *arguments: Any) -> Any:
        return await self.load()(*arguments)


class LateHandler:
    """The handler at ``place``, as "module:Class.method"; the class is made of ``state``."""

    def __init__(self, state: ApiState, place: str) -> None:
        self._state = state
        self._class, _, self._method = place.rpartition(".")
        self._handler: Any = None

    def load(self) -> Any:
        """Return the method."""
        if self._handler is None:
            self._handler = getattr(Late(self._class).load()(self._state), self._method)
        return self._handler

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        response: Response = await self.load()(request)
        return response
