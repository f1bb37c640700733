"""`Late`: a function of the API that is imported with its first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any


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
