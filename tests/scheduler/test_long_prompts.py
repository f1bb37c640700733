"""A long prompt has a bounded part of each step, so that short ones come through; neither starves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.scheduler.harness import Engine, answer, make_scheduler, oracle, request, rows_of, step

from quire.cost.cost_model import CostModel, Curve, StepTime
from quire.errors import ConfigError
from quire.request import Deadline, Terms, TokenEvent
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange

LIMIT = 16


def make_busy(**config: Any) -> Scheduler:
    """One to which a short prompt came just now, as sequence 0."""
    scheduler = make(**config)
    scheduler.add(request("earlier", 1, max_tokens=1), 0.0)
    step(scheduler)
    return scheduler


def make(**config: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "num_blocks": 400, "max_model_len": 1000, "max_num_batched_tokens": 64, "max_num_seqs": 8,
        "long_prefill_token_threshold": LIMIT,
    }  # fmt: skip
    return make_scheduler(**{**settings, **config})


@pytest.mark.parametrize(("after_s", "expected"), [(1.0, [16] * 6 + [4]), (61.0, [64, 36])])
def test_a_long_prompt_alone_has_four_times_its_threshold_unless_short_ones_came_lately(
    after_s: float, expected: list[int]
) -> None:
    scheduler = make_busy()
    scheduler.add(request("long", 100), after_s)
    chunks: list[int] = []
    while sum(chunks) < 100:
        plan = scheduler.plan(after_s)
        chunks += rows_of(plan).values()
        assert plan is not None
        scheduler.apply(answer(scheduler, plan), after_s)
    assert chunks == expected


def test_a_short_prompt_is_computed_in_the_next_step() -> None:
    scheduler = make()
    scheduler.add(request("long", 500), 0.0)
    step(scheduler)
    scheduler.add(request("short", 10), 0.0)
    assert rows_of(scheduler.plan(0.0)) == {0: 1, 1: 10}  # a sixteenth of 16 is the long one's


def test_without_a_threshold_a_long_prompt_has_whole_steps() -> None:
    scheduler = make(long_prefill_token_threshold=0)
    scheduler.add(request("long", 500), 0.0)
    step(scheduler)
    scheduler.add(request("short", 10), 0.0)
    assert rows_of(scheduler.plan(0.0)) == {0: 64}


def test_short_prompts_without_end_do_not_stop_a_long_one() -> None:
    scheduler = make_busy(num_blocks=2000)
    scheduler.add(request("long", 200), 0.0)
    steps = 0
    while not any(event.request_id == "long" and event.token_ids for event in step(scheduler)):
        for i in range(4):
            scheduler.add(request(f"short-{steps}-{i}", 15, max_tokens=1), 0.0)
        steps += 1
        assert steps <= 200 // 7 + 4  # an eighth of 60 tokens per step
    assert steps >= 20  # they were let through


def test_long_prompts_take_turns_by_rank_while_short_ones_pass() -> None:
    scheduler = make()
    for name in ("first", "second", "third"):
        scheduler.add(request(name, 48, max_tokens=1), 0.0)
    scheduler.add(request("short", 8, max_tokens=1), 0.0)
    ends = []
    for _ in range(40):
        # Within a step's budget, so that they are cut only since a short one came.
        ends += [event.request_id for event in step(scheduler) if event.finish_reason is not None]
    assert ends == ["short", "first", "second", "third"]


def test_a_prompt_that_fits_a_step_is_whole_where_no_short_one_came() -> None:
    scheduler = make()
    scheduler.add(request("middle", 60, max_tokens=1), 0.0)
    assert rows_of(scheduler.plan(0.0)) == {0: 60}


def test_a_cached_prefix_makes_a_prompt_short() -> None:
    scheduler = make_busy()
    prefix = list(range(5000, 5096))
    scheduler.add(request("before", prefix, max_tokens=1), 0.0)
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(request("long", 500), 0.0)
    step(scheduler)
    scheduler.add(request("turn", [*prefix, 1, 2, 3], max_tokens=1), 0.0)
    assert rows_of(scheduler.plan(0.0)) == {2: 1, 3: 3}


def test_short_prompts_leave_a_running_prompt_its_blocks() -> None:
    scheduler = make(num_blocks=60)  # of 4 tokens: the long one needs 51 of them
    scheduler.add(request("long", 200, max_tokens=4), 0.0)
    step(scheduler)
    for i in range(12):
        scheduler.add(request(f"short-{i}", 12, max_tokens=2), 0.0)
    ends = []
    while scheduler.has_work:
        ends += [event.request_id for event in step(scheduler) if event.finish_reason is not None]
    assert scheduler.stats().num_preemptions == 0
    assert len(ends) == 13
    assert ends.index("long") > 6  # short ones ran in what was free


def test_blocks_of_a_running_prompt_are_not_given_away() -> None:
    """Of 16 blocks, the long one needs 13, and one as it enters. Each short one stays within a block of its own."""
    scheduler = make_busy(num_blocks=16, block_size=16, caching=False, max_num_seqs=12)
    scheduler.add(request("long", 200, max_tokens=4), 0.0)
    step(scheduler)
    for i in range(40):
        scheduler.add(request(f"short-{i}", 8, max_tokens=8), 0.0)
    ends = []
    while "long" not in ends:
        ends += [event.request_id for event in step(scheduler) if event.finish_reason is not None]
        assert scheduler.stats().num_running <= 1 + 3
    assert scheduler.stats().num_preemptions == 0
    assert len(ends) > 4  # short ones ran meanwhile


def test_priority_decides_among_those_that_fit() -> None:
    scheduler = make(order="priority", max_num_batched_tokens=20)
    scheduler.add(request("long", 500), 0.0)
    step(scheduler)
    scheduler.add(request("late", 14, priority=5), 0.0)
    scheduler.add(request("first", 14, priority=-5), 0.0)
    assert rows_of(scheduler.plan(0.0)) == {0: 2, 2: 14, 1: 4}  # an eighth of 20


def test_a_full_house_of_short_ones_does_not_slow_the_long_one() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("long", 500), 0.0)
    step(scheduler)
    scheduler.add(request("short", 10), 0.0)  # finds no seat
    assert rows_of(scheduler.plan(0.0)) == {0: 16}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_shares_change_no_token(in_flight: int) -> None:
    requests = [request("long", 300, max_tokens=6)]
    requests += [request(f"short-{i}", 3 + i, max_tokens=5, n=1 + i % 2) for i in range(6)]
    engine = Engine(make(num_blocks=120), in_flight=in_flight)
    engine.put(requests)
    engine.run()
    for one in requests:
        for index in range(one.sampling.n):
            assert engine.tokens(one.request_id, index) == oracle(one, index)


def test_the_threshold_changes_while_the_engine_runs() -> None:
    scheduler = make()
    scheduler.add(request("long", 500), 0.0)
    step(scheduler)
    scheduler.change_policy(PolicyChange(long_prefill_token_threshold=0))
    assert rows_of(scheduler.plan(0.0)) == {0: 64}
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold = -1 .* 0…"):
        scheduler.change_policy(PolicyChange(long_prefill_token_threshold=-1))


def timed(scheduler: Scheduler, now: float) -> tuple[float, list[TokenEvent]]:
    """One step at a millisecond per token; return when it was over and what came."""
    plan = scheduler.plan(now)
    assert plan is not None
    now += 1e-3 * sum(rows_of(plan).values())
    return now, scheduler.apply(answer(scheduler, plan), now)


def under_long_prompts(step_time: StepTime | None = None, **config: Any) -> tuple[Scheduler, float]:
    """A scheduler that has measured its pace, with one long prompt that runs and twelve that wait; the time."""
    scheduler, now = make(max_num_seqs=3, num_blocks=2000, **config), 0.0
    if step_time is not None:
        scheduler.use_step_time(step_time)
    for i in range(13):
        scheduler.add(request(f"long-{i}", 400, max_tokens=40), now)
    for _ in range(4):
        now, _ = timed(scheduler, now)
    return scheduler, now


def first_token_s(scheduler: Scheduler, now: float, name: str) -> float:
    """Run until a request has its first token; return when that was."""
    while True:
        now, events = timed(scheduler, now)
        if any(event.request_id == name and event.token_ids for event in events):
            return now


@pytest.mark.parametrize("num_prompt", [2, 10, 16])
def test_a_short_request_is_not_refused_for_long_prompts(num_prompt: int) -> None:
    """Its first token is due in far less than the long prompts take, and comes in time."""
    limit_s = 0.08  # the prompts before it take 5 s, and their outputs twelve seats
    for threshold, accepts in ((LIMIT, True), (0, False)):
        for how in ("deadline", "max_ttft"):
            settings = {"max_ttft_s": limit_s} if how != "deadline" else {}
            scheduler, now = under_long_prompts(long_prefill_token_threshold=threshold, **settings)
            short = request("short", num_prompt, arrival_s=now)
            if how == "deadline":
                short = replace(short, terms=Terms(deadline=Deadline(limit_s, None)))
            refused = [event.error for event in scheduler.add(short, now)]
            assert (not refused) == accepts, refused
            if accepts:
                assert first_token_s(scheduler, now, "short") - now <= limit_s


def test_a_long_request_waits_for_all_before_it() -> None:
    scheduler, now = under_long_prompts(max_ttft_s=4.5)
    (refused,) = scheduler.add(request("another", 400, arrival_s=now), now)
    assert refused.error_kind == "capacity"
    assert refused.retry_after_s > 0.0


def test_refused_long_prompts_hold_no_place_before_short_ones() -> None:
    scheduler, now = under_long_prompts(max_ttft_s=0.2)
    for i in range(3):
        (refused,) = scheduler.add(request(f"another-{i}", 400, arrival_s=now), now)
        assert refused.error_kind == "capacity"
    assert not scheduler.add(request("short", 10, arrival_s=now), now)


@pytest.mark.parametrize("num_shorts", [0, 3])
def test_the_first_token_of_a_short_prompt_is_predicted(num_shorts: int) -> None:
    """With a model of step times, and behind others of its kind."""
    model = CostModel(0.0, Curve((0.0, 1.0), (0.0, 1e-3)))
    scheduler, now = under_long_prompts(step_time=model)
    for i in range(num_shorts):
        scheduler.add(request(f"before-{i}", 12, arrival_s=now), now)
    scheduler.add(request("short", 12, arrival_s=now), now)
    predicted_s = scheduler.state.requests["short"].predicted_s
    stats = scheduler.stats().ttft
    assert stats.long_tokens == LIMIT
    assert predicted_s == pytest.approx(
        stats.seconds(12 * num_shorts, 12, busy=True, num_long=13 * 400), rel=1e-6
    )
    measured_s = first_token_s(scheduler, now, "short") - now
    assert 0.5 * measured_s <= predicted_s <= 2.0 * measured_s
