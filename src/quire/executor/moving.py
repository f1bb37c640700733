"""Blocks on their way between a worker's memory and a store: `BlockMover`, and the executor that begins its transfers.

    plan.transfers ──> MovingExecutor ──> BlockMover ──> threads: store.read into blocks, store.write from blocks
    scheduler      <── take_ended     <──

The scheduler holds the blocks of a transfer until it has ended, so no step touches them meanwhile. A block is one row
of the cache's storage and one record of the store, under the hash that names its content.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.clock import Clock
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.metrics.log import Log
from quire.step import KvTransfer, StepPlan, StepResult, TransferDone

if TYPE_CHECKING:
    from quire.tiers.store import BlockStore

log = Log("kv_transfers")


class Ended(NamedTuple):
    """The end of a transfer that took ``seconds`` on its thread."""

    done: TransferDone
    seconds: float


class Mover(Protocol):
    """Carries transfers out: `BlockMover`, and a stand-in that tests step."""

    def begin(self, transfer: KvTransfer) -> None:
        """Begin a transfer."""
        ...

    def cancel(self, transfer_id: int) -> None:
        """End a transfer without a word of its end: nothing is written for it when this returns."""
        ...

    def close(self) -> None:
        """Begin nothing more."""
        ...


class BlockMover:
    """Moves blocks on two threads for loads and one for stores. `begin` and `take_ended` are called between steps."""

    def __init__(
        self, store: BlockStore, blocks: Sequence[memoryview], forget: Callable[[Sequence[int]], None], clock: Clock,
        *, is_direct: bool, states: Sequence[memoryview] = (),
    ) -> None:  # fmt: skip
        """``blocks``: the memory of each, by its id; ``states``: that of recurrent states, by slot.

        ``forget``: called with the blocks that a load is about to fill.

        ``is_direct``: whether a block may hold anything while it is filled. Kernels that mask what they read beyond a
        sequence need numbers there that are finite: then bytes come into the block once they are checked.
        """
        self.store, self.block_bytes, self.is_direct = store, blocks[0].nbytes, is_direct
        self._blocks, self._states, self._forget, self._clock = blocks, states, forget, clock
        self._loads = ThreadPoolExecutor(2, "kv-load")
        self._stores = ThreadPoolExecutor(1, "kv-store")
        self._open: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        # Lets the scheduler store what it has not stored yet.
        self.before_close: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """The tier's."""
        return self.store.name

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks the store has, by the hashes of their content."""
        return self.store.contains(keys)

    def kept(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks need not be stored."""
        return self.store.kept(keys)

    def begin(self, transfer: KvTransfer) -> None:
        """Begin a transfer."""
        pool = self._loads if transfer.direction == "load" else self._stores
        if transfer.direction == "load":
            self._forget([block.block_id for block in transfer.blocks if block.group >= 0])
        try:
            self._open[transfer.transfer_id] = pool.submit(self._run, transfer)
        except RuntimeError:  # threads begin nothing more while the interpreter ends
            self._run(transfer)

    def cancel(self, transfer_id: int, timeout_s: float = 30.0) -> None:
        """End a transfer without a word of its end: nothing is written for it when this returns.

        Raises:
            EngineDeadError: the store does not come back, and may write into the block at any time.
        """
        future = self._open.pop(transfer_id, None)
        if future is None or future.cancel():
            return
        try:
            future.result(timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(
                f"A read of the tier {self.name} did not end in {timeout_s:g} s."
            ) from error
        with self._lock:
            self._ended = [ended for ended in self._ended if ended.done.transfer_id != transfer_id]

    def take_ended(self) -> list[Ended]:
        """Return the transfers that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        for transfer in ended:
            self._open.pop(transfer.done.transfer_id, None)
        return ended

    def close(self) -> None:
        """Begin nothing more after `before_close`, and do not wait for what a store does not end."""
        self.before_close()
        self.before_close = lambda: None
        for pool in (self._loads, self._stores):
            pool.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def memory_of(self, transfer: KvTransfer) -> list[memoryview]:
        """Return the memory of the blocks of a transfer."""
        memory = self._blocks, self._states
        return [memory[block.group < 0][block.block_id] for block in transfer.blocks]

    def move(self, transfer: KvTransfer) -> Ended:
        """Carry a transfer out, on this thread."""
        start_s, num_blocks, error = self._clock.now(), 0, None
        keys, memory = [block.block_hash for block in transfer.blocks], self.memory_of(transfer)
        try:
            if transfer.direction == "load":
                read = self.store.read if self.is_direct else self._read_checked
                num_blocks = read(keys, memory, transfer.handle)
            else:
                num_blocks = self.store.write(keys, [(block,) for block in memory])
        except Exception as failure:  # whatever it is, the blocks are computed
            log.error("transfer_failed", tier=self.name, error=failure)
            error = f"{type(failure).__name__}: {failure}"
        if error is None and num_blocks < len(keys):
            error = f"{self.name} has {num_blocks} of {len(keys)} blocks"
        return Ended(TransferDone(transfer.transfer_id, num_blocks, error), self._clock.now() - start_s)

    def _read_checked(
        self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str, piece_blocks: int = 32
    ) -> int:
        """Fill blocks with bytes that are checked, a piece at a time."""
        num_whole = 0
        blocks = [memoryview(bytearray(self.block_bytes)) for _ in keys[:piece_blocks]]
        while num_whole < len(keys):
            piece = keys[num_whole : num_whole + piece_blocks]
            targets = into[num_whole : num_whole + piece_blocks]
            buffers = [
                block if target.nbytes == block.nbytes else memoryview(bytearray(target.nbytes))
                for target, block in zip(targets, blocks, strict=False)
            ]
            count = self.store.read(piece, buffers, giver)
            for target, buffer in zip(targets[:count], buffers, strict=False):
                target[:] = buffer
            num_whole += count
            if count < len(piece):
                break
        return num_whole

    def _run(self, transfer: KvTransfer) -> None:
        ended = self.move(transfer)
        with self._lock:
            self._ended.append(ended)


class MovingExecutor:
    """An executor whose plans may have transfers."""

    def __init__(self, inner: Executor, mover: Mover) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner, self._mover = inner, mover
        self._out: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        """As `Executor.submit`; transfers begin."""
        self._inner.submit(plan)
        self._out.append(plan)
        for transfer in plan.transfers:
            self._mover.begin(transfer)

    def collect(self) -> StepResult:
        """As `Executor.collect`; where the step failed, its transfers are over as well."""
        plan = self._out.pop(0)
        try:
            result = self._inner.collect()
        except Exception:
            self._cancel(plan)
            raise
        if result.error is not None:
            self._cancel(plan)
        return result

    def close(self) -> None:
        """As `Executor.close`."""
        self._mover.close()
        self._inner.close()

    def _cancel(self, plan: StepPlan) -> None:
        for transfer in plan.transfers:
            self._mover.cancel(transfer.transfer_id)
