"""`PlanHash`: a hash of every plan that passes an executor, to tell whether two runs planned the same.

All that the scheduler decided is in it, in order: which rows of which sequence, their blocks, moves, admissions. Token
ids of outputs are not: a model's and a simulator's differ.
"""

from __future__ import annotations

from hashlib import blake2b

from quire.executor.base import Executor
from quire.step import StepPlan, StepResult


class PlanHash:
    """An executor around another one."""

    def __init__(self, inner: Executor) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self.num_plans = 0
        self._inner = inner
        self._hash = blake2b(digest_size=16)

    @property
    def hexdigest(self) -> str:
        """Of the plans so far."""
        return self._hash.hexdigest()

    def submit(self, plan: StepPlan) -> None:
        new = [
            (n.seq_id, n.epoch, n.sample_index, n.prompt_token_ids, len(n.output_token_ids))
            for n in plan.new_seqs
        ]
        parts = (plan.step, new, [tuple(s) for s in plan.seqs], plan.gone, [tuple(m) for m in plan.kv_moves])
        self._hash.update(repr(parts).encode())
        self.num_plans += 1
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()
