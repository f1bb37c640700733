"""Rows of a step: decodes first, in turn where they do not fit, the rest to prompt chunks."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.scheduler.harness import answer, make_scheduler, request, rows_of, step

from quire.errors import ConfigError
from quire.scheduler.slo import PolicyChange


def test_prompts_are_cut_to_the_rows_that_are_left() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(request("a", 16), 0.0)
    scheduler.add(request("b", 16), 0.0)
    chunks = []
    for _ in range(4):
        plan = scheduler.plan(0.0)
        assert plan is not None
        chunks.append(rows_of(plan))
        scheduler.apply(answer(scheduler, plan), 0.0)
    assert chunks == [{0: 10}, {0: 6, 1: 4}, {1: 9, 0: 1}, {1: 3, 0: 1}]


def test_decodes_come_first_and_take_turns() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    for i in range(5):
        scheduler.add(request(f"r{i}", 6, max_tokens=40), 0.0)
    step(scheduler)
    scheduler.change_policy(PolicyChange(max_num_batched_tokens=2))
    scheduler.add(request("late", 8), 0.0)
    turns: Counter[int] = Counter()
    for _ in range(10):
        plan = scheduler.plan(0.0)
        assert plan is not None
        assert len(plan.seqs) == 2
        turns.update(rows_of(plan).keys())
        scheduler.apply(answer(scheduler, plan), 0.0)
    assert turns == Counter(dict.fromkeys(range(5), 4))


def test_without_chunks_a_prompt_waits_until_it_fits_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, enable_chunked_prefill=False)
    scheduler.add(request("a", 15), 0.0)
    scheduler.add(request("b", 15), 0.0)
    plans = []
    for _ in range(2):
        plan = scheduler.plan(0.0)
        assert plan is not None
        plans.append(rows_of(plan))
        scheduler.apply(answer(scheduler, plan), 0.0)
    assert plans == [{0: 15}, {1: 15, 0: 1}]


def test_without_chunks_only_what_outgrew_the_step_is_cut() -> None:
    """It cannot be refused any more, so it must not be stuck."""
    scheduler = make_scheduler(
        num_blocks=11, max_num_batched_tokens=12, enable_chunked_prefill=False, caching=False
    )
    scheduler.add(request("a", 10, max_tokens=26), 0.0)
    scheduler.add(request("b", 10, max_tokens=26), 0.0)
    ends = []
    for _ in range(200):
        ends += [e for e in step(scheduler) if e.finish_reason is not None]
    assert [(e.request_id, e.finish_reason) for e in ends] == [("a", "length"), ("b", "length")]
    assert ends[1].timing.num_preemptions > 0
    assert scheduler.stats().num_chunks > 0


def test_a_wrong_setting_changes_nothing() -> None:
    scheduler = make_scheduler()
    before = scheduler.config
    for change in (
        PolicyChange(max_num_seqs=0, max_queue=7),
        PolicyChange(order="random"),  # type: ignore[arg-type]
        PolicyChange(gate="open"),  # type: ignore[arg-type]
        PolicyChange(max_num_seqs=before.max_num_seqs + 1),
        PolicyChange(max_num_batched_tokens=before.max_num_batched_tokens + 1),
        PolicyChange(dynamic_max_wait_s=-1.0),
    ):
        with pytest.raises(ConfigError) as caught:
            scheduler.change_policy(change)
        param = str(caught.value.param)
        assert f"{param} = {getattr(change, param)!r} is not allowed: it must be" in str(caught.value)
    assert scheduler.config == before
