"""The memory of the fake executor: pages of hashes, and what a worker knows of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.fakes.model import MASK, chain, next_state, start_state

from quire.request import Adapter
from quire.step import NewSeq, SeqPlan

_GROUP_SALT = 0xA24BAED4963EE407


class WorkerSeq:
    """A worker's state of one sequence: its ids, its block table, and what its slots should hold."""

    __slots__ = ("before", "computed", "drafts", "new_seq", "states", "table", "token_ids")

    def __init__(self, new_seq: NewSeq, num_groups: int, adapter: Adapter | None = None) -> None:
        self.new_seq = new_seq
        self.token_ids = [*new_seq.prompt_token_ids, *new_seq.output_token_ids]
        self.before = start_state(adapter)  # the state before the first token
        self.states = chain(self.token_ids, self.before)  # [num tokens]
        self.table: list[dict[int, int]] = [{} for _ in range(num_groups)]  # per group: row -> block id
        self.computed: int | None = None  # rows computed; None before the first plan
        self.drafts: list[int] = []  # proposed for the next step

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.new_seq.prompt_token_ids)

    def append(self, token_id: int) -> None:
        self.states.append(next_state(self.states[-1], len(self.token_ids), token_id))
        self.token_ids.append(token_id)

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        del self.token_ids[num_tokens:], self.states[num_tokens:]

    def force(self, token_ids: tuple[int, ...]) -> None:
        """Overwrite the last known ids (beams)."""
        if token_ids:
            start = len(self.token_ids) - len(token_ids)
            self.token_ids[start:] = token_ids
            self.states = chain(self.token_ids)

    def update_table(self, plan: SeqPlan) -> None:
        """Write the plan's block ids into the table."""
        for rows, start, ids in zip(self.table, plan.block_start, plan.new_block_ids, strict=False):
            rows.update(enumerate(ids, start))


class FakePages:
    """``[num_blocks, block_size]`` slots. A page belongs to whichever group the block tables say."""

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.block_size = block_size
        self._slots: NDArray[np.uint64] = np.zeros((num_blocks, block_size), np.uint64)

    def copy(self, source: int, target: int) -> None:
        self._slots[target] = self._slots[source]

    def get(self, block_id: int) -> NDArray[np.uint64]:
        """Return a copy of a page's slots."""
        return self._slots[block_id].copy()

    def put(self, block_id: int, slots: NDArray[np.uint64]) -> None:
        """Fill a page."""
        self._slots[block_id] = slots

    def spoil(self, block_id: int, first_slot: int = 0) -> None:
        """Write garbage, as a step that failed half-way would."""
        self._slots[block_id, first_slot:] ^= np.uint64(0x5BD1E9955BD1E995)

    def spoil_rows(self, seq: WorkerSeq, start: int, end: int) -> None:
        """Write garbage into the slots of positions ``start`` … ``end`` − 1."""
        for rows in seq.table:
            for row in range(start // self.block_size, -(-end // self.block_size)):
                self.spoil(rows[row], max(0, start - row * self.block_size))

    def write(self, seq: WorkerSeq, start: int, end: int) -> None:
        """Compute the rows ``start`` … ``end`` − 1: each slot from the one before it, as the pages have it."""
        for group, rows in enumerate(seq.table):
            salt = group * _GROUP_SALT
            states: Sequence[int] = seq.states
            if start and self.windows[group] != 1:
                before = (self._slot(rows, start - 1) - salt) & MASK
                if before != states[start - 1]:  # the page lies: so will all that follows
                    states = [0] * start + chain(seq.token_ids[start:end], before, start)
            for position in range(start, end):
                row, slot = divmod(position, self.block_size)
                self._slots[rows[row], slot] = (states[position] + salt) & MASK

    def read(self, seq: WorkerSeq, start: int, end: int) -> int:
        """Return the sum of the differences between what the rows ``start`` … ``end`` − 1 see and what they should."""
        drift = 0
        for group, rows in enumerate(seq.table):
            first = self._first_visible(group, start)
            first_row = first // self.block_size
            ids = [rows[row] for row in range(first_row, -(-end // self.block_size))]
            offset = first_row * self.block_size
            seen = self._slots[ids].ravel()[first - offset : end - offset]
            due = self.due(seq.states[first:end], group)
            if not np.array_equal(seen, due):
                drift += int((seen - due).sum())
                drift += drift == 0
        return drift & MASK

    def due(self, states: Sequence[int], group: int) -> NDArray[np.uint64]:
        """Return what the slots of tokens with these states hold."""
        return np.array(states, np.uint64) + np.uint64(group * _GROUP_SALT & MASK)

    def visible(self, seq: WorkerSeq, start: int, end: int) -> set[int]:
        """Return the blocks that the rows ``start`` … ``end`` − 1 read or write."""
        return {
            rows[row]
            for group, rows in enumerate(seq.table)
            for row in range(self._first_visible(group, start) // self.block_size, -(-end // self.block_size))
        }

    def written(self, seq: WorkerSeq, start: int, end: int) -> set[int]:
        """Return the blocks that the rows ``start`` … ``end`` − 1 write."""
        span = range(start // self.block_size, -(-end // self.block_size))
        return {rows[row] for rows in seq.table for row in span}

    def _slot(self, rows: dict[int, int], position: int) -> int:
        row, slot = divmod(position, self.block_size)
        return int(self._slots[rows[row], slot])

    def _first_visible(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)
