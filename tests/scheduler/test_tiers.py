"""The policy of a tier: what is loaded and stored, by cost; what is slow, lost or refused harms nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.fakes.integrity import check_integrity
from tests.scheduler.harness import answer, make_scheduler, request

from quire.executor.moving import Ended
from quire.request import FinishReason, KvTerms, SampleTiming, Sampling
from quire.scheduler.scheduler import Scheduler, Sleep
from quire.step import KvTransfer, StepPlan, StepResult, TransferDone

PROMPT = tuple(range(18))  # four full blocks of four tokens
BYTES = 1000


class FakeTier:
    """A tier that has what it was told to have; the test ends its transfers."""

    name = "disk"
    block_bytes = BYTES

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.open: dict[int, KvTransfer] = {}
        self.ended: list[Ended] = []

    def contains(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))

    def kept(self, keys: Sequence[bytes]) -> int:
        return self.contains(keys)

    def take_ended(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def end(self, num_blocks: int | None = None, seconds: float = 0.001) -> None:
        """End the transfers that are open; ``num_blocks`` of each are whole; None: all."""
        for transfer in self.open.values():
            count = len(transfer.blocks) if num_blocks is None else num_blocks
            if transfer.direction == "store":
                self.keys |= {block.block_hash for block in transfer.blocks[:count]}
            error = None if count == len(transfer.blocks) else "lost"
            self.ended.append(Ended(TransferDone(transfer.transfer_id, count, error), seconds))
        self.open.clear()


class Bench:
    """A scheduler with a tier, stepped by hand."""

    def __init__(self, tier: FakeTier | None = None, **config: object) -> None:
        self.tier = tier or FakeTier()
        self.tier.open.clear()
        self.scheduler: Scheduler = make_scheduler(**config)  # type: ignore[arg-type]
        self.scheduler.state.policies.turn_on("tiers").connect(self.tier)
        self.now = 0.0
        self.ends: dict[str, FinishReason] = {}
        self.timing: dict[str, SampleTiming] = {}

    def step(self, seconds: float = 0.1) -> StepPlan | None:
        """Plan and apply one step that takes ``seconds``."""
        self.scheduler.expire(self.now)
        plan = self.scheduler.plan(self.now)
        self.now += seconds
        if plan is not None:
            self.tier.open.update({transfer.transfer_id: transfer for transfer in plan.transfers})
            for event in self.scheduler.apply(answer(self.scheduler, plan), self.now):
                if event.finish_reason is not None:
                    self.ends[event.request_id] = event.finish_reason
                    assert event.timing is not None
                    self.timing[event.request_id] = event.timing
        check_integrity(self.scheduler)
        return plan

    def run(self, *, ends: bool = True) -> None:
        """Run to the end; transfers ``ends`` at once, or never."""
        for _ in range(200):
            self.step()
            if ends:
                self.tier.end()
            state = self.scheduler.state
            if not state.sequences and not (ends and self.scheduler.has_work):
                return
        raise AssertionError("it does not come to an end")

    def add(self, name: str, prompt: Sequence[int] = PROMPT, **kwargs: object) -> None:
        self.scheduler.add(request(name, prompt, arrival_s=self.now, max_tokens=2, **kwargs), self.now)  # type: ignore[arg-type]

    @property
    def loads(self) -> list[int]:
        return [len(t.blocks) for t in self.tier.open.values() if t.direction == "load"]


def warm(**config: object) -> Bench:
    """Return a new engine whose tier has the blocks of `PROMPT`, as after a restart."""
    first = Bench(**config)
    first.add("a")
    first.run()
    assert first.scheduler.stats().num_stored_blocks == 4 * len(config.get("windows", (None,)))  # type: ignore[arg-type]
    return Bench(first.tier, **config)


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_prompt_is_stored_and_loaded_after_a_restart(windows: tuple[int | None, ...]) -> None:
    bench = warm(windows=windows)
    bench.add("b")
    bench.step()
    assert bench.loads == [4 * len(windows)]
    bench.run()
    assert bench.timing["b"].num_loaded_tokens == 16
    stats = bench.scheduler.stats()
    assert (stats.num_loaded_blocks, stats.num_cached_tokens) == (4 * len(windows), 16)
    assert stats.num_stored_blocks == 0, "the tier has them"


def test_requests_with_one_prefix_wait_for_one_load() -> None:
    bench = warm()
    bench.add("b")
    bench.add("c", (*PROMPT, 90))
    bench.step()
    assert bench.loads == [4]
    assert bench.scheduler.stats().num_waiting == 2
    bench.run()
    assert bench.scheduler.stats().num_loaded_blocks == 4
    assert bench.ends == dict.fromkeys("bc", FinishReason.LENGTH)


def test_what_is_not_in_the_tier_is_computed_at_once() -> None:
    bench = warm()
    bench.add("b", (99, *PROMPT))
    plan = bench.step()
    assert plan is not None
    assert bench.loads == []
    assert len(plan.seqs) == 1


def test_salts_are_kept_apart() -> None:
    bench = warm()
    bench.add("b", salt="other")
    bench.step()
    assert bench.loads == []


def test_a_prompt_that_is_to_be_computed_is_neither_stored_nor_loaded() -> None:
    """That of the golden prompt: a life of the server before this one had the same id and salt."""
    bench = Bench()
    bench.add("golden/1", salt="golden/1")
    bench.run()
    assert not bench.tier.keys
    bench.tier.contains = len  # type: ignore[assignment, method-assign]
    bench.add("golden/2", salt="golden/2")
    bench.step()
    assert bench.loads == []


def test_a_load_that_does_not_end_is_given_up() -> None:
    bench = warm()
    bench.add("b")
    bench.step()
    assert bench.loads == [4]
    action = bench.scheduler.next_action(bench.now)
    assert isinstance(action, Sleep), "the loop looks for the end of the load"
    bench.run(ends=False)
    assert bench.ends == {"b": FinishReason.LENGTH}
    bench.add("c", (*PROMPT[:17], 77))
    bench.scheduler.cache.prefix.clear()
    bench.run(ends=False)
    assert len(bench.loads) == 1, "nothing more is loaded while one hangs"
    bench.tier.end()
    bench.step()
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("num_whole", [0, 1, 3])
def test_what_is_lost_is_computed(num_whole: int) -> None:
    bench = warm()
    bench.add("b")
    bench.step()
    bench.tier.end(num_whole)
    bench.tier.keys.clear()
    plan = bench.step()
    assert plan is not None
    assert plan.seqs[0].num_computed_tokens == 4 * num_whole
    bench.run()
    assert bench.ends == {"b": FinishReason.LENGTH}


def test_a_tier_that_loses_is_not_asked_but_for_a_try() -> None:
    bench = warm()
    for number in range(200):
        bench.add(f"r{number}")
        for _ in range(20):
            bench.step(0.01)
            bench.tier.end(seconds=2.0)  # a step of the prompt takes 0.01 s
            if not bench.scheduler.state.sequences:
                break
        bench.step()
        bench.scheduler.cache.prefix.clear()
    loaded = bench.scheduler.stats().num_loaded_blocks // 4
    assert 1 <= loaded <= 4
    assert len(bench.ends) == 200


def test_a_tier_that_keeps_nothing_is_not_tried_forever() -> None:
    bench = Bench()
    bench.add("a")
    for _ in range(10):
        bench.step()
        bench.tier.end(0)
    bench.step()
    assert not bench.scheduler.has_work
    assert bench.scheduler.stats().num_failed_transfers == 1


def test_a_long_prompt_is_stored_in_pieces() -> None:
    bench = Bench(num_blocks=64, max_model_len=200)
    bench.add("a", tuple(range(130)))
    largest = 0
    for _ in range(40):
        bench.step()
        largest = max([largest, *(len(transfer.blocks) for transfer in bench.tier.open.values())])
        bench.tier.end()
    assert largest == 64 // 8
    assert len(bench.tier.keys) == 130 // 4


def test_a_prompt_of_a_failed_step_is_not_stored() -> None:
    bench = Bench()
    bench.add("a")
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    failed = tuple(each._replace(error="NaN") for each in answer(bench.scheduler, plan).seqs)
    bench.scheduler.apply(StepResult(plan.step, failed), 0.1)
    bench.run()
    assert not bench.tier.keys


def test_loads_leave_half_of_the_pool() -> None:
    """Blocks that are loaded long before their sequence enters would displace others."""
    first = Bench(num_blocks=64)
    prompts = [tuple(range(start, start + 62)) for start in range(100, 900, 100)]
    for number, prompt in enumerate(prompts):
        first.add(f"a{number}", prompt)
        first.run()
    bench = Bench(first.tier, num_blocks=64)
    for number, prompt in enumerate(prompts):
        bench.add(f"b{number}", prompt)
    bench.step()
    assert 0 < sum(bench.loads) <= 32
    bench.run()
    assert len(bench.ends) == len(prompts)


def test_what_a_peer_will_have_is_loaded_from_it() -> None:
    """Though the tier does not say yet that it is there."""
    bench = Bench()
    bench.add("b", kv=KvTerms(engine_id="peer", num_tokens=12))
    bench.step()
    assert bench.loads == [3]
    assert [transfer.handle for transfer in bench.tier.open.values()] == ["peer"]
    bench.run()
    assert bench.timing["b"].num_loaded_tokens == 12


@pytest.mark.parametrize(
    "kv", [KvTerms(engine_id="peer", num_tokens=16), KvTerms(engine_id="peer", num_tokens=800)]
)
def test_a_peer_that_does_not_keep_its_word_costs_a_computation(kv: KvTerms) -> None:
    bench = Bench()
    bench.add("b", kv=kv)
    bench.step()
    assert bench.loads == [4]
    bench.tier.end(0)
    bench.run()
    assert bench.ends == {"b": FinishReason.LENGTH}
    assert bench.timing["b"].num_loaded_tokens == 0


@pytest.mark.parametrize(("most", "blocks"), [(0, []), (7, [1]), (8, [2]), (100, [4])])
def test_a_request_may_bound_what_is_loaded(most: int, blocks: list[int]) -> None:
    bench = warm()
    bench.add("b", kv=KvTerms(max_load_tokens=most))
    bench.step()
    assert bench.loads == blocks
    bench.run()
    assert bench.timing["b"].num_loaded_tokens == 4 * sum(blocks)


def test_a_prompt_for_a_peer_is_stored_chunk_by_chunk() -> None:
    bench, num_stored = Bench(max_num_batched_tokens=8), list[int]()
    asked = request("a", PROMPT, kv=KvTerms(gives=True))
    bench.scheduler.add(replace(asked, sampling=Sampling(max_tokens=0, seed=0)), 0.0)
    for _ in range(8):
        bench.step()
        bench.tier.end()
        num_stored.append(bench.scheduler.stats().num_stored_blocks)
    assert bench.ends == {"a": FinishReason.LENGTH}
    assert 0 < num_stored[2] < 4, num_stored
    assert num_stored[-1] == 4


def test_other_prompts_are_stored_once_they_are_whole() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a")
    for _ in range(2):
        bench.step()
        assert not bench.tier.open


def test_waiting_for_a_peer_does_not_make_the_tier_slow() -> None:
    bench = warm()
    cost = bench.scheduler.state.policies.turn_on("tiers").cost
    bench.add("a", (98, *PROMPT), kv=KvTerms(engine_id="peer", num_tokens=16))
    for _ in range(4):
        bench.step()
    bench.tier.end(seconds=0.3)
    bench.run()
    assert cost.seconds(BYTES) == 0.0
    bench.add("b")
    bench.step()
    bench.tier.end(seconds=0.3)
    bench.run()
    assert cost.seconds(BYTES) > 0.0
