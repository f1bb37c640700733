"""A cache by itself: tables stepped by hand, as the scheduler would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.fakes.integrity import check_cache

from quire.cache.blocks import BlockTable
from quire.cache.events import EventBuffer
from quire.cache.manager import CacheManager
from quire.cache.references import StepBlocks
from quire.config import CacheConfig

NO = -1


class Bench:
    """`CacheManager` plus the tables alive, checked after every step."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        windows: tuple[int | None, ...] = (None,),
        *,
        caching: bool = True,
        events: EventBuffer | None = None,
    ) -> None:
        config = CacheConfig(
            num_blocks, block_size, windows, enable_prefix_caching=caching, model_key="bench"
        )
        self.cache = CacheManager(config, events)
        self.tables: list[BlockTable] = []
        self.next_step = 0

    @contextmanager
    def step(self) -> Iterator[StepBlocks]:
        """Plan a step; it stays in flight until `apply`."""
        record = self.cache.references.open_step(self.next_step)
        self.next_step += 1
        yield record
        self.cache.references.end_planning(empty=False)
        self.check()

    def apply(self) -> None:
        """Apply the oldest step in flight."""
        self.cache.references.close_step(min(self.cache.references.steps))
        self.check()

    def admit(
        self, tokens: Sequence[int], *, salt: str = "", budget: int = 1000
    ) -> tuple[BlockTable, int] | None:
        """Admit a prompt in the step being planned and publish what it computes; return table and cached tokens."""
        table = self.cache.new_table(cache_salt=salt)
        admitted = self.cache.admit(table, tokens, len(tokens), budget, uncut=False)
        if admitted is None:
            return None
        table.last_step = self.cache.references.planning.step
        self.cache.publisher.publish(
            table, tokens, admitted.num_cached + admitted.num_scheduled, planned=True
        )
        table.take_unsent()
        self.tables.append(table)
        return table, admitted.num_cached

    def run(self, tokens: Sequence[int], *, salt: str = "") -> tuple[BlockTable, int]:
        """Admit a prompt in a step of its own, and apply it."""
        with self.step():
            done = self.admit(tokens, salt=salt)
        assert done is not None
        self.apply()
        self.cache.settle(done[0], tokens, len(tokens))
        self.check()
        return done

    def release(self, table: BlockTable) -> None:
        self.cache.release(table)
        self.tables.remove(table)
        self.check()

    def check(self) -> None:
        check_cache(self.cache, self.tables)
