"""The steps that `quire profile` measures: decodes, chunks and both, over rows, running sequences and context.

    decodes     1 … max_num_seqs sequences with one row, at a short, a middle and a long context
    chunks      2 … max_num_batched_tokens rows of one prompt, from its start and from the middle; some do not draw
    several     chunks of several prompts in one step
    mixed       decodes beside a chunk

Counts lie on the knots of `quire.plan.fit` and between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.plan.cost_model import StepFeatures, chunk_pairs

DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHUNKS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
SEVERAL = ((2, 8), (4, 16), (8, 4), (3, 64), (6, 100), (16, 16))
MIXED_DECODES = (1, 4, 16, 48, 96)
MIXED_CHUNKS = (12, 64, 200, 512, 1400)
LONG_DECODES = (
    16  # sequences at most that are measured at the longest context: more keys than any trace brings
)
REPEATS_OF_A_STEP = 64  # tokens that a sequence grows by while it is measured, at most


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step. The context of a decode is what it reads at first; it grows by one with each repetition."""

    num_decodes: int = 0
    context: int = 1  # keys that a decode reads
    num_chunks: int = 0
    chunk: int = 0  # rows of each
    start: int = 0  # rows computed before
    draws: bool = True  # the chunks end at the last known token

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_chunks * self.chunk

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_chunks

    @property
    def features(self) -> StepFeatures:
        """Of the first repetition."""
        return StepFeatures(
            self.num_rows,
            self.num_seqs,
            self.num_decodes + self.num_chunks * self.draws,
            self.num_decodes * self.context,
            self.num_chunks * (self.start + self.chunk),
            self.num_chunks * chunk_pairs(self.start, self.chunk),
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks that its sequences hold at most."""
        decode = -(-(self.context + REPEATS_OF_A_STEP) // block_size)
        chunk = -(-(self.start + self.chunk + REPEATS_OF_A_STEP) // block_size)
        return self.num_decodes * decode + self.num_chunks * chunk


def cases(config: EngineConfig, max_blocks: int) -> list[Case]:
    """Return the steps that fit the engine's limits and ``max_blocks``, the cheap ones first."""
    scheduler, block_size = config.scheduler, config.cache.block_size
    longest = scheduler.max_model_len - REPEATS_OF_A_STEP

    def fits(case: Case) -> bool:
        return (
            case.num_seqs <= scheduler.max_num_seqs
            and case.num_rows <= scheduler.max_num_batched_tokens
            and case.start + case.chunk <= longest
            and case.context <= longest
            and case.num_blocks(block_size) <= max_blocks
        )

    found = dict.fromkeys(case for case in _all(longest) if fits(case))
    return sorted(
        found, key=lambda case: (case.num_rows, case.features.chunk_pairs, case.features.decode_kv_tokens)
    )


def _all(longest: int) -> Iterator[Case]:
    middle = max(1, longest // 2)
    contexts = (32, max(33, longest // 8), max(34, longest // 3), max(35, longest - 1))
    for num in DECODES:
        for context in contexts[: 4 if num <= LONG_DECODES else 3]:
            yield Case(num_decodes=num, context=context)
    for chunk in CHUNKS:
        yield Case(num_chunks=1, chunk=chunk)
        yield Case(num_chunks=1, chunk=chunk, draws=False)
        yield Case(num_chunks=1, chunk=chunk, start=middle)
    for num, chunk in SEVERAL:
        yield Case(num_chunks=num, chunk=chunk)
        yield Case(num_chunks=num, chunk=chunk, start=longest // 8)
    for num in MIXED_DECODES:
        for chunk in MIXED_CHUNKS:
            yield Case(num, contexts[1], 1, chunk)
            yield Case(num, contexts[2], 1, chunk, start=longest // 8, draws=False)
