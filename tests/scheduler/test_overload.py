"""Bounds of the queue, and the time that a rejected client is told."""

from __future__ import annotations

from dataclasses import replace

from tests.scheduler.harness import Engine, make_scheduler, request, step

from quire.request import Deadline, Terms


def test_the_queue_is_bounded_by_prompt_tokens_too() -> None:
    scheduler = make_scheduler(max_queue_tokens=40)
    assert scheduler.add(request("long", 60), 0.0) == [], "the first is never too long"
    (event,) = scheduler.add(request("b", 8), 0.0)
    assert event.error_kind == "capacity"
    assert "prompts of 60 tokens wait and of at most 40" in (event.error or "")
    step(scheduler)
    assert scheduler.add(request("c", 8), 0.0) == []


def test_the_queue_is_bounded_by_bytes_too() -> None:
    scheduler = make_scheduler(max_queue_bytes=50_000)
    heavy = request("heavy", 8)
    heavy = replace(heavy, sampling=replace(heavy.sampling, logit_bias=dict.fromkeys(range(4096), 1.0)))
    assert scheduler.add(heavy, 0.0) == [], "the first is never too large"
    for refused in (replace(request("grammar", 8), grammar="x" * 50_000), request("b", 8)):
        (event,) = scheduler.add(refused, 0.0)
        assert event.error_kind == "capacity"
        assert event.retry_after_s >= 1
        assert "bytes wait and of at most 50000 bytes may" in (event.error or "")
    step(scheduler)
    assert scheduler.add(request("c", 8), 0.0) == []


def test_the_time_told_is_the_wait_of_the_whole_queue() -> None:
    told = []
    for most in (4, 8, 16):
        engine = Engine(make_scheduler(max_num_seqs=2, max_queue=most))
        engine.put(request(f"w{i}", max_tokens=20) for i in range(2))
        engine.step()
        engine.put(request(f"late{i}", max_tokens=200, prompt=10 + i) for i in range(most + 3))
        engine.step()
        told.append([engine.end(f"late{i}").retry_after_s for i in range(most, most + 3)])
    print(told)
    assert all(times[0] == times[-1] >= 1 for times in told), "a rejected request holds no place"
    assert told[0] < told[1] < told[2]


def test_a_restarted_request_is_never_rejected_for_now() -> None:
    scheduler = make_scheduler(max_queue=1, max_ttft_s=0.001)
    for i in range(4):
        before = replace(request(f"r{i}", outputs=((),)), terms=Terms(deadline=Deadline(0.001, None)))
        assert scheduler.add(before, 0.0) == []


def test_an_unmeasured_engine_rejects_no_first_token() -> None:
    scheduler = make_scheduler(max_ttft_s=0.001)
    assert [scheduler.add(request(f"r{i}"), 0.0) for i in range(20)] == [[]] * 20
