"""`CarriedStates`: the slots of recurrent states that transfers read and fill, and which states a tier is to have.

    store    checkpoints keep their bytes until these have left: a slot whose checkpoint goes meanwhile is free then
    load     a slot that no step knows; once its bytes are whole, it is a checkpoint of the node that they belong to

A state travels as one more block after those of its row, under a name of its own.
"""

from __future__ import annotations

import sys

from quire.cache.blocks import Node
from quire.cache.checkpoint_places import Kind
from quire.cache.checkpoints import Checkpoint, LiveState
from quire.cache.manager import CacheManager
from quire.cache.prefix_cache import group_block_hash
from quire.cache.states import StateSlots
from quire.step import TransferBlock

# Where other prompts and turns are likely to go on: not the ladders behind a prompt and within an answer.
STORED_KINDS = (Kind.ANSWER, Kind.PROMPT, Kind.BRANCH)


class CarriedStates:
    """The states of one engine that are on their way."""

    def __init__(self, cache: CacheManager, slots: StateSlots) -> None:
        self.loading: dict[int, int] = {}  # transfer → slot
        self.storing: dict[int, list[int]] = {}  # transfer → slots
        # Slots that are stored, and whose checkpoints have gone.
        self.orphans: list[int] = []
        self._cache, self._slots = cache, slots

    @property
    def stored_slots(self) -> set[int]:
        """The slots that stores read."""
        return {slot for slots in self.storing.values() for slot in slots}

    def is_stored(self, block_hash: bytes) -> bool:
        """Whether the node of a block has a state that a tier is to have."""
        node = self._cache.prefix.nodes.get(block_hash)
        checkpoint = None if node is None else self._slots.checkpoints.get(node)
        if checkpoint is None:
            return False
        # Where a prompt ends with a block, the same prompt begins again one block before its end.
        is_before_end = checkpoint.owner.num_known - checkpoint.num_tokens == self._cache.block_size
        return is_before_end or checkpoint.kind in STORED_KINDS

    def begin_store(self, transfer_id: int, node: Node) -> tuple[TransferBlock, ...]:
        """Let ``transfer_id`` read the state of ``node``, if it has one that is to be stored."""
        if self._is_full or not self.is_stored(node.block_hash):
            return ()
        slot = self._slots.checkpoints[node].slot
        self.storing.setdefault(transfer_id, []).append(slot)
        return (self._block_of(slot, node.block_hash),)

    def begin_load(self, transfer_id: int, block_hash: bytes) -> tuple[TransferBlock, ...]:
        """Let ``transfer_id`` fill a slot with the state after the block ``block_hash``, if one can be had."""
        slots, most = self._slots, max(1, self._slots.config.num_checkpoints // 4)
        # A step in flight may read and write slots that are free now.
        if len(self.loading) >= most or self._is_full or self._cache.references.steps:
            return ()
        if not slots.free and not slots.evict(sys.float_info.max):  # any but those of running sequences
            return ()
        slot = self.loading[transfer_id] = slots.free.pop()
        return (self._block_of(slot, block_hash),)

    def end(self, transfer_id: int, node: Node | None = None, num_tokens: int = 0) -> None:
        """A transfer is over. ``node``: to which the state of a load belongs, if it is whole."""
        slots = self._slots
        if self.storing.pop(transfer_id, None) is not None:
            held = self.stored_slots
            slots.free += [slot for slot in self.orphans if slot not in held]
            self.orphans = [slot for slot in self.orphans if slot in held]
        slot = self.loading.pop(transfer_id, None)
        if slot is None:
            return
        if node is None or node in slots.checkpoints or not self._cache.prefix.has(node):
            slots.free.append(slot)
            return
        loaded = LiveState(slot, num_tokens, is_running=False)
        slots.checkpoints.add(node, Checkpoint(slot, num_tokens, Kind.PROMPT, slots.num_admitted, loaded))

    def name_of(self, block_hash: bytes) -> bytes:
        """Return the name of the state after the block ``block_hash``."""
        return group_block_hash(block_hash, self._cache.windows.num_groups)

    @property
    def _is_full(self) -> bool:
        """Whether no further slot may be on its way: each running sequence has one, however long a tier takes."""
        return len(self.loading) + len(self.stored_slots) >= self._slots.config.num_checkpoints

    def _block_of(self, slot: int, block_hash: bytes) -> TransferBlock:
        return TransferBlock(-1, slot, self.name_of(block_hash))
