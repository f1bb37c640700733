"""Executors without a model whose steps take a given time: `StepLedger` says what a step gives, a `StepTime` how long.

`TimedExecutor` sleeps that long on the wall clock, which is how the simulator's clock is checked against a live
server. `quire.sim.executor` shares the ledger and moves a virtual clock.
"""

from __future__ import annotations

import time
from collections import deque
from operator import itemgetter

from quire.clock import Clock
from quire.plan.cost_model import StepFeatures, StepTime, chunk_pairs
from quire.request import SamplingParams
from quire.step import NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

FIRST_TOKEN_ID = 3  # below it are the special ids of most vocabularies
NUM_TOKEN_IDS = 97
_start_of, _count_of = itemgetter(2), itemgetter(3)  # of a SeqPlan


def drawn_token(sampling: SamplingParams, sample_index: int) -> int:
    """Return the token that a sequence draws, always: none of its stop ids, so that it ends by length."""
    barred = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    token_id = FIRST_TOKEN_ID + ((sampling.seed or 0) + sample_index) % NUM_TOKEN_IDS
    while token_id in barred:
        token_id += 1
    return token_id


class StepLedger:
    """What a worker has to remember in order to answer plans, but no ids: a sequence draws `drawn_token`, always."""

    def __init__(self) -> None:
        # Per sequence: its known tokens at admission, the result of a step that draws, the one of a step that does not.
        self._seqs: dict[int, tuple[int, SeqResult, SeqResult]] = {}
        self._drawn: dict[int, SeqResult] = {}
        self._chunking: set[int] = set()  # those whose known tokens are not all computed yet

    def take(self, plan: StepPlan) -> tuple[StepResult, StepFeatures, int]:
        """Return the plan's result, its features, and how many of its sequences draw from one row."""
        for seq_id in plan.gone:
            self._seqs.pop(seq_id, None)
            self._drawn.pop(seq_id, None)
            self._chunking.discard(seq_id)
        for new in plan.new_seqs:
            self._admit(new)
        seqs = plan.seqs
        if self._chunking:
            results, step, num_decodes = self._mixed(seqs)
        else:  # one row each, and each draws: most steps
            drawn, num_decodes = self._drawn, len(seqs)
            results = tuple([drawn[seq[0]] for seq in seqs])
            kv = sum(map(_start_of, seqs)) + num_decodes
            step = StepFeatures(num_decodes, num_decodes, num_decodes, kv, 0, 0)
        return StepResult(plan.step, results, moves_done=len(plan.kv_moves)), step, num_decodes

    def _admit(self, new: NewSeq) -> None:
        token_id = drawn_token(new.sampling, new.sample_index)
        num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
        drawn = SeqResult(new.seq_id, new.epoch, (token_id,))
        self._seqs[new.seq_id] = (num_known, drawn, SeqResult(new.seq_id, new.epoch, ()))
        self._drawn[new.seq_id] = drawn
        self._chunking.add(new.seq_id)

    def _mixed(self, seqs: tuple[SeqPlan, ...]) -> tuple[tuple[SeqResult, ...], StepFeatures, int]:
        """`take` where some sequences are still in their prompt: as if none were, then what these change."""
        drawn, chunking = self._drawn, self._chunking
        results = [drawn[seq[0]] for seq in seqs]
        num_rows, num_seqs = sum(map(_count_of, seqs)), len(seqs)
        num_logits = num_decodes = num_seqs
        decode_kv = sum(map(_start_of, seqs)) + num_seqs
        chunk_kv = pairs = 0
        for index in [i for i, seq in enumerate(seqs) if seq[0] in chunking]:
            seq_id, _, start, count = seqs[index][:4]
            known, _, undrawn = self._seqs[seq_id]
            if count > 1:
                num_decodes -= 1
                decode_kv -= start + 1
                chunk_kv += start + count
                pairs += chunk_pairs(start, count)
            if start + count >= known:
                chunking.discard(seq_id)
                continue
            results[index] = undrawn
            num_logits -= 1
            num_decodes -= count == 1
        features = StepFeatures(num_rows, num_seqs, num_logits, decode_kv, chunk_kv, pairs)
        return tuple(results), features, num_decodes


class TimedExecutor:
    """Sleeps until each step is over: a step starts when it is submitted and the one before is over."""

    def __init__(self, step_time: StepTime, clock: Clock, *, max_in_flight: int = 1) -> None:
        assert max_in_flight >= 1
        self.max_in_flight = max_in_flight
        self._step_time = step_time
        self._clock = clock
        self._ledger = StepLedger()
        self._free_s = 0.0  # when the last step submitted is over
        self._out: deque[tuple[StepResult, float]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; fewer than ``max_in_flight`` are out."""
        assert len(self._out) < self.max_in_flight
        result, step, _ = self._ledger.take(plan)
        self._free_s = max(self._free_s, self._clock.now()) + self._step_time.seconds(step)
        self._out.append((result, self._free_s))

    def collect(self) -> StepResult:
        """Sleep until the oldest plan is over and return its result."""
        result, over_s = self._out.popleft()
        time.sleep(max(0.0, over_s - self._clock.now()))
        return result

    def close(self) -> None:
        """Forget what is out."""
        self._out.clear()
