"""Slots for LoRA adapters: which adapter is in which slot of the workers, and what may enter when slots run out.

A slot is in use while a sequence runs with its adapter. What is not in use stays where it is until another adapter
needs the room: the least recently used goes first. So a plan never names more adapters than there are slots.

**Fairness.** A sequence whose adapter has no slot is passed over, and waits; others behind it may enter. So that it
does not wait for ever behind newcomers of the adapters that are in, each adapter that waits for a slot closes one that
is in use, the one loaded first, to requests behind it that have not begun. Its sequences end, and then it is free. The
adapter that takes it is loaded last, so adapters take turns, and a request waits at most for those that ran when its
turn came. Requests of the base model do not wait for a slot, except behind more than `LOOKAHEAD` that do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from quire.request import Adapter
from quire.scheduler.policy import LOOKAHEAD, Policy
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom
from quire.step import AdapterMove


class Rule(Policy):
    """The slots of one engine."""

    def __init__(self, state: SchedulerState) -> None:
        self.slots = AdapterSlots(state.config.max_loras)

    def budget(self, room: StepRoom) -> None:
        room.num_extra = LOOKAHEAD
        room.filters.append(_Gate(self.slots).lets_in)

    def on_start(self, seq: Sequence, forked: bool) -> None:
        seq.adapter_slot = self.slots.enter(seq.group.request.adapter)

    def on_stop(self, seq: Sequence) -> None:
        self.slots.leave(seq.group.request.adapter)


class AdapterSlots:
    """Slots 1 … ``num_slots``; 0 is the base model."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_loads = 0
        self.free_slots = list(range(num_slots, 0, -1))
        self.slots: dict[str, int] = {}  # key of an adapter → its slot, in order of loading
        self.users: dict[str, int] = {}  # key → sequences that run with it
        self.idle: OrderedDict[str, None] = OrderedDict()  # keys without users, least recently used first
        self._moves: list[AdapterMove] = []  # for the next plan

    def has_room(self, adapter: Adapter) -> bool:
        """Tell whether a sequence with ``adapter`` could run now."""
        return adapter.key in self.slots or bool(self.free_slots or self.idle)

    def oldest_in_use(self, count: int) -> set[str]:
        """Return the keys of the ``count`` adapters in use that were loaded first."""
        return set(islice((key for key in self.slots if key in self.users), count))

    def enter(self, adapter: Adapter | None) -> int:
        """A sequence starts to run; there is room. Return its slot."""
        if adapter is None:
            return 0
        key = adapter.key
        if key not in self.slots:
            self._load(adapter)
        self.idle.pop(key, None)
        self.users[key] = self.users.get(key, 0) + 1
        return self.slots[key]

    def leave(self, adapter: Adapter | None) -> None:
        """A sequence stopped running."""
        if adapter is None:
            return
        key = adapter.key
        self.users[key] -= 1
        if self.users[key] == 0:
            del self.users[key]
            self.idle[key] = None

    def take_moves(self) -> tuple[AdapterMove, ...]:
        """Return what the workers have to load before the step being planned."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def repeat(self, moves: Iterable[AdapterMove]) -> None:
        """A step failed, and the workers may not have seen its moves: those that still hold are sent again."""
        lost = [move for move in moves if self.slots.get(move.adapter.key) == move.slot]
        self._moves = [*lost, *self._moves]

    def _load(self, adapter: Adapter) -> None:
        if self.free_slots:
            slot = self.free_slots.pop()
        else:
            slot = self.slots.pop(self.idle.popitem(last=False)[0])
        self.slots[adapter.key] = slot
        self._moves = [move for move in self._moves if move.slot != slot]
        self._moves.append(AdapterMove(slot, adapter))
        self.num_loads += 1


class _Gate:
    """Which sequences may enter in one plan, asked in order of rank."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self._blocked: set[str] = set()  # adapters that found no slot
        self._closed: set[str] = set()  # adapters whose slots they wait for

    def lets_in(self, seq: Sequence) -> bool:
        """Tell whether ``seq`` may enter before all that are asked about later."""
        adapter = seq.group.request.adapter
        if adapter is None:
            return True
        if adapter.key in self._closed:  # but beams of one search wait for each other
            return any(member.state is SequenceState.RUNNING for member in seq.group.sequences)
        if adapter.key not in self._blocked and self.slots.has_room(adapter):
            return True
        self._blocked.add(adapter.key)
        self._closed = self.slots.oldest_in_use(len(self._blocked))
        return False
