"""The blocks of transfers: taken at the start, published or given up at the end.

    load     takes a table of its own: what the tree has of the prompt, then blocks for what is to come
    store    shares the blocks of a path of the tree, up to its root, since idle blocks must form whole subtrees

Either way the transfer has references of its own from its start to its `TransferDone`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.blocks import NO_BLOCK, BlockTable, Node
from quire.cache.manager import CacheManager
from quire.cache.prefix_cache import group_block_hash
from quire.cache.references import TransferBlocks
from quire.step import TransferBlock


def begin_load(
    cache: CacheManager, transfer_id: int, table: BlockTable, token_ids: Sequence[int], num_blocks: int
) -> tuple[TransferBlock, ...]:
    """Take blocks for the full rows of ``token_ids`` below ``num_blocks`` that the tree does not have.

    ``table`` (the sequence's) stays empty. Returns the blocks to fill, row by row: none where nothing is missing or no
    block is available.
    """
    num_groups, references = cache.windows.num_groups, cache.references
    if cache.states is not None:  # blocks alone are of no use: no checkpoint comes with them
        return ()
    own = BlockTable(num_groups, table.root, cache.block_size)
    own.chain = table.chain
    hit = cache.match(own, token_ids)
    num_rows = min(num_blocks, len(own.chain)) - len(hit.nodes)
    num_rows = min(num_rows, (references.num_available - hit.num_idle(cache.pool.ref_counts)) // num_groups)
    if num_rows <= 0 or hit.copy_tail:
        return ()
    cache.fill(own, hit, num_rows)
    references.transfers[transfer_id] = TransferBlocks([], own, tuple(token_ids), own.num_published)
    return tuple(
        TransferBlock(group, own.rows[group][row], group_block_hash(own.chain[row], group))
        for row in range(own.num_rows - num_rows, own.num_rows)
        for group in range(num_groups)
    )


def begin_store(
    cache: CacheManager, transfer_id: int, block_hash: bytes, num_blocks: int
) -> tuple[TransferBlock, ...]:
    """Hold the block that ``block_hash`` names and all before it; return the last ``num_blocks`` rows of these.

    Returns none where the tree does not have it, or the step that computes it is still in flight.
    """
    references = cache.references
    node = cache.prefix.nodes.get(block_hash)
    if node is None or node.step > references.applied_step:
        return ()
    path: list[Node] = []
    while node is not None:
        path.append(node)
        node = node.parent
    blocks = tuple(
        TransferBlock(group, member.block_ids[group], group_block_hash(member.block_hash, group))
        for member in reversed(path[:num_blocks])
        for group in member.groups
    )
    if blocks:  # else windows have left only nodes without blocks
        shared = [block_id for member in path for block_id in member.block_ids if block_id != NO_BLOCK]
        for block_id in shared:
            references.share(block_id)
        references.transfers[transfer_id] = TransferBlocks(shared)
    return blocks


def end_transfer(cache: CacheManager, transfer_id: int, num_blocks: int) -> None:
    """Publish the rows of a load of whose blocks the first ``num_blocks`` are whole; give up what was held."""
    references = cache.references
    transfer = references.transfers.pop(transfer_id)
    table = transfer.table
    if table is not None:
        num_rows = transfer.num_hit_rows + num_blocks // cache.windows.num_groups
        references.drop_all(table.truncate(num_rows))
        cache.publisher.publish(table, transfer.token_ids, num_rows * cache.block_size, planned=False)
        cache.release(table)
    references.drop_all(transfer.block_ids)
