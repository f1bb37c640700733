"""The access log: a line for each request, in the log or as JSON lines in a file of their own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.metrics.log import Log
from quire.private import appended, tighten
from quire_gateway.exchange import Exchange
from quire_gateway.patience import FLUSH_S
from quire_gateway.stage import Stage

MAX_WAITING = 100_000  # lines; more are counted and dropped while the file takes none
log = Log("gateway")
_encode = msgspec.json.Encoder().encode


class AccessLog(Stage):
    """Lines wait at most `FLUSH_S`. The file is opened for each write, so that it may be moved away at any time."""

    def __init__(self, path: str | None, *, logs: bool, unix_time: Callable[[], float] = time.time) -> None:
        """``path``: of the file, if any; ``logs``: write to the log of the gateway."""
        self._unix_time = unix_time
        self._path = path  # "-": standard output
        self._logs = logs
        self._lines: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None
        self._is_failing = False
        if path is not None and path != "-":
            # A collector may need to read the file: its rights are left to the operator.
            tighten(Path(path), changes=False)

    async def after(self, exchange: Exchange, now: float) -> None:
        fields = _fields(exchange, now)
        if self._logs:
            log.info("request", **fields)
        if self._path is not None and len(self._lines) < MAX_WAITING:
            self._lines.append(_encode({"time": round(self._unix_time(), 3), **fields}))
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush_soon())

    async def close(self) -> None:
        """Write what waits."""
        if self._flushing is not None:
            await self._flushing
        await self._flush()

    async def _flush_soon(self) -> None:
        while self._lines:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await asyncio.to_thread(_append, str(self._path), b"\n".join(lines) + b"\n")
        except OSError as error:
            if not self._is_failing:
                log.error("access_log_failed", path=self._path, error=str(error))
            self._is_failing = True
        else:
            self._is_failing = False


def _append(path: str, data: bytes) -> None:
    if path == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    with appended(Path(path)) as file:
        file.write(data)


def _fields(exchange: Exchange, now: float) -> dict[str, Any]:
    usage, backend, request = exchange.usage, exchange.backend, exchange.request
    first_s = exchange.answer.first_s
    return {
        "request_id": exchange.request_id,
        "trace_id": exchange.trace_id,
        "tenant": exchange.tenant or None,
        "key": exchange.key or None,
        "client": (exchange.scope.get("client") or [None])[0],
        "path": exchange.path,
        "status": exchange.answer.status,
        "outcome": exchange.outcome,
        "model": exchange.named_model or None,
        "target": exchange.target.model if exchange.target is not None else None,
        "backend": backend.name if backend is not None else None,
        "stream": request.streams if request is not None else None,
        "attempts": exchange.attempts.num,
        "ttft_ms": round(1e3 * (first_s - exchange.arrival_s), 1) if first_s is not None else None,
        "ms": round(1e3 * (now - exchange.arrival_s), 1),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
