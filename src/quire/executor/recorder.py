"""The flight recorder: the last plans and results of an engine, and what is needed to run them again.

    live sequences before the ring          ring of steps                       out
    NewSeq, output ids, block tables    │   (plan, result) (plan, result) …  │  plans without a result

A step is recorded as references to its plan and result, which never change. When the oldest step leaves the ring, it is
applied to the live sequences before the ring, so that a recording can be replayed from its first step on.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.clock import Clock
from quire.executor.base import Executor
from quire.request import Adapter, Sampling
from quire.step import NewSeq, SeqResult, StepPlan, StepResult
from quire.units import ID_BYTES

# Approximate size of the ring; a step with long prompts or many log-probabilities takes more than others.
MAX_BYTES = 32 * 2**20
_SEQ_BYTES, _LOGPROB_BYTES = 400, 64


class RecordedStep(NamedTuple):
    """A plan, and its result (None: it was out). Seconds of the engine's clock."""

    plan: StepPlan
    result: StepResult | None
    submitted_s: float
    collected_s: float = 0.0


@dataclass(slots=True)
class LiveSeq:
    """A sequence that the worker had before the first step of a recording."""

    new: NewSeq  # the sequence at its admission
    output_token_ids: list[int]  # since then
    tables: list[list[int]]  # per cache group: block of each row; negative: none


@dataclass(frozen=True, slots=True)
class Recording:
    """What a flight recorder saves, oldest step first."""

    about: dict[str, str]  # version, reason, setup … (docs/metrics.md)
    settings: str  # `EngineArgs` as JSON
    has_ids: bool
    live: list[LiveSeq]
    adapters: dict[int, Adapter]  # before the first step, by slot
    steps: list[RecordedStep]


class Recorder:
    """The ring. `save` may be called from any thread, the rest from the one that steps."""

    def __init__(self, num_steps: int, max_bytes: int = MAX_BYTES) -> None:
        self._num_steps, self._max_bytes = num_steps, max_bytes
        self._lock = threading.Lock()
        self._live: dict[int, LiveSeq] = {}
        self._adapters: dict[int, Adapter] = {}
        self._steps: deque[tuple[RecordedStep, int]] = deque()  # each with its approximate bytes
        self._num_bytes = 0
        self._out: deque[tuple[StepPlan, float]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def submitted(self, plan: StepPlan, now_s: float) -> None:
        """Note a plan that is handed to the executor."""
        self._out.append((plan, now_s))

    def collected(self, result: StepResult, now_s: float) -> None:
        """Note the result of the oldest plan that is out."""
        with self._lock:
            plan, submitted_s = self._out.popleft()
            num_bytes = _size(plan, result)
            self._steps.append((RecordedStep(plan, result, submitted_s, now_s), num_bytes))
            self._num_bytes += num_bytes
            while len(self._steps) > self._num_steps or (
                self._num_bytes > self._max_bytes and len(self._steps) > 1
            ):
                (oldest, num_bytes) = self._steps.popleft()
                self._num_bytes -= num_bytes
                self._apply(oldest)

    def take(self, about: dict[str, str], settings: str, *, with_ids: bool) -> Recording:
        """Return the recording as of now. Without ids it says what was computed, but cannot be replayed."""
        with self._lock:
            live = [
                LiveSeq(seq.new, list(seq.output_token_ids), [list(rows) for rows in seq.tables])
                for seq in self._live.values()
            ]
            steps = [step for step, _ in self._steps]
            steps += [RecordedStep(plan, None, submitted_s) for plan, submitted_s in tuple(self._out)]
            adapters = dict(self._adapters)
        if not with_ids:
            live = [LiveSeq(_bare(s.new), [-1] * len(s.output_token_ids), s.tables) for s in live]
            steps = [_without_ids(step) for step in steps]
        return Recording(about, settings, with_ids, live, adapters, steps)

    def _apply(self, step: RecordedStep) -> None:
        """Bring the live sequences behind ``step``."""
        plan, result = step.plan, step.result
        assert result is not None
        live = self._live
        for seq_id in plan.gone:
            live.pop(seq_id, None)
        self._adapters.update((move.slot, move.adapter) for move in plan.adapter_moves)
        for new in plan.new_seqs:
            live[new.seq_id] = LiveSeq(new, [], [])
        for seq in plan.seqs:
            if seq.new_block_ids or seq.forced_token_ids:
                known = live.get(seq.seq_id)
                if known is not None and known.new.epoch == seq.epoch:
                    write_tables(known.tables, seq.block_start, seq.new_block_ids)
                    if count := len(seq.forced_token_ids):
                        known.output_token_ids[-count:] = seq.forced_token_ids
        for seq_result in result.seqs:
            known = live.get(seq_result.seq_id)
            if known is not None and known.new.epoch == seq_result.epoch:
                known.output_token_ids += seq_result.token_ids


class RecordingExecutor:
    """An `Executor` whose steps a `Recorder` notes."""

    def __init__(self, inner: Executor, recorder: Recorder, clock: Clock) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner, self._recorder, self._clock = inner, recorder, clock

    def submit(self, plan: StepPlan) -> None:
        self._recorder.submitted(plan, self._clock.now())
        try:
            self._inner.submit(plan)
        except Exception as error:  # the core fails the step, and will not collect it
            result = StepResult(plan.step, error=f"{type(error).__name__}: {error}")
            self._recorder.collected(result, self._clock.now())
            raise

    def collect(self) -> StepResult:
        try:
            result = self._inner.collect()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._recorder.collected(StepResult(-1, error=text), self._clock.now())
            raise
        self._recorder.collected(result, self._clock.now())
        return result

    def close(self) -> None:
        self._inner.close()


def write_tables(
    tables: list[list[int]], starts: tuple[int, ...], new_block_ids: tuple[tuple[int, ...], ...]
) -> None:
    """Write the ``new_block_ids`` of a `SeqPlan` into block tables, per cache group."""
    tables += [[] for _ in range(len(new_block_ids) - len(tables))]
    for rows, start, ids in zip(tables, starts, new_block_ids, strict=False):
        rows += [-1] * (start - len(rows))
        rows[start : start + len(ids)] = ids


def _size(plan: StepPlan, result: StepResult) -> int:
    """Return about how many bytes a step keeps alive."""
    size = _SEQ_BYTES * len(plan.seqs)
    for new in plan.new_seqs:
        size += _SEQ_BYTES + ID_BYTES * (len(new.prompt_token_ids) + len(new.output_token_ids))
        size += 0 if new.grammar is None else len(new.grammar)
        size += sum(len(span.data) for span in new.spans)
    for seq in result.seqs:
        for entries in (seq.logprobs, seq.prompt_logprobs):
            if entries:
                size += len(entries) * _LOGPROB_BYTES * (1 + len(entries[0].top_token_ids))
    return size


def _bare(new: NewSeq) -> NewSeq:
    """Return ``new`` without what its client wrote."""
    hidden = Sampling(max_tokens=new.sampling.max_tokens, temperature=new.sampling.temperature)
    return replace(
        new,
        prompt_token_ids=(-1,) * len(new.prompt_token_ids),
        output_token_ids=(-1,) * len(new.output_token_ids),
        sampling=hidden,
        grammar=None,
        pooling=None,
        spans=(),
    )


def _without_ids(step: RecordedStep) -> RecordedStep:
    plan, result = step.plan, step.result
    seqs = tuple(seq._replace(forced_token_ids=(-1,) * len(seq.forced_token_ids)) for seq in plan.seqs)
    plan = replace(plan, new_seqs=tuple(map(_bare, plan.new_seqs)), seqs=seqs)
    if result is not None:
        bare = (
            SeqResult(s.seq_id, s.epoch, (-1,) * len(s.token_ids), s.num_next_drafts, error=s.error)
            for s in result.seqs
        )
        result = replace(result, seqs=tuple(bare))
    return step._replace(plan=plan, result=result)
