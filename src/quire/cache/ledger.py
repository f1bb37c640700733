"""`reclaim`: while nothing runs, every block is in the prefix tree or free.

A block that is neither, or is counted twice, comes of a bug, which must not cost memory until the next restart.
"""

from __future__ import annotations

from quire.cache.events import BlockRemoved
from quire.cache.manager import CacheManager


def reclaim(cache: CacheManager) -> int:
    """Put the books of ``cache`` right; return how many blocks were counted wrongly.

    Only while no sequence, step or transfer refers to blocks. Where the books are wrong, they begin anew, and the whole
    tree is forgotten: nothing says which of its blocks still have their content.
    """
    pool, prefix = cache.pool, cache.prefix
    assert not cache.references.steps
    assert not cache.references.transfers
    in_tree = [node is not None for node in prefix.node_of]
    num_wrong = sum(map(int.__ne__, pool.ref_counts, in_tree))
    num_lost = abs(pool.num_blocks - pool.num_free - prefix.num_blocks)
    if not num_wrong and not num_lost and pool.is_whole and prefix.num_idle == prefix.num_blocks:
        return 0
    if prefix.events is not None:
        for node in prefix.nodes.values():
            if node.has_blocks:
                prefix.events.add(BlockRemoved(node.block_hash, node.groups))
    fresh = CacheManager(cache.config, prefix.events)
    fresh.prefix.num_evicted = prefix.num_evicted
    fresh.references.applied_step = cache.references.applied_step
    cache.pool, cache.prefix = fresh.pool, fresh.prefix
    cache.references, cache.publisher = fresh.references, fresh.publisher
    return max(num_wrong, num_lost, 1)
