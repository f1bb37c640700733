"""A store of blocks in a dict that may lose them, and a mover that tests step: it moves as late as it can."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.clock import VirtualClock
from quire.engine.kv_tier import mover_of
from quire.executor.base import Executor
from quire.executor.moving import Ended
from quire.step import KvTransfer


class DictStore:
    """As `quire.tiers.store.BlockStore`. ``loss``: the probability that a block is lost when it is read or written."""

    name = "disk"

    def __init__(self, loss: float = 0.0, seed: int = 0) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.num_lost = 0
        self._loss, self._random = loss, random.Random(seed)

    def contains(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def kept(self, keys: Sequence[bytes]) -> int:
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        for index, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if self._loses() or key not in self.blocks:
                self.blocks.pop(key, None)
                buffer[:] = b"\xff" * buffer.nbytes  # as a read that failed half-way
                return index
            buffer[:] = self.blocks[key]
        return len(keys)

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self._loses():
                return index
            self.blocks[key] = b"".join(block)
        return len(keys)

    def close(self) -> None:
        pass

    def _loses(self) -> bool:
        lost = self._random.random() < self._loss
        self.num_lost += lost
        return lost


class SteppedMover:
    """A `BlockMover` without threads: a transfer takes up to ``delay`` looks for its end, and moves at the last.

    Blocks that are to be filled are spoiled at once, and those of a store must not change meanwhile.
    """

    def __init__(self, executor: Executor, store: DictStore, delay: int = 0, seed: int = 0) -> None:
        self._inner = mover_of(executor, store, VirtualClock())
        self.block_bytes, self.name = self._inner.block_bytes, store.name
        self.contains, self.kept = store.contains, store.kept
        self._store, self._delay, self._random = store, delay, random.Random(seed)
        self._open: dict[int, tuple[KvTransfer, int, list[bytes]]] = {}
        self.num_cancelled = 0

    def begin(self, transfer: KvTransfer) -> None:
        memory = self._inner.memory_of(transfer)
        junk = b"\xff" if self._inner.is_direct else b"\x11"  # not a number, or a small one
        for buffer in memory if transfer.direction == "load" else ():
            buffer[:] = junk * buffer.nbytes
        seen = [bytes(buffer) for buffer in memory] if transfer.direction == "store" else []
        self._open[transfer.transfer_id] = transfer, self._random.randint(0, self._delay), seen

    def cancel(self, transfer_id: int) -> None:
        self.num_cancelled += 1
        del self._open[transfer_id]

    def take_ended(self) -> list[Ended]:
        ended = []
        for key, (transfer, left, seen) in list(self._open.items()):
            if left:
                self._open[key] = transfer, left - 1, seen
                continue
            del self._open[key]
            if seen:
                assert seen == [bytes(buffer) for buffer in self._inner.memory_of(transfer)], (
                    "a stored block changed"
                )
            ended.append(self._inner.move(transfer))
        return ended

    def close(self) -> None:
        self._inner.close()
