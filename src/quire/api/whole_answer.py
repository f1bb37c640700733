"""Answers that are not streamed: the chunks of each choice become one, of several candidates the best are kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from quire.api.job import Job
from quire.engine.best_of import choose_best
from quire.engine.output import OutputChunk, merge
from quire.request import FinishReason

# Ends of a choice after which its answer is complete; None: it goes on.
GOOD_ENDS = (None, FinishReason.STOP, FinishReason.LENGTH)


async def whole_choices(
    job: Job,
    chunks: AsyncGenerator[tuple[int, OutputChunk], None],
    check_end: Callable[[OutputChunk], None],
    echoes: Sequence[str],
) -> list[OutputChunk]:
    """Return one chunk per choice once all are there. ``check_end`` raises for an end that is not a good one.

    ``echoes``: the text of each prompt, if its answers begin with it.
    """
    n, num_samples = job.sampling.n, job.sampling.num_samples
    pieces: list[list[OutputChunk]] = [[] for _ in range(len(job.prompts) * num_samples)]
    async with aclosing(chunks):
        async for index, chunk in chunks:
            if chunk.finish_reason not in GOOD_ENDS:
                check_end(chunk)
            pieces[index].append(chunk)
    choices: list[OutputChunk] = []
    for start in range(0, len(pieces), num_samples):
        candidates = [merge(chunks_of_one) for chunks_of_one in pieces[start : start + num_samples]]
        choices += choose_best(candidates, job.sampling)
    if echoes:
        choices = [replace(choice, text=echoes[i // n] + choice.text) for i, choice in enumerate(choices)]
    return choices
