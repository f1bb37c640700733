"""Executors without a model whose steps take a given time: `StepLedger` says what a step gives, a `StepTime` how long.

`TimedExecutor` is the simulator's, on a virtual clock. On the wall clock it sleeps, which is how the simulator's clock
is checked against a live server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from quire.clock import Clock
from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.request import Sampling
from quire.step import NewSeq, SeqResult, StepPlan, StepResult

FIRST_TOKEN_ID = 25  # lower ids are special in most vocabularies
NUM_TOKEN_IDS = 80
_start_of = itemgetter(2)  # `SeqPlan.num_computed_tokens`


def sampled_token(sampling: Sampling, sample_index: int) -> int:
    """Return the token that a sequence always samples: none of its stop ids, so that it ends by length."""
    barred = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    token_id = FIRST_TOKEN_ID + ((sampling.seed or 0) + sample_index) % NUM_TOKEN_IDS
    while token_id in barred:
        token_id += 1
    return token_id


class Taken(NamedTuple):
    """What a plan gives, and what it has to do for it."""

    result: StepResult
    step: StepFeatures
    num_decodes: int  # sequences with one known token in the step
    num_restored: int = 0  # kept from before a preemption; not in ``step``


class StepLedger:
    """What a worker has to remember to answer plans. A sequence always samples `sampled_token`."""

    def __init__(
        self, *, restores: bool = False, add_drafts: Callable[[StepPlan, Taken], Taken] | None = None
    ) -> None:
        """``restores``: tokens computed before a preemption are kept elsewhere and not computed again.

        ``add_drafts`` adds what drafts change in the answer to a plan that was taken as if it had none.
        """
        self._restores, self._add_drafts = restores, add_drafts
        self._computed: dict[int, int] = {}  # with ``restores``: tokens that a sequence has had computed
        self._restorable: dict[int, int] = {}  # tokens kept for sequences that are admitted again
        # Per sequence: its known tokens at admission, its result where a step samples, and where it does not.
        self._seqs: dict[int, tuple[int, SeqResult, SeqResult]] = {}
        self._sampled: dict[int, SeqResult] = {}
        self._chunking: set[int] = set()  # those whose known tokens are not all computed yet

    def take(self, plan: StepPlan) -> Taken:
        """Answer a plan."""
        for seq_id in plan.gone:
            self._seqs.pop(seq_id, None)
            self._sampled.pop(seq_id, None)
            self._chunking.discard(seq_id)
        for new in plan.new_seqs:
            self._admit(new)
        if self._restores:
            self._computed.update((seq[0], seq[2] + seq[3]) for seq in plan.seqs)
        taken = self._mixed(plan) if self._chunking else self._decoded(plan)
        return taken if self._add_drafts is None else self._add_drafts(plan, taken)

    def _decoded(self, plan: StepPlan) -> Taken:
        """`take` where no sequence is in its prompt."""
        # One token each, and each samples: most steps.
        seqs, sampled = plan.seqs, self._sampled
        num = len(seqs)
        results = tuple([sampled[seq[0]] for seq in seqs])
        step = StepFeatures(num, num, num, sum(map(_start_of, seqs)) + num, 0, 0)
        return Taken(StepResult(plan.step, results), step, num)

    def _admit(self, new: NewSeq) -> None:
        token_id = sampled_token(new.sampling, new.sample_index)
        num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
        sampled = SeqResult(new.seq_id, new.epoch, (token_id,))
        self._seqs[new.seq_id] = (num_known, sampled, SeqResult(new.seq_id, new.epoch, ()))
        self._sampled[new.seq_id] = sampled
        self._chunking.add(new.seq_id)
        if self._restores and new.epoch > 0:
            self._restorable[new.seq_id] = min(num_known - 1, self._computed.get(new.seq_id, 0))

    def _mixed(self, plan: StepPlan) -> Taken:
        """`take` where some sequences are still in their prompt: as if none were, then what these change."""
        seqs, sampled, chunking = plan.seqs, self._sampled, self._chunking
        results = [sampled[seq[0]] for seq in seqs]
        num_tokens = num_logits = num_decodes = num_seqs = len(seqs)
        decode_kv = sum(map(_start_of, seqs)) + num_seqs
        chunk_kv = pairs = num_restored = 0
        left = len(chunking)  # to be found; a plan has the chunks first
        for index, (seq_id, _, start, count, *_) in enumerate(seqs):
            if seq_id not in chunking:
                continue
            known, _, unsampled = self._seqs[seq_id]
            if count > 1:
                num_tokens += count - 1
                num_decodes -= 1
                decode_kv -= start + 1
                restored = min(count, max(0, self._restorable.get(seq_id, 0) - start))
                if restored:
                    num_restored += restored
                    num_tokens -= restored
                if restored < count:
                    chunk_kv += start + count
                    pairs += chunk_pairs(start + restored, count - restored)
            left -= 1
            if start + count >= known:
                chunking.discard(seq_id)
            else:
                results[index] = unsampled
                num_logits -= 1
                num_decodes -= count == 1
            if not left:
                break
        step = StepFeatures(num_tokens, num_seqs, num_logits, decode_kv, chunk_kv, pairs)
        return Taken(StepResult(plan.step, tuple(results)), step, num_decodes, num_restored)


class TimedExecutor:
    """Computes plans one after the other, as one device: a step starts when it is submitted and the one before is over.

    ``seconds``: of a step. ``on_submit`` is told when each plan will be over. `collect` calls ``wait`` with the seconds
    until its plan is.
    """

    def __init__(
        self,
        seconds: Callable[[Taken], float],
        clock: Clock,
        *,
        wait: Callable[[float], None] = time.sleep,
        on_submit: Callable[[float], None] = lambda over_s: None,
        max_in_flight: int = 1,
        restores: bool = False,
        add_drafts: Callable[[StepPlan, Taken], Taken] | None = None,
        stages: Callable[[Taken], Sequence[float]] | None = None,
    ) -> None:
        """``restores``, ``add_drafts``: see `StepLedger`.

        ``stages``: the seconds of each stage of a pipeline, in place of ``seconds``; a stage computes one step at a
        time, and as many steps are in flight as there are stages.
        """
        assert max_in_flight >= 1
        self.chains_steps = stages is None
        self._stages, self._stage_free_s = stages, [0.0] * max_in_flight
        self.out_s = 0.0  # in which at least one step was in flight
        self.max_in_flight = max_in_flight
        self.slowdown = 1.0  # factor for steps submitted from now on
        self.num_steps = 0
        self.busy_s = 0.0
        self._seconds = seconds
        self._clock = clock
        self._wait = wait
        self._on_submit = on_submit
        self._ledger = StepLedger(restores=restores, add_drafts=add_drafts)
        self.free_s = 0.0  # when the last plan submitted is over
        self._out: deque[tuple[StepResult, float]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; fewer than ``max_in_flight`` are out."""
        assert len(self._out) < self.max_in_flight
        taken = self._ledger.take(plan)
        before_s = max(self.free_s, now_s := self._clock.now())
        if self._stages is None:
            seconds = self._seconds(taken) * self.slowdown
            self.free_s = before_s + seconds
        else:
            seconds = self._through_stages(taken, now_s)
        self.num_steps += 1
        self.busy_s += seconds
        self.out_s += self.free_s - before_s
        self._out.append((taken.result, self.free_s))
        self._on_submit(self.free_s)

    def _through_stages(self, taken: Taken, now_s: float) -> float:
        """Let a step pass through the stages; return their mean seconds."""
        assert self._stages is not None
        at_s, seconds = now_s, [stage_time * self.slowdown for stage_time in self._stages(taken)]
        for stage, stage_s in enumerate(seconds):
            at_s = max(at_s, self._stage_free_s[stage]) + stage_s
            self._stage_free_s[stage] = at_s
        self.free_s = at_s
        return sum(seconds) / len(seconds)

    @property
    def bubbles(self) -> float:
        """Share of the stages' time in which they waited though a step was in flight."""
        return max(0.0, 1.0 - self.busy_s / self.out_s) if self._stages is not None and self.out_s else 0.0

    def collect(self) -> StepResult:
        """Wait until the oldest plan is over and return its result."""
        result, over_s = self._out.popleft()
        if (left_s := over_s - self._clock.now()) > 0.0:
            self._wait(left_s)
        return result

    def close(self) -> None:
        """Forget what is out."""
        self._out.clear()
