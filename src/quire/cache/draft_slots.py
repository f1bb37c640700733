"""`DraftSlots`: slots for the states behind each token of a step that verifies drafts, so that drafts can be rejected.

    tokens of the step    known    draft 1    draft 2    draft 3
    state behind it       slot a   slot b     slot c     the sequence's own slot

If one of the three is accepted, the sequence goes on from slot b: the plan of its next step has a `StateMove` into its
own slot, and until then the slot is kept. The slots are reserved when the scheduler chooses how many drafts a step
verifies, and are apart from those of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.cache.blocks import BlockTable


class DraftSlots:
    """The slots ``slots`` of one engine."""

    def __init__(self, slots: range) -> None:
        self._slots = slots
        self.free: list[int] = []
        self._reserved: dict[BlockTable, list[int]] = {}  # for the step that is being planned
        self._written: dict[int, dict[BlockTable, list[int]]] = {}  # per step in flight
        self._behind: dict[BlockTable, int] = {}  # a sequence's state, until its next step
        self.clear()

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Nothing runs: all slots are free."""
        self.free = list(self._slots)[::-1]
        self._reserved.clear()
        self._written.clear()
        self._behind.clear()

    def reserve(self, table: BlockTable, num_drafts: int) -> int:
        """Reserve slots for ``num_drafts`` drafts of ``table``; return for how many there are any."""
        count = min(num_drafts, len(self.free))
        if count:
            self._reserved[table] = [self.free.pop() for _ in range(count)]
        return count

    def place(self, step: int, table: BlockTable, num_known: int, num_drafts: int) -> list[tuple[int, int]]:
        """Return where ``step`` writes states, as (tokens of the chunk, slot).

        Behind the ``num_known`` tokens of the chunk that are no drafts, and behind each draft but the last.
        """
        slots = self._reserved.pop(table)
        assert len(slots) >= num_drafts
        self.free += slots[num_drafts:]
        self._written.setdefault(step, {})[table] = slots[:num_drafts]
        return list(enumerate(slots[:num_drafts], num_known))

    def planned(self) -> None:
        """A plan is complete: what was reserved and is not in it is free."""
        for slots in self._reserved.values():
            self.free += slots
        self._reserved.clear()

    def close(self, step: int, num_accepted: Mapping[BlockTable, int]) -> None:
        """``step`` was applied. ``num_accepted``: drafts of the sequences that go on."""
        for table, slots in self._written.pop(step, {}).items():
            count = num_accepted.get(table, len(slots))
            if count < len(slots):
                self._behind[table] = slots.pop(count)
            self.free += slots

    def source(self, table: BlockTable, own: int) -> int:
        """Return the slot that has the state of ``table`` now; ``own``: its own slot."""
        return self._behind.get(table, own)

    def take(self, table: BlockTable) -> int | None:
        """Return the slot that the state of ``table`` is moved from before its next step; None: it is in its own.

        The slot is free again: a step makes its moves before anything else writes.
        """
        slot = self._behind.pop(table, None)
        if slot is not None:
            self.free.append(slot)
        return slot

    def end(self, table: BlockTable) -> None:
        """The sequence of ``table`` stops running."""
        self.take(table)
        self.free += self._reserved.pop(table, [])
