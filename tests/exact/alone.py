"""The oracle: one sequence by itself through the executor, driven by hand.

No scheduler, no cache: the whole prompt in one step into blocks in plain order, then one token a step.
"""

from __future__ import annotations

from quire.executor.base import Executor
from quire.kv_layout import KvLayout
from quire.request import FinishReason, Request
from quire.step import AdapterMove, NewSeq, SeqPlan, StepPlan


class AloneDriver:
    """Runs sequences one after another on an executor of its own."""

    def __init__(self, executor: Executor, layout: KvLayout, block_size: int, max_model_len: int) -> None:
        self._executor = executor
        self._num_groups = len(layout.groups)
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._step = 0
        self._seq_id = 0

    def run(self, request: Request, sample_index: int) -> tuple[tuple[int, ...], FinishReason]:
        """Return the output ids of sample ``sample_index`` of ``request``, the ending token included, and why."""
        self._seq_id += 1
        prompt, params = request.prompt_token_ids, request.sampling
        adapter = request.adapter
        loads = () if adapter is None else (AdapterMove(1, adapter),)
        new_seq = NewSeq(
            self._seq_id, 0, prompt, (), params, sample_index, adapter_slot=len(loads), state_slot=0
        )
        output: list[int] = []
        computed, reason = 0, None
        while reason is None:
            known = len(prompt) + len(output)
            rows = -(-known // self._block_size)
            blocks = tuple(
                tuple(range(group, rows * self._num_groups, self._num_groups))
                for group in range(self._num_groups)
            )
            plan = SeqPlan(self._seq_id, 0, computed, known - computed, (0,) * self._num_groups, blocks)
            step = StepPlan(self._step, (), (plan,))
            if not output:
                step = StepPlan(self._step, (new_seq,), (plan,), adapter_moves=loads)
            (token_id,) = self._submit(step)
            output.append(token_id)
            computed = known
            reason = self._reason(request, output)
        self._submit(StepPlan(self._step, gone=(self._seq_id,)))
        return tuple(output), reason

    def _submit(self, plan: StepPlan) -> tuple[int, ...]:
        self._executor.submit(plan)
        result = self._executor.collect()
        assert result.error is None, result.error
        self._step += 1
        if not result.seqs:
            return ()
        assert result.seqs[0].error is None, result.seqs[0].error
        return result.seqs[0].token_ids

    def _reason(self, request: Request, output: list[int]) -> FinishReason | None:
        params = request.sampling
        assert params.max_tokens is not None
        if output[-1] in params.eos_token_ids or output[-1] in params.stop_token_ids:
            return FinishReason.STOP
        total = len(request.prompt_token_ids) + len(output)
        if len(output) >= params.max_tokens or total >= self._max_model_len:
            return FinishReason.LENGTH
        return None
