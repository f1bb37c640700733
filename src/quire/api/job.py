"""`Job`: a checked request and how its answer is written; and `PromptStreams`, its prompts while they run, counted."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.api.protocol import RequestFields, SampledFields, deadline_of
from quire.api.relayed import RELAYED, Relayed
from quire.api.state import ApiState, Ticket
from quire.engine.output import OutputChunk
from quire.engine.stream import RequestStream
from quire.errors import RequestError, clip
from quire.http.edge import TENANT, TENANT_WEIGHT
from quire.http.refusals import Refusal
from quire.metrics.prometheus import RequestMetrics
from quire.metrics.trace import RequestPhases
from quire.request import Deadline, FinishReason, Pooling, SamplingParams, Tenant

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Any = None  # set at the end if it was asked for
    truncated_tokens: int = 0  # cut off by truncate_prompt_tokens; not in prompt_tokens

    def beside(self) -> dict[str, Any]:
        """Return the fields that stand beside ``usage`` in an answer."""
        return {} if self.timing is None else {"timing": self.timing}

    def to_json(self) -> dict[str, Any]:
        details = {"cached_tokens": self.cached_tokens}
        if self.truncated_tokens:
            details["truncated_tokens"] = self.truncated_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every answer and every chunk of it repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    determinism: str  # "exact" | "batch-dependent"

    def id_of(self, *place: str | int) -> str:
        """Return the id of a part of the answer, 32 hexadecimal digits: the same on every replica that writes it."""
        return hashlib.blake2b(repr((self.id, *place)).encode(), digest_size=16).hexdigest()

    def to_json(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "determinism": self.determinism,
        }


def new_head(state: ApiState, prefix: str, model: str | None) -> Head:
    """Return the head of an answer under a new id, or its gateway's. ``model``: the name that the request gives.

    Raises:
        NotFoundError: the model is not served.
    """
    info, relayed = state.frontend.info, RELAYED.get()
    return Head(
        id=prefix + (state.new_id() if relayed is None else relayed.answer_id),
        created=int(state.unix_time()) if relayed is None else relayed.created,
        model=state.check_model(model),
        fingerprint=state.settings.system_fingerprint,
        determinism=info.determinism if info is not None else state.model.determinism,
    )


class Answer:
    """How the chunks of a request are written: as one body, or as server-sent events if ``streamed``."""

    head: Head
    streamed = False

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed: one chunk per choice, the token ids of each prompt."""
        raise NotImplementedError

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        """Return the events before any chunk. ``echoes``: the text of each prompt if it is echoed, else empty."""
        raise NotImplementedError

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        """Return the events of one chunk of one choice; empty if there is nothing to show yet."""
        raise NotImplementedError

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last chunk."""
        raise NotImplementedError

    def error(self, refusal: Refusal) -> bytes:
        """Return the events that end a stream which had begun and failed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what to run and how to answer."""

    prompts: Sequence[str | Sequence[int]]
    sampling: SamplingParams
    answer: Answer
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    continues: bool = False  # the output continues the prompt's text
    client_request_id: str | None = None  # the body's request_id or rid
    prompt_text: str | None = None  # of a chat: the text that its template made
    truncate_to: int | None = None  # last tokens of each prompt that are kept; -1: as many as fit
    deadline: Deadline | None = None
    timing: bool = False  # the answer has a timing block
    in_background: bool = False  # a response that runs without its client
    echo: bool = False  # each choice begins with its prompt's text
    pooling: Pooling | None = None  # of requests that sample nothing
    prompt_param: str = "prompt"  # the endpoint's name of its prompts
    relayed: Relayed | None = None  # the answer goes through a gateway

    @property
    def is_tagged(self) -> bool:
        """Whether its stream is tagged: another replica can then continue it. The prompt's logprobs are not kept."""
        return (
            self.relayed is not None
            and self.answer.streamed
            and not (self.in_background or self.echo or self.samples_nothing)
            and self.sampling.prompt_logprobs is None
        )

    @property
    def samples_nothing(self) -> bool:
        """Whether only the prompts are computed."""
        return self.pooling is not None or self.sampling.max_tokens == 0


def common_fields(request: RequestFields, ignored: list[str] | None) -> dict[str, Any]:
    """Return the fields of a `Job` that every endpoint takes from its request.

    Raises:
        RequestError: a deadline that is wrong.
    """
    tenant = TENANT.get()
    given: dict[str, Any] = {
        "priority": request.priority,
        # Tenants share no cached blocks: the time to a first token would tell what another one has asked.
        "cache_salt": f"{tenant}\n{request.cache_salt}" if tenant else request.cache_salt,
        "client_request_id": request.request_id or getattr(request, "rid", None),
        "tenant": tenant or getattr(request, "user", ""),
        "truncate_to": getattr(request, "truncate_prompt_tokens", None),
        "relayed": RELAYED.get(),
    }
    if isinstance(request, SampledFields):
        given |= {"deadline": deadline_of(request.deadline_ms, ignored), "timing": request.timing}
    return given


_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
_LEAST = 16  # tokens that a prompt counts as


@dataclass(frozen=True, slots=True)
class _Started:
    """A prompt that was submitted."""

    stream: RequestStream
    metrics: RequestMetrics
    ticket: Ticket | None  # of the forecast


@dataclass(slots=True, eq=False)
class PromptStreams:
    """The prompts of a job as streams of the frontend, counted for usage, metrics and forecast."""

    _state: ApiState
    _job: Job
    _arrival_s: float
    _request_id: str
    _trace: Mapping[str, str]
    usage: Usage = field(default_factory=Usage)
    echoes: list[str] = field(default_factory=list)  # the text of each prompt, with `Job.echo`
    _prompts: list[_Started] = field(default_factory=list)
    _open: deque[_Started] = field(default_factory=deque)  # not known to have ended

    async def submit(self) -> None:
        """Start all prompts, or none."""
        job, relayed, n = self._job, self._job.relayed, self._job.sampling.n
        adapter = self._state.adapter_of(job.answer.head.model)
        try:
            for i, given in enumerate(job.prompts):
                prompt = await self._cut(given)
                if i:
                    await asyncio.sleep(0)  # other requests have their turn between two prompts
                if job.samples_nothing:
                    await self._wait_for_turn()
                if job.echo:
                    self.echoes.append(self._text_of(prompt))
                stream = await self._state.frontend.submit(
                    prompt,
                    job.sampling,
                    request_id=job.answer.head.id + (f"-{i}" if len(job.prompts) > 1 else ""),
                    priority=job.priority,
                    cache_salt=job.cache_salt,
                    tenant=Tenant(job.tenant, TENANT_WEIGHT.get()),
                    continues=job.continues,
                    pooling=job.pooling,
                    deadline=job.deadline,
                    adapter=adapter,
                    **({} if relayed is None else relayed.of_prompt(i, n)),
                )
                stream.merges = (
                    not job.is_tagged
                )  # the cuts between events must not depend on the reader's pace
                self._started(stream)
        except BaseException as error:
            await self.close()
            if isinstance(error, RequestError) and error.param == "prompt" != job.prompt_param:
                message = str(error)
                if message.startswith("prompt "):
                    message = job.prompt_param + message.removeprefix("prompt")
                raise RequestError(message, param=job.prompt_param, code=error.code) from None
            raise

    async def _wait_for_turn(self) -> None:
        """Wait until few tokens of this request are left to compute, so that it shares the engine with others."""
        most = self._state.settings.tokens_at_once
        while sum(max(_LEAST, len(prompt.stream.prompt_token_ids)) for prompt in self._open) >= most:
            await self._open.popleft().stream.ended()

    def _text_of(self, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        skip = self._job.sampling.skip_special_tokens
        return self._state.frontend.tokenizer.decode(prompt, skip_special_tokens=skip)

    def _started(self, stream: RequestStream) -> None:
        state, sampling, num_tokens = self._state, self._job.sampling, len(stream.prompt_token_ids)
        metrics = state.metrics.request(
            self._arrival_s,
            n=sampling.num_samples,
            max_tokens=sampling.max_tokens,
            prompt_tokens=num_tokens,
            on_end=self._spans(stream.request_id),
        )
        ticket = None if state.forecast is None else state.forecast.enter(num_tokens)
        self._prompts.append(_Started(stream, metrics, ticket))
        self._open.append(self._prompts[-1])
        self.usage.prompt_tokens += num_tokens

    async def _cut(self, prompt: str | Sequence[int]) -> str | Sequence[int]:
        """Apply ``truncate_prompt_tokens``; the usage counts the tokens that are cut off."""
        asked, limit = self._job.truncate_to, self._state.model.max_model_len
        if asked is None:
            return prompt
        if asked != -1 and not 1 <= asked <= limit:
            raise RequestError(
                f"truncate_prompt_tokens = {clip(asked)} is not allowed: it must be an integer in 1…{limit} (the "
                "context of this model), or -1 for as many as the context holds.",
                param="truncate_prompt_tokens",
            )
        ids = await self._state.frontend.prompts.tokenize(prompt) if isinstance(prompt, str) else prompt
        room = limit - (self._job.sampling.max_tokens or 1) if asked == -1 else asked
        num_cut = max(0, len(ids) - max(room, 1))
        self.usage.truncated_tokens += num_cut
        return ids[num_cut:] if num_cut else prompt

    def _spans(self, request_id: str) -> Callable[[RequestPhases], None] | None:
        """Return the function that makes the spans of a prompt when it ends; None without a tracer."""
        if self._state.tracer is None:
            return None
        sampling = self._job.sampling
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._job.answer.head.model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": sampling.n,
            "http.request_id": self._request_id,
        }
        return self._state.tracer.follow(self._trace, attributes)

    async def abort(self) -> None:
        for prompt in self._prompts:
            await prompt.stream.abort()

    async def close(self) -> None:
        """Abort the prompts that still run."""
        for prompt in self._prompts:
            await prompt.stream.aclose()
            prompt.metrics.abandon(self._state.now())
            if prompt.ticket is not None:
                prompt.ticket.leave()

    def token_ids(self) -> list[Sequence[int]]:
        return [prompt.stream.prompt_token_ids for prompt in self._prompts]

    def note_timing(self) -> None:
        if self._job.timing:
            streams = [prompt.stream for prompt in self._prompts]
            total_s = self._state.now() - self._arrival_s
            self.usage.timing = timing_of(streams, self._job.answer.head.determinism, total_s)

    def predicted_ms(self) -> float | None:
        """Return the predicted time to the first token of the last prompt to have one; None without a forecast."""
        predicted_s = [prompt.ticket.predicted_s for prompt in self._prompts if prompt.ticket is not None]
        return max(predicted_s) * 1e3 if predicted_s else None

    async def chunks(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """Yield (choice index, chunk) of all prompts as they arrive, counted; raise on an error of the engine."""
        if len(self._prompts) == 1:  # the most frequent case, with one generator less per chunk
            async with aclosing(aiter(self._prompts[0].stream)) as chunks:
                async for chunk in chunks:
                    self._count(0, chunk)
                    yield chunk.index, chunk
            return
        n = self._job.sampling.num_samples
        async with aclosing(_merged([prompt.stream for prompt in self._prompts])) as merged:
            async for prompt, chunk in merged:
                self._count(prompt, chunk)
                yield prompt * n + chunk.index, chunk

    def delivered(self) -> Iterator[tuple[int, OutputChunk]]:
        """Yield the chunks that the client has from another replica. They count for usage, not for metrics."""
        assert self._job.relayed is not None
        self.usage.cached_tokens = self._job.relayed.cached_tokens
        for i, prompt in enumerate(self._prompts):
            for chunk in prompt.stream.delivered:
                self.usage.completion_tokens += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    prompt.metrics.finish(chunk.index, chunk.finish_reason.value, self._state.now())
                yield i * self._job.sampling.n + chunk.index, chunk

    def _count(self, index: int, chunk: OutputChunk) -> None:
        prompt, num_tokens, now_s = self._prompts[index], len(chunk.token_ids), self._state.now()
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


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, OutputChunk], None]:
    """Yield (index of the stream, chunk) in order of arrival."""
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


def timing_of(streams: Sequence[RequestStream], determinism: str, total_s: float) -> Any:
    """Return the ``timing`` block of an answer that has ended: one object, or a list of one per prompt."""
    blocks = [_timing(stream, determinism, total_s) for stream in streams]
    return blocks[0] if len(blocks) == 1 else blocks


def _timing(stream: RequestStream, determinism: str, total_s: float) -> dict[str, Any]:
    output, timing = stream.output, stream.output.timing
    has_token = timing.ttft_s > 0.0
    return {
        "queued_ms": _ms(timing.queued_s),
        "prefill_ms": _ms(timing.ttft_s - timing.queued_s) if has_token else None,
        "first_token_ms": _ms(timing.ttft_s) if has_token else None,
        "total_ms": _ms(total_s),
        "prompt_tokens": len(stream.prompt_token_ids),
        "cached_tokens": timing.num_cached_tokens,
        "cache_miss": timing.cache_miss or None,
        "completion_tokens": output.num_output_tokens,
        "preemptions": output.num_preemptions,
        "chunks": output.num_chunks,
        "steps": output.num_steps,
        "accepted_drafts": output.num_accepted,
        "seed": stream.seed,
        "determinism": determinism,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
