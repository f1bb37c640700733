"""Which sequences decode in a step whose budget is smaller than their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.scheduler.sequence import Sequence


def in_turn(
    decodes: Iterable[Sequence], limit: int, step: int, find_room: Callable[[Sequence, int], bool]
) -> list[Sequence]:
    """Choose up to ``limit`` of them, round robin: the sequence that waited longest for a turn comes first.

    ``find_room(sequence, end)`` gives it blocks up to ``end``, or returns False.
    """
    chosen: list[Sequence] = []
    for seq in sorted(decodes, key=lambda seq: seq.turn):
        end = seq.num_planned + 1
        if end <= seq.table.capacity or find_room(seq, end):
            chosen.append(seq)
            seq.turn = (step + 1, len(chosen))
            if len(chosen) == limit:
                break
    return chosen
