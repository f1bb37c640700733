"""The SLO controller on given step times: what it sends, and that steps hold."""

from __future__ import annotations

import random

from tests.fakes.executor import FakeExecutor, FakeFaults

from quire.clock import VirtualClock
from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import CostModel, Curve, StepFeatures
from quire.engine.core import EngineCore
from quire.engine.messages import ChangePolicy
from quire.request import Request, SamplingParams
from quire.scheduler.policies.forecast import ModelledPredictor
from quire.scheduler.policies.slo import MIN_CHUNK, SloController
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange
from quire.step import SeqPlan
from quire_lab.sim.latency import Latency, sim_executor

CONFIG = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=8192)
# 4 ms a step, 20 µs a row, 0.1 ms a sequence, 0.1 µs a key
MODEL = CostModel(4e-3, Curve((0.0, 1.0), (0.0, 2e-5)), per_seq_s=1e-4, per_decode_kv_s=1e-7)


class Engine:
    """Steps of ``decodes`` sequences, and a chunk as large as the budget leaves, in the modelled time × ``slower``."""

    def __init__(self, tpot_s: float, slower: float = 1.0) -> None:
        self.predictor = ModelledPredictor(CONFIG, MODEL)
        self.controller, self.slower = SloController(self.predictor, CONFIG, tpot_s), slower
        self.now = 0.0
        self.budget, self.limit = CONFIG.max_num_batched_tokens, CONFIG.max_num_seqs
        self.sent: list[PolicyChange] = []

    def run(self, decodes: int, *, waiting: bool, context: int = 500) -> float:
        decodes = min(decodes, self.limit)
        rows = max(0, self.budget - decodes) if waiting else 0
        seqs = [SeqPlan(i, 0, context, 1) for i in range(decodes)]
        seqs += [SeqPlan(99, 0, 0, rows)] if rows > 1 else []
        pairs, kv = (rows * (rows + 1) // 2, rows) if rows > 1 else (0, 0)
        step = StepFeatures(decodes + rows, len(seqs), len(seqs), decodes * (context + 1), kv, pairs)
        seconds = MODEL.seconds(step) * self.slower
        self.predictor.note(seqs, self.now, self.now + seconds, num_prompt_tokens=rows)
        self.now += seconds
        change = self.controller.applied()
        if change is not None:
            self.sent.append(change)
            self.budget = change.max_num_batched_tokens or self.budget
            self.limit = change.max_num_seqs or self.limit
        return seconds


def test_the_mean_of_steps_with_prompts_and_decodes_holds() -> None:
    engine = Engine(0.025)
    steps = [engine.run(16, waiting=True) for _ in range(200)]
    assert steps[0] > 0.08  # the default budget breaks it
    late = steps[50:]
    assert sum(late) / len(late) <= 0.025
    assert sum(late) / len(late) > 0.8 * 0.025  # and no prompt row is left out for nothing


def test_it_learns_that_the_machine_is_slower_than_the_model() -> None:
    engine = Engine(0.05, slower=2.5)
    late = [engine.run(16, waiting=True) for _ in range(300)][100:]
    assert 0.8 * 0.05 < sum(late) / len(late) <= 0.05


def test_fewer_run_where_decodes_alone_are_too_slow() -> None:
    engine = Engine(0.008)
    for _ in range(100):
        engine.run(64, waiting=False)
    assert 1 <= engine.limit < 40
    assert engine.predictor.decode_s(engine.limit) <= 0.008


def test_nobody_waits_where_nobody_decodes() -> None:
    engine = Engine(0.02)
    for _ in range(20):
        engine.run(16, waiting=True)
    assert engine.budget < 2000
    for _ in range(3):
        engine.run(0, waiting=True)
    # One sequence has ended its prompt and decodes next: its budget is of one decode, and no more than a person set.
    assert engine.budget <= CONFIG.max_num_batched_tokens


def test_whatever_comes_the_settings_stay_within_what_a_person_set() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    engine = Engine(rng.uniform(1e-4, 0.2), slower=rng.uniform(0.05, 20))
    for _ in range(300):
        engine.run(rng.randrange(65), waiting=rng.random() < 0.5, context=rng.randrange(8000))
    for change in engine.sent:
        assert change.max_num_seqs is None or 1 <= change.max_num_seqs <= CONFIG.max_num_seqs
        budget = change.max_num_batched_tokens
        assert budget is None or MIN_CHUNK <= budget <= CONFIG.max_num_batched_tokens


def test_a_failed_step_teaches_nothing() -> None:
    scheduler = Scheduler(CONFIG, CacheConfig(num_blocks=100), step_time=MODEL)
    executor = FakeExecutor(CacheConfig(100), faults=FakeFaults(1.0))
    core = EngineCore(scheduler, executor, VirtualClock())
    core.controller = SloController(core.scheduler.predictor, CONFIG, 0.02)
    core.put(Request("a", (1,) * 300, SamplingParams(max_tokens=4, seed=0), 0.0))
    core.begin()
    core.clock.advance(100.0)  # type: ignore[attr-defined]
    (event,) = core.finish()
    assert event.error_kind == "step"
    assert isinstance(core.scheduler.predictor, ModelledPredictor)
    assert core.scheduler.predictor.decode_s(1) == MODEL.seconds(StepFeatures(1, 1, 1, 2048, 0, 0))
    assert core.scheduler.predictor.step_s == 0.0


def test_what_a_person_set_stays_until_it_is_released() -> None:
    """Through the core's inbox, where the controller's wishes and a person's meet."""
    clock, over = VirtualClock(), [0.0]
    executor = sim_executor(Latency(MODEL), clock, lambda over_s: over.append(over_s))
    scheduler = Scheduler(CONFIG, CacheConfig(num_blocks=4000), step_time=MODEL)
    core = EngineCore(scheduler, executor, clock, SloController(scheduler.predictor, CONFIG, 0.010))
    for index in range(40):
        sampling = SamplingParams(max_tokens=400, ignore_eos=True, seed=index)
        core.put(Request(str(index), (1,) * 300, sampling, 0.0))

    def steps(num: int) -> tuple[int, int]:
        for _ in range(num):
            core.begin()
            clock.advance_to(over[-1])
            core.finish()
        return core.scheduler.config.max_num_seqs, core.scheduler.config.max_num_batched_tokens

    limit, budget = steps(60)
    assert limit < CONFIG.max_num_seqs
    assert budget < 1000
    core.put(ChangePolicy("0", PolicyChange(max_num_batched_tokens=1000)))
    for _ in range(60):
        assert steps(1)[1] == 1000
    core.put(ChangePolicy("1", PolicyChange(), ("max_num_batched_tokens",)))
    assert steps(60)[1] < 1000
    first, second = core.replies
    assert (first.pinned, second.pinned) == (("max_num_batched_tokens",), ())
    core.put(PolicyChange(max_num_seqs=50))  # as a restarted engine hears of it again
    assert steps(60)[0] == 50


def test_nothing_is_released_without_a_controller() -> None:
    executor = sim_executor(Latency(MODEL), VirtualClock(), lambda over_s: None)
    core = EngineCore(Scheduler(CONFIG, CacheConfig(num_blocks=10)), executor, VirtualClock())
    core.put(ChangePolicy("0", PolicyChange(max_queue=5), ("max_num_seqs",)))
    core.step()
    (reply,) = core.replies
    assert reply.param == "release"
    assert "without --slo" in (reply.error or "")
    assert core.scheduler.config.max_queue == CONFIG.max_queue
