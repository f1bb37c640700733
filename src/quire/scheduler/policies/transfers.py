"""Blocks on their way from or to another tier or peer.

    load     a waiting sequence becomes `LOADING_KV`, and the next plan begins the transfer
             its end publishes the blocks that came whole; the sequence waits again, and its admission finds them
    store    published blocks keep a reference each until their bytes have left

A transfer outlives the step that begins it, and the sequence that it is for. A step that fails ends the transfers that
it was to begin: the executor writes nothing more for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from quire.cache.transfers import begin_load, begin_store, end_transfer
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import SchedulerState
from quire.step import KvTransfer, TransferBlock, TransferDone


class Rule(Policy):
    """The transfers of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # Sequence in state LOADING_KV → the transfer that it waits for.
        self.loading: dict[Sequence, int] = {}
        self._new: list[KvTransfer] = []  # begin with the next plan
        self._next_id = 0

    def take_new(self) -> tuple[KvTransfer, ...]:
        """Return the transfers that the step being planned begins."""
        new, self._new = tuple(self._new), []
        return new

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended while it waited for a load, which goes on."""
        self.loading.pop(seq, None)

    def load(self, request_id: str, remote: str, num_blocks: int, handle: str = "") -> int | None:
        """Let a waiting request wait for up to the first ``num_blocks`` blocks of its prompt, which ``remote`` has.

        Returns the id of the transfer, or None where nothing is loaded: the request runs or is unknown, may not read
        cached blocks, or the prefix tree has what could be loaded.
        """
        group = self._state.requests.get(request_id)
        sequences = group.sequences if group is not None else []
        seq = next((s for s in sequences if s.state is SequenceState.WAITING), None)
        return None if seq is None else self.load_for(seq, remote, num_blocks, handle)

    def load_for(self, seq: Sequence, remote: str, num_blocks: int, handle: str = "") -> int | None:
        """As `load`, for a sequence that waits."""
        if not (seq.group.reads_prefix and self._state.cache.config.enable_prefix_caching):
            return None
        transfer_id = self._next_id
        blocks = begin_load(self._state.cache, transfer_id, seq.table, seq.token_ids, num_blocks)
        if not blocks:
            return None
        self.join(seq, transfer_id)
        return self._begin("load", blocks, remote, handle, seq)

    def join(self, seq: Sequence, transfer_id: int) -> None:
        """Let a sequence that waits wait for a transfer."""
        self._state.waiting.remove(seq)
        seq.state = SequenceState.LOADING_KV
        self.loading[seq] = transfer_id

    def leave(self, transfer_id: int) -> None:
        """Let the sequences that wait for a transfer wait for it no longer."""
        for seq in [seq for seq, waited_for in self.loading.items() if waited_for == transfer_id]:
            del self.loading[seq]
            self._state.enqueue(seq)

    def store(self, block_hash: bytes, remote: str, num_blocks: int = 1, handle: str = "") -> int | None:
        """Copy the published block ``block_hash``, and up to ``num_blocks`` − 1 before it, to ``remote``.

        Returns the id of the transfer, or None where the block is not in the prefix tree or not computed yet.
        """
        blocks = begin_store(self._state.cache, self._next_id, block_hash, num_blocks)
        return self._begin("store", blocks, remote, handle) if blocks else None

    def end(self, ended: Iterable[TransferDone]) -> None:
        """Take in the ends of transfers; one that is not known has been ended already."""
        counters = self._state.counters
        for done in ended:
            transfer = self._state.cache.references.transfers.get(done.transfer_id)
            if transfer is None:
                continue
            if transfer.table is not None:
                counters.num_loaded_blocks += done.num_blocks
            else:
                counters.num_stored_blocks += done.num_blocks
            counters.num_failed_transfers += done.error is not None
            end_transfer(self._state.cache, done.transfer_id, done.num_blocks)
            self.leave(done.transfer_id)

    def fail(self, error: str) -> None:
        """The executor died: the transfers that it was told of have ended; others begin with the next plan."""
        untold = {transfer.transfer_id for transfer in self._new}
        open_ids = [key for key in self._state.cache.references.transfers if key not in untold]
        self.end([TransferDone(key, 0, error) for key in open_ids])

    def _begin(
        self,
        direction: Literal["load", "store"],
        blocks: tuple[TransferBlock, ...],
        remote: str,
        handle: str,
        seq: Sequence | None = None,
    ) -> int:
        transfer_id = self._next_id
        self._next_id += 1
        seq_id, epoch = (None, 0) if seq is None else (seq.seq_id, seq.epoch)
        self._new.append(KvTransfer(transfer_id, direction, blocks, remote, seq_id, epoch, handle))
        return transfer_id
