"""The transfers of the fake executor: pages that really travel, slowly, and at times not at all.

A page is read or written as late as possible, and a page to be filled is spoiled at the start. So a block that is
reused, read or published too early shows in the tokens of a sequence that reads it, here or after a later load.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tests.fakes.kv import FakePages
from tests.fakes.model import chain, start_state

from quire.cache.prefix_cache import extend_chain, group_block_hash, root_hash
from quire.request import Request
from quire.step import KvTransfer, TransferDone


@dataclass(frozen=True, slots=True)
class FakeTransferRates:
    """How long transfers take, and how often they fail."""

    delay: int = 0  # ticks per block at most
    failure: float = 0.0  # probability per block
    seed: int = 0


class FakeTransfers:
    """Call `tick` as often as time passes. ``on_done`` is told of ends while no step is out."""

    def __init__(self, pages: FakePages, rates: FakeTransferRates, violations: list[str]) -> None:
        self.on_done: Callable[[TransferDone], None] | None = None
        self.done: list[TransferDone] = []  # for the next result
        self.seen: Counter[str] = Counter()
        self._pages = pages
        self._remote: dict[bytes, NDArray[np.uint64]] = {}  # page hash -> the page's slots
        self._rates = rates
        self._violations = violations
        self._seen_first: dict[tuple[int, int], NDArray[np.uint64]] = {}  # (transfer, block) -> its content
        self._random = random.Random(rates.seed)
        self._open: dict[int, tuple[KvTransfer, list[int]]] = {}  # ticks left before each block

    def prefill(self, model_key: str, request: Request, num_blocks: int) -> None:
        """Let the other side compute the first blocks of a prompt, as another replica would."""
        adapter = "" if request.adapter is None else request.adapter.key
        size, num_groups = self._pages.block_size, len(self._pages.windows)
        root = root_hash(model_key, size, adapter=adapter, cache_salt=request.terms.cache_salt)
        hashes: list[bytes] = []
        extend_chain(hashes, root, request.prompt_token_ids, size)
        states = chain(request.prompt_token_ids, start_state(request.adapter))
        for row, block_hash in enumerate(hashes[:num_blocks]):
            for group in range(num_groups):
                page = self._pages.due(states[row * size : (row + 1) * size], group)
                self._remote[group_block_hash(block_hash, group)] = page

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self.done)

    @property
    def open_blocks(self) -> set[int]:
        """Blocks that are being filled."""
        return {
            block.block_id
            for transfer, left in self._open.values()
            if transfer.direction == "load"
            for block in transfer.blocks[len(transfer.blocks) - len(left) :]
        }

    def begin(self, transfer: KvTransfer) -> None:
        if transfer.direction == "load":
            for block in transfer.blocks:
                self._pages.spoil(block.block_id)
        else:
            for block in transfer.blocks:
                self._seen_first[transfer.transfer_id, block.block_id] = self._pages.get(block.block_id)
        ticks = [self._random.randint(0, self._rates.delay) for _ in transfer.blocks]
        self._open[transfer.transfer_id] = (transfer, ticks)
        self.seen[f"{transfer.direction}s"] += 1

    def tick(self, *, step_is_out: bool) -> None:
        """Let time pass: each transfer moves its next block, or waits for it."""
        if not step_is_out and self.on_done is not None:
            for done in self.take_done():
                self.on_done(done)
        for transfer, left in list(self._open.values()):
            while left and left[0] == 0:
                if not self._move(transfer, len(transfer.blocks) - len(left)):
                    break
                left.pop(0)
            else:
                if left:
                    left[0] -= 1
                else:
                    self._end(transfer, len(transfer.blocks), None, step_is_out=step_is_out)
                continue
            self._end(transfer, len(transfer.blocks) - len(left), "injected", step_is_out=step_is_out)

    def die(self) -> None:
        """The executor loses everything: no transfer that has begun ever ends."""
        self.seen["transfers lost"] += len(self._open)
        self._open.clear()
        self.done.clear()

    def _move(self, transfer: KvTransfer, index: int) -> bool:
        block = transfer.blocks[index]
        if self._rates.failure and self._random.random() < self._rates.failure:
            return False
        if transfer.direction == "store":
            page = self._remote[block.block_hash] = self._pages.get(block.block_id)
            if not np.array_equal(page, self._seen_first.pop((transfer.transfer_id, block.block_id))):
                self._violations.append(f"block {block.block_id} was written while it was being stored")
            return True
        page = self._remote.get(block.block_hash)
        if page is None:  # the other side does not have it (any more)
            return False
        self._pages.put(block.block_id, page)
        return True

    def _end(self, transfer: KvTransfer, num_blocks: int, error: str | None, *, step_is_out: bool) -> None:
        del self._open[transfer.transfer_id]
        self.seen["partial loads"] += transfer.direction == "load" and 0 < num_blocks < len(transfer.blocks)
        done = TransferDone(transfer.transfer_id, num_blocks, error)
        if step_is_out or self.on_done is None:
            self.done.append(done)
        else:
            self.on_done(done)

    def take_done(self) -> tuple[TransferDone, ...]:
        done, self.done = tuple(self.done), []
        return done
