"""Steps replayed from captured graphs, one for each number of tokens and sequences and width of the tables, rounded up.

    decode    one token a sequence: sizes 8 apart, 32 apart from 256 on
    mixed     up to `MIXED_TOKENS` tokens, a prompt's chunk among them: powers of two, so that few sizes come often

`capture_policy` says when one is captured: while idle, or once it is repaid. Nothing is computed then, so the buffers
may hold the numbers of any step. Without a GPU a "graph" calls the function again over the same buffers, so that
tests see what a replay sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from quire.clock import Clock
from quire.runner.capture_policy import CapturePolicy
from quire.runner.device_batch import Room

LEAST_WIDTH = 64  # blocks of a table
LEAST_TOKENS = 16  # of a mixed step
MIXED_TOKENS = 256  # from about here on a step's matrix products take longer than its launches

Forward = Callable[[], torch.Tensor]
_log = logging.getLogger(__name__)


class StepGraphs:
    """Which steps have a graph, and which are about to get one."""

    def __init__(
        self, device: torch.device, max_num_seqs: int, max_blocks: int, scratch_block: int, clock: Clock, *, mixed: bool
    ) -> None:  # fmt: skip
        """``mixed``: not of decode steps alone."""
        self._mixed = mixed
        self._cuda = device.type == "cuda"
        self._sizes = sizes_up_to(max_num_seqs)
        self._max_blocks = max_blocks
        self._scratch_block = scratch_block
        self._clock = clock
        self._policy: CapturePolicy[Room] = CapturePolicy()
        self._seen: dict[Room, Forward] = {}  # of sizes that are not captured
        self._graphs: dict[Room, Forward] = {}  # compute what the buffers hold now
        self._pool: Any = None  # memory that all graphs share: one replays at a time

    def __len__(self) -> int:
        return len(self._graphs)

    def room_for(self, num_tokens: int, num_seqs: int, num_blocks: int, *, adapted: bool) -> Room | None:
        """Return the sizes that such a step with tables of ``num_blocks`` is padded to, if any."""
        largest = self._sizes[-1]
        if num_seqs > largest or (num_tokens > num_seqs and not (self._mixed and num_tokens <= MIXED_TOKENS)):
            return None
        if num_tokens == num_seqs:
            tokens = seqs = next(size for size in self._sizes if size >= num_seqs)
        else:
            seqs = min(_power_of_two(num_seqs), largest)
            tokens = max(LEAST_TOKENS, _power_of_two(num_tokens), _power_of_two(seqs + 1))
        width = min(max(LEAST_WIDTH, _power_of_two(num_blocks)), self._max_blocks)
        return Room(tokens, seqs, width, self._scratch_block, adapted)

    def run(self, room: Room, forward: Forward) -> torch.Tensor:
        """Compute the step whose numbers lie in the buffers of ``room``: ``forward()``, or its replay."""
        graph = self._graphs.get(room)
        if graph is not None:
            return graph()
        start_s = self._clock.now()
        logits = forward()
        self._policy.launched(room, self._clock.now() - start_s)
        self._seen[room] = forward
        self.capture_one(idle=False)
        return logits

    def capture_one(self, *, idle: bool) -> None:
        """Capture the size that is to have a graph now, if any. ``idle``: no step is in flight or planned."""
        room = self._policy.next(idle=idle)
        if room is None:
            return
        start_s = self._clock.now()
        self._graphs[room] = self._capture(room, self._seen.pop(room))
        self._policy.captured(room, self._clock.now() - start_s)

    def drop(self) -> None:
        """Give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._policy.forget()
        self._pool = None

    def _capture(self, room: Room, forward: Forward) -> Forward:
        if not self._cuda:
            return forward
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        self._pool = self._pool or graph.pool()
        sizes = (room.num_tokens, room.num_seqs, room.width)
        _log.info("captured a step of %d tokens, %d sequences, tables of %d blocks", *sizes)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


def sizes_up_to(largest: int) -> list[int]:
    """1, 2, 4, 8, 16 … in steps of 8, from 256 on of 32; the last is ``largest``."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, largest, 32)]
    return [*(size for size in sizes if size < largest), largest]


def _power_of_two(size: int) -> int:
    """The least that is not below ``size``."""
    return 1 << (size - 1).bit_length()
