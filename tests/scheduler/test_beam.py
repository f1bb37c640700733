"""Beams equal a plain beam search over the fake model, whatever the scheduler does; the books always agree."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.fakes.executor import FakeFaults
from tests.fakes.model import chain
from tests.scheduler.harness import MODEL, Engine, make_scheduler, oracle, request
from tests.scheduler.plain_search import plain_search

from quire.engine.messages import AbortRequest
from quire.request import FinishReason, Request

SEED = 20261121


def beam(name: str, prompt: Any = 8, **fields: Any) -> Request:
    return request(name, prompt, **{"use_beam_search": True, "temperature": 0.0, "max_tokens": 8, **fields})


def check(engine: Engine, one: Request) -> None:
    expected = plain_search(one, engine.scheduler.config.max_model_len, MODEL)
    ends = {*one.sampling.eos_token_ids, *one.sampling.stop_token_ids}
    for index, output in enumerate(expected):
        assert engine.tokens(one.request_id, index) == output, (one.request_id, index)
        end = engine.end(one.request_id, index)
        assert end.finish_reason is (FinishReason.STOP if output[-1] in ends else FinishReason.LENGTH)
        assert end.stop_token_id == (output[-1] if output[-1] in ends else None)
    assert (one.request_id, len(expected)) not in engine.events, "no event beyond the answers"


def random_beam(rng: random.Random, index: int) -> Request:
    n = rng.randint(1, 4)
    return beam(
        f"b{index}",
        rng.randint(1, 20),
        n=n,
        best_of=rng.choice((None, n, n + 2)),
        max_tokens=rng.randint(1, 14),
        length_penalty=rng.choice((1.0, 1.0, 0.0, 0.6, 2.0, -1.0)),
        early_stopping=rng.choice((False, True, "never")),
        eos_token_ids=tuple(rng.sample(range(500), rng.choice((0, 60, 150)))),
        stop_token_ids=tuple(rng.sample(range(500), rng.choice((0, 30)))),
        logprobs=rng.choice((None, 0, 2)),
        arrival_s=rng.random(),
    )


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]
)
def test_beams_equal_a_plain_search(seed: int) -> None:
    """Tight budgets, few blocks and seats, several steps in flight, plain requests between them."""
    rng = random.Random(SEED + seed)
    block_size = rng.choice((1, 4, 4, 8))
    windows: tuple[int | None, ...] = rng.choice(((None,), (None,), (None, 6)))
    rows = -(-40 // block_size) * len(windows)  # what one sequence may need
    scheduler = make_scheduler(
        num_blocks=rng.choice((rows + 2, 2 * rows, 20 * rows)),
        block_size=block_size,
        windows=windows,
        caching=rng.random() < 0.8,
        max_num_batched_tokens=rng.choice((1, 3, 16, 64)),
        max_num_seqs=rng.choice((1, 3, 8, 20)),
        max_model_len=40,
    )
    engine = Engine(scheduler, in_flight=rng.choice((1, 2, 4)))
    beams = [random_beam(rng, i) for i in range(6)]
    plain = [request(f"p{i}", rng.randint(1, 20), max_tokens=9, n=rng.choice((1, 3))) for i in range(4)]
    both = [*beams, *plain]
    rng.shuffle(both)
    for one in both:
        engine.put([one])
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.run(limit=6000)
    for one in beams:
        check(engine, one)
    for one in plain:
        for index in range(one.sampling.n):
            assert engine.tokens(one.request_id, index) == oracle(one, index)
    stats = scheduler.stats()
    assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks
    assert not engine.executor.seq_ids - set(scheduler.state.gone)


def test_beams_fork_copy_on_write_and_free() -> None:
    engine = Engine(make_scheduler())
    one = beam("b", 10, n=4, max_tokens=9)
    engine.put([one])
    engine.run()
    check(engine, one)
    assert scheduler_counts(engine)["num_forks"] >= 3
    assert scheduler_counts(engine)["num_preemptions"] == 0


def test_too_few_blocks_preempt_beams_and_change_nothing() -> None:
    engine = Engine(make_scheduler(num_blocks=9, max_num_batched_tokens=7))
    asked = [beam(f"b{i}", 9, n=3, max_tokens=12) for i in range(2)]
    engine.put(asked)
    engine.run(limit=3000)
    assert scheduler_counts(engine)["num_preemptions"] > 0
    for one in asked:
        check(engine, one)


def test_more_beams_than_seats_take_turns() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    asked = [beam(f"b{i}", 9, n=4, max_tokens=6) for i in range(2)]
    engine.put(asked)
    engine.run(limit=3000)
    for one in asked:
        check(engine, one)


def scheduler_counts(engine: Engine) -> dict[str, int]:
    stats = engine.scheduler.stats()
    return {name: getattr(stats, name) for name in ("num_forks", "num_preemptions")}


@pytest.mark.parametrize("in_flight", [1, 3])
def test_an_abort_at_any_step_leaves_nothing(in_flight: int) -> None:
    for steps in range(14):
        engine = Engine(make_scheduler(max_num_batched_tokens=6), in_flight=in_flight)
        kept = beam("kept", 9, n=2, max_tokens=6)
        engine.put([beam("b", 9, n=2, best_of=4, max_tokens=40), kept])
        for _ in range(steps):
            engine.step()
        engine.core.put(AbortRequest("b"))
        engine.run()
        check(engine, kept)
        for index in range(2):
            assert engine.end("b", index).finish_reason is FinishReason.ABORT
        assert not engine.events["b", 2] + engine.events["b", 3], "two answers were asked for"
        stats = engine.scheduler.stats()
        assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks


@pytest.mark.parametrize("seed", range(3))
def test_a_failed_step_ends_the_whole_request(seed: int) -> None:
    faults = FakeFaults(step_error=0.03, seq_error=0.02, collect_raises=0.02, seed=seed)
    engine = Engine(make_scheduler(max_num_batched_tokens=9), in_flight=1 + seed % 3, faults=faults)
    rng = random.Random(seed)
    asked = [random_beam(rng, i) for i in range(10)]
    engine.put(asked)
    engine.run(limit=3000)
    num_failed = 0
    for one in asked:
        reasons = {engine.end(one.request_id, i).finish_reason for i in range(one.sampling.n)}
        if FinishReason.ERROR in reasons:
            assert reasons == {FinishReason.ERROR}
            num_failed += 1
        else:
            check(engine, one)
    assert 0 < num_failed < len(asked)


def test_logprobs_of_the_answers() -> None:
    engine = Engine(make_scheduler())
    one = beam("b", 9, n=2, best_of=3, logprobs=2, max_tokens=5)
    engine.put([one])
    engine.run()
    for index in range(2):
        (event,) = engine.events["b", index]
        assert event.logprobs is not None
        for place, entry in enumerate(event.logprobs):
            context = [*one.prompt_token_ids, *event.token_ids[:place]]
            found = MODEL.logprobs(chain(context)[-1], 6, 0)
            assert entry.token_id == event.token_ids[place] == found.top_token_ids[entry.rank - 1]
            assert entry.logprob == found.top_logprobs[entry.rank - 1]
            assert entry.top_token_ids == found.top_token_ids[:2]
