"""Bounds of the queue, and promises: places held for requests that were rejected."""

from __future__ import annotations

from dataclasses import replace

from tests.scheduler.harness import Engine, make_scheduler, request, step

from quire.request import Deadline
from quire.scheduler.queue import Promises


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


def test_the_time_told_grows_with_the_line() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2, max_queue=2))
    engine.put(request(f"w{i}", max_tokens=20) for i in range(4))
    for _ in range(4):
        engine.step()
    engine.put(request(f"late{i}", max_tokens=2000, prompt=10 + i) for i in range(12))
    engine.step()
    told = [engine.end(f"late{i}").retry_after_s for i in range(2, 12)]
    assert told == sorted(told)
    assert told[-1] > told[0] >= 1


def full(**config: object) -> Engine:
    """An engine of one seat with a full queue of one, from which "again" was rejected."""
    engine = Engine(make_scheduler(max_num_seqs=1, max_queue=1, **config))
    engine.put(request(name, max_tokens=30) for name in "ab")
    engine.step()
    engine.put([request("b2", max_tokens=30), request("again", max_tokens=30)])
    engine.step()
    assert engine.end("again").error_kind == "capacity"
    return engine


def test_a_promised_place_is_held() -> None:
    engine = full()
    told = engine.end("again").retry_after_s
    engine.clock.advance(told)
    engine.step()
    fresh, again = request("fresh", 9, max_tokens=30), request("again", max_tokens=30)
    (event,) = engine.scheduler.add(fresh, engine.clock.now())
    assert event.error_kind == "capacity"
    assert engine.scheduler.add(replace(again, request_id="second"), engine.clock.now()) == []


def test_promises_that_are_not_kept_hold_nothing_for_long() -> None:
    promises = Promises()
    for i in range(200):
        promises.make(i + 1, 8, float(i))
    assert promises.expected() == (200, 1600)
    assert promises.redeem(200, 0.0) is False, "not yet"
    assert promises.redeem(200, 199.0) is True
    assert len(promises) == 2, "those of the last seconds"
    assert promises.share < 0.2
    assert promises.expected()[0] == 1


def test_a_restarted_request_is_never_rejected_for_now() -> None:
    scheduler = make_scheduler(max_queue=1, max_ttft_s=0.001)
    for i in range(4):
        before = replace(request(f"r{i}", outputs=((),)), deadline=Deadline(0.001, None))
        assert scheduler.add(before, 0.0) == []


def test_an_unmeasured_engine_rejects_no_first_token() -> None:
    scheduler = make_scheduler(max_ttft_s=0.001)
    assert [scheduler.add(request(f"r{i}"), 0.0) for i in range(20)] == [[]] * 20
