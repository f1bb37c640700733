"""Engine-seconds and KV-block-seconds: who pays for a step, and for blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from tests.scheduler.harness import Engine, answer, make_scheduler, request

from quire.request import Request, SampleTiming, TokenEvent
from quire.scheduler.scheduler import Scheduler
from quire.step import StepResult


@dataclass
class Timed:
    """A scheduler whose steps take as long as a test says."""

    scheduler: Scheduler
    now: float = 100.0
    ends: dict[tuple[str, int], SampleTiming] = field(default_factory=dict)
    events: list[TokenEvent] = field(default_factory=list)

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.note(self.scheduler.add(each, self.now))

    def step(self, seconds: float) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        self.now += seconds
        self.note(self.scheduler.apply(answer(self.scheduler, plan), self.now))
        return True

    def run(self, seconds: float = 1.0) -> None:
        while self.step(seconds):
            pass

    def note(self, events: list[TokenEvent]) -> None:
        self.events += events
        for event in events:
            if event.finish_reason is not None:
                assert event.timing is not None
                self.ends[event.request_id, event.sample_index] = event.timing

    def charged_s(self) -> float:
        return sum(timing.engine_s for timing in self.ends.values())


def test_step_is_shared_by_scheduled_tokens() -> None:
    timed = Timed(make_scheduler())
    timed.add(request("a", 4, max_tokens=3), request("b", 12, max_tokens=1))
    timed.step(8.0)  # 4 + 12 tokens
    assert timed.ends["b", 0].engine_s == pytest.approx(6.0)
    timed.step(1.0)
    timed.step(2.0)
    assert timed.ends["a", 0].engine_s == pytest.approx(2.0 + 1.0 + 2.0)


def test_requests_engine_seconds_sum_to_busy_time() -> None:
    timed = Timed(make_scheduler(num_blocks=16, max_num_batched_tokens=10, max_num_seqs=4))
    timed.add(*(request(f"r{i}", 5 + 3 * i, max_tokens=20 + i, n=1 + i % 2) for i in range(6)))
    timed.step(0.5)
    timed.now += 10.0  # idle time is nobody's
    timed.run(0.25)
    stats = timed.scheduler.stats()
    assert stats.num_preemptions
    assert stats.num_chunks
    assert stats.busy_s == pytest.approx(timed.now - 100.0 - 10.0)
    assert timed.charged_s() == pytest.approx(stats.busy_s)
    assert stats.unshared_s == 0.0


def test_steps_in_flight_are_not_counted_twice() -> None:
    scheduler = make_scheduler()
    timed = Timed(scheduler)
    timed.add(request("a", 4, max_tokens=3))
    first = scheduler.plan(100.0)
    second = scheduler.plan(100.5)
    assert first is not None
    assert second is not None
    timed.note(scheduler.apply(answer(scheduler, first), 102.0))
    timed.note(scheduler.apply(answer(scheduler, second), 103.0))
    assert scheduler.stats().busy_s == pytest.approx(3.0)


def test_a_sequence_that_ended_in_flight_is_charged_nothing() -> None:
    scheduler = make_scheduler()
    timed = Timed(scheduler)
    timed.add(request("a", 6, max_tokens=9), request("b", 2, max_tokens=9))
    plan = scheduler.plan(100.0)
    assert plan is not None
    result = answer(scheduler, plan)
    timed.note(scheduler.abort("a"))
    timed.note(scheduler.apply(result, 108.0))
    timed.now = 108.0
    timed.run(1.0)
    stats = scheduler.stats()
    assert stats.unshared_s == pytest.approx(6.0)
    assert timed.ends["a", 0].engine_s == 0.0
    assert timed.charged_s() + stats.unshared_s == pytest.approx(stats.busy_s)


@pytest.mark.parametrize("whole_step", [True, False], ids=["step", "sequence"])
def test_a_failed_step_is_charged_to_its_sequences(whole_step: bool) -> None:
    scheduler = make_scheduler()
    timed = Timed(scheduler)
    timed.add(request("a", 6, max_tokens=9), request("b", 2, max_tokens=1))
    plan = scheduler.plan(100.0)
    assert plan is not None
    result = answer(scheduler, plan)
    first = result.seqs[0]._replace(token_ids=(), error="bad")
    failed = (
        StepResult(plan.step, error="bad") if whole_step else replace(result, seqs=(first, *result.seqs[1:]))
    )
    timed.note(scheduler.apply(failed, 108.0))
    assert timed.ends["a", 0].engine_s == pytest.approx(6.0)
    assert timed.ends["b", 0].engine_s == pytest.approx(2.0)


def test_preempted_sequence_pays_for_both_times() -> None:
    timed = Timed(make_scheduler(num_blocks=7, max_num_seqs=2))
    timed.add(request("a", 8, max_tokens=12), request("b", 8, max_tokens=6))
    timed.run(1.0)
    assert timed.ends["b", 0].num_preemptions
    assert timed.charged_s() == pytest.approx(timed.scheduler.stats().busy_s)


def test_blocks_count_for_as_long_as_they_are_held() -> None:
    timed = Timed(make_scheduler(block_size=4))
    timed.add(request("a", 7, max_tokens=3))
    timed.step(1.0)  # tokens 0…6 in 2 blocks
    timed.step(2.0)  # token 7 in the second
    timed.step(4.0)  # token 8 in a third
    assert timed.ends["a", 0].kv_block_s == pytest.approx(2 * 1.0 + 2 * 2.0 + 3 * 4.0)
    assert timed.scheduler.stats().kv_block_s == pytest.approx(18.0)


def test_waiting_and_preempted_sequences_hold_no_blocks() -> None:
    timed = Timed(make_scheduler(max_num_seqs=1))
    timed.add(request("a", 4, max_tokens=2), request("b", 4, max_tokens=1))
    timed.step(1.0)
    timed.step(1.0)
    timed.step(8.0)
    assert timed.ends["b", 0].kv_block_s == pytest.approx(8.0)


def test_shared_blocks_count_for_each_sequence() -> None:
    timed = Timed(make_scheduler(block_size=4))
    timed.add(request("a", 9, max_tokens=1, n=2))
    timed.step(1.0)  # the first 8 tokens, of the leader
    while timed.step(1.0):
        pass
    assert timed.ends["a", 0].kv_block_s >= 3.0
    assert timed.ends["a", 1].kv_block_s >= 3.0


def test_rows_that_slide_out_of_a_window_are_not_held() -> None:
    held = {}
    for window in (None, 4):
        timed = Timed(make_scheduler(block_size=4, windows=(window,)))
        timed.add(request("a", 4, max_tokens=20))
        timed.run(1.0)
        held[window] = timed.ends["a", 0].kv_block_s
    assert held[4] <= 2 * 20 + 1
    assert held[None] > held[4]


def test_beams_beyond_the_answers_are_charged_to_the_answers() -> None:
    engine = Engine(make_scheduler())
    collect = engine.executor.collect

    def slow_collect() -> StepResult:
        engine.clock.advance(0.5)
        return collect()

    engine.executor.collect = slow_collect  # type: ignore[method-assign]
    engine.put([request("a", 6, max_tokens=4, n=1, best_of=3, temperature=0.0, use_beam_search=True)])
    engine.run()
    timing = engine.end("a").timing
    stats = engine.core.stats()
    assert timing is not None
    assert stats.busy_s >= 2.0
    assert timing.engine_s == pytest.approx(stats.busy_s)
    assert timing.kv_block_s == pytest.approx(stats.kv_block_s)


def test_a_sequence_with_stop_strings_tells_its_cost_each_time() -> None:
    timed = Timed(make_scheduler())
    timed.add(request("a", 4, max_tokens=4, stop=("x",)), request("b", 4, max_tokens=4))
    timed.run(1.0)
    costs = [event.timing.engine_s for event in timed.events if event.request_id == "a" and event.timing]
    assert costs == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert sum(event.timing is not None for event in timed.events if event.request_id == "b") == 2


def test_unused_slots_are_the_figure_of_fragmentation() -> None:
    timed = Timed(make_scheduler(block_size=4))
    timed.add(request("a", 5, max_tokens=9), request("b", 8, max_tokens=9))
    timed.step(1.0)
    stats = timed.scheduler.stats()
    assert stats.num_unused_slots == 3
    assert stats.kv_fragmentation == pytest.approx(3 / 16)
    timed.run()
    assert timed.scheduler.stats().num_unused_slots == 0
