"""`WaitingQueue`: the sequences that wait, by rank; and `StepRoom`: what a step has for them and for running prompts.

Smaller ranks come first, equal ones by arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from quire.config import SchedulerConfig
from quire.request import Tenant
from quire.scheduler.sequence import Sequence, SortKey


class WaitingQueue:
    """Waiting sequences by rank, with a limit on what they may hold kept by `is_full`."""

    def __init__(self) -> None:
        self._entries: list[tuple[SortKey, Sequence]] = []
        # The same entries, kept where a policy wants them (`group_by_tenant`).
        self.by_tenant: dict[Tenant, list[tuple[SortKey, Sequence]]] | None = None
        self.num_tokens = 0  # prompt tokens
        self.num_bytes = 0  # about, requests

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    def add(self, seq: Sequence) -> None:
        insort(self._entries, (seq.key, seq), key=_rank)
        if self.by_tenant is not None:
            insort(self.by_tenant.setdefault(seq.group.request.terms.tenant, []), (seq.key, seq), key=_rank)
        self.num_tokens += seq.num_prompt
        self.num_bytes += seq.group.num_bytes

    def remove(self, seq: Sequence) -> None:
        _remove(self._entries, seq)
        if self.by_tenant is not None:
            own = self.by_tenant[seq.group.request.terms.tenant]
            _remove(own, seq)
            if not own:
                del self.by_tenant[seq.group.request.terms.tenant]
        self.num_tokens -= seq.num_prompt
        self.num_bytes -= seq.group.num_bytes

    def group_by_tenant(self) -> None:
        """Keep `by_tenant` from now on."""
        self.by_tenant = {}
        self.reorder()

    def first(self, count: int) -> list[Sequence]:
        """Return the first ``count`` by rank."""
        return [seq for _, seq in self._entries[:count]]

    def reorder(self) -> None:
        """The keys changed."""
        waiting = list(self)
        self._entries.clear()
        if self.by_tenant is not None:
            self.by_tenant.clear()
        self.num_tokens = self.num_bytes = 0
        for seq in waiting:
            self.add(seq)

    def oldest_arrival_s(self) -> float:
        return min(seq.group.request.arrival_s for seq in self)

    def is_full(self, config: SchedulerConfig, num_more: int, num_prompt: int, num_bytes: int) -> bool:
        """Tell whether a request of this size finds no room. ``num_more``: sequences that wait elsewhere."""
        num_waiting, most_tokens, most_bytes = (
            len(self) + num_more,
            config.max_queue_tokens,
            config.max_queue_bytes,
        )
        if num_waiting >= config.max_queue:
            return True
        if not num_waiting:
            return False
        return (most_tokens is not None and self.num_tokens + num_prompt > most_tokens) or (
            most_bytes is not None and self.num_bytes + num_bytes > most_bytes
        )


class PromptShare(Protocol):
    """Divides the tokens of one step among prompts."""

    def room(self, seq: Sequence, num_left: int) -> int:
        """Return the tokens that ``seq``, which runs and has ``num_left`` to compute, may have."""
        ...

    def room_of_waiting(self, seq: Sequence) -> int:
        """Return the same of a sequence that waits; 0: it is passed over."""
        ...

    def spend(self, num_tokens: int, seq: Sequence, num_left: int) -> None:
        """``seq`` was given some."""
        ...

    def running_planned(self) -> None:
        """The prompts that run have had theirs."""
        ...

    def held_blocks(self, seq: Sequence) -> int:
        """Return the blocks that ``seq``, which runs, needs yet and that no other may take."""
        ...


@dataclass(slots=True)
class StepRoom:
    """What policies may change of a step once its decodes are chosen and before its prompts are."""

    now: float
    left: int  # tokens
    decodes: list[Sequence]
    prefills: list[Sequence]  # run and have more than one token to compute; by rank
    waiting: WaitingQueue
    running: list[Sequence]
    max_num_seqs: int
    # Whether a sequence failed to get a block, so that none of lower rank may take one.
    starved: bool
    drafts: dict[Sequence, int] = field(default_factory=dict)  # verified, per decode
    # Returns how many sequences may enter; None: all that wait.
    seats: Callable[[], int] | None = None
    # Returns the first ``count`` that may enter; None: those that wait, by rank.
    order: Callable[[int], list[Sequence]] | None = None
    # Sequences beyond the seats that are looked at, since some may be passed over.
    num_extra: int = 0
    # Each tells whether a sequence may enter; it is passed over otherwise. The order of asking is that of entry.
    filters: list[Callable[[Sequence], bool]] = field(default_factory=list)
    share: PromptShare | None = None  # None: each prompt may have what is left

    def free_seats(self) -> int:
        """Return how many sequences may enter by their number."""
        seats = len(self.waiting) if self.seats is None else self.seats()
        return min(seats, self.max_num_seqs - len(self.running))

    def in_order(self, seats: int) -> list[Sequence]:
        """Return the waiting sequences that are looked at for ``seats``, in the order in which they may enter."""
        count = seats + self.num_extra
        return self.waiting.first(count) if self.order is None else self.order(count)

    def entering(self) -> list[Sequence]:
        """Return the sequences that would enter next if tokens and blocks allowed."""
        seats = self.free_seats() if self.waiting else 0
        return self.in_order(seats) if seats > 0 else []


def _remove(entries: list[tuple[SortKey, Sequence]], seq: Sequence) -> None:
    index = bisect_left(entries, seq.key, key=_rank)
    assert entries[index][1] is seq
    del entries[index]


def _rank(entry: tuple[SortKey, Sequence]) -> SortKey:
    return entry[0]
