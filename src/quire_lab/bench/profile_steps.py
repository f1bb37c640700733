"""The steps that `quire profile` measures, and `StepProfiler`, which times them on an engine's executor.

    decodes     1 … max_num_seqs sequences with one row each, at a short, a middle and a long context
    chunks      2 … max_num_batched_tokens rows of one prompt, from its start and from the middle; some do not sample
    several     chunks of several prompts in one step
    mixed       decodes beside a chunk
    drafted     decodes with 1 … 8 drafts each, with speculation: verifying them, and proposing the next ones

Counts lie on the knots of `quire.cost.fit` and between them. The profiler makes plans without a scheduler. A sequence
enters at the context that the case asks for, its blocks filled beforehand by copies: the executor is told that the
first rows are computed, which saves computing them. Attention reads real blocks, as many as in live traffic.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from quire.clock import Clock
from quire.config import AUTO_DRAFTS, EngineConfig, SchedulerConfig
from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.draft_cost import DraftLedger, DraftWork, MeasuredDrafts
from quire.cost.fit import MeasuredStep, cut_mean
from quire.errors import StepError
from quire.executor.base import Executor
from quire.executor.timed import FIRST_TOKEN_ID
from quire.request import SamplingParams
from quire.step import KvMove, NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

SEVERAL = ((2, 8), (4, 16), (8, 4), (3, 64), (6, 100), (16, 16))
MIXED_DECODES = (1, 4, 16, 48, 96)
MIXED_CHUNKS = (12, 64, 200, 512, 1400)
DRAFTED = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = tuple(2**i for i in range(AUTO_DRAFTS.bit_length()))
# Most sequences with drafts at the second and the third context: a draft model has to compute it first.
DRAFTED_AT = (DRAFTED[-1], 16, 2)
# Most sequences that are measured at the longest context: together more keys than a step of any trace.
LONG_DECODES = 16
REPEATS_OF_A_STEP = 64  # tokens that a sequence grows by at most while it is measured


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step. The context of a decode grows by one with each repetition."""

    num_decodes: int = 0
    context: int = 1  # keys that a decode reads in the first repetition
    num_chunks: int = 0
    chunk: int = 0  # rows of each
    start: int = 0  # tokens computed before the chunk
    samples: bool = True  # the chunks end at the last known token
    # Per decode, from the second repetition on: the first has nothing to verify.
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes * (1 + self.num_drafts) + self.num_chunks * self.chunk

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_chunks

    @property
    def features(self) -> StepFeatures:
        """Return the features of the first repetition, as if it had drafts."""
        return StepFeatures(
            self.num_rows,
            self.num_seqs,
            self.num_decodes * (1 + self.num_drafts) + self.num_chunks * self.samples,
            self.num_decodes * (self.context + self.num_drafts),
            self.num_chunks * (self.start + self.chunk),
            self.num_chunks * chunk_pairs(self.start, self.chunk),
            self.num_decodes * chunk_pairs(self.context, self.num_drafts),
        )

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks that its sequences hold at most."""
        decode = -(-(self.context + REPEATS_OF_A_STEP) // block_size)
        chunk = -(-(self.start + self.chunk + REPEATS_OF_A_STEP) // block_size)
        return self.num_decodes * decode + self.num_chunks * chunk


def cases(config: EngineConfig, max_blocks: int) -> list[Case]:
    """Return the steps that fit the engine's limits and ``max_blocks``, the cheapest first."""
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

    most = scheduler.max_num_drafts
    fitting = dict.fromkeys(
        case for case in _all(longest, scheduler) if fits(case) and case.num_drafts <= most
    )
    return sorted(fitting, key=lambda c: (c.num_rows, c.features.chunk_pairs, c.features.decode_kv_tokens))


def _sizes(first: int, most: int) -> Iterator[int]:
    """Yield the powers of two from ``first`` to ``most``, and the middle between each two from 2 on."""
    size = first
    while size <= most:
        yield size
        if size > 1 and 3 * size // 2 <= most:
            yield 3 * size // 2
        size *= 2


def _all(longest: int, limits: SchedulerConfig) -> Iterator[Case]:
    middle = max(1, longest // 2)
    contexts = (32, max(33, longest // 8), max(34, longest // 3), max(35, longest - 1))
    for num in _sizes(1, limits.max_num_seqs):
        for context in contexts[: 4 if num <= LONG_DECODES else 3]:
            yield Case(num_decodes=num, context=context)
    for chunk in _sizes(2, limits.max_num_batched_tokens):
        yield Case(num_chunks=1, chunk=chunk)
        yield Case(num_chunks=1, chunk=chunk, samples=False)
        yield Case(num_chunks=1, chunk=chunk, start=middle)
    for num, chunk in SEVERAL:
        yield Case(num_chunks=num, chunk=chunk)
        yield Case(num_chunks=num, chunk=chunk, start=longest // 8)
    for num in MIXED_DECODES:
        for chunk in MIXED_CHUNKS:
            yield Case(num, contexts[1], 1, chunk)
            yield Case(num, contexts[2], 1, chunk, start=longest // 8, samples=False)
    for most, context in zip(DRAFTED_AT, contexts, strict=False):
        for num in (n for n in DRAFTED if n <= most):
            for drafts in DRAFTS:
                yield Case(num, context, num_drafts=drafts)


ANCHOR_DECODES = (1, 8)


def anchors(todo: Sequence[Case]) -> list[Case]:
    """Return the cases whose times tell whether the machine has changed: decodes, and the largest chunk."""
    plain = [c for c in todo if not c.num_drafts]
    decodes = [c for num in ANCHOR_DECODES for c in plain if (c.num_decodes, c.num_chunks) == (num, 0)][::4]
    chunks = [c for c in todo if (c.num_decodes, c.num_chunks) == (0, 1) and c.num_rows <= 512]
    return [*decodes, *chunks[-1:]]


REPEATS = 5  # repetitions of a case per visit
WARM = 1  # repetitions that are not counted
# Sequences that read other blocks before a chunk, and the keys that they read.
STIRRING, STIRRED = 16, 16384


class StepProfiler:
    """Runs cases and keeps their times. Blocks 0 … max_blocks of the executor's pool are written to."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Clock,
        sampling: SamplingParams,
        *,
        max_blocks: int,
        seed: int = 0,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._sampling = sampling
        self._block_size = config.cache.block_size
        self._num_groups = len(config.cache.windows)
        self._num_states = config.cache.num_states
        self._vocab_size = config.model.spec.vocab_size
        self._max_blocks = max_blocks
        self._max_seqs = config.scheduler.max_num_seqs
        self._longest = config.scheduler.max_model_len - REPEATS_OF_A_STEP
        self._random = Random(f"profile {seed}")
        self._step = 0
        self._next_id = 0
        self._next_block = 0  # first block of the next chunk
        self._gone: tuple[int, ...] = ()
        self._stirring: tuple[SeqPlan, ...] = ()
        self._max_paths = config.scheduler.max_draft_paths
        # The sequences enter without a draft model's K and V of their contexts.
        self._ledger = DraftLedger(config.scheduler.max_num_batched_tokens, cached_prefix=False)
        self._times: dict[Case, list[tuple[StepFeatures, float]]] = defaultdict(list)
        self._drafts: dict[DraftWork, list[float]] = defaultdict(list)  # seconds

    def fill(self) -> None:
        """Write one block and copy it to the others: reads of memory never written all hit the same zero page."""
        seq = self._new([(1, self._block_size)])[0]
        plan = self._placed([seq], [(0, self._block_size)], 0)
        self._run(StepPlan(self._step, (seq,), tuple(plan)))
        moves = tuple(KvMove(0, block) for block in range(1, self._max_blocks))
        for start in range(0, len(moves), 256):
            self._run(StepPlan(self._step, kv_moves=moves[start : start + 256]))
        self._gone = (seq.seq_id,)
        self._stir()

    def visit(self, case: Case, repeats: int = REPEATS, limit_s: float = math.inf) -> None:
        """Measure one case ``repeats`` times, or fewer once that has taken ``limit_s``."""
        assert WARM < repeats <= REPEATS_OF_A_STEP
        spans = [(case.context - 1, 1)] * case.num_decodes
        decodes = self._new(spans)
        plans = [p._replace(max_next_drafts=case.num_drafts) for p in self._placed(decodes, spans, 0)]
        entering = tuple(decodes)
        times: list[tuple[StepFeatures, float]] = []
        for _ in range(repeats):
            chunks = self._chunks(case)
            new = (*entering, *(seq for seq, _ in chunks))
            seconds, result = self._run(StepPlan(self._step, new, (*plans, *(plan for _, plan in chunks))))
            times.append((_with_decodes(case, plans), seconds))
            entering = ()
            plans = [_next(plan, outcome) for plan, outcome in zip(plans, result.seqs, strict=False)]
            self._gone = tuple(seq.seq_id for seq, _ in chunks)
            if sum(seconds for _, seconds in times[bool(case.num_drafts) :]) > limit_s:
                break
        first = min(WARM, len(times) - 1)  # a step so long that it runs once needs no warm-up
        self._times[case] += times[first:]
        self._gone += tuple(seq.seq_id for seq in decodes)

    def probe(self, case: Case) -> float:
        """Measure one case and return the median of this visit alone."""
        before = len(self._times[case])
        self.visit(case, REPEATS + 2)
        return statistics.median(seconds for _, seconds in self._times[case][before:])

    def measured(self) -> list[MeasuredStep]:
        """Return the mean of each case: its seconds, and its features, since the contexts of decodes grew."""
        steps = []
        for times in self._times.values():
            mean = (
                round(statistics.fmean(column)) for column in zip(*(step for step, _ in times), strict=True)
            )
            steps.append(MeasuredStep(StepFeatures(*mean), cut_mean([seconds for _, seconds in times])))
        return steps

    def measured_drafts(self) -> list[MeasuredDrafts]:
        """Return the mean seconds of proposing, by its work. How many are accepted depends on the text of requests."""
        return [MeasuredDrafts(work, cut_mean(times), ()) for work, times in self._drafts.items()]

    def _chunks(self, case: Case) -> list[tuple[NewSeq, SeqPlan]]:
        """Return the chunks of one repetition: new sequences in blocks that no recent step has read.

        A server's prompts come once, between steps that read other blocks. The same rows repeated find weights, keys
        and tables in the CPU caches and measure a quarter too fast, so other blocks are read first (`_stirring`).
        """
        if not case.num_chunks:
            return []
        if self._stirring:
            self._run(StepPlan(self._step, (), self._stirring))
        spans = [(case.start, case.chunk)] * case.num_chunks
        seqs = self._new(spans, spare=0 if case.samples else 1)
        need = case.num_blocks(self._block_size)
        behind = need - sum(self._blocks_of(span) for span in spans)  # those of the decodes
        self._next_block = max(behind, self._next_block)
        if self._next_block + need - behind > self._max_blocks:
            self._next_block = behind
        plans = self._placed(seqs, spans, self._next_block)
        self._next_block += need - behind
        return list(zip(seqs, plans, strict=True))

    def _stir(self) -> None:
        """Make the sequences that read other blocks between two chunks: one row each, and no token is sampled."""
        most = min(self._max_blocks, STIRRED // self._block_size)
        context = max(1, min(self._longest, STIRRED // STIRRING))
        num = min(STIRRING, self._max_seqs, most * self._block_size // (context + REPEATS_OF_A_STEP))
        spans = [(context - 1, 1)] * num
        seqs = self._new(spans, spare=1)
        plans = self._placed(seqs, spans, 0)
        if num:
            self._run(StepPlan(self._step, tuple(seqs), tuple(plans)))
        self._stirring = tuple(plan._replace(block_start=(), new_block_ids=()) for plan in plans)

    def _new(self, spans: Sequence[tuple[int, int]], *, spare: int = 0) -> list[NewSeq]:
        """Return sequences whose known tokens end with their span, or ``spare`` tokens after it."""
        new = []
        for start, count in spans:
            num = start + count + spare
            prompt = tuple(self._random.choices(range(FIRST_TOKEN_ID, self._vocab_size), k=num))
            # What lies in the slot of a state does not matter.
            slot = self._next_id % self._num_states if self._num_states else -1
            new.append(NewSeq(self._next_id, 0, prompt, (), self._sampling, 0, state_slot=slot))
            self._next_id += 1
        return new

    def _placed(
        self, seqs: Sequence[NewSeq], spans: Sequence[tuple[int, int]], first_block: int
    ) -> list[SeqPlan]:
        """Return the plans of the first repetition; each sequence has its own blocks for all repetitions."""
        plans, free = [], first_block
        for seq, (start, count) in zip(seqs, spans, strict=True):
            rows = self._blocks_of((start, count))
            # The cache groups share blocks: their contents do not matter.
            ids = (tuple(range(free, free + rows)),) * self._num_groups
            free += rows
            plans.append(SeqPlan(seq.seq_id, 0, start, count, (0,) * self._num_groups, ids))
        return plans

    def _blocks_of(self, span: tuple[int, int]) -> int:
        return -(-(sum(span) + REPEATS_OF_A_STEP) // self._block_size)

    def _run(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Compute a plan; return its seconds without those of proposing drafts, and its result."""
        gone, self._gone = self._gone, ()
        plan = StepPlan(
            plan.step, plan.new_seqs, plan.seqs, gone, plan.kv_moves, max_draft_paths=self._max_paths
        )
        self._step += 1
        start_s = self._clock.now()
        self._executor.submit(plan)
        result = self._executor.collect()
        seconds = self._clock.now() - start_s
        error = result.error or next((seq.error for seq in result.seqs if seq.error), None)
        if error:
            raise StepError(f"a measured step failed: {error}")
        work = self._ledger.take(plan, result)
        if work.num_forwards:
            self._drafts[work].append(result.draft_s)
        return seconds - result.draft_s, result


def _with_decodes(case: Case, plans: Sequence[SeqPlan]) -> StepFeatures:
    """Return the features of ``case`` where its decodes are ``plans``."""
    drafts = sum(plan.num_draft_tokens for plan in plans)
    step, more = case.features, drafts - case.num_decodes * case.num_drafts
    return step._replace(
        num_tokens=step.num_tokens + more,
        num_logits=step.num_logits + more,
        decode_kv_tokens=sum(plan.num_computed_tokens + plan.num_scheduled_tokens for plan in plans),
        draft_pairs=sum(chunk_pairs(plan.num_computed_tokens + 1, plan.num_draft_tokens) for plan in plans),
    )


def _next(plan: SeqPlan, outcome: SeqResult) -> SeqPlan:
    """Return the next step of a decode: with the drafts that the executor has for it."""
    return plan._replace(
        num_computed_tokens=plan.num_computed_tokens + len(outcome.token_ids),
        num_scheduled_tokens=1 + outcome.num_next_drafts,
        num_draft_tokens=outcome.num_next_drafts,
        block_start=(),
        new_block_ids=(),
    )
