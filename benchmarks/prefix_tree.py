"""Processor time of a large prefix tree: what is published, evicted, withdrawn and cleared.

The bound: with a million blocks no step waits for more than 5 ms, also after `PrefixCache.clear`, which the next steps
take apart in slices. Processor time, since other programs make wall clocks useless.

    python -m benchmarks.prefix_tree [--blocks 1000000] [--depth 100]
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable

from quire.cache.blocks import BlockPool, Windows
from quire.cache.prefix_cache import HASH_BYTES, PrefixCache


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=100, help="blocks of one prompt")
    args = parser.parse_args()
    gc.disable()
    pool = BlockPool(args.blocks)
    tree = PrefixCache(pool, 16, Windows((None,), 16))
    print(f"{args.blocks:,} blocks in prompts of {args.depth}; milliseconds of processor time")
    seconds = timed(lambda: publish(pool, tree, args.depth))
    print(f"publish and give up, each   {seconds / args.blocks * 1e3:.5f}")
    quarter = args.blocks // 4
    print(f"evict, each                 {timed(lambda: tree.evict(quarter)) / quarter * 1e3:.5f}")
    leaf = next(reversed(tree.nodes.values()))
    print(f"withdraw one leaf           {timed(lambda: tree.withdraw([leaf])) * 1e3:.3f}")
    print(f"clear                       {timed(tree.clear) * 1e3:.3f}")
    slices = []
    while tree.num_blocks:
        slices.append(timed(tree.take_apart))
    print(
        f"slices of clear             {len(slices):,}, at most {max(slices) * 1e3:.3f}, all {sum(slices) * 1e3:.0f}"
    )


def publish(pool: BlockPool, tree: PrefixCache, depth: int) -> None:
    """Fill the pool with prompts that share nothing, and give each up."""
    rng = random.Random(0)
    while pool.num_free:
        block_ids, node, above = pool.take_many(min(depth, pool.num_free)), None, bytes(HASH_BYTES)
        for block_id in block_ids:
            block_hash = rng.randbytes(HASH_BYTES)
            node = tree.insert(block_hash, node, above, (block_id,), 0, ())
            above = block_hash
        tree.mark_idle(pool.drop_all(reversed(block_ids)))


def timed(act: Callable[[], object]) -> float:
    """Return the processor seconds of ``act``."""
    start = time.process_time()
    act()
    return time.process_time() - start


if __name__ == "__main__":
    main()
