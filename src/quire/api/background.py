"""Background responses: begun, answered at once with their id, and asked for again until they are there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from quire.api.generation import Generation
from quire.api.refusals import refusal_of
from quire.api.response_answer import ResponseAnswer
from quire.api.running import RunningRequests
from quire.errors import QuireError
from quire.metrics.log import Log

log = Log("api")


@dataclass(slots=True)
class _Pending:
    generation: Generation
    answer: ResponseAnswer
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    deleted: bool = False

    def response(self) -> dict[str, Any]:
        """The response as of now."""
        begun = self.generation.usage.completion_tokens > 0
        return self.answer.begun("in_progress" if begun else "queued")


class BackgroundResponses:
    """Responses that are not in the store yet. As many as the engine's queue takes; the others fail."""

    def __init__(self, running: RunningRequests) -> None:
        self._running = running
        self._pending: dict[str, _Pending] = {}

    def start(self, generation: Generation, answer: ResponseAnswer) -> dict[str, Any]:
        """Run ``generation`` and return the response as it begins."""
        pending = _Pending(generation, answer)
        self._pending[answer.head.id] = pending
        pending.task = asyncio.get_running_loop().create_task(self._run(pending))
        return pending.response()

    def get(self, response_id: str) -> dict[str, Any] | None:
        """Return a response that is not complete, or None."""
        pending = self._pending.get(response_id)
        return None if pending is None else pending.response()

    def input_items(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return the input of a response that is not complete, or None."""
        pending = self._pending.get(response_id)
        return None if pending is None else pending.answer.input_items

    async def cancel(self, response_id: str, *, delete: bool = False) -> bool:
        """End a response that is not complete, and wait until that is in the store; return whether there was one.

        ``delete``: forget it instead.
        """
        pending = self._pending.get(response_id)
        if pending is None or pending.task is None:
            return False
        pending.cancelled = True
        pending.deleted = delete
        await pending.generation.cancel()
        await asyncio.wait([pending.task])
        return True

    async def _run(self, pending: _Pending) -> None:
        generation, answer = pending.generation, pending.answer
        ids = frozenset((answer.head.id, generation.request_id))
        try:
            with self._running.entered(ids, generation):
                await generation.submit()
                await generation.answer(_nowhere, ())
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("background_response_crashed", id=answer.head.id)
            if not pending.deleted:
                answer.end("cancelled" if pending.cancelled else "failed", refusal_of(error))
        finally:
            await generation.close()
            del self._pending[answer.head.id]


async def _nowhere(message: Message) -> None:
    """Nobody waits for the bytes; the answer has stored itself."""
