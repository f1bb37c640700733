"""What goes to a backend for one attempt, and the answer that has begun to come."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import ClientResponse

from quire_gateway.exchange import Exchange
from quire_gateway.placing import Placed


@dataclass(slots=True, eq=False)
class Outgoing:
    """The request of one attempt. Stages add to it (`Stage.prepare`)."""

    exchange: Exchange
    placed: Placed
    headers: list[tuple[str, str]]
    body: bytes
    is_second: bool = False  # next to another attempt that still runs


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun."""

    placed: Placed
    response: ClientResponse
    first: bytes = b""  # of its stream
