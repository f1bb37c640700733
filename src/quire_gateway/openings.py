"""`Openings`: connections to backends are opened a few at a time, so that a burst of requests is no burst of connects.

A request that finds no idle connection waits in order of arrival for one of `PER_BACKEND` attempts at its backend, and
one of `IN_ALL`. The time limit of an attempt begins with the attempt and does not count the loop's own lateness
(`quire_gateway.patience`): the busier this process is, the less a late answer says of the backend.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.tracing import Trace

from quire.errors import CapacityError
from quire_gateway.patience import lasting

PER_BACKEND = 32  # attempts at once
IN_ALL = 128
MAX_WAITING = 16_384  # for an attempt; more are refused


class Openings(aiohttp.TCPConnector):
    """A pool of connections whose attempts to open one are bounded. Belongs to one event loop."""

    def __init__(self, connect_s: float, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s, ttl_dns_cache=5)
        self._connect_s = connect_s
        self._all = asyncio.Semaphore(IN_ALL)
        self._of: defaultdict[ConnectionKey, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PER_BACKEND)
        )
        self._users: defaultdict[ConnectionKey, int] = defaultdict(int)  # that wait or open
        self.num_waiting = 0

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """Open a connection once it is the request's turn.

        Raises:
            CapacityError: too many wait already (retryable).
            TimeoutError: the attempt took longer than it may.
        """
        if self.num_waiting >= MAX_WAITING:
            raise CapacityError(
                f"{MAX_WAITING} requests wait for a connection to a backend: try again later.", retryable=True
            )
        key = req.connection_key
        self.num_waiting += 1
        self._users[key] += 1
        is_waiting = True
        try:
            async with self._of[key], self._all:
                self.num_waiting -= 1
                is_waiting = False
                async with lasting(self._connect_s):
                    return await super()._create_connection(req, traces, timeout)
        finally:
            self.num_waiting -= is_waiting
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._of[key]
