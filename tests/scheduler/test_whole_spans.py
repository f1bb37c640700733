"""Spans whose tokens see each other both ways are never cut by a step, and everything still ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.fakes.executor import FakeDrafts
from tests.scheduler.harness import Engine, answer, make_scheduler, oracle, request, rows_of, step

from quire.request import FinishReason, Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange
from quire.spans import Span
from quire.step import StepPlan

IMAGE = 9


def seen(name: str, parts: list[int], *, whole: bool = True, **fields: object) -> Request:
    """A request whose prompt has so many tokens of text, of an image, of text …"""
    ids: list[int] = []
    spans: list[Span] = []
    for index, length in enumerate(parts):
        if index % 2 == 0:
            ids += [100 + (7 * at + len(name)) % 90 for at in range(length)]
            continue
        content = f"{name[0]}{index}{length}".encode().ljust(32)
        spans.append(Span(len(ids), length, content, (1, 1), b"", whole))
        ids += [IMAGE] * length
    return replace(request(name, ids, **fields), spans=tuple(spans))  # type: ignore[arg-type]


def prompt_chunks(scheduler: Scheduler, num_tokens: int) -> list[int]:
    """Return the sizes of the chunks of the prompt of sequence 0."""
    found: list[int] = []
    while sum(found) < num_tokens:
        plan = scheduler.plan(0.0)
        assert plan is not None
        found.append(rows_of(plan)[0])
        scheduler.apply(answer(scheduler, plan), 0.0)
    return found


def test_chunk_ends_before_a_span_that_does_not_fit_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=2)
    scheduler.add(seen("a", [10, 12, 3, 8, 2]), 0.0)
    assert prompt_chunks(scheduler, 35) == [10, 15, 10]


def test_spans_that_do_not_see_both_ways_are_cut() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=2)
    scheduler.add(seen("a", [10, 12, 3, 8, 2], whole=False), 0.0)
    assert prompt_chunks(scheduler, 35) == [16, 16, 3]


def test_span_may_have_more_than_the_share_of_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=4)
    scheduler.add(request("short", 2), 0.0)
    scheduler.add(seen("a", [6, 12, 9]), 0.0)
    sizes: list[int] = []
    while sum(sizes) < 27:
        plan = scheduler.plan(0.0)
        assert plan is not None
        sizes.append(rows_of(plan).get(1, 0))
        scheduler.apply(answer(scheduler, plan), 0.0)
    assert max(sizes) == 13  # with the one token before it


def test_span_is_computed_though_the_budget_became_smaller_than_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    scheduler.change_policy(PolicyChange(max_num_batched_tokens=5))
    scheduler.add(seen("a", [6, 12, 9]), 0.0)
    assert prompt_chunks(scheduler, 27) == [5, 1, 12, 5, 4]


def test_hit_may_end_in_a_span() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, block_size=4)
    for name, length in (("a", 3), ("aa", 9)):  # the same image, and other words behind it
        scheduler.add(seen(name, [0, 14, length], max_tokens=1), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None
        assert list(rows_of(plan).values()) == ([16] if name == "a" else [11])
        scheduler.apply(answer(scheduler, plan), 0.0)
        while scheduler.has_work:
            step(scheduler)


def test_span_too_large_for_the_memory_fails_its_request() -> None:
    """A chunk that has other tokens as well is computed again in smaller ones; a span is not tried for ever."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(seen("a", [20, 24, 9]), 0.0)
    sizes: list[int] = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan is not None
        sizes.append(rows_of(plan)[0])
        result = answer(scheduler, plan)
        if sizes[-1] >= 24:
            failed = result.seqs[0]._replace(error="no memory", out_of_memory=True)
            result = replace(result, seqs=(failed,), max_tokens=sizes[-1] // 2)
        events = scheduler.apply(result, 0.0)
    assert sizes == [53, 20, 26, 24]
    assert [event.finish_reason for event in events] == [FinishReason.ERROR]


def test_entering_span_preempts_nothing_that_is_planned() -> None:
    """With sliding windows a sequence enters with fewer blocks than its first span takes."""
    scheduler = make_scheduler(12, 4, (None, 5), max_model_len=44, order="priority")
    engine = Engine(scheduler)
    asked = [request("low", 20, priority=1, max_tokens=8), request("last", 5, priority=2, max_tokens=8)]
    engine.put(asked)
    engine.step()
    asked.append(seen("first", [0, 9, 1], priority=0))
    engine.put(asked[-1:])
    engine.run()
    assert scheduler.stats().num_preemptions > 0
    assert [engine.tokens(one.request_id) for one in asked] == [oracle(one) for one in asked]


def test_drafts_leave_room_for_a_span() -> None:
    """Four sequences with four drafts each would fill each step."""
    scheduler = make_scheduler(max_num_seqs=5, max_num_batched_tokens=20, max_num_drafts=4, max_model_len=200)
    engine = Engine(scheduler, drafts=FakeDrafts(4))
    others = [request(f"other {number}", 3, max_tokens=60) for number in range(4)]
    engine.put(others)
    for _ in range(4):
        engine.step()
    one = seen("a", [1, 14, 1], max_tokens=1)
    engine.put([one])
    for _ in range(4):
        engine.step()
    assert engine.tokens("a") == oracle(one)
    assert all(len(engine.tokens(other.request_id)) < 60 for other in others)


class Checked(Engine):
    """Checks that no plan cuts a span."""

    def watch(self, requests: dict[str, Request]) -> None:
        submit, spans = self.executor.submit, {}

        def checked(plan: StepPlan) -> None:
            for new in plan.new_seqs:
                spans[new.seq_id] = new.spans
            for seq in plan.seqs:
                end = seq.num_computed_tokens + seq.num_scheduled_tokens
                for span in spans[seq.seq_id]:
                    assert not span.start < end < span.end, (seq, span)
            submit(plan)

        self.executor.submit = checked  # type: ignore[method-assign]


WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 16), (None, None, 13))


def play(seed: int) -> None:
    rng = random.Random(seed)
    longest, seats = rng.choice((5, 9, 12)), rng.choice((1, 3, 6))
    budget = longest + seats + rng.choice((0, 1, 7, 40))
    windows, size = rng.choice(WINDOWS), rng.choice((1, 4, 8))
    rows = -(-64 // size)
    scheduler = make_scheduler(
        int(rows * len(windows) * rng.choice((1.3, 1.6, 3.0))) + 2 * len(windows), size, windows,
        caching=rng.random() < 0.8, max_num_seqs=seats, max_num_batched_tokens=budget,
        long_prefill_token_threshold=rng.choice((0, 0, 1, 4, 20)), order=rng.choice(("fcfs", "priority", "fair")),
    )  # fmt: skip
    engine, asked = Checked(scheduler, in_flight=rng.choice((1, 2))), {}
    for number in range(12):
        parts = [rng.randint(1, 9)]
        while rng.random() < 0.7 and sum(parts) + longest + 6 < 48:
            parts += [rng.randint(1, longest), rng.randint(1, 5)]
        name = f"{rng.choice('abc')}{number}"
        asked[name] = seen(name, parts, max_tokens=rng.randint(1, 8), priority=rng.randint(0, 2))
    engine.watch(asked)
    waiting = list(asked.values())
    for _ in range(2000):
        if waiting and rng.random() < 0.4:
            engine.put([waiting.pop()])
        if rng.random() < 0.05:
            scheduler.change_policy(PolicyChange(max_num_batched_tokens=rng.randint(1, budget)))
        if not waiting and not engine.core.has_work:
            break
        engine.step()
    else:
        raise AssertionError(f"seed {seed}: still at work: {engine.core.stats()}")
    for name, one in asked.items():
        assert engine.tokens(name) == oracle(one), (seed, name)


def test_random_prompts_with_spans_end_as_if_alone() -> None:
    for seed in range(60):
        play(seed)


@pytest.mark.slow
def test_many_random_prompts_with_spans_end_as_if_alone() -> None:
    for seed in range(60, 2000):
        play(seed)
