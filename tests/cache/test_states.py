"""Recurrent states beside the blocks: slots, checkpoints, what a hit needs, and what an agent's turns compute again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.fakes.executor import FakeDrafts
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import MODEL, Engine, oracle, request

from quire.cache.blocks import BlockTable, Node
from quire.cache.checkpoint_places import Kind, places_of, score
from quire.cache.checkpoints import Checkpoint, Checkpoints, LiveState
from quire.cache.draft_slots import DraftSlots
from quire.config import CacheConfig, SchedulerConfig
from quire.request import FinishReason, Request
from quire.scheduler.scheduler import Scheduler, audit
from quire.step import SeqResult, StepResult

SIZE = 16


def make_engine(
    num_checkpoints: int = 16,
    *,
    max_num_seqs: int = 4,
    num_blocks: int = 400,
    in_flight: int = 1,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 4096,
    num_drafts: int = 0,
) -> Engine:
    """An engine of a model with states. Of its drafts, up to ``num_drafts`` per step, a fifth are wrong."""
    cache = CacheConfig(
        num_blocks,
        SIZE,
        num_states=max_num_seqs,
        num_checkpoints=num_checkpoints,
        num_draft_states=num_drafts * max_num_seqs,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_num_drafts=num_drafts,
    )
    drafts = FakeDrafts(num_drafts, 0.2, seed=7)
    return Engine(Scheduler(config, cache), in_flight=in_flight, drafts=drafts)


def run(engine: Engine, *requests: Request) -> list[int]:
    """Run ``requests`` together; return how many tokens of each prompt came from the cache."""
    engine.put(requests)
    engine.run()
    cached = []
    for one in requests:
        assert engine.tokens(one.request_id) == oracle(one)
        timing = engine.end(one.request_id).timing
        assert timing is not None
        cached.append(timing.num_cached_tokens)
    return cached


def test_places_double_their_distance_from_the_end() -> None:
    places = {place.num_tokens: place.kind for place in places_of(1000, 0, 0, SIZE)}
    assert places.pop(992) is Kind.PROMPT
    assert set(places.values()) == {Kind.BACKWARD}
    assert sorted(places) == [480, 736, 864, 928, 960, 976]
    for num_differing in range(1, 1000):
        first = 1000 - num_differing
        best = max([0, *(at for at in (*places, 992) if at <= first)])
        assert first - best <= num_differing + SIZE


def test_a_prompt_that_leaves_the_tree_is_learned_at_its_second_use() -> None:
    branches = [p for p in places_of(320, 0, 192, SIZE) if p.kind is Kind.BRANCH]
    assert branches == [(192, Kind.BRANCH, 192 - 64)]
    assert not [p for p in places_of(320, 160, 192, SIZE) if p.kind is Kind.BRANCH]
    engine = make_engine()
    system = list(range(3000, 3000 + 20 * SIZE))
    users = [request(f"user {i}", [*system, *range(5000 + 500 * i, 5300 + 500 * i)]) for i in range(3)]
    assert [run(engine, user) for user in users] == [[0], [96], [320]]


def test_same_prompt_again_begins_at_the_last_edge_before_its_end() -> None:
    engine = make_engine()
    prompt = range(4000, 4000 + 4 * SIZE)
    assert run(engine, request("first", prompt)) == [0]
    assert run(engine, request("again", prompt)) == [3 * SIZE]
    assert run(engine, request("longer", [*prompt, 1, 2, 3])) == [4 * SIZE]


def test_blocks_without_a_checkpoint_are_no_hit() -> None:
    engine = make_engine(num_checkpoints=0)
    prompt = range(4000, 4000 + 5 * SIZE)
    assert run(engine, request("first", prompt)) == [0]
    assert run(engine, request("again", prompt)) == [0]
    assert engine.scheduler.stats().num_checkpoints == 0


def test_a_seat_needs_a_slot() -> None:
    engine = make_engine(max_num_seqs=2, num_checkpoints=0, in_flight=2)
    run(engine, *(request(f"r{i}", 40 + i, max_tokens=30, n=1) for i in range(6)))
    assert engine.scheduler.stats().num_live_states == 0


@pytest.mark.parametrize("num_prompt", [3 * SIZE, 3 * SIZE + 1, 50])
def test_forks_copy_the_state(num_prompt: int) -> None:
    engine = make_engine()
    one = request("n", num_prompt, n=4, temperature=1.0, max_tokens=20)
    engine.put([one])
    engine.run()
    assert [engine.tokens("n", i) for i in range(4)] == [oracle(one, i) for i in range(4)]
    again = replace(one, request_id="again")  # its leader's prompt is cached but for the last tokens
    engine.put([again])
    engine.run()
    assert [engine.tokens("again", i) for i in range(4)] == [oracle(one, i) for i in range(4)]


def test_least_likely_checkpoint_goes_first() -> None:
    assert score(Kind.BACKWARD, 0, 0, 512) < score(Kind.BRANCH, 0, 3, 512) < score(Kind.PROMPT, 0, 10, 16)
    assert score(Kind.BRANCH, 3, 3, 99) > score(Kind.BRANCH, 0, 3, 99) > score(Kind.BRANCH, 0, 9, 99)
    assert score(Kind.BACKWARD, 0, 7, 2000) > score(Kind.BACKWARD, 0, 0, SIZE)
    engine = make_engine(num_checkpoints=20, max_num_seqs=1, num_blocks=2000)
    live = request("live", 300, max_tokens=2 * SIZE)
    run(engine, live)
    turn = [*live.prompt_token_ids, *oracle(live), *range(77, 99)]
    for i in range(8):  # eight cold prompts write ten checkpoints each
        run(engine, request(f"other {i}", 1000 + i))
    assert run(engine, request("next turn", turn)) == [(300 + 2 * SIZE - 1) // SIZE * SIZE]


@pytest.mark.parametrize("order", [(16, 32, 64), (64, 32, 16), (32, 64, 16), (64, 16, 32)])
def test_worth_of_checkpoints_is_that_of_any_order(order: tuple[int, ...]) -> None:
    """A checkpoint that is saved before another on its path takes over what that one saved up to there."""
    path: list[Node] = []
    for _ in range(5):
        path.append(Node(b"", path[-1] if path else None, b"", (0,), 0))
    checkpoints, live = Checkpoints(), LiveState(0, 0)
    side = Node(b"", path[0], b"", (0,), 0)  # leaves the path behind its first block
    checkpoints.add(side, Checkpoint(9, 32, Kind.ANSWER, 0, live))
    for num_tokens in order:
        checkpoints.add(path[num_tokens // SIZE - 1], Checkpoint(0, num_tokens, Kind.ANSWER, 0, live))
    assert [checkpoints[path[i]].num_saved for i in (0, 1, 3)] == [16, 16, 32]
    assert checkpoints[side].num_saved == 16


def test_preempted_sequences_begin_at_their_last_checkpoint() -> None:
    engine = make_engine(num_blocks=24, max_num_seqs=4)
    ones = [request(f"r{i}", 60 + i, max_tokens=100) for i in range(4)]
    engine.put(ones)
    engine.run()
    for one in ones:
        assert engine.tokens(one.request_id) == oracle(one)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_checkpoint_loads > 0


def test_a_failed_sequence_saves_no_checkpoint() -> None:
    """Not even of blocks that another sequence computed before, and whose checkpoints are gone."""
    engine = make_engine()
    scheduler, prompt = engine.scheduler, range(4000, 4000 + 4 * SIZE)
    run(engine, request("first", prompt))
    slots = scheduler.state.policies.states.slots
    slots.free += [slots.checkpoints.remove(node) for node in list(slots.checkpoints)]
    scheduler.add(request("fails", prompt), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.seqs[0].checkpoints
    failed = SeqResult(plan.seqs[0].seq_id, plan.seqs[0].epoch, (), error="broken")
    (event,) = scheduler.apply(StepResult(plan.step, (failed,)), 0.0)
    assert event.finish_reason is FinishReason.ERROR
    check_integrity(scheduler)
    assert scheduler.stats().num_checkpoints == 0


def test_cleared_tree_gives_its_checkpoints_back() -> None:
    engine = make_engine(num_checkpoints=6)
    run(engine, request("r", 200))
    assert engine.scheduler.stats().num_checkpoints > 0
    engine.scheduler.cache.prefix.clear()
    assert engine.scheduler.stats().num_checkpoints == 0
    assert run(engine, request("again", 200)) == [0]


def test_audit_forgets_checkpoints_with_the_tree() -> None:
    engine = make_engine()
    run(engine, request("r", 200))
    engine.scheduler.cache.pool.take()
    assert audit(engine.scheduler) == 1
    assert engine.scheduler.stats().num_checkpoints == 0
    assert run(engine, request("s", 200)) == [0]


def test_answer_that_is_written_otherwise_has_checkpoints() -> None:
    for num_same in (15, 20, 33, 70, 100, 150):
        engine = make_engine(num_checkpoints=32)
        first = request("first", 300, max_tokens=200)
        run(engine, first)
        turn = [*first.prompt_token_ids, *oracle(first)[:num_same], *range(4000, 4060)]
        (cached,) = run(engine, request("next", turn))
        assert 300 + num_same - cached <= SIZE + num_same // 2, num_same


def test_a_conversation_whose_end_was_evicted_goes_on_near_it() -> None:
    engine = make_engine(num_checkpoints=8, max_num_seqs=2, num_blocks=400, max_model_len=8192)
    history = list(range(2000, 2700))
    for turn in range(8):
        one = request(f"agent {turn}", tuple(history), max_tokens=40)
        run(engine, one)
        history += [*oracle(one), *range(9000 + 1000 * turn, 9500 + 1000 * turn)]
    num_evicted = 1500
    run(engine, request("other", 400 * SIZE - (len(history) - 500) + num_evicted))
    (cached,) = run(engine, request("next", tuple(history)))
    assert len(history) - 500 - cached <= 2 * num_evicted


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize(("num_checkpoints", "num_blocks"), [(64, 2000), (4, 2000), (4, 300)])
def test_an_agents_turn_computes_little_again(num_checkpoints: int, num_blocks: int, num_drafts: int) -> None:
    """Twenty turns with another conversation in between: at most two blocks beyond what is new."""
    rng = random.Random(45)
    engine = make_engine(
        num_checkpoints, max_num_seqs=2, num_blocks=num_blocks, in_flight=2, num_drafts=num_drafts
    )
    histories = {"agent": [*range(2000, 2700)], "other": [*range(9000, 9300)]}
    for turn in range(20):
        for name, history in histories.items():
            num_seen = len(history) if turn else 0
            history += [rng.randrange(MODEL.vocab_size) for _ in range(rng.randint(5, 60))]
            one = request(f"{name} {turn}", tuple(history), max_tokens=rng.randint(1, 70))
            (cached,) = run(engine, one)
            assert num_seen - cached <= 2 * SIZE, (name, turn)
            history += oracle(one)
    stats = engine.scheduler.stats()
    assert stats.num_checkpoints <= num_checkpoints + 2
    assert (stats.num_accepted_tokens > 100) == (num_drafts > 0)


def test_no_more_drafts_are_verified_than_there_are_slots_for() -> None:
    slots = DraftSlots(range(20, 25))
    first, second, third = (BlockTable(1, b"root", SIZE) for _ in range(3))
    assert [slots.reserve(table, 3) for table in (first, second, third)] == [3, 2, 0]
    assert [count for count, _ in slots.place(1, first, 1, 3)] == [1, 2, 3]
    slots.planned()  # the second is in no plan
    assert slots.reserve(third, 3) == 2
    slots.place(2, third, 1, 2)
    slots.close(1, {first: 1})
    assert slots.source(first, 7) == 21
    slots.close(2, {third: 2})
    assert slots.source(third, 7) == 7
    assert slots.take(first) == 21
    assert sorted(slots.free) == [20, 21, 22, 23, 24]
