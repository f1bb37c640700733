"""The blocks of transfers: taken at the start, published or given up at the end.

    load     takes a table of its own: what the tree has of the prompt, then blocks for what is to come
    store    shares the blocks of a path of the tree, up to its root, since idle blocks must form whole subtrees

Either way the transfer has references of its own from its start to its `TransferDone`. With recurrent layers, blocks
are of use only up to a state: a load brings the state after its last row as well, or nothing, and a store takes along
the states that its rows have.
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
    carried = None if cache.states is None else cache.states.carried
    own = BlockTable(num_groups, table.root, cache.block_size)
    own.chain = table.chain
    hit = cache.match(own, token_ids)
    if carried is not None:  # the tree may have blocks behind its last state
        hit = cache.prefix.find(own.chain[:num_blocks], len(token_ids), -1)
    elif cache.states is not None:
        return ()
    num_rows = min(num_blocks, len(own.chain)) - len(hit.nodes)
    num_room = (references.num_available - hit.num_idle(cache.pool.ref_counts)) // num_groups
    states: tuple[TransferBlock, ...] = ()
    if carried is None:
        num_rows = min(num_rows, num_room)
    elif num_rows <= num_room and len(hit.nodes) + num_rows == num_blocks and not hit.copy_tail:
        states = carried.begin_load(transfer_id, own.chain[num_blocks - 1])
    if hit.copy_tail or not (states or (carried is None and num_rows > 0)):
        return ()
    cache.fill(own, hit, num_rows)
    references.transfers[transfer_id] = TransferBlocks([], own, tuple(token_ids), len(hit.nodes))
    blocks = [
        TransferBlock(group, own.rows[group][row], group_block_hash(own.chain[row], group))
        for row in range(own.num_rows - num_rows, own.num_rows)
        for group in range(num_groups)
    ]
    return (*blocks, *states)


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
    blocks: list[TransferBlock] = []
    carried = None if cache.states is None else cache.states.carried
    for member in reversed(path[:num_blocks]):
        for group in member.groups:
            name = group_block_hash(member.block_hash, group)
            blocks.append(TransferBlock(group, member.block_ids[group], name))
        if carried is not None:
            blocks += carried.begin_store(transfer_id, member)
    if blocks:  # else windows have left only nodes without blocks
        shared = [block_id for member in path for block_id in member.block_ids if block_id != NO_BLOCK]
        for block_id in shared:
            references.share(block_id)
        references.transfers[transfer_id] = TransferBlocks(shared)
    return tuple(blocks)


def end_transfer(cache: CacheManager, transfer_id: int, num_blocks: int) -> None:
    """Publish the rows of a load of whose blocks the first ``num_blocks`` are whole; give up what was held.

    A load that was to bring a state and did not brings nothing.
    """
    references, num_groups = cache.references, cache.windows.num_groups
    transfer = references.transfers.pop(transfer_id)
    table, num_rows, node = transfer.table, transfer.num_hit_rows, None
    carried = None if cache.states is None else cache.states.carried
    if table is not None:
        is_whole = num_blocks > (table.num_rows - num_rows) * num_groups  # with its state
        if carried is None:
            num_rows += num_blocks // num_groups
        elif is_whole:
            num_rows = table.num_rows
        references.drop_all(table.truncate(num_rows))
        cache.publisher.publish(table, transfer.token_ids, num_rows * cache.block_size, planned=False)
        if is_whole and table.num_published == num_rows:
            node = table.tip
        cache.release(table)
    if carried is not None:
        carried.end(transfer_id, node, num_rows * cache.block_size)
    references.drop_all(transfer.block_ids)
