"""`Generation`: a job while it runs, from its prompts to the last byte of its answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Send

from quire.api.job import Job
from quire.api.prompt_streams import PromptStreams
from quire.api.state import ApiState
from quire.engine.output import OutputChunk, merge
from quire.engine.results import choose_best
from quire.errors import QuireError
from quire.http.body import STREAM_HEADERS, Headers, send_json
from quire.http.call import Call
from quire.http.refusals import HttpError, Refusal, refusal_of, refusal_of_chunk
from quire.metrics.log import Log
from quire.request import NO_TENANT, FinishReason

if TYPE_CHECKING:
    from quire.api.relayed import Relayed

log = Log("api")

_GOOD = (None, FinishReason.STOP, FinishReason.LENGTH)
CONTINUES = 503  # status of an error after which a client may come back for the rest: shutdown, a dead engine
CANCELLED = "cancelled"
CANCELLED_BY_CLIENT = "cancelled_by_client"


class Tap(Protocol):
    """Sees a stream before its client does, so that it can go on elsewhere."""

    headers: Headers  # the answer has them too
    resumes: bool  # the client has a part of the stream

    def attach(self, generation: Generation) -> None:
        """``generation`` is the one whose stream it is."""

    async def replay(self, generation: Generation, send: Send, opening: bytes) -> bool:
        """Bring the answer to where the client has it; return whether it had ended with an error."""
        ...

    async def chunk(self, index: int, chunk: OutputChunk, cached_tokens: int, events: bytes) -> bytes | None:
        """Return what the client gets for the ``events`` of a chunk; None: it gets no more."""
        ...

    async def end(self, status: int, events: bytes) -> bytes:
        """Return the same of the last events. ``status``: of the error that ends the stream, or 0."""
        ...


class Generation:
    """Runs a `Job`. The choice index of sample s of prompt p is ``p * n + s``, as in OpenAI's API."""

    def __init__(
        self,
        state: ApiState,
        job: Job,
        arrival_s: float,
        call: Call,
        trace: Mapping[str, str],
        tap: Tap | None = None,
        relayed: Relayed | None = None,
    ) -> None:
        """``trace``: the headers that name the client's span.

        ``tap`` and ``relayed``: of an answer that can go on elsewhere, or has begun there.
        """
        self.job = job
        self.disconnected = False
        self.state = state
        self._arrival_s = arrival_s
        self.call = call
        self._tap = tap
        self.streams = PromptStreams(state, job, arrival_s, call, trace, relayed, tap is None)
        self.usage = self.streams.usage
        self._begun = False  # the first bytes of a stream were sent
        self._ended = False  # the last bytes were sent
        self._cancelled = ""  # the error's code
        if tap is not None:
            tap.attach(self)

    async def submit(self) -> None:
        """Start all prompts, or none.

        Raises:
            QuireError: a prompt is rejected, or the request was cancelled meanwhile.
        """
        await self.streams.submit()
        if self._cancelled:
            raise _cancellation(self._cancelled)

    async def answer(self, send: Send, headers: Headers) -> None:
        """Send the answer. An error before the first byte is raised, one after it is an event of the stream.

        In the background, the first events are sent before the prompts are submitted, which is done here.
        """
        if self.job.in_background:
            opening = await self._start_stream(send, headers)
            await send({"type": "http.response.body", "body": opening, "more_body": True})
            try:
                await self.submit()
            except Exception as error:
                await self._fail_stream(send, error)
                return
        if self.state.forecast is not None and (predicted_ms := self.streams.predicted_ms()) is not None:
            headers = (*headers, (b"x-quire-predicted-ttft-ms", f"{predicted_ms:.1f}".encode()))
        if self.job.answer.streamed:
            await self._answer_stream(send, headers)
        else:
            await self._answer_whole(send, headers)

    async def disconnect(self) -> None:
        """The client disconnected: abort, so that the blocks are free in the next step.

        ASGI servers report the end of an answer in the same way, which changes nothing here.
        """
        if not self._ended:
            self.disconnected = True
            self.state.metrics.counters["quire:http_disconnects"] += 1
            await self.streams.abort()

    async def cancel(self, code: str = CANCELLED) -> None:
        """End the request; its client gets an error with this code."""
        self._cancelled = code
        await self.streams.abort()

    @property
    def owner(self) -> str:
        return self.job.owner

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return the line of ``GET /requests``."""
        return {
            "id": self.job.answer.head.id,
            "request_id": self.call.request_id,
            "model": self.job.answer.head.model,
            "seconds": round(now_s - self._arrival_s, 3),
            "num_choices": len(self.job.prompts) * self.job.sampling.n,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "stream": self.job.answer.streamed and not self.job.in_background,
            "priority": self.job.options.get("priority", 0),
            "tenant": self.job.options.get("tenant", NO_TENANT).name,
        }

    def log_end(self, seconds: float) -> None:
        """Log at the level debug what the request has used."""
        names = dict(zip(("prompt_tokens", "cached_tokens", "output_tokens"), self.usage.counts, strict=True))
        request_id, answer_id = self.call.request_id, self.job.answer.head.id
        log.debug("request_done", request_id=request_id, id=answer_id, seconds=seconds, **names)

    def _check_end(self, chunk: OutputChunk) -> None:
        """Raise unless the last chunk of a choice ends an answer that can be shown."""
        if chunk.finish_reason is FinishReason.ERROR:
            after_s = max(self.state.settings.retry_after_s, math.ceil(chunk.retry_after_s))
            refusal = refusal_of_chunk(chunk.error, chunk.error_kind, retry_after_s=after_s)
            if chunk.error_kind == "capacity":
                self.state.busy.rejected(refusal, self.state.now())
            raise HttpError(refusal)
        if chunk.finish_reason is FinishReason.DEADLINE and not self.usage.completion_tokens:
            raise HttpError(refusal_of_chunk(chunk.error, chunk.error_kind))
        if chunk.finish_reason is FinishReason.ABORT:
            if self._cancelled:
                raise _cancellation(self._cancelled)
            if not self.disconnected:
                message = "The request was aborted: the server is shutting down."
                raise HttpError(Refusal(503, message, code="aborted"))

    async def _answer_whole(self, send: Send, headers: Headers) -> None:
        job = self.job
        n, num_samples = job.sampling.n, job.sampling.num_samples
        collected: list[list[OutputChunk]] = [[] for _ in range(len(job.prompts) * num_samples)]
        async with aclosing(self.streams.chunks()) as chunks:
            async for index, chunk in chunks:
                if chunk.finish_reason not in _GOOD:
                    self._check_end(chunk)
                collected[index].append(chunk)
        wholes: list[OutputChunk] = []
        for start in range(0, len(collected), num_samples):
            wholes += choose_best(
                [merge(parts) for parts in collected[start : start + num_samples]], job.sampling
            )
        if echoes := self.streams.echoes:
            wholes = [replace(whole, text=echoes[i // n] + whole.text) for i, whole in enumerate(wholes)]
        if job.timing:
            self.streams.note_timing()
        body = job.answer.whole(wholes, self.streams.token_ids(), self.usage)
        self._ended = True
        await send_json(send, 200, body, headers)

    async def _answer_stream(self, send: Send, headers: Headers) -> None:
        answer, tap = self.job.answer, self._tap
        try:
            if tap is not None and tap.resumes:
                opening = await self._start_stream(send, headers)
                if await tap.replay(self, send, opening):
                    return
            async with aclosing(self.streams.chunks()) as chunks:
                async for index, chunk in chunks:
                    if chunk.finish_reason not in _GOOD:
                        self._check_end(chunk)
                    # Not earlier: a rejection by the engine is the first chunk, and has a status of its own.
                    frame = b"" if self._begun else await self._start_stream(send, headers)
                    frame += answer.frame(index, chunk, self.usage)
                    if tap is not None:
                        shown = await tap.chunk(index, chunk, self.usage.cached_tokens, frame)
                        if shown is None:
                            return
                        frame = shown
                    if frame:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            if not self._begun:
                raise
            await self._fail_stream(send, error)
            return
        if self.job.timing:
            self.streams.note_timing()
        await self.send_last(send, answer.closing(self.usage))

    async def _start_stream(self, send: Send, headers: Headers) -> bytes:
        """Send the status, and return the first events."""
        self._begun = True
        tagged = () if self._tap is None else self._tap.headers
        every = [(b"content-type", self.job.answer.media_type), *STREAM_HEADERS, *tagged, *headers]
        await send({"type": "http.response.start", "status": 200, "headers": every})
        return self.job.answer.opening(self.streams.token_ids(), self.streams.echoes, self.usage)

    async def _fail_stream(self, send: Send, error: Exception) -> None:
        """End a stream that had begun with an event that has the error."""
        if not isinstance(error, QuireError):
            log.exception("stream_crashed", id=self.job.answer.head.id)
        refusal = refusal_of(error)
        await self.send_last(send, self.job.answer.error(refusal), refusal.status)

    async def send_last(self, send: Send, body: bytes, status: int = 0) -> None:
        """``status``: of the error that ``body`` is, or 0."""
        self._ended = True
        if self._tap is not None:
            body = await self._tap.end(status, body)
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _cancellation(code: str) -> HttpError:
    # Clients retry a 409, 429 or 5xx by themselves; this request was ended on purpose.
    by = "its client" if code == CANCELLED_BY_CLIENT else "an operator"
    return HttpError(Refusal(499, f"The request was cancelled by {by}.", code=code))
