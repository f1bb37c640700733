"""Blocks from and to other tiers: what waits, what is published when, what becomes of failures and deaths."""

from __future__ import annotations

import pytest
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import Engine, answer, make_scheduler, oracle, request, step

from quire.engine.messages import LoadKv, TransfersDone
from quire.request import FinishReason
from quire.scheduler.scheduler import Scheduler, Wait
from quire.step import KvTransfer, StepPlan, StepResult, TransferDone

PROMPT = tuple(range(10))


def loading(num_wanted: int = 2, **config: object) -> tuple[Scheduler, KvTransfer]:
    """A scheduler with one request, of 10 tokens in blocks of 4, that waits for a load; and its transfer."""
    scheduler = make_scheduler(**config)  # type: ignore[arg-type]
    scheduler.add(request("a", PROMPT), 0.0)
    assert scheduler.transfers.load("a", "host", num_wanted, "handle") == 0
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.seqs == ()
    (transfer,) = plan.transfers
    assert scheduler.apply(StepResult(plan.step), 0.0) == []
    check_integrity(scheduler)
    return scheduler, transfer


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def test_a_load_names_blocks_and_hashes() -> None:
    _, transfer = loading(5, windows=(None, 8))
    assert (transfer.direction, transfer.remote, transfer.handle) == ("load", "host", "handle")
    assert (transfer.seq_id, transfer.epoch) == (0, 0)
    assert [block.group for block in transfer.blocks] == [0, 1, 0, 1], "two full rows, row by row"
    assert len({block.block_id for block in transfer.blocks}) == 4
    assert len({block.block_hash for block in transfer.blocks}) == 4


def test_a_sequence_that_loads_waits_without_spinning() -> None:
    scheduler, transfer = loading()
    assert scheduler.next_action(1.0) == Wait()
    assert scheduler.has_work
    assert scheduler.stats().num_waiting == 1
    scheduler.transfers.end([TransferDone(transfer.transfer_id, 2)])
    (seq,) = planned(scheduler).seqs
    assert (seq.num_computed_tokens, seq.num_scheduled_tokens) == (8, 2)


@pytest.mark.parametrize(("whole", "start"), [(0, 0), (1, 4), (2, 8)])
def test_what_came_is_used_and_the_rest_is_computed(whole: int, start: int) -> None:
    scheduler, transfer = loading()
    scheduler.transfers.end([TransferDone(transfer.transfer_id, whole, None if whole == 2 else "lost")])
    check_integrity(scheduler)
    (seq,) = planned(scheduler).seqs
    assert (seq.num_computed_tokens, seq.num_scheduled_tokens) == (start, 10 - start)
    stats = scheduler.stats()
    assert (stats.num_loaded_blocks, stats.num_failed_transfers) == (whole, whole < 2)


def test_blocks_are_not_published_before_they_came() -> None:
    scheduler, transfer = loading()
    assert scheduler.stats().num_cached_blocks == 0
    scheduler.add(request("b", PROMPT), 0.0)
    (seq,) = planned(scheduler).seqs
    assert seq.num_computed_tokens == 0
    scheduler.transfers.end(
        [TransferDone(transfer.transfer_id, 2)]
    )  # b has published the same rows meanwhile
    check_integrity(scheduler)
    assert scheduler.stats().num_cached_blocks == 2


def test_a_result_tells_of_a_transfer_too() -> None:
    scheduler, transfer = loading()
    scheduler.add(request("b", 6), 0.0)
    plan = planned(scheduler)
    done = (TransferDone(transfer.transfer_id, 2),)
    result = answer(scheduler, plan)
    scheduler.apply(StepResult(plan.step, result.seqs, transfers_done=done), 0.0)
    assert {p.seq_id: p.num_computed_tokens for p in planned(scheduler).seqs}[0] == 8


def test_a_load_outlives_the_sequence_it_is_for() -> None:
    scheduler, transfer = loading()
    (event,) = scheduler.abort("a")
    assert event.finish_reason is FinishReason.ABORT
    check_integrity(scheduler)
    assert scheduler.stats().num_free_blocks == 62, "bytes are still written to its blocks"
    scheduler.transfers.end([TransferDone(transfer.transfer_id, 2)])
    assert scheduler.stats().num_idle_blocks == 2
    assert not scheduler.has_work


def test_a_failed_step_ends_the_transfers_it_began() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", PROMPT), 0.0)
    scheduler.transfers.load("a", "host", 2)
    plan = planned(scheduler)
    scheduler.apply(StepResult(plan.step, error="failed"), 0.0)
    assert scheduler.stats().num_free_blocks == 64
    (seq,) = planned(scheduler).seqs
    assert seq.num_scheduled_tokens == 10
    scheduler.transfers.end([TransferDone(0, 2)])  # a late message is ignored
    check_integrity(scheduler)


def test_the_death_of_the_executor_ends_what_was_begun() -> None:
    scheduler, _ = loading()
    scheduler.add(request("b", 6), 0.0)
    scheduler.transfers.load("b", "host", 1)  # not told to the executor yet
    assert scheduler.fail_in_flight("died", 0.0) == []
    check_integrity(scheduler)
    plan = planned(scheduler)
    assert [seq.seq_id for seq in plan.seqs] == [0]
    assert [transfer.seq_id for transfer in plan.transfers] == [1]


def test_a_stored_block_stays_until_its_bytes_left() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(request("a", 8, max_tokens=1), 0.0)
    plan = planned(scheduler)
    last = list(scheduler.cache.prefix.nodes)[-1]
    assert scheduler.transfers.store(last, "host") is None, "its step is in flight"
    scheduler.apply(answer(scheduler, plan), 0.0)
    transfer_id = scheduler.transfers.store(last, "host")
    assert transfer_id is not None
    (transfer,) = planned(scheduler).transfers
    assert (transfer.direction, len(transfer.blocks)) == ("store", 1)
    check_integrity(scheduler)
    scheduler.add(request("b", 20, max_tokens=1), 0.0)
    assert scheduler.next_action(0.0) == Wait(), "four blocks are free, and two are being read"
    scheduler.apply(StepResult(1), 0.0)
    scheduler.transfers.end([TransferDone(transfer_id, 1)])
    assert planned(scheduler).seqs
    check_integrity(scheduler)


@pytest.mark.parametrize("why", ["unknown", "running", "cached", "no caching"])
def test_nothing_is_loaded_where_it_would_not_help(why: str) -> None:
    scheduler = make_scheduler(caching=why != "no caching")
    scheduler.add(request("a", PROMPT), 0.0)
    if why in ("running", "cached"):
        step(scheduler)
        scheduler.add(request("b", PROMPT), 0.0)
    before = scheduler.stats()
    name = {"unknown": "x", "cached": "b"}.get(why, "a")
    assert scheduler.transfers.load(name, "host", 2) is None
    assert scheduler.stats() == before


def test_a_load_takes_no_more_blocks_than_are_free() -> None:
    scheduler, transfer = loading(2, num_blocks=4)
    assert len(transfer.blocks) == 2
    scheduler.add(request("b", [*PROMPT, 1, 2]), 0.0)
    scheduler.transfers.load("b", "host", 3)
    (second,) = planned(scheduler).transfers
    assert len(second.blocks) == 2
    check_integrity(scheduler)


def test_tokens_are_those_of_the_oracle_after_a_load() -> None:
    engine = Engine(make_scheduler())
    one = request("a", PROMPT)
    engine.executor.transfers.prefill(engine.scheduler.cache.config.model_key, one, 2)
    engine.executor.transfers.on_done = lambda done: engine.core.put(TransfersDone((done,)))
    engine.put([one])
    engine.core.put(LoadKv("a", "host", 2))
    for _ in range(40):
        engine.step()
        engine.executor.tick()
    assert engine.tokens("a") == oracle(one)
    assert engine.end("a").timing.num_cached_tokens == 8
    assert not engine.core.has_work
