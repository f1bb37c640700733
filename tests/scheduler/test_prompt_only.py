"""Log-probabilities of prompts, and requests that end with their prompt: each entry comes, whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes.executor import FakeFaults
from tests.fakes.model import chain
from tests.scheduler.harness import MODEL, Engine, make_scheduler, oracle, request

from quire.request import FinishReason, Pooling, Request, TokenLogprobs


def scores(engine: Engine, one: Request) -> list[TokenLogprobs | None]:
    """The entries of a request's events by their places; what comes twice must be equal."""
    found: list[TokenLogprobs | None] = [None] * len(one.prompt_token_ids)
    for index in range(one.sampling.n):
        for event in engine.events[one.request_id, index]:
            for place, entry in enumerate(event.prompt_logprobs or (), event.prompt_start):
                assert found[place] in (None, entry)
                found[place] = entry
    return found


def expected_scores(one: Request) -> list[TokenLogprobs | None]:
    ids, count = one.prompt_token_ids, one.sampling.prompt_logprobs or 0
    return [None, *(MODEL.logprobs(s, count, i) for s, i in zip(chain(ids), ids[1:], strict=False))]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_prompt_token_but_the_first_is_scored_once(n: int, budget: int, in_flight: int) -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=budget), in_flight=in_flight)
    asked = [request(f"r{i}", size, prompt_logprobs=2, n=n) for i, size in enumerate((1, 2, 9, 17))]
    engine.put(asked)
    engine.run()
    for one in asked:
        assert scores(engine, one) == expected_scores(one)
        for index in range(n):
            assert engine.tokens(one.request_id, index) == oracle(one, index)
        events = [e for i in range(n) for e in engine.events[one.request_id, i]]
        assert sum(len(e.prompt_logprobs or ()) for e in events) == len(one.prompt_token_ids) - 1
        first = next(e for e in engine.events[one.request_id, 0] if e.token_ids)
        assert all(
            engine.events[one.request_id, 0].index(first) > i
            for i, e in enumerate(engine.events[one.request_id, 0])
            if e.prompt_logprobs
        ), "they come before the first token"


def test_they_do_not_read_the_cache_and_publish() -> None:
    engine = Engine(make_scheduler())
    prompt = range(100, 117)
    engine.put([request("first", prompt)])
    engine.run()
    scored = request("scored", prompt, prompt_logprobs=0)
    engine.put([scored])
    engine.run()
    assert engine.end("scored").timing.num_cached_tokens == 0
    assert scores(engine, scored) == expected_scores(scored)
    other = range(200, 217)
    engine.put([request("publishes", other, prompt_logprobs=0)])
    engine.run()
    engine.put([request("reads", other)])
    engine.run()
    assert engine.end("reads").timing.num_cached_tokens == 16


@pytest.mark.parametrize("max_tokens", [0, 12])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_preemption_loses_and_changes_no_prompt_logprob(max_tokens: int, in_flight: int) -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=5)
    engine = Engine(scheduler, in_flight=in_flight)
    asked = [request(f"r{i}", 14, prompt_logprobs=1, max_tokens=max_tokens) for i in range(4)]
    talker = [request(f"t{i}", 3, max_tokens=20, arrival_s=-1.0) for i in range(2)]
    engine.put([*talker, *asked])
    engine.run()
    assert scheduler.stats().num_preemptions > 0
    for one in asked:
        assert scores(engine, one) == expected_scores(one)
        if max_tokens:
            assert engine.tokens(one.request_id) == oracle(one)


def test_a_prompt_alone_ends_by_length_without_a_token() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=4))
    asked = [
        request("a", 11, prompt_logprobs=1, max_tokens=0, n=2),
        request("b", 1, prompt_logprobs=0, max_tokens=0),
    ]
    engine.put(asked)
    engine.run()
    for one in asked:
        assert scores(engine, one) == expected_scores(one)
        for index in range(one.sampling.n):
            assert engine.tokens(one.request_id, index) == []
            assert engine.end(one.request_id, index).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["last", "mean", "logprobs"])
def test_pooling(kind: str) -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=6, max_model_len=20))
    pooling = Pooling(kind, (3, 4) if kind == "logprobs" else ())  # type: ignore[arg-type]
    prompts = [
        range(100, 117),
        range(100, 117),
        range(300, 301),
        range(400, 420),
    ]  # the last fills the context
    asked = [replace(request(f"p{i}", p, max_tokens=1), pooling=pooling) for i, p in enumerate(prompts)]
    for one in asked:
        engine.put([one])
        engine.run()
        end = engine.end(one.request_id)
        assert end.pooled == MODEL.pooled(chain(one.prompt_token_ids)[-1], pooling)
        assert end.finish_reason is FinishReason.STOP
        assert engine.tokens(one.request_id) == []
    assert engine.end("p1").timing.num_cached_tokens == (0 if kind == "mean" else 16)


def test_after_a_restart_what_was_delivered_is_not_computed_again() -> None:
    engine = Engine(make_scheduler())
    one = request("r", 9, prompt_logprobs=1, outputs=((),))
    engine.put([one])
    engine.run()
    assert scores(engine, one) == expected_scores(one)
    resumed = request("s", 9, prompt_logprobs=1)
    tokens = oracle(resumed)
    engine.put([replace(resumed, output_token_ids=(tuple(tokens[:2]),))])
    engine.run()
    assert engine.tokens("s") == tokens[2:]
    assert not any(e.prompt_logprobs for e in engine.events["s", 0])


def test_failed_steps_end_them_as_they_end_others() -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=4), faults=FakeFaults(seq_error=0.1, seed=3))
    asked = [request(f"r{i}", 15, prompt_logprobs=1) for i in range(12)]
    engine.put(asked)
    engine.run()
    reasons = {one.request_id: engine.end(one.request_id).finish_reason for one in asked}
    assert set(reasons.values()) == {FinishReason.ERROR, FinishReason.LENGTH}
    for one in asked:
        if reasons[one.request_id] is FinishReason.LENGTH:
            assert scores(engine, one) == expected_scores(one)
