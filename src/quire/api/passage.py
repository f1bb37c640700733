"""`Passage`: one answer that can go on elsewhere, or has begun there; and the taps of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from starlette.types import Send

from quire.api.generation import CONTINUES, Generation, Tap
from quire.api.job import Job
from quire.api.journal import Entry, Journal
from quire.api.journal_file import Head
from quire.api.relayed import Relayed, Tags, write_tag
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.http.body import Headers
from quire.http.call import AnswerName, Call

_REPLAYED_AT_ONCE = 256  # chunks; other requests get their turn then


class Passage:
    """One answer that can go on elsewhere, or has begun there. ``entry``: the stream that it resumes."""

    def __init__(
        self, journal: Journal | None, path: str, relayed: Relayed, entry: Entry | None = None
    ) -> None:
        self.relayed = relayed
        self.tap: Tap | None = None
        self._journal = journal
        self._path = path
        self._resumed = entry
        self._begun: Entry | None = None

    @property
    def parts(self) -> tuple[Tap | None, Relayed]:
        """What a `Generation` gets of it."""
        return self.tap, self.relayed

    @property
    def answer(self) -> AnswerName:
        return self.relayed.answer

    async def begin(self, state: ApiState, job: Job, call: Call, pieces: list[bytes]) -> None:
        """Choose the tap. ``pieces``: of the body.

        Raises:
            RequestError: the answer cannot go on here.
        """
        fingerprint = state.continuable_with(job.answer.head.model)
        self.relayed.check(fingerprint, len(job.prompts) * job.sampling.n)
        is_continuable = is_streamed_alone(job)
        if self.relayed.by_gateway:
            self.tap = Tagged(fingerprint, self.relayed) if is_continuable else None
            return
        entry = self._resumed
        if entry is None and self._journal is not None and is_continuable:
            num_bytes = sum(map(len, pieces))
            head = Head(self._path, call.tenant, str(self.answer), fingerprint, state.unix_time(), num_bytes)
            entry = self._begun = await self._journal.begin(job.answer.head.id, head, pieces)
        if entry is not None:
            self.tap = Written(entry, self.relayed, is_continuable=is_continuable)

    async def end(self) -> None:
        """The answer has ended, or its client has left."""
        if self._begun is not None and self._journal is not None:
            await self._journal.release(self._begun)


def is_streamed_alone(job: Job) -> bool:
    """Whether another server can continue its stream. The prompt's logprobs are not kept."""
    return (
        job.answer.streamed
        and not (job.in_background or job.echo or job.samples_nothing)
        and job.sampling.prompt_logprobs is None
    )


class Tagged:
    """The stream for a gateway: each group of events follows its tag."""

    def __init__(self, fingerprint: str, relayed: Relayed) -> None:
        self._tags = Tags(fingerprint)
        self._relayed = relayed
        self.headers: Headers = self._tags.headers
        self.resumes = relayed.is_resumed

    def attach(self, generation: Generation) -> None:
        """``generation`` is the one whose stream it is."""

    async def replay(self, generation: Generation, send: Send, opening: bytes) -> bool:
        """Bring the answer to where the client has it; return whether it had ended with an error."""
        await _replayed(generation, self._relayed, opening)
        return False

    async def chunk(self, index: int, chunk: OutputChunk, cached_tokens: int, events: bytes) -> bytes | None:
        return self._tags.chunk(index, chunk, cached_tokens, events)

    async def end(self, status: int, events: bytes) -> bytes:
        return self._tags.end(status, events)


class Written:
    """The stream in the journal: each chunk is in its file before the client has its events."""

    headers: Headers = ()

    def __init__(self, entry: Entry, relayed: Relayed, *, is_continuable: bool) -> None:
        self._entry = entry
        self._relayed = relayed
        self._generation: Generation | None = None
        self.resumes = is_continuable and relayed.is_resumed and bool(relayed.delivered)

    def attach(self, generation: Generation) -> None:
        """``generation`` is the one whose stream it is."""
        self._generation = generation
        self._entry.end_request = generation.disconnect

    async def replay(self, generation: Generation, send: Send, opening: bytes) -> bool:
        """As of `Tagged`; what the client has not seen is sent."""
        events, entry = await _replayed(generation, self._relayed, opening), self._entry
        if shown := entry.numbered(events):
            await send({"type": "http.response.body", "body": shown, "more_body": True})
        if entry.end is None or not entry.end.status:
            return False
        await generation.send_last(send, entry.end.events.encode(), entry.end.status)
        return True

    async def chunk(self, index: int, chunk: OutputChunk, cached_tokens: int, events: bytes) -> bytes | None:
        """Return the events with their ids; None: the rest is for the client that comes back."""
        if self._generation is not None and self._generation.disconnected:
            return None
        return await self._entry.chunk(write_tag(index, chunk, cached_tokens), events)

    async def end(self, status: int, events: bytes) -> bytes:
        return events if status == CONTINUES else await self._entry.finish(status, events)


async def _replayed(generation: Generation, relayed: Relayed, events: bytes) -> bytes:
    """Return the events of all that was delivered, after ``events``."""
    for i, (index, chunk) in enumerate(delivered_chunks(generation, relayed)):
        events += generation.job.answer.frame(index, chunk, generation.usage)
        if i % _REPLAYED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return events


def delivered_chunks(generation: Generation, relayed: Relayed) -> Iterator[tuple[int, OutputChunk]]:
    """Yield the chunks that the client has from another replica. They count for usage, not for metrics."""
    usage, prompts, n = generation.usage, generation.streams.prompts, generation.job.sampling.n
    usage.cached_tokens = relayed.cached_tokens
    chunks_of = [iter(prompt.stream.delivered) for prompt in prompts]
    # Their order numbers the events of a journal.
    for delivered in relayed.delivered:
        i = delivered.choice // n
        if (chunk := next(chunks_of[i], None)) is None:
            continue
        usage.completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            prompts[i].metrics.finish(chunk.index, chunk.finish_reason.value, generation.state.now())
        yield i * n + chunk.index, chunk
