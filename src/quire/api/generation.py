"""`Generation`: a job while it runs, from its prompts to the last byte of its answer.

`PromptStreams` are its prompts as streams of the frontend, counted for usage, metrics and forecast.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Send

from quire.api.forecast import Ticket
from quire.api.job import Job, Usage
from quire.api.prompt_lists import merged, prompt_text, truncated, wait_for_turn
from quire.api.state import ApiState
from quire.api.whole_answer import GOOD_ENDS, whole_choices
from quire.engine.output import OutputChunk
from quire.engine.prompts import NOT_BEGUN, Begun
from quire.engine.stream import RequestStream
from quire.errors import QuireError, RequestError
from quire.http.body import Headers, send_json
from quire.http.call import AnswerName, Call
from quire.http.events import STREAM_HEADERS
from quire.http.refusals import HttpError, Refusal, as_refusal, refusal_of_chunk
from quire.metrics.log import Log
from quire.metrics.server import RequestMetrics
from quire.request import FinishReason

if TYPE_CHECKING:
    from quire.api.relayed import Relayed

log = Log("api")

# Status of an error after which a client may come back for the rest: shutdown, a dead engine.
CONTINUES = 503
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
        # The last bytes were sent.
        self.has_ended = False
        self._cancelled = ""  # the error's code
        if tap is not None:
            tap.attach(self)

    async def submit(self) -> None:
        """Start all prompts, or none. Raises `QuireError` for a prompt that is rejected, and if it was cancelled."""
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
        if not self.has_ended:
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
            "priority": self.job.terms.priority,
            "tenant": self.job.terms.tenant.name,
        }

    def check_end(self, chunk: OutputChunk) -> None:
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
        job, streams = self.job, self.streams
        choices = await whole_choices(job, streams.chunks(), self.check_end, streams.echoes)
        if job.timing:
            streams.note_timing()
        body = job.answer.body(choices, streams.token_ids(), self.usage)
        self.has_ended = True
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
                    if chunk.finish_reason not in GOOD_ENDS:
                        self.check_end(chunk)
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
        refusal = as_refusal(error)
        await self.send_last(send, self.job.answer.error(refusal), refusal.status)

    async def send_last(self, send: Send, body: bytes, status: int = 0) -> None:
        """``status``: of the error that ``body`` is, or 0."""
        self.has_ended = True
        if self._tap is not None:
            body = await self._tap.end(status, body)
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _cancellation(code: str) -> HttpError:
    # Clients retry a 409, 429 or 5xx by themselves; this request was ended on purpose.
    by = "its client" if code == CANCELLED_BY_CLIENT else "an operator"
    return HttpError(Refusal(499, f"The request was cancelled by {by}.", code=code))


_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class _Started:
    """A prompt that was submitted."""

    stream: RequestStream
    metrics: RequestMetrics
    ticket: Ticket | None  # with a forecast


@dataclass(slots=True, eq=False)
class PromptStreams:
    """The prompts of a job as streams of the frontend, counted for usage, metrics and forecast."""

    _state: ApiState
    _job: Job
    _arrival_s: float
    _call: Call
    _trace: Mapping[str, str]
    # None: the answer cannot go on elsewhere.
    _relayed: Relayed | None = None
    # Where a stream can go on elsewhere, the cuts between its events must not depend on the reader's pace.
    _merges: bool = True
    usage: Usage = field(default_factory=Usage)
    echoes: list[str] = field(default_factory=list)  # the text of each prompt, with `Job.echo`
    prompts: list[_Started] = field(default_factory=list)
    # Those not known to have ended.
    _open: deque[RequestStream] = field(default_factory=deque)

    async def submit(self) -> None:
        """Start all prompts, or none."""
        job, state = self._job, self._state
        is_alone = len(job.prompts) == 1
        model = job.answer.head.model
        adapter = None if model in state.model.names else state.adapter_of(model)
        try:
            for i, prompt in enumerate(job.prompts):
                if job.truncate_to is not None:
                    prompt, num_cut = await truncated(state.frontend, job, prompt, job.truncate_to)
                    self.usage.truncated_tokens += num_cut
                if i:
                    await asyncio.sleep(0)  # other requests have their turn between two prompts
                if job.samples_nothing:
                    await wait_for_turn(self._open, state.settings.tokens_at_once)
                if job.echo:
                    self.echoes.append(prompt_text(state.frontend.tokenizer, job, prompt))
                stream = await state.frontend.submit(
                    prompt,
                    job.sampling,
                    request_id=job.answer.head.id + ("" if is_alone else f"-{i}"),
                    terms=job.terms,
                    continues=job.continues,
                    adapter=adapter,
                    pooling=job.poolings[i] if job.poolings else job.pooling,
                    begun=NOT_BEGUN if self._call.answer is None else self._begun(self._call.answer, i),
                )
                stream.merges = self._merges
                self._start(stream)
        except BaseException as error:
            await self.close()
            if isinstance(error, RequestError) and error.param == "prompt" != job.prompt_param:
                message = str(error)
                if message.startswith("prompt "):
                    message = job.prompt_param + message.removeprefix("prompt")
                raise RequestError(message, param=job.prompt_param, code=error.code) from None
            raise

    def _begun(self, answer: AnswerName, prompt: int) -> Begun:
        """Return what an answer that has a name already says of one prompt."""
        if self._relayed is not None:
            return self._relayed.of_prompt(prompt, self._job.sampling.n)
        return Begun(answer.seed_of(prompt))

    def _start(self, stream: RequestStream) -> None:
        state, sampling, num_tokens = self._state, self._job.sampling, len(stream.prompt_token_ids)
        on_end = None
        if state.tracer is not None:
            from quire.api.timing import span_writer

            on_end = span_writer(state.tracer, self._trace, self._job, self._call, stream)
        metrics = state.metrics.request(
            self._arrival_s,
            n=sampling.num_samples,
            max_tokens=sampling.max_tokens,
            prompt_tokens=num_tokens,
            on_end=on_end,
        )
        ticket = None if state.forecast is None else state.forecast.enter(num_tokens)
        self.prompts.append(_Started(stream, metrics, ticket))
        self._open.append(stream)
        self.usage.prompt_tokens += num_tokens

    async def abort(self) -> None:
        for prompt in self.prompts:
            await prompt.stream.abort()

    async def close(self) -> None:
        """Abort the prompts that still run."""
        for prompt in self.prompts:
            await prompt.stream.aclose()
            prompt.metrics.abandon(self._state.now())
            if prompt.ticket is not None:
                prompt.ticket.leave()

    def token_ids(self) -> list[Sequence[int]]:
        return [prompt.stream.prompt_token_ids for prompt in self.prompts]

    def note_timing(self) -> None:
        """Put the timing block of the answer into the usage."""
        from quire.api.timing import describe_timing

        streams, total_s = [prompt.stream for prompt in self.prompts], self._state.now() - self._arrival_s
        self.usage.notes = self._job.notes
        self.usage.timing = describe_timing(self._state, self._job, streams, total_s)

    def cost(self) -> tuple[float, float]:
        """Return the engine-seconds and KV-block-seconds of what has been computed."""
        outputs = [prompt.stream.output for prompt in self.prompts]
        return sum(output.engine_s for output in outputs), sum(output.kv_block_s for output in outputs)

    def predicted_ms(self) -> float | None:
        """Return the predicted time to the first token of the last prompt to have one; None without a forecast."""
        predicted_s = [prompt.ticket.predicted_s for prompt in self.prompts if prompt.ticket is not None]
        return max(predicted_s) * 1e3 if predicted_s else None

    async def chunks(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """Yield (choice index, chunk) of all prompts as they arrive, counted; raise on an error of the engine."""
        if len(self.prompts) == 1:  # the most frequent case, with one generator less per chunk
            async with aclosing(aiter(self.prompts[0].stream)) as chunks:
                async for chunk in chunks:
                    self._count(0, chunk)
                    yield chunk.index, chunk
            return
        n = self._job.sampling.num_samples
        async with aclosing(merged([prompt.stream for prompt in self.prompts])) as chunks_of_all:
            async for prompt, chunk in chunks_of_all:
                self._count(prompt, chunk)
                yield prompt * n + chunk.index, chunk

    def _count(self, index: int, chunk: OutputChunk) -> None:
        prompt, num_tokens, now_s = self.prompts[index], len(chunk.token_ids), self._state.now()
        metrics, output = prompt.metrics, prompt.stream.output
        if not metrics.is_admitted and (num_tokens or chunk.finish_reason in _COMPLETE):
            metrics.admitted(output.timing.queued_s, output.timing.num_cached_tokens)
            if prompt.ticket is not None:
                ratio = prompt.ticket.first(now_s - self._arrival_s)
                self._state.metrics.histograms["quire:ttft_prediction_ratio"].observe(ratio)
            if not prompt.stream.delivered:  # else its first replica has told
                self.usage.cached_tokens += output.timing.num_cached_tokens
        if num_tokens:
            self.usage.completion_tokens += num_tokens
            metrics.chunk(chunk.index, num_tokens, now_s)
        if chunk.finish_reason is not None:
            metrics.finish(chunk.index, chunk.finish_reason.value, now_s, output.num_preemptions)
