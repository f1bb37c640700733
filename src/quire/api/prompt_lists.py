"""What a job of several prompts needs, and prompts that are cut or shown: their turns, their chunks in one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from quire.api.job import Job
from quire.engine.frontend import Frontend
from quire.engine.output import OutputChunk
from quire.engine.stream import RequestStream
from quire.errors import RequestError, clip
from quire.text.tokenizer import Tokenizer

# Tokens that a short prompt counts as.
_LEAST = 16


async def wait_for_turn(streams: deque[RequestStream], max_tokens: int) -> None:
    """Wait until few tokens of ``streams`` are left to compute, so that they share the engine with others.

    Streams that have ended are removed.
    """
    while sum(max(_LEAST, len(stream.prompt_token_ids)) for stream in streams) >= max_tokens:
        await streams.popleft().ended()


def prompt_text(tokenizer: Tokenizer, job: Job, prompt: str | Sequence[int]) -> str:
    """Return the text of a prompt, for an answer that begins with it."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=job.sampling.skip_special_tokens)


async def truncated(
    frontend: Frontend, job: Job, prompt: str | Sequence[int], num_last: int
) -> tuple[str | Sequence[int], int]:
    """Apply ``truncate_prompt_tokens``: return the prompt, and how many of its tokens are cut off."""
    limit = frontend.model.max_model_len
    if num_last != -1 and not 1 <= num_last <= limit:
        raise RequestError(
            f"truncate_prompt_tokens = {clip(num_last)} is not allowed: it must be an integer in 1…{limit} (the "
            "context of this model), or -1 for as many as the context holds.",
            param="truncate_prompt_tokens",
        )
    ids = await frontend.prompts.tokenize(prompt) if isinstance(prompt, str) else prompt
    room = limit - (job.sampling.max_tokens or 1) if num_last == -1 else num_last
    num_cut = max(0, len(ids) - max(room, 1))
    return (ids[num_cut:] if num_cut else prompt), num_cut


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, OutputChunk], None]:
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
