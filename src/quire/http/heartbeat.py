"""`Heartbeat`: a replica says to a gateway, again and again, that it is there and what it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from quire.clock import BEAT_S
from quire.http.client_errors import connection_problem
from quire.metrics.log import Log

log = Log("server")
TTL_S = 5 * BEAT_S


class Heartbeat:
    """Posts to ``/admin/backends`` of a gateway. ``describe`` returns the body at each beat; None: take it off."""

    def __init__(
        self,
        gateway: str,
        key: str | None,
        describe: Callable[[], Mapping[str, Any] | None],
        interval_s: float = BEAT_S,
    ) -> None:
        self._interval_s = interval_s
        self._url = f"{gateway.rstrip('/')}/admin/backends"
        self._headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        self._describe = describe
        self._failure = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Beat in the running loop until it ends."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Say nothing more: another server does, under the same name."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=BEAT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            name = ""
            while True:
                description = self._describe()
                if description is not None:
                    name = description["name"]
                    await self._send(session.post(self._url, json={"ttl_s": TTL_S, **description}))
                elif name:
                    await self._send(session.delete(f"{self._url}/{name}"))
                    name = ""
                await asyncio.sleep(self._interval_s)

    async def _send(self, call: Any) -> None:
        """Log what is new: a failure, its end, or another failure."""
        failure = ""
        try:
            async with call as response:
                if response.status >= 400:
                    failure = f"{response.status}: {(await response.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = connection_problem(error)
        if failure and failure != self._failure:
            log.error("gateway_unreachable", url=self._url, error=failure)
        elif not failure and self._failure:
            log.info("gateway_reached", url=self._url)
        self._failure = failure
