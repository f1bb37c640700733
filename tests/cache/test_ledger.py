"""Blocks that a bug has lost are found while nothing runs, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engine.toy import engine_config
from tests.fakes.engine import build
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import request

from quire.cache.manager import CacheManager, reclaim
from quire.clock import VirtualClock
from quire.engine import child
from quire.engine.core import EngineCore
from quire.engine.heartbeat import Heartbeat, Ticker
from quire.request import TokenEvent
from quire.scheduler.scheduler import Scheduler, audit


def run(core: EngineCore, name: str) -> list[TokenEvent]:
    core.put(request(name, prompt=range(70), max_tokens=20))
    events = []
    while core.has_work:
        events += core.step()
    return events


@pytest.fixture
def core() -> EngineCore:
    config = engine_config()
    made = EngineCore(Scheduler(config.scheduler, config.cache), build(config, ""), VirtualClock())
    run(made, "first")
    return made


def lose_one(cache: CacheManager) -> None:
    cache.pool.take()


def share_a_cached_one(cache: CacheManager) -> None:
    cache.pool.share(next(b for b, node in enumerate(cache.prefix.node_of) if node is not None))


def free_a_cached_one(cache: CacheManager) -> None:
    cache.pool.drop(next(b for b, node in enumerate(cache.prefix.node_of) if node is not None))


def free_one_twice(cache: CacheManager) -> None:
    cache.pool.free_ids.append(cache.pool.free_ids[0])


def count_wrongly(cache: CacheManager) -> None:
    cache.prefix.num_idle -= 1


@pytest.mark.parametrize(
    "fault", [lose_one, share_a_cached_one, free_a_cached_one, free_one_twice, count_wrongly]
)
def test_what_is_lost_is_reclaimed_and_counted(
    core: EngineCore, fault: Callable[[CacheManager], None]
) -> None:
    fault(core.scheduler.cache)
    assert audit(core.scheduler) == 1
    check_integrity(core.scheduler)
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_reclaimed_blocks == 1
    assert [e.token_ids for e in run(core, "again")] == [e.token_ids for e in run(core, "and again")]
    check_integrity(core.scheduler)
    assert audit(core.scheduler) == 0


def test_good_books_are_left_alone(core: EngineCore) -> None:
    cached = core.stats().num_cached_blocks
    assert cached > 0
    assert reclaim(core.scheduler.cache) == 0
    assert core.stats().num_cached_blocks == cached


def test_a_running_engine_is_not_audited(core: EngineCore) -> None:
    core.put(request("long", prompt=range(70), max_tokens=20))
    core.step()
    lose_one(core.scheduler.cache)
    assert audit(core.scheduler) == 0


def test_the_loop_audits_after_a_second_without_work(core: EngineCore, tmp_path: Path) -> None:
    clock = core.clock
    assert isinstance(clock, VirtualClock)
    core.step()
    polls = []

    def poll(timeout_ms: int) -> bool:
        polls.append(core.stats().num_reclaimed_blocks)
        clock.advance(timeout_ms / 1e3)
        return len(polls) == 10

    lose_one(core.scheduler.cache)
    ticker = Ticker(Heartbeat(tmp_path / "page"), core.scheduler, clock)
    child._wait(core, SimpleNamespace(poll=poll), clock, ticker)  # type: ignore[arg-type]
    assert polls == [0] * 4 + [1] * 6
