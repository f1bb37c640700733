"""`Holders`: which backend holds which stored response.

A gateway remembers where the responses are that it has passed on. After a restart, and at another gateway, the hint in
the id names the backend, where there are several tenants (`quire_gateway.ownership`). Without a hint, or where the
backend has no such response, since another one continued its stream, all backends are asked.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend, Fleet
from quire_gateway.ownership import Owner
from quire_gateway.routing import DEFAULT_CAPACITY

MAX_HOLDERS = DEFAULT_CAPACITY
Asks = Callable[[Backend, str], Awaitable[bool]]  # whether a backend has the response of an id


class Holders:
    """The holders of the last `MAX_HOLDERS` responses, and how others are found."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._names: OrderedDict[str, str] = OrderedDict()  # response → backend

    def put(self, response_id: str, backend: str) -> None:
        """``backend`` answered with this id."""
        self._names[response_id] = backend
        self._names.move_to_end(response_id)
        if len(self._names) > MAX_HOLDERS:
            self._names.popitem(last=False)

    def likely(self, response_id: str, owner: Owner, hint: str) -> tuple[list[Backend], list[Backend]]:
        """Return the backends that should hold a response, and those that may hold it otherwise."""
        return self._split(response_id, owner, hint, self._fleet)

    async def find(self, exchange: Exchange, owner: Owner, asks: Asks) -> str | None:
        """Return the one backend that can take a request, since it holds the response that the request goes on with.

        None: any can, as far as is known.
        """
        request = exchange.request
        assert request is not None
        previous = request.body.get("previous_response_id")
        if not (previous or request.hint):
            return None
        names = dict.fromkeys(target.model for target in exchange.targets)
        serving = list(dict.fromkeys(b for name in names for b in self._fleet.serving(name)))
        if len(serving) < 2:
            return None
        previous = previous if isinstance(previous, str) else ""
        likely, others = self._split(previous, owner, request.hint, serving)
        if likely and (self._names.get(previous) == likely[0].name or not previous):
            return likely[0].name  # of an item alone no backend can be asked
        for backends in (likely, others) if previous else ():
            ready = [b for b in backends if b.is_ready]
            for backend, has in zip(
                ready, await asyncio.gather(*(asks(b, previous) for b in ready)), strict=True
            ):
                if has:
                    self.put(previous, backend.name)
                    return backend.name
        return likely[0].name if likely else None

    def _split(
        self, response_id: str, owner: Owner, hint: str, backends: Iterable[Backend]
    ) -> tuple[list[Backend], list[Backend]]:
        among = list(backends)
        known = [b for b in among if b.name == self._names.get(response_id)]
        if known:
            return known, []
        hinted = [b for b in among if hint and owner.hint_of(b.name) == hint]
        return hinted, [b for b in among if b not in hinted]
