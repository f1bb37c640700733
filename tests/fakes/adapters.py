"""The adapters of the fake executor: what lies in which slot, and whether plans agree with it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fakes.kv import WorkerSeq
from tests.fakes.model import start_state

from quire.request import Adapter
from quire.step import StepPlan


class FakeAdapters:
    """A sequence's tokens begin from a state that its adapter's content gives, so a wrong one shows in them."""

    def __init__(self) -> None:
        self._slots: dict[int, Adapter] = {}

    def take_in(self, plan: StepPlan, seqs: dict[int, WorkerSeq], num_groups: int) -> list[str]:
        """Load what the plan moves and add its new sequences to ``seqs``; return what contradicts the slots."""
        self._slots.update(plan.adapter_moves)
        wrong = []
        for new in plan.new_seqs:
            adapter = self._slots.get(new.adapter_slot)
            if new.adapter_slot and adapter is None:
                wrong.append(f"sequence {new.seq_id}: adapter slot {new.adapter_slot} is empty")
            seqs[new.seq_id] = WorkerSeq(new, num_groups, adapter)
        return wrong + self._exchanged(plan, seqs)

    def _exchanged(self, plan: StepPlan, seqs: Mapping[int, WorkerSeq]) -> list[str]:
        """Sequences of the plan whose slot another adapter took."""
        states = {slot: start_state(adapter) for slot, adapter in self._slots.items()}
        running = [seq for p in plan.seqs if (seq := seqs.get(p.seq_id)) is not None]
        return [
            f"sequence {seq.new_seq.seq_id} runs, and another adapter is in its slot"
            for seq in running
            if seq.before != states.get(seq.new_seq.adapter_slot, 0)
        ]
