"""The recurrent states of the fake executor: a slot holds the hash of the tokens that were scanned into it.

A step advances the live slot of a sequence from what the slot holds, so a wrong slot, a checkpoint of another place, or
a slot that two sequences share changes the tokens that follow, and is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.fakes.kv import WorkerSeq
from tests.fakes.model import MASK, chain

from quire.step import SeqPlan, StateMove, StepPlan

_GARBAGE = 0x5BD1E9955BD1E995


class FakeStates:
    """``num_slots`` slots; without slots every call does nothing."""

    def __init__(self, num_slots: int) -> None:
        self._values = [_GARBAGE] * num_slots

    def move(self, moves: Iterable[StateMove]) -> None:
        for source, target in moves:
            self._values[target] = self._values[source]

    def spoil(self, slots: Iterable[int]) -> None:
        """Write garbage, as a step that failed half-way would."""
        for slot in slots:
            self._values[slot] ^= _GARBAGE

    def advance(self, p: SeqPlan, seq: WorkerSeq, *, fails: bool) -> str:
        """Scan the chunk of ``p`` and write its checkpoints; return what is wrong with its state, if anything is."""
        if not self._values:
            return ""
        slot, start, end = (
            seq.new_seq.state_slot,
            p.num_computed_tokens,
            p.num_computed_tokens + p.num_scheduled_tokens,
        )
        before = self._values[slot] if start else seq.before
        wrong = start > 0 and before != seq.states[start - 1]
        states: Sequence[int] = seq.states[start:end]
        if wrong or fails:
            states = chain(seq.token_ids[start:end], before ^ (_GARBAGE * fails), start)
        self._values[slot] = states[-1]
        for num_tokens, target in p.checkpoints:
            self._values[target] = states[num_tokens - 1]
        return f"sequence {p.seq_id} goes on at {start} from another state" if wrong else ""

    def drift(self, seq: WorkerSeq) -> int:
        """Return how far the state of ``seq`` is from what its computed tokens give."""
        if not self._values or not seq.computed:
            return 0
        return (self._values[seq.new_seq.state_slot] - seq.states[seq.computed - 1]) & MASK

    def written(self, plans: Iterable[SeqPlan], seqs: dict[int, WorkerSeq]) -> dict[int, tuple[int, int]]:
        """Return the slots that ``plans`` write, each with its sequence and epoch."""
        if not self._values:
            return {}
        return {
            slot: (p.seq_id, p.epoch)
            for p in plans
            for slot in (seqs[p.seq_id].new_seq.state_slot, *(slot for _, slot in p.checkpoints))
        }

    def reused(
        self, plan: StepPlan, slots: dict[int, tuple[int, int]], out: Iterable[dict[int, tuple[int, int]]]
    ) -> list[str]:
        """Return what is written twice in one step, or written while a step that is out writes it for another."""
        if not self._values:
            return []
        num_writes = len(plan.seqs) + sum(len(p.checkpoints) for p in plan.seqs)
        wrong = [f"step {plan.step} writes a state slot twice"] if len(slots) < num_writes else []
        taken = [(move.dst_slot, None) for move in plan.state_moves]
        for slot, owner in (*slots.items(), *taken):
            for others in out:
                if slot in others and others[slot] != owner and (owner is not None or slot not in slots):
                    wrong.append(
                        f"step {plan.step} writes state slot {slot}, which a step that is out writes"
                    )
        return wrong
