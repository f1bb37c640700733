"""Decode steps replayed from captured graphs, one for each number of sequences (rounded up) and width of the tables.

A graph is captured once a size was decoded `REPAID` times: until then launching kernel by kernel costs less than the
capture. Without a GPU a "graph" calls the function again over the same buffers, so that tests see what a replay sees.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.runner.device_batch import Room

REPAID = 16  # steps of a size
LEAST_WIDTH = 64  # blocks of a table

Forward = Callable[[], torch.Tensor]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Graph:
    """``replay`` computes what the buffers hold now; returns the logits of all of them."""

    replay: Forward


class DecodeGraphs:
    """Which steps have a graph, and which are about to get one."""

    def __init__(self, device: torch.device, max_num_seqs: int, max_blocks: int, scratch_block: int) -> None:
        self._cuda = device.type == "cuda"
        self._sizes = sizes_up_to(max_num_seqs)
        self._max_blocks = max_blocks
        self._scratch_block = scratch_block
        self._counts: Counter[Room] = Counter()
        self._graphs: dict[Room, Graph] = {}
        self._pool: Any = None  # memory that all graphs share: one replays at a time

    def __len__(self) -> int:
        return len(self._graphs)

    def room_for(self, num_seqs: int, num_blocks: int) -> Room | None:
        """Return the sizes that a decode step of ``num_seqs`` and tables of ``num_blocks`` is padded to, if any."""
        size = next((size for size in self._sizes if size >= num_seqs), None)
        if size is None:
            return None
        width = max(LEAST_WIDTH, 1 << (num_blocks - 1).bit_length())
        return Room(size, min(width, self._max_blocks), self._scratch_block)

    def run(self, room: Room, forward: Forward) -> torch.Tensor:
        """Compute the step whose numbers lie in the buffers of ``room``: ``forward()``, or its replay."""
        graph = self._graphs.get(room)
        if graph is not None:
            return graph.replay()
        logits = forward()
        self._counts[room] += 1
        if self._counts[room] == REPAID:
            self._graphs[room] = self._capture(room, forward)
        return logits

    def drop(self) -> None:
        """Give their memory back."""
        self._graphs.clear()
        self._counts.clear()
        self._pool = None

    def _capture(self, room: Room, forward: Forward) -> Graph:
        if not self._cuda:
            return Graph(forward)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        self._pool = self._pool or graph.pool()
        _log.info("captured decode of %d sequences, tables of %d blocks", room.num_seqs, room.width)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return Graph(replay)


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 16 … in steps of 8, from 256 on of 32; the last is ``largest``."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]
