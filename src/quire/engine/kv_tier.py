"""The tiers of an engine in this process: their stores, what moves blocks, and the policy that decides.

Loaded where `CacheConfig.tiers` says so. A tier is never needed: where its folder cannot be used, the start fails; what
happens to it later, or to a server, costs a computation and nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.clock import Clock, WallClock
from quire.config import CacheConfig, EngineConfig
from quire.engine.core import EngineCore
from quire.engine.kv_root import kv_root
from quire.engine.messages import Shutdown
from quire.errors import ConfigError, EngineDeadError, ModelLoadError
from quire.executor.base import Executor
from quire.executor.moving import BlockMover, MovingExecutor
from quire.metrics.log import Log
from quire.models.checkpoint import describe
from quire.models.content import content_digest
from quire.scheduler.scheduler import Sleep, Wait
from quire.tiers.disk import DiskStore
from quire.tiers.peers import open_peers
from quire.tiers.stack import TierStack
from quire.tiers.store import BlockStore

log = Log("kv_tier")


def open_store(config: EngineConfig) -> BlockStore:
    """Return the store of ``config.cache.tiers``: of several, one that has them all.

    Raises:
        ConfigError: its folder or its address cannot be used, or the extra `redis` is missing.
        ModelLoadError: the model's files are not those that the root names.
    """
    model = config.model
    files = () if model.load_format == "random" else describe(Path(model.path), model.load_format).files
    if kv_root(config, content_digest(files)) != config.cache.model_key:
        raise ModelLoadError(f"{model.path} has changed while it was loaded: start again.")
    stores: list[BlockStore] = []
    with ExitStack() as opened:  # where one cannot be used, those before it are closed
        for index, tier in enumerate(config.cache.tiers):
            stores.append(_open(config.cache, tier, is_shared=not index and bool(config.cache.engine_id)))
            opened.callback(stores[-1].close)
        opened.pop_all()
    return stores[0] if len(stores) == 1 else TierStack(stores, WallClock())


def _open(cache: CacheConfig, tier: tuple[str, int], *, is_shared: bool) -> BlockStore:
    place, size_bytes = tier
    if is_shared:
        return open_peers(place, size_bytes, cache.peers, cache.model_key, cache.engine_id)
    if "://" in place:
        from quire.tiers.remote import RedisStore

        return RedisStore(place, cache.model_key, password=os.environ.get("QUIRE_KV_REMOTE_PASSWORD"))
    return DiskStore(Path(place), size_bytes, cache.model_key)


def mover_of(executor: Executor, store: BlockStore, clock: Clock) -> BlockMover:
    """Return what moves blocks between ``store`` and the memory of ``executor``.

    Raises:
        ConfigError: the blocks do not lie in this process.
    """
    from quire.executor.local import LocalExecutor

    if not isinstance(executor, LocalExecutor):
        raise ConfigError("A tier of KV blocks is for an engine on a CPU, in one process.", param="kv_disk")
    import torch

    worker = executor.worker
    rows = worker.runner.kv.storage.view(torch.uint8).numpy()

    states: list[memoryview] = []
    if worker.runner.states is not None:
        states += map(memoryview, worker.runner.states.storage.view(torch.uint8).numpy())

    def forget(block_ids: Sequence[int]) -> None:
        # A draft model keeps something of each block, which does not travel.
        if worker.drafting is not None:
            worker.drafting.forget(block_ids)

    is_direct = not worker.runner.kv.needs_clear
    blocks = [memoryview(row) for row in rows]
    return BlockMover(store, blocks, forget, clock, is_direct=is_direct, states=states)


def connected(executor: Executor, config: EngineConfig, clock: Clock) -> tuple[MovingExecutor, BlockMover]:
    """Return ``executor`` with the tier of ``config``, and what moves its blocks. Raises as the two functions above."""
    mover = mover_of(executor, open_store(config), clock)
    return MovingExecutor(executor, mover), mover


def decide(core: EngineCore, mover: BlockMover) -> None:
    """Let the scheduler of ``core`` decide on transfers, and end those that it still wants when the mover is closed."""
    core.scheduler.state.policies.turn_on("tiers").connect(mover)
    core.completed = lambda stats: replace(stats, tiers=counts_by_tier(mover.store))
    mover.before_close = partial(settle, core)


def counts_by_tier(store: BlockStore) -> dict[str, dict[str, int]]:
    """Return the counts of a store, or of each that it has, by name."""
    stores = store.stores if isinstance(store, TierStack) else (store,)
    return {each.name: each.counts().as_dict() for each in stores}


def settle(core: EngineCore, limit_s: float = 10.0) -> None:
    """Abort what runs, and let the tier store what it was to store. An engine that has died stores nothing more."""
    end_s = core.clock.now() + limit_s
    core.put(Shutdown())
    try:
        while not isinstance(core.rest, Wait) and core.clock.now() < end_s:
            core.step()
            if isinstance(core.rest, Sleep):
                time.sleep(0.002)
    except EngineDeadError as error:
        log.warning("last_prompts_not_stored", error=error)
