"""Who comes first. An order is a sort key; equal ranks fall back to arrival, then to the sequence id.

    fcfs             arrival
    priority         Request.priority (smaller first), then arrival
    shortest-first   number of prompt tokens, then arrival; the output's length is not known
    longest-prefix   most tokens in the prefix tree at this moment, then arrival; among the first 128 that wait

The same key ranks running sequences when blocks run out: the last one is preempted first. Running sequences have
their prefix already, so under longest-prefix they rank by arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.config import OrderKind
from quire.scheduler.sequence import Sequence, SortKey


def sort_key(order: OrderKind, seq: Sequence) -> SortKey:
    """Return the rank of a sequence; smaller comes first."""
    request = seq.group.request
    if order == "priority":
        return (request.priority, request.arrival_s, seq.seq_id)
    if order == "shortest-first":
        return (seq.num_prompt, request.arrival_s, seq.seq_id)
    return (request.arrival_s, seq.seq_id)


class WaitingQueue:
    """Waiting sequences by rank."""

    def __init__(self) -> None:
        self._entries: list[tuple[SortKey, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    def add(self, seq: Sequence) -> None:
        insort(self._entries, (seq.key, seq), key=lambda entry: entry[0])

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._entries, seq.key, key=lambda entry: entry[0])
        assert self._entries[index][1] is seq
        del self._entries[index]

    def first(self, count: int) -> list[Sequence]:
        """Return the first ``count`` by rank."""
        return [seq for _, seq in self._entries[:count]]

    def reorder(self) -> None:
        """The keys changed."""
        waiting = list(self)
        self._entries.clear()
        for seq in waiting:
            self.add(seq)

    def oldest_arrival_s(self) -> float:
        return min(seq.group.request.arrival_s for seq in self)
