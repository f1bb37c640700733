"""From token events to text: the output state of a request, shared by the online and the offline path.

    TokenEvent ──> RequestOutputState.feed ──> OutputChunk ──> RequestStream    (asyncio)
                                       └─────> FinishSample                     (to the core, for a stop string)

A stop string ends a sample here. Its terminal chunk goes out at once; ids, logprobs and usage are cut at the token that
completed the string, later events of the sample are ignored, and `FinishSample` tells the core. Text is released only
when no stop string can begin in it, so nothing that was streamed is ever taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.engine.messages import FinishSample
from quire.metrics.log import Log
from quire.request import FinishReason, Request, SampleTiming, TokenEvent, TokenLogprobs
from quire.text.stop import StopMatcher
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer

log = Log("frontend")


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """New output of one sample. Exactly the last chunk of each sample carries ``finish_reason``.

    ``token_ids`` may be ahead of ``text``, which holds back half a character or the beginning of a stop string. A stop
    *token* is the last of ``token_ids`` and has no text.
    """

    index: int  # sample index
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id, if the request asked for them
    finish_reason: FinishReason | None = None
    # With the first chunk, if the request asked for them; the prompt's first token has None.
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: tuple[float, ...] | None = None  # in the only chunk of a request with a `Pooling`
    # The stop token id, the stop string, or the deadline's name; None for EOS.
    stop_reason: int | str | None = None
    error: str | None = None  # with FinishReason.ERROR and FinishReason.DEADLINE
    # "capacity", "hopeless", "never_fits", "step", "internal", "dead", "deadline", "slow_reader".
    error_kind: str | None = None
    retry_after_s: float = 0.0  # with "hopeless"
    stop_token_id: int | None = None  # the EOS or stop token that ended it: the last of token_ids


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
        self.num_tokens = self.num_steps = self.num_chunks = self.num_preemptions = 0
        self.num_accepted = 0  # drafts
        self.engine_s = self.kv_block_s = 0.0
        self.started = False  # its first chunk was returned
        self.finished = False

    def note_step(self, event: TokenEvent) -> None:
        """Count a step. The core sends its own count with the first token after an admission and at the end."""
        self.num_accepted += max(0, len(event.token_ids) - 1)
        if event.timing is not None:
            self.num_steps = max(self.num_steps, event.timing.num_steps)
            self.num_chunks = max(self.num_chunks, event.timing.num_chunks)
            # A restarted engine counts from zero again, so a number never falls.
            self.num_preemptions = max(self.num_preemptions, event.timing.num_preemptions)
            self.engine_s = max(self.engine_s, event.timing.engine_s)
            self.kv_block_s = max(self.kv_block_s, event.timing.kv_block_s)
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
        self.timing = SampleTiming()  # the first sample's, with its first token
        self._send = send
        self._samples = [_Sample(request, tokenizer, continues) for _ in range(request.sampling.num_samples)]
        self._num_open = request.sampling.num_samples
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_preemptions(self) -> int:
        return sum(sample.num_preemptions for sample in self._samples)

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
    def engine_s(self) -> float:
        """The request's share of the engine's time, so far as told, summed over the samples."""
        return sum(sample.engine_s for sample in self._samples)

    @property
    def kv_block_s(self) -> float:
        """KV blocks that its samples held, times seconds, so far as told."""
        return sum(sample.kv_block_s for sample in self._samples)

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
        sample.note_step(event)
        if event.timing is not None and event.sample_index == 0 and sample.num_tokens == 0:
            self.timing = event.timing
        pieces, used = [], 0
        sampling = self.request.sampling
        # Whether the last token is the stop token that ended the sample: counted, but without text.
        silent_stop = event.stop_token_id is not None and not sampling.include_stop_str_in_output
        for token_id in event.token_ids:
            used += 1
            if silent_stop and used == len(event.token_ids):
                sample.num_tokens += 1
                break
            pieces.append(sample.feed(token_id, sampling.min_tokens))
            if sample.matched is not None:
                break
        reason = event.finish_reason
        stop_reason: int | str | None = None
        if sample.matched is None and reason is not None:
            pieces.append(sample.finish())
            if event.stop_token_id is not None and event.stop_token_id not in sampling.eos_token_ids:
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
        deadline = self.request.terms.deadline
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
            stop_token_id=event.stop_token_id if used == len(event.token_ids) else None,
        )
