"""`CarriedStates`: the slots of recurrent states that transfers read and fill, and which states a tier is to have.

    store    checkpoints keep their bytes until these have left: a slot whose checkpoint goes meanwhile is free then
    load     a slot that no step knows; once its bytes are whole, it is a checkpoint of the node that they belong to

A state travels as one more block after those of its row, under a name of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.cache.blocks import Node
from quire.cache.checkpoint_places import Kind
from quire.cache.checkpoints import Checkpoint, LiveState
from quire.cache.prefix_cache import PrefixCache, group_block_hash
from quire.step import TransferBlock

if TYPE_CHECKING:
    from quire.cache.states import StateSlots

# Where other prompts and turns are likely to go on: not the ladders behind a prompt and within an answer.
STORED_KINDS = (Kind.ANSWER, Kind.PROMPT, Kind.BRANCH)
# The score of a checkpoint that makes room for a load: any but those of running sequences.
_WORTH = 1e9


class CarriedStates:
    """The states of one engine that are on their way."""

    def __init__(self, slots: StateSlots, prefix: PrefixCache, block_size: int) -> None:
        self.loading: dict[int, int] = {}  # transfer → slot
        self.storing: dict[int, list[int]] = {}  # transfer → slots
        # Slots that are stored, and whose checkpoints have gone.
        self.orphans: list[int] = []
        self._slots, self.prefix, self._block_size = slots, prefix, block_size

    @property
    def stored_slots(self) -> set[int]:
        """The slots that stores read."""
        return {slot for slots in self.storing.values() for slot in slots}

    def is_stored(self, block_hash: bytes) -> bool:
        """Whether the node of a block has a state that a tier is to have."""
        node = self.prefix.nodes.get(block_hash)
        checkpoint = None if node is None else self._slots.checkpoints.get(node)
        if checkpoint is None:
            return False
        # Where a prompt ends with a block, the same prompt begins again one block before its end.
        is_before_end = checkpoint.owner.num_known - checkpoint.num_tokens == self._block_size
        return is_before_end or checkpoint.kind in STORED_KINDS

    def begin_store(self, transfer_id: int, node: Node) -> tuple[TransferBlock, ...]:
        """Let ``transfer_id`` read the state of ``node``, if it has one that is to be stored."""
        if not self.is_stored(node.block_hash):
            return ()
        slot = self._slots.checkpoints[node].slot
        self.storing.setdefault(transfer_id, []).append(slot)
        return (self._block_of(slot, node.block_hash),)

    def begin_load(self, transfer_id: int, block_hash: bytes) -> tuple[TransferBlock, ...]:
        """Let ``transfer_id`` fill a slot with the state after the block ``block_hash``, if one can be had."""
        slots = self._slots
        most = max(1, slots.config.num_checkpoints // 4)
        if len(self.loading) >= most or slots.in_flight or not (slots.free or slots.evict(_WORTH)):
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
        if node is None or node in slots.checkpoints or not self.prefix.has(node):
            slots.free.append(slot)
            return
        loaded = LiveState(slot, num_tokens, is_running=False)
        slots.checkpoints.add(node, Checkpoint(slot, num_tokens, Kind.PROMPT, slots.num_admitted, loaded))

    def name_of(self, block_hash: bytes) -> bytes:
        """Return the name of the state after the block ``block_hash``."""
        return group_block_hash(block_hash, self.prefix.windows.num_groups)

    def _block_of(self, slot: int, block_hash: bytes) -> TransferBlock:
        return TransferBlock(-1, slot, self.name_of(block_hash))
