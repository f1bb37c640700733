"""Steps replayed from captured graphs, one for each number of tokens and sequences and width of the tables, rounded up.

    decode    one token per sequence: sizes 8 apart, 32 apart from 256 on
    mixed     up to `MIXED_TOKENS` tokens, a prompt's chunk among them: powers of two, so that few sizes come often

A capture costs about as much host time as launching its step a few times, and steps that come meanwhile wait for it.
So sizes are captured one at a time, the most frequent first, and only

    while idle        no step is in flight and none is planned, and the size came twice
    or once repaid    launches of the size have cost as many seconds as the capture will, and it takes at most 0.1 s

Nothing is computed in a capture, so the buffers may hold the numbers of any step. Without a GPU a "graph" calls the
function again over the same buffers, so that tests see what a replay sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from quire.clock import Clock
from quire.runner.device_batch import CapturedShape

LEAST_WIDTH = 64  # blocks of a table
LEAST_TOKENS = 16  # tokens in a mixed step
# From about here on a step's matrix products take longer than its launches.
MIXED_TOKENS = 256
MOST_DELAY_S = 0.1  # a capture delays a step by it
LAUNCHES_PER_CAPTURE = 3.0  # assumed until a capture was measured
LEAST_USES = 2

Size = TypeVar("Size", bound=Hashable)
Forward = Callable[[], torch.Tensor]
_log = logging.getLogger(__name__)


class StepGraphs:
    """The captured shapes, and those that are about to be captured."""

    def __init__(
        self, device: torch.device, max_num_seqs: int, max_blocks: int, scratch_block: int, clock: Clock, *, mixed: bool
    ) -> None:  # fmt: skip
        """``mixed``: also of steps with a prompt's chunk."""
        self._mixed = mixed
        self._cuda = device.type == "cuda"
        self._sizes = sizes_up_to(max_num_seqs)
        self._max_blocks = max_blocks
        self._scratch_block = scratch_block
        self._clock = clock
        self._policy: CapturePolicy[CapturedShape] = CapturePolicy()
        self._seen: dict[CapturedShape, Forward] = {}  # sizes that are not captured
        self._graphs: dict[CapturedShape, Forward] = {}  # compute what the buffers hold now
        self._pool: Any = None  # memory that all graphs share: one replays at a time

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_for(
        self, num_tokens: int, num_seqs: int, num_blocks: int, *, adapted: bool
    ) -> CapturedShape | None:
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
        return CapturedShape(tokens, seqs, width, self._scratch_block, adapted)

    def run(self, shape: CapturedShape, forward: Forward) -> torch.Tensor:
        """Compute the step whose numbers lie in the buffers of ``shape``: ``forward()``, or its replay."""
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph()
        start_s = self._clock.now()
        logits = forward()
        self._policy.launched(shape, self._clock.now() - start_s)
        self._seen[shape] = forward
        self.capture_one(idle=False)
        return logits

    def capture_one(self, *, idle: bool) -> None:
        """Capture the size that is to have a graph now, if any. ``idle``: no step is in flight or planned."""
        shape = self._policy.next(idle=idle)
        if shape is None:
            return
        start_s = self._clock.now()
        self._graphs[shape] = self._capture(shape, self._seen.pop(shape))
        self._policy.captured(shape, self._clock.now() - start_s)

    def drop(self) -> None:
        """Give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._policy.forget()
        self._pool = None

    def _capture(self, shape: CapturedShape, forward: Forward) -> Forward:
        if not self._cuda:
            return forward
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        self._pool = self._pool or graph.pool()
        sizes = (shape.num_tokens, shape.num_seqs, shape.width)
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


@dataclass(slots=True)
class _Uses:
    count: int = 0
    spent_s: float = 0.0
    shortest_s: float = float("inf")


class CapturePolicy(Generic[Size]):
    """When which size is captured: counts and seconds of those that are not, no device."""

    def __init__(self) -> None:
        self._uses: dict[Size, _Uses] = {}
        self._ratio = LAUNCHES_PER_CAPTURE

    def launched(self, size: Size, took_s: float) -> None:
        """A step of ``size`` was launched kernel by kernel in ``took_s`` of the host's time."""
        uses = self._uses.setdefault(size, _Uses())
        uses.count += 1
        uses.spent_s += took_s
        uses.shortest_s = min(uses.shortest_s, took_s)

    def captured(self, size: Size, took_s: float) -> None:
        """``size`` is captured; how long it took is what the next ones are expected to take."""
        uses = self._uses.pop(size)
        if uses.shortest_s > 0.0:
            self._ratio = max(1.0, took_s / uses.shortest_s)

    def next(self, *, idle: bool) -> Size | None:
        """Return the size to capture now, if any."""
        for size, uses in sorted(self._uses.items(), key=lambda item: -item[1].count):
            if uses.count < LEAST_USES:
                return None
            expected_s = self._ratio * uses.shortest_s
            if idle or (uses.spent_s >= expected_s and expected_s <= MOST_DELAY_S):
                return size
        return None

    def forget(self) -> None:
        """Start to count anew: what was captured is gone."""
        self._uses.clear()
