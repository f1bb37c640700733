"""How a step's attention is cut into items for a GPU: which rows, and which keys.

A row is a (token, query head of one kv head), token by token; row r of a sequence has the position
``start + r // group``.

    tile    up to ``rows`` rows of one sequence: one matrix of queries
    item    a tile with a range of positions: what one program computes, for one kv head

                positions →   0        split     2·split    seq_len
        tile 0 of seq 0       [ item 0 | item 1 | item 2 ]           a causal tile ends behind its last row
        tile 1 of seq 0       [ item 3 | item 4 | item 5 | item 6 ]
        tile 0 of seq 1       [ item 7 ]

Splits lie at absolute multiples of ``split``, so a row's keys are cut alike in every batch and chunk. Made once a step
for all the layers of a cache group, in numpy, with no loop over tokens or sequences, and uploaded with the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
WHOLE = 1 << 30  # positions: a split that no context reaches


@dataclass(frozen=True, slots=True)
class Work:
    """``items [num_items, 4]``, ``tiles [num_tiles, 4]``, int32. A row may see nothing of an item.

    An item: sequence, first row, first position, end position. A tile: sequence, first row, first item, items.
    """

    items: npt.NDArray[np.int32]
    tiles: npt.NDArray[np.int32]


def cut_work(
    cu_seqlens_q: IntArray,
    seq_lens: IntArray,
    seqs: IntArray,
    *,
    group: int,
    rows: int,
    window: int | None,
    split: int,
    keys: int,
) -> Work:
    """Cut the sequences ``seqs``. ``keys`` divides ``split``: items start at multiples of it, before what is masked."""
    assert split % keys == 0, (split, keys)
    q_lens = (cu_seqlens_q[1:] - cu_seqlens_q[:-1])[seqs]
    start = seq_lens[seqs] - q_lens
    tiles_of = -(-(q_lens * group) // rows)
    owner = np.repeat(np.arange(len(seqs)), tiles_of)  # [num_tiles]
    first_row = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * rows
    last_row = np.minimum(first_row + rows, q_lens[owner] * group) - 1
    end = start[owner] + last_row // group + 1
    low = np.zeros_like(end)
    if window is not None:
        low = np.maximum(start[owner] + first_row // group - window + 1, 0)
    first_split = low // split
    items_of = (end - 1) // split - first_split + 1
    first_item = np.cumsum(items_of) - items_of
    tile = np.repeat(np.arange(len(owner)), items_of)  # [num_items]
    place = (np.arange(len(tile)) - first_item[tile] + first_split[tile]) * split
    begin = np.maximum(place, low[tile] // keys * keys)
    stop = np.minimum(place + split, end[tile])
    seq = seqs[owner]
    return Work(
        np.stack((seq[tile], first_row[tile], begin, stop), axis=1).astype(np.int32),
        np.stack((seq, first_row, first_item, items_of), axis=1).astype(np.int32),
    )


def split_for(
    cu_seqlens_q: IntArray,
    seq_lens: IntArray,
    seqs: IntArray,
    *,
    kv_heads: int,
    keys: int,
    programs: int,
    smallest: int,
) -> int:
    """Choose a split so that about ``programs`` programs share the keys of ``seqs``, none less than ``smallest``.

    This depends on the batch: the faster mode, not the invariant one.
    """
    total = int(seq_lens[seqs].sum())
    even = -(-total * kv_heads // programs)
    return -(-max(even, smallest, 1) // keys) * keys
