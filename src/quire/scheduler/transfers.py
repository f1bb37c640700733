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
from quire.scheduler.sequence import Sequence, SequenceState
from quire.scheduler.state import SchedulerState
from quire.step import KvTransfer, TransferBlock, TransferDone


def load(
    state: SchedulerState, request_id: str, remote: str, num_blocks: int, handle: str = ""
) -> int | None:
    """Let a waiting request wait for up to the first ``num_blocks`` blocks of its prompt, which ``remote`` has.

    Returns the id of the transfer, or None where nothing is loaded: the request runs or is unknown, may not read
    cached blocks, or the prefix tree has what could be loaded.
    """
    group = state.requests.get(request_id)
    sequences = group.sequences if group is not None else []
    seq = next((s for s in sequences if s.state is SequenceState.WAITING), None)
    if seq is None or not (seq.group.reads_prefix and state.cache.config.enable_prefix_caching):
        return None
    transfer_id = state.next_transfer_id
    blocks = begin_load(state.cache, transfer_id, seq.table, seq.token_ids, num_blocks)
    if not blocks:
        return None
    state.waiting.remove(seq)
    seq.state = SequenceState.LOADING_KV
    state.loading[transfer_id] = seq
    return _begin(state, "load", blocks, remote, handle, seq)


def store(
    state: SchedulerState, block_hash: bytes, remote: str, num_blocks: int = 1, handle: str = ""
) -> int | None:
    """Copy the published block ``block_hash``, and up to ``num_blocks`` − 1 before it, to ``remote``.

    Returns the id of the transfer, or None where the block is not in the prefix tree or not computed yet.
    """
    blocks = begin_store(state.cache, state.next_transfer_id, block_hash, num_blocks)
    return _begin(state, "store", blocks, remote, handle) if blocks else None


def end_transfers(state: SchedulerState, ended: Iterable[TransferDone]) -> None:
    """Take in the ends of transfers; one that is not known has been ended already."""
    counters = state.counters
    for done in ended:
        transfer = state.cache.references.transfers.get(done.transfer_id)
        if transfer is None:
            continue
        if transfer.table is not None:
            counters.num_loaded_blocks += done.num_blocks
        else:
            counters.num_stored_blocks += done.num_blocks
        counters.num_failed_transfers += done.error is not None
        end_transfer(state.cache, done.transfer_id, done.num_blocks)
        seq = state.loading.pop(done.transfer_id, None)
        if seq is not None:
            state.enqueue(seq)


def fail_transfers(state: SchedulerState, error: str) -> None:
    """The executor died: what it was told to transfer has ended. What it was not told yet begins with the next plan."""
    untold = {transfer.transfer_id for transfer in state.new_transfers}
    open_ids = [key for key in state.cache.references.transfers if key not in untold]
    end_transfers(state, [TransferDone(key, 0, error) for key in open_ids])


def _begin(
    state: SchedulerState,
    direction: Literal["load", "store"],
    blocks: tuple[TransferBlock, ...],
    remote: str,
    handle: str,
    seq: Sequence | None = None,
) -> int:
    transfer_id = state.next_transfer_id
    state.next_transfer_id += 1
    seq_id, epoch = (None, 0) if seq is None else (seq.seq_id, seq.epoch)
    state.new_transfers.append(KvTransfer(transfer_id, direction, blocks, remote, seq_id, epoch, handle))
    return transfer_id
