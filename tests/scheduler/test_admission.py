"""Refusals with their numbers, and requests that come back after a restart."""

from __future__ import annotations

from tests.scheduler.harness import Engine, make_scheduler, oracle, request

from quire.request import FinishReason


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=32)
    (event,) = scheduler.add(request("a", 32), 0.0)
    assert event.finish_reason is FinishReason.ERROR
    assert event.error_kind == "never_fits"
    assert event.error is not None
    assert "32 tokens" in event.error
    assert not scheduler.has_work


def test_what_the_pool_can_never_hold_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4)
    (event,) = scheduler.add(request("a", 10, max_tokens=8), 0.0)
    assert event.error_kind == "never_fits"
    assert event.error is not None
    for number in ("18 tokens", "10 prompt", "8 output", "5 KV blocks", "4 in all"):
        assert number in event.error
    # The last token is never computed: 17 tokens would need 16 rows, which is 4 blocks.
    assert scheduler.add(request("b", 10, max_tokens=7), 0.0) == []


def test_a_sliding_window_needs_its_window_only() -> None:
    scheduler = make_scheduler(num_blocks=12, windows=(None, 8))
    assert scheduler.add(request("a", 20, max_tokens=16), 0.0) == []  # 9 blocks + 3
    (event,) = scheduler.add(request("b", 20, max_tokens=20), 0.0)
    assert event.error_kind == "never_fits"


def test_the_largest_request_that_is_not_refused_runs_to_its_end() -> None:
    for windows, num_blocks in (((None,), 4), ((None, 8), 7), ((5,), 2), ((3, 17), 7)):
        engine = Engine(make_scheduler(num_blocks, windows=windows, max_num_batched_tokens=16), in_flight=2)
        one = request("a", 10, max_tokens=7)
        assert engine.scheduler.add(request("large", 10, max_tokens=40), 0.0) or windows in ((5,), (3, 17))
        engine.scheduler.abort("large")
        engine.put([one])
        engine.run()
        assert engine.tokens("a") == oracle(one)


def test_without_chunks_a_prompt_must_fit_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)
    (event,) = scheduler.add(request("a", 9), 0.0)
    assert event.error_kind == "never_fits"


def test_a_full_queue_refuses_for_now() -> None:
    scheduler = make_scheduler(max_queue=2)
    assert scheduler.add(request("a"), 0.0) == []
    assert scheduler.add(request("b"), 0.0) == []
    events = scheduler.add(request("c", n=3), 0.0)
    assert [e.error_kind for e in events] == ["capacity"] * 3
    assert [e.sample_index for e in events] == [0, 1, 2]
    scheduler.plan(0.0)
    assert scheduler.add(request("d"), 0.0) == []
    assert scheduler.stats().num_refused == 1


def test_a_restarted_request_goes_on_where_it_was() -> None:
    one = request("a", 9, n=3, max_tokens=10)
    full = [oracle(one, i) for i in range(3)]
    outputs = (tuple(full[0][:4]), (), tuple(full[2][:7]))
    engine = Engine(make_scheduler())
    engine.put([request("a", 9, n=3, max_tokens=10, outputs=outputs, finished=(2,))])
    engine.run()
    assert engine.tokens("a", 0) == full[0][4:]
    assert engine.tokens("a", 1) == full[1]
    assert ("a", 2) not in engine.events


def test_a_restarted_request_that_had_its_last_token_ends_at_once() -> None:
    one = request("a", 9, max_tokens=5)
    scheduler = make_scheduler()
    (event,) = scheduler.add(request("a", 9, max_tokens=5, outputs=(tuple(oracle(one)),)), 0.0)
    assert event.finish_reason is FinishReason.LENGTH
    (event,) = scheduler.add(request("b", 9, max_tokens=5, eos_token_ids=(7,), outputs=((3, 7),)), 0.0)
    assert (event.finish_reason, event.stop_token_id) == (FinishReason.STOP, 7)
    assert not scheduler.has_work


def test_a_request_of_which_every_sample_ended_is_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert scheduler.add(request("a", n=2, outputs=((1,), (2,)), finished=(0, 1)), 0.0) == []
    assert not scheduler.has_work
