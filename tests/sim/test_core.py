"""`EngineCore`: messages, exceptions of the executor, draining, and runs that replay."""

from __future__ import annotations

import threading

import pytest
from tests.engine.toy import engine_config
from tests.fakes.engine import FAKE
from tests.fakes.executor import FakeFaults
from tests.scheduler.harness import Engine, make_scheduler, oracle, request
from tests.sim.driver import Driver
from tests.sim.scenario import make_scenario

from quire.clock import WallClock
from quire.engine.in_process import InProcessClient
from quire.engine.messages import (
    AbortRequest,
    ChangePolicy,
    Drain,
    FinishSample,
    Reply,
    ResetPrefixCache,
    Shutdown,
)
from quire.request import FinishReason
from quire.scheduler.scheduler import Sleep
from quire.scheduler.settings import PolicyChange, settings
from quire.step import StepPlan


@pytest.mark.parametrize("faults", [FakeFaults(collect_raises=1.0), FakeFaults(submit_raises=1.0)])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_an_exception_is_a_failed_step_and_no_lost_request(faults: FakeFaults, in_flight: int) -> None:
    engine = Engine(make_scheduler(max_num_seqs=2), in_flight=in_flight, faults=faults)
    engine.put(request(name, n=2) for name in "abc")
    engine.run()
    ends = [engine.end(name, i) for name in "abc" for i in range(2)]
    assert {e.error_kind for e in ends} == {"step"}
    assert all(e.error is not None and e.error.startswith("StepError: injected") for e in ends)
    stats = engine.core.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_failed_steps > 0


def test_the_engine_lives_after_a_failed_step() -> None:
    engine = Engine(make_scheduler(), faults=FakeFaults(collect_raises=0.3, seed=3))
    one = request("late")
    engine.put(request(f"r{i}") for i in range(6))
    engine.run()
    for attempt in range(50):
        again = request(f"late{attempt}")
        engine.put([again])
        engine.run()
        if engine.end(again.request_id).finish_reason is FinishReason.LENGTH:
            assert engine.tokens(again.request_id) == oracle(again)
            return
    raise AssertionError(f"no request ever came through: {one}")


def test_drain_refuses_newcomers_and_serves_the_rest() -> None:
    engine = Engine(make_scheduler())
    one = request("a")
    engine.put([one])
    engine.step()
    engine.core.put(Drain())
    engine.put([request("b", n=2)])
    engine.run()
    assert engine.tokens("a") == oracle(one)
    assert [engine.end("b", i).error_kind for i in range(2)] == ["capacity"] * 2


def test_shutdown_ends_everything() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2), in_flight=4)
    engine.put(request(name, n=2, max_tokens=30) for name in "abc")
    for _ in range(3):
        engine.step()
    engine.core.put(Shutdown())
    engine.run()
    assert {engine.end(name, i).finish_reason for name in "abc" for i in range(2)} == {FinishReason.ABORT}
    stats = engine.core.stats()
    assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks


def test_messages_take_effect_in_order_at_the_next_step() -> None:
    engine = Engine(make_scheduler())
    engine.put([request("a", max_tokens=30)])
    engine.core.put(AbortRequest("a"))
    engine.step()
    assert engine.end("a").finish_reason is FinishReason.ABORT
    assert not engine.core.has_work
    engine.put([request("b", max_tokens=30)])
    for _ in range(4):
        engine.step()
    engine.core.put(FinishSample("b", 0, 2))
    engine.run()
    assert engine.end("b").finish_reason is FinishReason.STOP


def test_a_wrong_policy_is_told_and_changes_nothing() -> None:
    engine = Engine(make_scheduler())
    engine.core.put(PolicyChange(max_num_seqs=-1))
    engine.core.put(PolicyChange(max_num_seqs=3))
    engine.step()
    assert engine.scheduler.config.max_num_seqs == 3
    assert len(engine.core.rejected) == 1
    assert "max_num_seqs = -1" in engine.core.rejected[0]


def test_a_call_is_answered_with_what_was_and_what_is() -> None:
    engine = Engine(make_scheduler())
    before = settings(engine.scheduler.config)
    engine.core.put(ChangePolicy("0", PolicyChange()))
    engine.core.put(ChangePolicy("1", PolicyChange(max_num_seqs=3, gate="static")))
    engine.core.put(ChangePolicy("2", PolicyChange(order="priority", max_num_seqs=0)))
    assert engine.core.has_work
    engine.step()
    read, changed, refused = engine.core.replies
    assert read == Reply("0", before, before)
    assert changed == Reply("1", {**before, "max_num_seqs": 3, "gate": "static"}, before)
    assert refused.values == changed.values == settings(engine.scheduler.config)
    assert refused.param == "max_num_seqs"
    assert "max_num_seqs = 0 is not allowed" in (refused.error or "")


def test_a_reset_of_the_prefix_cache_leaves_what_runs_alone() -> None:
    engine = Engine(make_scheduler())
    prompt = tuple(range(1, 41))
    engine.put([request("a", prompt, max_tokens=30)])
    engine.run()
    engine.put([request("b", prompt, max_tokens=30)])
    for _ in range(3):
        engine.step()
    assert engine.scheduler.stats().num_cached_tokens > 0
    engine.core.put(ResetPrefixCache("reset"))
    engine.step()
    (reply,) = engine.core.replies
    assert reply.values["num_freed_blocks"] > 0
    assert engine.scheduler.stats().num_cached_blocks == 0
    engine.run()
    assert engine.tokens("b") == engine.tokens("a")
    cached = engine.scheduler.stats().num_cached_tokens
    engine.put([request("c", prompt, max_tokens=30)])
    engine.run()
    assert engine.scheduler.stats().num_cached_tokens == cached, "nothing was left of the prefix"


def test_put_is_safe_from_other_threads() -> None:
    engine = Engine(make_scheduler(max_queue=1000))
    threads = [
        threading.Thread(target=lambda t=t: [engine.core.put(request(f"{t}-{i}")) for i in range(20)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.core.has_work:
        engine.step()
    assert len(engine.events) == 80
    assert all(engine.end(name).finish_reason is FinishReason.LENGTH for name, _ in engine.events)


def test_the_dynamic_gate_tells_when_to_come_back() -> None:
    engine = Engine(make_scheduler(gate="dynamic", dynamic_max_wait_s=0.5))
    engine.put([request("a")])
    engine.step()
    assert engine.core.has_work
    assert engine.core.rest == Sleep(0.5)
    engine.clock.advance_to(0.5)
    engine.step()
    assert engine.core.rest is None
    assert engine.core.stats().num_running == 1


def test_the_loop_rests_where_nothing_can_be_planned() -> None:
    """A sequence that nothing in this process can bring on must not keep a processor busy."""
    client = InProcessClient(engine_config(), WallClock(), executor=FAKE)
    client.wait_ready()
    core = client.core
    core.scheduler.plan = lambda now: None  # type: ignore[method-assign]
    steps: list[None] = []
    begin = core.begin
    core.begin = lambda: steps.append(None) or begin()  # type: ignore[method-assign, func-returns-value]
    client.send(request("a"))
    for _ in range(4):
        assert client.receive(0.02) == []
    assert core.has_work
    assert len(steps) == 1, "it went round without a message, a result or a time to wait for"
    client.send(AbortRequest("a"))
    assert [event.finish_reason for event in client.receive()] == [FinishReason.ABORT]


@pytest.mark.parametrize("seed", [3, 17, 31])
def test_a_run_replays(seed: int) -> None:
    """Plans are a function of the inbox and of the clock: the same seed gives the same plans, block by block."""
    logs: list[list[StepPlan]] = []
    for _ in range(2):
        driver = Driver(make_scenario(seed))
        plans: list[StepPlan] = []
        plan = driver.scheduler.plan
        driver.scheduler.plan = lambda now, plan=plan, plans=plans: keep(plan(now), plans)  # type: ignore[method-assign]
        driver.run()
        logs.append(plans)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 20


def keep(plan: StepPlan | None, plans: list[StepPlan]) -> StepPlan | None:
    if plan is not None:
        plans.append(plan)
    return plan
