"""One HTTP request at work: its prompts as streams of the frontend, answered whole or as server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.types import Send

from quire.api.forecast import Ticket
from quire.api.job import Job
from quire.api.replies import Usage
from quire.api.state import ApiState
from quire.api.timing import timing_of
from quire.engine.output import OutputChunk, choose_best, merge
from quire.engine.stream import RequestStream, ended
from quire.errors import QuireError, RequestError
from quire.http import sse
from quire.http.body import Headers, send_json
from quire.http.refusals import HttpError, Refusal, refusal_of, refusal_of_chunk
from quire.metrics.log import Log
from quire.metrics.prometheus import RequestMetrics
from quire.metrics.trace import RequestPhases
from quire.request import FinishReason

_PROMPTS_AT_ONCE = 256  # of a request that draws nothing; more would fill the queue that others wait in
CANCELLED = "cancelled"
CANCELLED_BY_CLIENT = "cancelled_by_client"
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # ends of what was computed
log = Log("api")


class Generation:
    """Runs a `Job`. The choice index of sample s of prompt p is ``p * n + s``, as in OpenAI's API."""

    def __init__(
        self, state: ApiState, job: Job, arrival_s: float, request_id: str, trace: Mapping[str, str]
    ) -> None:
        self._state = state
        self._trace = trace  # the headers that name the client's span
        self.request_id = request_id  # under which the client and the log know it
        self.job = job
        self._arrival_s = arrival_s
        self._streams: list[RequestStream] = []
        self._metrics: list[RequestMetrics] = []
        self._tickets: list[Ticket] = []  # of the forecast, one a prompt
        self._echoes: list[str] = []  # text of each prompt, with `echo`
        self.usage = Usage()
        self._ended = False  # the last bytes are on their way
        self.disconnected = False
        self._cancelled = ""  # by an operator, or the client of a background response: the error's code
        self._begun = False  # the first bytes of a stream are on their way

    async def submit(self) -> None:
        """Start all prompts, or none."""
        job, single = self.job, len(self.job.prompts) == 1
        adapter = self._state.adapter_of(job.answer.head.model)
        try:
            for i, given in enumerate(job.prompts):
                prompt, num_cut = await _cut(self._state, job, given)
                self.usage.truncated_tokens += num_cut
                if i >= _PROMPTS_AT_ONCE and job.draws_nothing:
                    await ended(self._streams[i - _PROMPTS_AT_ONCE])
                if job.echo:
                    self._echoes.append(
                        prompt if isinstance(prompt, str) else _text_of(self._state, job, prompt)
                    )
                stream = await self._state.frontend.submit(
                    prompt,
                    job.sampling,
                    request_id=job.answer.head.id if single else f"{job.answer.head.id}-{i}",
                    priority=job.priority,
                    cache_salt=job.cache_salt,
                    tenant=job.tenant,
                    continues=job.continues,
                    pooling=job.pooling,
                    deadline=job.deadline,
                    adapter=adapter,
                )
                self._streams.append(stream)
                self._metrics.append(
                    self._state.metrics.request(
                        self._arrival_s,
                        n=job.sampling.num_samples,
                        max_tokens=job.sampling.max_tokens,
                        prompt_tokens=len(stream.prompt_token_ids),
                        on_end=_spans(self._state, job, self._trace, stream.request_id, self.request_id),
                    )
                )
                if self._state.forecast is not None:
                    self._tickets.append(self._state.forecast.enter(len(stream.prompt_token_ids)))
                self.usage.prompt_tokens += len(stream.prompt_token_ids)
            self._check_cancelled()
        except BaseException as error:
            await self.close()
            if isinstance(error, RequestError) and error.param == "prompt" != job.prompt_param:
                message = str(error)  # begins with the field's name, or tells of the prompt
                if message.startswith("prompt "):
                    message = job.prompt_param + message.removeprefix("prompt")
                raise RequestError(message, param=job.prompt_param, code=error.code) from None
            raise

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
        if self._tickets:
            predicted_ms = max(ticket.predicted_s for ticket in self._tickets) * 1e3
            headers = (*headers, (b"x-quire-predicted-ttft-ms", f"{predicted_ms:.1f}".encode()))
        if self.job.answer.streamed:
            await self._answer_stream(send, headers)
        else:
            await self._answer_whole(send, headers)

    async def close(self) -> None:
        """Abort whatever still runs."""
        for stream, metrics in zip(self._streams, self._metrics, strict=True):
            await stream.aclose()
            metrics.abandon(self._state.now())
        for ticket in self._tickets:
            ticket.leave()

    async def disconnect(self) -> None:
        """The client is gone: abort, so that the blocks are free in the next step.

        A server reports the end of its own answer in the same way; that is no disconnection.
        """
        if self._ended:
            return
        self.disconnected = True
        self._state.metrics.counters["quire:http_disconnects"] += 1
        for stream in self._streams:
            await stream.abort()

    async def cancel(self, code: str = CANCELLED) -> None:
        """End the request; its client gets an error with this code."""
        self._cancelled = code
        for stream in self._streams:
            await stream.abort()

    def describe(self, now_s: float) -> dict[str, Any]:
        """The line of ``GET /requests``."""
        return {
            "id": self.job.answer.head.id,
            "request_id": self.request_id,
            "model": self.job.answer.head.model,
            "seconds": round(now_s - self._arrival_s, 3),
            "num_choices": len(self.job.prompts) * self.job.sampling.n,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "stream": self.job.answer.streamed and not self.job.in_background,
            "priority": self.job.priority,
            "tenant": self.job.tenant,
        }

    def _check_cancelled(self) -> None:
        if self._cancelled:
            # Clients try a 409, 429 or 5xx again by themselves; this one was ended on purpose.
            by = "its client" if self._cancelled == CANCELLED_BY_CLIENT else "an operator"
            raise HttpError(Refusal(499, f"The request was cancelled by {by}.", code=self._cancelled))

    async def _answer_whole(self, send: Send, headers: Headers) -> None:
        job = self.job
        n, drawn = job.sampling.n, job.sampling.num_samples
        collected: list[list[OutputChunk]] = [[] for _ in range(len(job.prompts) * drawn)]
        async with aclosing(self._chunks()) as chunks:
            async for index, chunk in chunks:
                collected[index].append(chunk)
        wholes: list[OutputChunk] = []
        for start in range(0, len(collected), drawn):
            wholes += choose_best([merge(parts) for parts in collected[start : start + drawn]], job.sampling)
        if self._echoes:
            wholes = [
                replace(whole, text=self._echoes[i // n] + whole.text) for i, whole in enumerate(wholes)
            ]
        if job.timing:
            self.usage.timing = timing_of(
                self._streams, job.answer.head.determinism, self._state.now() - self._arrival_s
            )
        body = job.answer.whole(wholes, _token_ids(self._streams), self.usage)
        self._ended = True
        await send_json(send, 200, body, headers)

    async def _answer_stream(self, send: Send, headers: Headers) -> None:
        answer = self.job.answer
        try:
            async with aclosing(self._chunks()) as chunks:
                async for index, chunk in chunks:
                    # Only now: a refusal by the engine is the first chunk, and deserves its own status.
                    frame = b"" if self._begun else await self._start_stream(send, headers)
                    frame += answer.frame(index, chunk, self.usage)
                    if frame:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            if not self._begun:
                raise
            await self._fail_stream(send, error)
            return
        if self.job.timing:
            self.usage.timing = timing_of(
                self._streams, answer.head.determinism, self._state.now() - self._arrival_s
            )
        await self._send_last(send, answer.closing(self.usage))

    async def _start_stream(self, send: Send, headers: Headers) -> bytes:
        """Send the status, and return the first events."""
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS, *headers]})
        return self.job.answer.opening(_token_ids(self._streams), self._echoes, self.usage)

    async def _fail_stream(self, send: Send, error: Exception) -> None:
        """End a stream that had begun with an event that has the error."""
        if not isinstance(error, QuireError):
            log.exception("stream_crashed", id=self.job.answer.head.id)
        await self._send_last(send, self.job.answer.error(refusal_of(error)))

    async def _send_last(self, send: Send, body: bytes) -> None:
        self._ended = True
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _chunks(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """Yield (choice index, chunk) of all streams as they come; count them; raise on an error of the engine."""
        if len(self._streams) == 1:  # by far the most frequent, and one generator less a chunk
            async with aclosing(aiter(self._streams[0])) as chunks:
                async for chunk in chunks:
                    self._count(0, chunk)
                    yield chunk.index, chunk
            return
        n = self.job.sampling.num_samples
        async with aclosing(_merged(self._streams)) as merged:
            async for prompt, chunk in merged:
                self._count(prompt, chunk)
                yield prompt * n + chunk.index, chunk

    def _count(self, prompt: int, chunk: OutputChunk) -> None:
        metrics, num_tokens = self._metrics[prompt], len(chunk.token_ids)
        if not metrics.is_admitted and (num_tokens or chunk.finish_reason in _COMPLETE):
            stream = self._streams[prompt]
            metrics.admitted(stream.output.queued_s, stream.output.num_cached_tokens)
            if self._tickets:
                ratio = self._tickets[prompt].first(self._state.now() - self._arrival_s)
                self._state.metrics.histograms["quire:ttft_prediction_ratio"].observe(ratio)
            self.usage.cached_tokens += stream.output.num_cached_tokens
        if num_tokens:
            self.usage.completion_tokens += num_tokens
            metrics.chunk(chunk.index, num_tokens, self._state.now())
        if chunk.finish_reason is not None:
            preemptions = self._streams[prompt].output.num_preemptions
            metrics.finish(chunk.index, chunk.finish_reason.value, self._state.now(), preemptions)
            if chunk.finish_reason is FinishReason.ABORT:
                self._check_cancelled()
            if chunk.finish_reason is not FinishReason.ABORT or not self.disconnected:
                has_text = self.usage.completion_tokens > 0
                _check_end(chunk, has_text, self._state.settings.retry_after_s)


def _check_end(chunk: OutputChunk, has_text: bool, retry_after_s: int) -> None:
    """Raise unless the chunk ends an answer that can be shown."""
    if chunk.finish_reason is FinishReason.ERROR:
        after_s = max(retry_after_s, math.ceil(chunk.retry_after_s))
        raise HttpError(refusal_of_chunk(chunk.error, chunk.error_kind, retry_after_s=after_s))
    if chunk.finish_reason is FinishReason.DEADLINE and not has_text:
        raise HttpError(refusal_of_chunk(chunk.error, chunk.error_kind))
    if chunk.finish_reason is FinishReason.ABORT:
        message = "The request was aborted: the server is shutting down."
        raise HttpError(Refusal(503, message, code="aborted"))


def _token_ids(streams: Sequence[RequestStream]) -> list[Sequence[int]]:
    return [stream.prompt_token_ids for stream in streams]


async def _cut(state: ApiState, job: Job, prompt: str | list[int]) -> tuple[str | list[int], int]:
    """Apply ``truncate_prompt_tokens``; what goes is counted, never silent."""
    asked, limit = job.truncate_to, state.model.max_model_len
    if asked is None:
        return prompt, 0
    if asked != -1 and not 1 <= asked <= limit:
        raise RequestError(
            f"truncate_prompt_tokens = {asked} is not allowed: it must be an integer in 1…{limit} (the context of "
            "this model), or -1 for as many as the context holds.",
            param="truncate_prompt_tokens",
        )
    ids = await state.frontend.tokenize(prompt) if isinstance(prompt, str) else prompt
    room = limit - (job.sampling.max_tokens or 1) if asked == -1 else asked
    kept = ids[-max(room, 1) :]
    num_cut = len(ids) - len(kept)
    return (kept if num_cut else prompt), num_cut


def _text_of(state: ApiState, job: Job, ids: list[int]) -> str:
    return state.frontend.tokenizer.decode(ids, skip_special_tokens=job.sampling.skip_special_tokens)


def _spans(
    state: ApiState, job: Job, trace: Mapping[str, str], request_id: str, http_request_id: str
) -> Callable[[RequestPhases], None] | None:
    """What makes the spans of one prompt when it has ended, where they are wanted."""
    if state.tracer is None:
        return None
    sampling = job.sampling
    attributes = {
        "gen_ai.request.id": request_id,
        "gen_ai.response.model": job.answer.head.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": sampling.n,
        "http.request_id": http_request_id,
    }
    return state.tracer.follow(trace, attributes)


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """Yield (which stream, chunk) in order of arrival."""
    queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]] = asyncio.Queue()

    async def forward(i: int) -> None:
        try:
            async for chunk in streams[i]:
                queue.put_nowait((i, chunk))
            queue.put_nowait((i, None))
        except Exception as error:
            queue.put_nowait((i, error))

    tasks = [asyncio.create_task(forward(i)) for i in range(len(streams))]
    try:
        num_open = len(tasks)
        while num_open:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
