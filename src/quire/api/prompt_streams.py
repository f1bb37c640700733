"""`PromptStreams`: the prompts of a `Job` while they run, counted for usage, metrics and forecast."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.api.job import Job, Usage
from quire.api.state import ApiState, Ticket
from quire.engine.output import OutputChunk
from quire.engine.prompts import RequestOptions
from quire.engine.stream import RequestStream
from quire.errors import RequestError, clip
from quire.http.call import AnswerName, Call
from quire.metrics.engine_stats import EngineStats
from quire.metrics.prometheus import RequestMetrics
from quire.metrics.trace import RequestPhases, RequestTracer
from quire.request import FinishReason

if TYPE_CHECKING:
    from quire.api.relayed import Relayed

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
    _call: Call
    _trace: Mapping[str, str]
    # None: the answer cannot go on elsewhere.
    _relayed: Relayed | None = None
    # Where a stream can go on elsewhere, the cuts between its events must not depend on the reader's pace.
    _merges: bool = True
    usage: Usage = field(default_factory=Usage)
    echoes: list[str] = field(default_factory=list)  # the text of each prompt, with `Job.echo`
    _prompts: list[_Started] = field(default_factory=list)
    _open: deque[_Started] = field(default_factory=deque)  # not known to have ended

    async def submit(self) -> None:
        """Start all prompts, or none."""
        job, state = self._job, self._state
        is_alone = len(job.prompts) == 1
        model = job.answer.head.model
        adapter = None if model in state.model.names else state.adapter_of(model)
        options: RequestOptions = {**job.options, "adapter": adapter, "pooling": job.pooling}
        try:
            for i, given in enumerate(job.prompts):
                prompt = given if job.truncate_to is None else await self._cut(given, job.truncate_to)
                if i:
                    await asyncio.sleep(0)  # other requests have their turn between two prompts
                if job.samples_nothing:
                    await self._wait_for_turn()
                if job.echo:
                    self.echoes.append(self._text_of(prompt))
                stream = await state.frontend.submit(
                    prompt,
                    job.sampling,
                    request_id=job.answer.head.id + ("" if is_alone else f"-{i}"),
                    continues=job.continues,
                    **options,
                    **({} if self._call.answer is None else self._named(self._call.answer, i)),
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

    def _named(self, answer: AnswerName, prompt: int) -> dict[str, Any]:
        """Return what an answer that has a name already gives `Frontend.submit` for one prompt."""
        if self._relayed is not None:
            return self._relayed.of_prompt(prompt, self._job.sampling.n)
        return {"seed": answer.seed_of(prompt)}

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

    def _start(self, stream: RequestStream) -> None:
        state, sampling, num_tokens = self._state, self._job.sampling, len(stream.prompt_token_ids)
        metrics = state.metrics.request(
            self._arrival_s,
            n=sampling.num_samples,
            max_tokens=sampling.max_tokens,
            prompt_tokens=num_tokens,
            on_end=None if state.tracer is None else self._spans(state.tracer, stream.request_id),
        )
        ticket = None if state.forecast is None else state.forecast.enter(num_tokens)
        self._prompts.append(_Started(stream, metrics, ticket))
        self._open.append(self._prompts[-1])
        self.usage.prompt_tokens += num_tokens

    async def _cut(self, prompt: str | Sequence[int], asked: int) -> str | Sequence[int]:
        """Apply ``truncate_prompt_tokens``; the usage counts the tokens that are cut off."""
        limit = self._state.model.max_model_len
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

    def _spans(self, tracer: RequestTracer, request_id: str) -> Callable[[RequestPhases], None]:
        """Return the function that makes the spans of a prompt when it ends."""
        sampling = self._job.sampling
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._job.answer.head.model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": sampling.n,
            "http.request_id": self._call.request_id,
        }
        return tracer.follow(self._trace, attributes)

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
        """Put the timing block of the answer into the usage."""
        streams = [prompt.stream for prompt in self._prompts]
        total_s = self._state.now() - self._arrival_s
        stats = self._state.frontend.stats()
        self.usage.notes = self._job.notes
        self.usage.timing = timing_of(streams, self._job.answer.head.determinism, total_s, stats)

    def cost(self) -> tuple[float, float]:
        """Return the engine-seconds and KV-block-seconds of what has been computed."""
        outputs = [prompt.stream.output for prompt in self._prompts]
        return sum(each.engine_s for each in outputs), sum(each.kv_block_s for each in outputs)

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
        assert self._relayed is not None
        self.usage.cached_tokens = self._relayed.cached_tokens
        n = self._job.sampling.n
        left = [iter(prompt.stream.delivered) for prompt in self._prompts]
        # Their order numbers the events of a journal.
        for each in self._relayed.delivered:
            i = each.choice // n
            if (chunk := next(left[i], None)) is None:
                continue
            self.usage.completion_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                self._prompts[i].metrics.finish(chunk.index, chunk.finish_reason.value, self._state.now())
            yield i * n + chunk.index, chunk

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


def timing_of(streams: Sequence[RequestStream], determinism: str, total_s: float, stats: EngineStats) -> Any:
    """Return the ``timing`` block of an answer that has ended: one object, or a list of one per prompt."""
    blocks = [_timing(stream, determinism, total_s) | _speculation(stats) for stream in streams]
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
        "engine_s": round(output.engine_s, 6),
        "kv_block_s": round(output.kv_block_s, 6),
        "seed": stream.seed,
        "determinism": determinism,
    }


def _speculation(stats: EngineStats) -> dict[str, Any]:
    """Return what the engine's control of drafts has chosen at the end of the answer; nothing without speculation."""
    if not stats.accepted_at:
        return {}
    measured = round(stats.measured_draft_gain, 3) or None
    gains = {"predicted_gain": round(stats.draft_gain, 3), "measured_gain": measured}
    return {"speculation": {"drafts": stats.num_chosen_drafts, **gains}}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
