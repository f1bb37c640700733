"""The POST endpoints: read, check, run, answer. One ASGI application per kind of endpoint."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.api.job import Job, Usage
from quire.api.piece_blocks import telling_blocks
from quire.api.prompt_streams import PromptStreams
from quire.api.relayed import MAX_DELIVERED_BYTES, Tags, enter, resumes
from quire.api.state import ApiState
from quire.engine.output import OutputChunk, merge
from quire.engine.results import choose_best
from quire.errors import QuireError, RequestError
from quire.http.account import account_of
from quire.http.body import STREAM_HEADERS, Disconnected, Headers, decode_body, read_pieces, send_json
from quire.http.client import BACKGROUND_KEY, PRIORITY_KEY
from quire.http.edge import adopt_request_id, request_id_of
from quire.http.refusals import HttpError, Refusal, refusal_of, refusal_of_chunk
from quire.http.wire import Ignored
from quire.metrics.log import Log
from quire.metrics.trace import trace_headers
from quire.request import FinishReason

log = Log("api")

# (state, body, what collects ignored fields and judges unknown names) → job
Prepare = Callable[[ApiState, Any, list[str] | None], Awaitable[Job]]
# The same → the JSON value of the answer.
Compute = Callable[[ApiState, Any, list[str] | None], Awaitable[Any]]


class PostEndpoint:
    """An ASGI application for one path: it reads the body under limits, and answers errors in the form of the path."""

    def __init__(self, state: ApiState, path: str) -> None:
        self._state = state
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = self._state.now()
        refusal = self._early_refusal(scope)
        if refusal is not None:
            await send_json(send, refusal.status, refusal.body(self._path), refusal.headers)
            self._state.metrics.response(self._path, refusal.status)
            return
        status, client = 200, Client(receive)
        try:
            pieces = await read_pieces(scope, receive, self._max_body_bytes(scope), "--max-body-mib")
            self._state.full_queue.read(pieces)
            client.watch()
            body = await decode_body(pieces, self._state.bodies.decode)
            del pieces
            await self._run(body, arrival_s, scope, client, send)
        except Disconnected:
            status = 499  # nginx's number for a client that disconnected; it is only counted
        except asyncio.CancelledError:
            if not client.has_left:
                raise
            self._state.metrics.counters["quire:http_disconnects"] += 1
            status = 499
        except Exception as error:
            client.release()
            status = await self._refuse(error, scope, send)
        finally:
            client.release()
        self._state.metrics.response(self._path, status)

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        raise NotImplementedError

    def _max_body_bytes(self, scope: Scope) -> int:
        return self._state.settings.max_body_bytes

    def _early_refusal(self, scope: Scope) -> Refusal | None:
        """Return the answer to a request that is refused before its body is read."""
        return None

    def _ignored(self) -> Ignored:
        """Return the list that collects the fields which the request's answer does not depend on."""
        return Ignored.of(lenient=self._state.settings.lenient, strict=self._state.settings.strict_fields)

    def _ignored_header(self, ignored: Ignored) -> list[tuple[bytes, bytes]]:
        self._state.metrics.counters["quire:ignored_fields"] += len(ignored)
        return ignored.header()

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> int:
        refusal = refusal_of(error, retry_after_s=self._state.settings.retry_after_s)
        request_id = request_id_of(scope)
        if not isinstance(error, QuireError):
            log.exception("request_crashed", request_id=request_id, path=self._path)
        elif refusal.status >= 500 and refusal.code != "queue_full":  # which `FullQueue` logs once
            log.error("request_failed", request_id=request_id, status=refusal.status, error=refusal.message)
        elif log.debugging:
            log.debug("request_refused", request_id=request_id, status=refusal.status, error=refusal.message)
        await send_json(send, refusal.status, refusal.body(self._path), refusal.headers)
        return refusal.status


class JsonEndpoint(PostEndpoint):
    """An endpoint that computes one JSON value and runs nothing on the engine."""

    def __init__(self, state: ApiState, path: str, compute: Compute) -> None:
        super().__init__(state, path)
        self._compute = compute

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        ignored = self._ignored()
        answer = await self._compute(self._state, body, ignored)
        client.release()
        await send_json(send, 200, msgspec.json.encode(answer), self._ignored_header(ignored))


class GenerateEndpoint(PostEndpoint):
    """An endpoint that runs a `Job`."""

    def __init__(self, state: ApiState, path: str, prepare: Prepare) -> None:
        super().__init__(state, path)
        self._prepare = prepare

    def _early_refusal(self, scope: Scope) -> Refusal | None:
        return self._state.full_queue.refusal() if self._may_wait(scope) else None

    def _may_wait(self, scope: Scope) -> bool:
        return PRIORITY_KEY not in scope and not resumes(scope, self._state.settings.gateway_key)

    async def _run(self, body: Any, arrival_s: float, scope: Scope, client: Client, send: Send) -> None:
        if self._may_wait(scope):
            self._state.full_queue.check()
        ignored = self._ignored()
        body = enter(scope, body, self._state.settings.gateway_key)
        job = await self._prepare(self._state, body, ignored)
        model = job.answer.head.model
        if job.relayed is not None:
            job.relayed.check(self._state.continuable_with(model), len(job.prompts) * job.sampling.n)
        adopt_request_id(scope, job.client_request_id)
        if scope.get(PRIORITY_KEY) is not None:
            job = replace(job, priority=scope[PRIORITY_KEY])
        trace = trace_headers(scope["headers"]) if self._state.tracer is not None else {}
        generation = Generation(self._state, job, arrival_s, request_id_of(scope), trace)
        if job.in_background and BACKGROUND_KEY not in scope:
            raise RequestError("background = true is not supported by this server.", param="background")
        ids = frozenset((job.answer.head.id, request_id_of(scope)))
        send = telling_blocks(send, scope, self._state, body, job, generation.streams)
        try:
            with self._state.running.entered(ids, generation):
                await self._answer(generation, ignored, client, send)
        finally:
            seconds, tokens = self._state.now() - arrival_s, generation.usage.counts
            self._state.finished.put(account_of(scope), model, self._path, tokens, seconds)
        if log.debugging:
            names = dict(zip(("prompt_tokens", "cached_tokens", "output_tokens"), tokens, strict=True))
            request_id = request_id_of(scope)
            log.debug("request_done", request_id=request_id, id=job.answer.head.id, seconds=seconds, **names)

    def _max_body_bytes(self, scope: Scope) -> int:
        is_form = resumes(scope, self._state.settings.gateway_key)
        return super()._max_body_bytes(scope) + (MAX_DELIVERED_BYTES if is_form else 0)

    async def _answer(self, generation: Generation, ignored: Ignored, client: Client, send: Send) -> None:
        try:
            if not generation.job.in_background:
                await generation.submit()
            leave = partial(generation.cancel, CANCELLED_BY_CLIENT)
            client.on_leave = leave if generation.job.in_background else generation.disconnect
            await generation.answer(send, self._ignored_header(ignored))
        except QuireError:
            if not generation.disconnected:
                raise
        finally:
            client.release()
            await generation.close()
        if generation.disconnected:
            raise Disconnected


class Client:
    """Watches for the client's disconnect: it cancels the task that serves the request, or calls ``on_leave``."""

    def __init__(self, receive: Receive) -> None:
        self.has_left = False  # and the task is cancelled
        self.on_leave: Callable[[], Awaitable[None]] | None = None
        self._receive = receive
        self._serving = asyncio.current_task()
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin; the body is read by now."""
        self._watching = asyncio.create_task(self._watch())

    def release(self) -> None:
        """End: the answer is being sent, or was."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        if self.on_leave is not None:
            await self.on_leave()
            return
        assert self._serving is not None
        self.has_left = True
        self._serving.cancel()


_REPLAYED_AT_ONCE = 256  # chunks; other requests get their turn then
CANCELLED = "cancelled"
CANCELLED_BY_CLIENT = "cancelled_by_client"


class Generation:
    """Runs a `Job`. The choice index of sample s of prompt p is ``p * n + s``, as in OpenAI's API."""

    def __init__(
        self, state: ApiState, job: Job, arrival_s: float, request_id: str, trace: Mapping[str, str]
    ) -> None:
        """``request_id``: the id for client and log; ``trace``: the headers that name the client's span."""
        self.job = job
        self.disconnected = False
        self._state = state
        self._arrival_s = arrival_s
        self._request_id = request_id
        self.streams = PromptStreams(state, job, arrival_s, request_id, trace)
        self._begun = False  # the first bytes of a stream were sent
        self._ended = False  # the last bytes were sent
        self._cancelled = ""  # the error's code
        self._tags = Tags(state.continuable_with(job.answer.head.model)) if job.is_tagged else None

    @property
    def usage(self) -> Usage:
        return self.streams.usage

    async def submit(self) -> None:
        """Start all prompts, or none.

        Raises:
            QuireError: a prompt is rejected, or the request was cancelled meanwhile.
        """
        await self.streams.submit()
        if self._cancelled:
            raise self._cancellation()

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
        predicted_ms = self.streams.predicted_ms()
        if predicted_ms is not None:
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
            self._state.metrics.counters["quire:http_disconnects"] += 1
            await self.streams.abort()

    async def cancel(self, code: str = CANCELLED) -> None:
        """End the request; its client gets an error with this code."""
        self._cancelled = code
        await self.streams.abort()

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return the line of ``GET /requests``."""
        return {
            "id": self.job.answer.head.id,
            "request_id": self._request_id,
            "model": self.job.answer.head.model,
            "seconds": round(now_s - self._arrival_s, 3),
            "num_choices": len(self.job.prompts) * self.job.sampling.n,
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "stream": self.job.answer.streamed and not self.job.in_background,
            "priority": self.job.priority,
            "tenant": self.job.tenant,
        }

    async def close(self) -> None:
        """Abort the prompts that still run."""
        await self.streams.close()

    def _cancellation(self) -> HttpError:
        # Clients retry a 409, 429 or 5xx by themselves; this request was ended on purpose.
        by = "its client" if self._cancelled == CANCELLED_BY_CLIENT else "an operator"
        return HttpError(Refusal(499, f"The request was cancelled by {by}.", code=self._cancelled))

    def _check_end(self, chunk: OutputChunk) -> None:
        """Raise unless the last chunk of a choice ends an answer that can be shown."""
        if chunk.finish_reason is FinishReason.ERROR:
            after_s = max(self._state.settings.retry_after_s, math.ceil(chunk.retry_after_s))
            refusal = refusal_of_chunk(chunk.error, chunk.error_kind, retry_after_s=after_s)
            if chunk.error_kind == "capacity":
                self._state.full_queue.rejected(refusal, after_s)
            raise HttpError(refusal)
        if chunk.finish_reason is FinishReason.DEADLINE and not self.usage.completion_tokens:
            raise HttpError(refusal_of_chunk(chunk.error, chunk.error_kind))
        if chunk.finish_reason is FinishReason.ABORT:
            if self._cancelled:
                raise self._cancellation()
            if not self.disconnected:
                message = "The request was aborted: the server is shutting down."
                raise HttpError(Refusal(503, message, code="aborted"))

    async def _answer_whole(self, send: Send, headers: Headers) -> None:
        job = self.job
        n, num_samples = job.sampling.n, job.sampling.num_samples
        collected: list[list[OutputChunk]] = [[] for _ in range(len(job.prompts) * num_samples)]
        async with aclosing(self.streams.chunks()) as chunks:
            async for index, chunk in chunks:
                if chunk.finish_reason is not None:
                    self._check_end(chunk)
                collected[index].append(chunk)
        wholes: list[OutputChunk] = []
        for start in range(0, len(collected), num_samples):
            wholes += choose_best(
                [merge(parts) for parts in collected[start : start + num_samples]], job.sampling
            )
        if echoes := self.streams.echoes:
            wholes = [replace(whole, text=echoes[i // n] + whole.text) for i, whole in enumerate(wholes)]
        self.streams.note_timing()
        body = job.answer.whole(wholes, self.streams.token_ids(), self.usage)
        self._ended = True
        await send_json(send, 200, body, headers)

    async def _answer_stream(self, send: Send, headers: Headers) -> None:
        answer, tags = self.job.answer, self._tags
        try:
            if tags is not None and self.job.relayed is not None and self.job.relayed.is_resumed:
                await self._start_stream(send, headers)
                for i, (index, chunk) in enumerate(self.streams.delivered()):
                    answer.frame(index, chunk, self.usage)  # the client has it
                    if i % _REPLAYED_AT_ONCE == 0:
                        await asyncio.sleep(0)
            async with aclosing(self.streams.chunks()) as chunks:
                async for index, chunk in chunks:
                    if chunk.finish_reason is not None:
                        self._check_end(chunk)
                    # Not earlier: a rejection by the engine is the first chunk, and has a status of its own.
                    frame = b"" if self._begun else await self._start_stream(send, headers)
                    frame += answer.frame(index, chunk, self.usage)
                    if tags is not None:
                        frame = tags.chunk(index, chunk, self.usage.cached_tokens, frame)
                    if frame:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            if not self._begun:
                raise
            await self._fail_stream(send, error)
            return
        self.streams.note_timing()
        await self._send_last(send, answer.closing(self.usage))

    async def _start_stream(self, send: Send, headers: Headers) -> bytes:
        """Send the status, and return the first events."""
        self._begun = True
        tagged = self._tags.headers if self._tags is not None else ()
        every = [(b"content-type", self.job.answer.media_type), *STREAM_HEADERS, *tagged, *headers]
        await send({"type": "http.response.start", "status": 200, "headers": every})
        return self.job.answer.opening(self.streams.token_ids(), self.streams.echoes, self.usage)

    async def _fail_stream(self, send: Send, error: Exception) -> None:
        """End a stream that had begun with an event that has the error."""
        if not isinstance(error, QuireError):
            log.exception("stream_crashed", id=self.job.answer.head.id)
        refusal = refusal_of(error)
        await self._send_last(send, self.job.answer.error(refusal), refusal.status)

    async def _send_last(self, send: Send, body: bytes, status: int = 0) -> None:
        """``status``: of the error that ``body`` is, or 0."""
        self._ended = True
        if self._tags is not None:
            body = self._tags.end(status, body)
        await send({"type": "http.response.body", "body": body, "more_body": False})
