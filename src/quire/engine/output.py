"""From token events to text: the output state of a request, shared by the online and the offline path.

    TokenEvent ──> RequestOutputState.feed ──> OutputChunk ──> RequestStream    (asyncio)
                                       └─────> FinishSample                     (to the core, for a stop string)

A stop string ends a sample here. Its terminal chunk goes out at once; ids, logprobs and usage are cut at the token that
completed the string, later events of the sample are ignored, and `FinishSample` tells the core. Text is released only
when no stop string can begin in it, so nothing that was streamed is ever taken back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from quire.engine.core import FinishSample
from quire.metrics.log import Log
from quire.request import FinishReason, Request, TokenEvent, TokenLogprobs
from quire.text.stop import StopMatcher
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer

log = Log("frontend")


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New output of one sample. Exactly the last chunk of each sample carries ``finish_reason``.

    ``token_ids`` may be ahead of ``text``, which holds back half a character or the beginning of a stop string. A stop
    *token* is the last of ``token_ids`` and has no text.
    """

    index: int  # which of n
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id, if the request asked for them
    finish_reason: FinishReason | None = None
    # With the first chunk, if the request asked for them; the prompt's first token has None.
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: tuple[float, ...] | None = None  # of a request with a `Pooling`, in its only chunk
    # The stop token id, the stop string, or the deadline's name; None for EOS.
    stop_reason: int | str | None = None
    error: str | None = None  # with FinishReason.ERROR and FinishReason.DEADLINE
    # "capacity", "hopeless", "never_fits", "step", "internal", "dead", "deadline".
    error_kind: str | None = None
    retry_after_s: float = 0.0  # with "hopeless"


_WITH_ERROR = (FinishReason.ERROR, FinishReason.DEADLINE)


def merge(chunks: Sequence[OutputChunk]) -> OutputChunk:
    """Return the chunks of one sample merged into one: what a client that does not stream gets."""
    assert chunks
    assert len({chunk.index for chunk in chunks}) == 1
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return replace(
        chunks[-1],
        text="".join([chunk.text for chunk in chunks]),
        token_ids=tuple([i for chunk in chunks for i in chunk.token_ids]),
        logprobs=tuple([entry for entries in logprobs for entry in entries]) if logprobs else None,
        prompt_token_ids=chunks[0].prompt_token_ids,
        prompt_logprobs=chunks[0].prompt_logprobs,
    )


class _Sample:
    """The text of one of the n samples."""

    __slots__ = (
        "detokenizer",
        "finished",
        "matcher",
        "num_accepted",
        "num_chunks",
        "num_steps",
        "num_tokens",
        "started",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer, continues: bool) -> None:
        sampling = request.sampling
        self.detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, continues=continues
        )
        self.matcher: StopMatcher | None = None
        if sampling.stop:
            self.matcher = StopMatcher(
                sampling.stop, include_stop_str_in_output=sampling.include_stop_str_in_output
            )
        self.num_tokens = 0
        self.num_steps = self.num_chunks = self.num_accepted = 0
        self.started = False  # its first chunk was returned
        self.finished = False

    def note_step(self, event: TokenEvent) -> None:
        """Count a step. The core sends its own count with the first token after an admission and at the end."""
        self.num_accepted += max(0, len(event.token_ids) - 1)
        if event.timing is not None:
            self.num_steps = max(self.num_steps, event.timing.num_steps)
            self.num_chunks = max(self.num_chunks, event.timing.num_chunks)
        elif event.token_ids:
            self.num_steps += 1

    @property
    def matched(self) -> str | None:
        return None if self.matcher is None else self.matcher.matched

    def feed(self, token_id: int, min_tokens: int) -> str:
        self.num_tokens += 1
        text = self.detokenizer.feed(token_id)
        if self.matcher is None:
            return text
        if self.num_tokens <= min_tokens:
            return self.matcher.pass_through(text)
        return self.matcher.feed(text)

    def finish(self) -> str:
        """Return the text that was held back; a stop string may complete in it."""
        text = self.detokenizer.finish()
        if self.matcher is None:
            return text
        text = self.matcher.feed(text)
        return text if self.matched is not None else text + self.matcher.finish()


class RequestOutputState:
    """The output of one request: n samples, and the numbers for usage and timing. Not thread-safe.

    ``continues``: the output continues the prompt's text, so a sentencepiece vocabulary's leading space is kept.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        send: Callable[[FinishSample], None],
        *,
        continues: bool = False,
    ) -> None:
        special = tokenizer.special_token_ids
        continues = continues and any(
            token_id not in special for token_id in reversed(request.prompt_token_ids)
        )
        self.request = request
        self.num_cached_tokens = 0
        self.queued_s = 0.0
        self.ttft_s = 0.0
        self.cache_miss = ""
        self._send = send
        self._samples = [_Sample(request, tokenizer, continues) for _ in range(request.sampling.num_samples)]
        self._preemptions = [0] * request.sampling.num_samples
        self._num_open = request.sampling.num_samples
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_preemptions(self) -> int:
        return sum(self._preemptions)

    @property
    def num_steps(self) -> int:
        """Steps that produced something, summed over the samples."""
        return sum(sample.num_steps for sample in self._samples)

    @property
    def num_chunks(self) -> int:
        """Of these, how many computed a chunk of the prompt."""
        return sum(sample.num_chunks for sample in self._samples)

    @property
    def num_accepted(self) -> int:
        return sum(sample.num_accepted for sample in self._samples)

    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered so far, summed over the samples (usage.completion_tokens)."""
        return sum(sample.num_tokens for sample in self._samples)

    def feed(self, event: TokenEvent) -> OutputChunk | None:
        """Take one event; return what it adds, or None if there is nothing to show or the sample is over."""
        sample = self._samples[event.sample_index]
        if event.prompt_logprobs is not None:
            # Entries that came before, from an earlier admission or another sample, are equal.
            self._prompt_logprobs += event.prompt_logprobs[len(self._prompt_logprobs) - event.prompt_start :]
        if sample.finished:
            return None
        self._note(event)
        pieces, used = [], 0
        min_tokens = self.request.sampling.min_tokens
        for token_id in event.token_ids:
            used += 1
            if used == len(event.token_ids) and self._is_silent_stop(event):
                sample.num_tokens += 1
                break
            pieces.append(sample.feed(token_id, min_tokens))
            if sample.matched is not None:
                break
        reason = event.finish_reason
        stop_reason: int | str | None = None
        if sample.matched is None and reason is not None:
            pieces.append(sample.finish())
            if event.stop_token_id is not None and event.stop_token_id not in self._eos:
                stop_reason = event.stop_token_id
            elif reason is FinishReason.DEADLINE:
                stop_reason = event.error
        return self._chunk(sample, event, "".join(pieces), used, reason, stop_reason)

    def end(
        self, reason: FinishReason, error: str | None = None, error_kind: str | None = None
    ) -> list[OutputChunk]:
        """End every open sample from this side (abort, shutdown, a dead engine), with the text that was held back."""
        chunks = []
        for index, sample in enumerate(self._samples):
            if not sample.finished:
                event = TokenEvent(
                    self.request.request_id, index, finish_reason=reason, error=error, error_kind=error_kind
                )
                chunk = self._chunk(sample, event, sample.finish(), 0, reason, None)
                assert chunk is not None
                chunks.append(chunk)
        return chunks

    def missed(self, name: str) -> list[TokenEvent]:
        """Return the terminal events of the open samples that have missed the limit ``name`` of the deadline."""
        deadline = self.request.deadline
        assert deadline is not None
        return [
            TokenEvent(
                self.request.request_id,
                index,
                finish_reason=FinishReason.DEADLINE,
                error=deadline.missed(name, sample.num_tokens),
                error_kind="deadline",
            )
            for index, sample in enumerate(self._samples)
            if not sample.finished and not (name == "first_token" and sample.num_tokens)
        ]

    @property
    def _eos(self) -> Sequence[int]:
        return self.request.sampling.eos_token_ids

    def _is_silent_stop(self, event: TokenEvent) -> bool:
        """Whether the last token of ``event`` is the stop token that ended the sample: counted, but without text."""
        return event.stop_token_id is not None and not self.request.sampling.include_stop_str_in_output

    def _note(self, event: TokenEvent) -> None:
        index, timing = event.sample_index, event.timing
        self._samples[index].note_step(event)
        if timing is None:
            return
        # A restarted engine counts from zero again, so a number never falls.
        self._preemptions[index] = max(self._preemptions[index], timing.num_preemptions)
        if index == 0 and self._samples[0].num_tokens == 0:
            self.cache_miss = timing.cache_miss
            self.num_cached_tokens = timing.num_cached_tokens
            self.queued_s = timing.queued_s
            self.ttft_s = timing.ttft_s

    def _chunk(
        self,
        sample: _Sample,
        event: TokenEvent,
        text: str,
        used: int,
        reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> OutputChunk | None:
        if sample.matched is not None:
            if event.finish_reason is None:
                self._send(FinishSample(event.request_id, event.sample_index, sample.num_tokens))
            reason, stop_reason = FinishReason.STOP, sample.matched
        if reason is None and not event.token_ids:
            return None
        if reason is not None:
            sample.finished = True
            self._num_open -= 1
        first, sample.started = not sample.started, True
        wanted = first and self.request.sampling.prompt_logprobs is not None
        return OutputChunk(
            index=event.sample_index,
            text=text,
            token_ids=event.token_ids[:used],
            logprobs=None if event.logprobs is None else event.logprobs[:used],
            finish_reason=reason,
            prompt_token_ids=self.request.prompt_token_ids if wanted else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if wanted else None,
            pooled=event.pooled,
            stop_reason=stop_reason,
            error=event.error if reason in _WITH_ERROR else None,
            error_kind=event.error_kind if reason in _WITH_ERROR else None,
            retry_after_s=event.retry_after_s,
        )


class RequestStream:
    """What `Frontend.submit` returns. Iterate over it once, or `collect` it; leaving it early aborts the request.

        async with contextlib.aclosing(await frontend.submit(prompt, sampling)) as stream:
            async for chunk in stream:
                ...

    Exactly one chunk of each of the n samples carries a ``finish_reason``; after the last of them the iteration ends.
    An engine error is a chunk with `FinishReason.ERROR`, not an exception.
    Leaving early means break, an exception, cancellation or `aclose`. Belongs to the event loop's thread.
    """

    def __init__(self, request_id: str, state: RequestOutputState, abandon: Callable[[], None]) -> None:
        """``abandon`` takes the request out of the engine; it is called at most once."""
        self.request_id = request_id
        self.prompt_token_ids = state.request.prompt_token_ids
        self.adapter = state.request.adapter
        seed = state.request.sampling.seed
        assert seed is not None
        self.seed = seed  # the request's own, or the one chosen for it
        self.output = state  # only this class changes it
        self.timers: list[asyncio.TimerHandle] = []  # of its deadline; cancelled at its end
        self._abandon = abandon
        self._chunks: deque[OutputChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        try:
            while True:
                while self._chunks:
                    for chunk in self._take():
                        yield chunk
                if self.output.finished:
                    return
                await self._news()
        finally:
            await self.abort()

    async def ended(self) -> None:
        """Wait, before reading, until every sample has its terminal chunk; the chunks stay readable."""
        while not self.output.finished:
            await self._news()

    async def _news(self) -> None:
        """Wait until chunks are added."""
        assert self._waiter is None, "one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    def _take(self) -> list[OutputChunk]:
        """Return the waiting chunks. If the reader fell behind, the chunks of each sample are merged into one."""
        if len(self._chunks) == 1:
            return [self._chunks.popleft()]
        samples: dict[int, list[OutputChunk]] = {}
        for chunk in self._chunks:
            samples.setdefault(chunk.index, []).append(chunk)
        self._chunks.clear()
        return [merge(chunks) for chunks in samples.values()]

    async def collect(self) -> tuple[OutputChunk, ...]:
        """Wait for the end and return one chunk per sample, by index."""
        chunks: list[list[OutputChunk]] = [[] for _ in range(self.output.request.sampling.num_samples)]
        async for chunk in self:
            chunks[chunk.index].append(chunk)
        return tuple(merge(each) for each in chunks)

    async def abort(self) -> None:
        """End the request now: open samples get a terminal chunk with `FinishReason.ABORT`. No effect once finished."""
        if not self.output.finished:
            self._push(self.output.end(FinishReason.ABORT))
            self._abandon()

    async def aclose(self) -> None:
        """Leave the stream: `abort`, and drop unread chunks."""
        await self.abort()
        self._chunks.clear()

    def feed(self, event: TokenEvent) -> None:
        """Turn an event into text and wake the reader (called by `OpenStreams`)."""
        try:
            chunk = self.output.feed(event)
        except Exception as error:  # an error in one request's text must not end the other streams
            log.exception("output_failed", request_id=self.request_id)
            self._push(self.output.end(FinishReason.ERROR, f"{type(error).__name__}: {error}", "internal"))
            self._abandon()
            return
        if chunk is not None:
            self._push([chunk])

    def fail(self, error: str, error_kind: str) -> None:
        """End every open sample with an error (called by `OpenStreams`)."""
        self._push(self.output.end(FinishReason.ERROR, error, error_kind))

    def _push(self, chunks: list[OutputChunk]) -> None:
        self._chunks.extend(chunks)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
