"""Which samples of a request its client gets. The API needs no more of what `quire.LLM` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quire.engine.output import OutputChunk
from quire.request import Sampling


def choose_best(chunks: Sequence[OutputChunk], sampling: Sampling) -> list[OutputChunk]:
    """Return the samples that the client gets: with best_of, the n with the largest mean log-probability.

    The best comes first; ties are broken by index. Log-probabilities are dropped if the client did not ask for them.
    """
    if sampling.best_of is None or sampling.use_beam_search:
        return list(chunks)

    def mean_logprob(chunk: OutputChunk) -> float:
        entries = chunk.logprobs or ()
        if chunk.error is not None or not entries:
            return -math.inf
        return math.fsum(entry.logprob for entry in entries) / len(entries)

    best = sorted(chunks, key=lambda chunk: -mean_logprob(chunk))[: sampling.n]
    return [
        replace(chunk, index=index, logprobs=None if sampling.logprobs is None else chunk.logprobs)
        for index, chunk in enumerate(best)
    ]
