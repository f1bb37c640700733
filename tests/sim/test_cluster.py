"""The simulated cluster: arithmetic by hand, replay by seed, faults, sessions, cancellation, routing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import CostModel, Curve, StepFeatures
from quire.cost.draft_cost import DraftCost
from quire.errors import ConfigError
from quire_lab.bench.summary import summarize
from quire_lab.sim.cluster import Cluster
from quire_lab.sim.drafts import Speculation
from quire_lab.sim.latency import Swap
from quire_lab.sim.replica import Add, ClusterConfig, Kill, Slow, parse_fault
from quire_lab.sim.run import Simulated, simulate
from quire_lab.workload.build import Synthetic, with_cancellations
from quire_lab.workload.distributions import Arrivals, Uniform
from quire_lab.workload.request import Workload, WorkloadRequest

pytestmark = pytest.mark.component

STEP = CostModel(
    fixed_s=0.010, rows=Curve((1.0, 101.0), (0.0, 0.100))
)  # 10 ms and 1 ms a row beyond the first
CONFIG = ClusterConfig(
    SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=2048),
    CacheConfig(num_blocks=512, model_key="sim"),
)


def workload(*requests: tuple[float, int, int]) -> Workload:
    """Requests of (arrival, prompt, output)."""
    made = (WorkloadRequest(t, p, o, index=i) for i, (t, p, o) in enumerate(requests))
    return Workload(tuple(made), {}, "by hand")


MIXED = Synthetic(
    120,
    prompt_lengths=Uniform(5, 300),
    output_lengths=Uniform(1, 60),
    arrivals=Arrivals(4.0),
    prefix_length=64,
    num_prefixes=3,
    num_turns=3,
    think_s=0.5,
)


def run(config: ClusterConfig = CONFIG, **change: object) -> Simulated:
    return simulate(replace(config, **change), STEP, MIXED.build(seed=5))  # type: ignore[arg-type]


def test_the_router_learns_the_pace_of_replicas() -> None:
    config = replace(CONFIG, num_replicas=2, routing="prefix-predicted")
    cluster = Cluster(config, STEP, MIXED.build(seed=5))
    cluster.run()
    for number in range(2):
        assert cluster.router.ttft.num_observed(number) > 10
        assert cluster.router.ttft.predict(number, 100) > STEP.fixed_s


def check_whole(result: Simulated, num_requests: int = 120) -> None:
    """Every request ended once, with all its tokens."""
    assert [r.index for r in result.records] == list(range(num_requests))
    for record, asked in zip(
        result.records, sorted(MIXED.build(seed=5).requests, key=lambda r: r.index), strict=True
    ):
        assert record.status == "ok", record
        assert record.num_output_tokens == asked.num_output_tokens


def test_one_request_takes_the_steps_it_must() -> None:
    result = simulate(CONFIG, STEP, workload((1.0, 101, 5)))
    (record,) = result.records
    assert record.first_token_s == pytest.approx(1.0 + 0.110)
    assert record.end_s == pytest.approx(1.110 + 4 * 0.010)
    assert record.tpot_s == pytest.approx(0.010)
    assert result.num_steps == 5
    assert result.replicas[0].busy_s == pytest.approx(0.150)


def test_an_arrival_waits_for_the_step_that_runs() -> None:
    result = simulate(CONFIG, STEP, workload((0.0, 101, 3), (0.001, 1, 1)))
    assert result.records[1].first_token_s == pytest.approx(0.110 + 0.011)  # with the other's second token
    assert result.records[0].first_token_s == pytest.approx(0.110)


def test_two_steps_in_flight_overlap_nothing_on_the_device() -> None:
    config = replace(CONFIG, max_in_flight=2)
    result = simulate(config, STEP, workload((0.0, 101, 5)))
    assert result.records[0].end_s == pytest.approx(0.150)
    assert result.records[0].itl_s == pytest.approx((0.010,) * 4)


def test_a_closed_loop_of_users_sends_when_the_answer_is_there() -> None:
    config = replace(CONFIG, concurrency=1)
    result = simulate(config, STEP, workload((0.0, 101, 3), (0.0, 1, 2), (0.0, 1, 1)))
    assert [r.arrival_s for r in result.records] == pytest.approx([0.0, 0.130, 0.150])
    assert [r.sent_s for r in result.records] == [r.arrival_s for r in result.records]
    assert [r.end_s for r in result.records] == pytest.approx([0.130, 0.150, 0.160])
    everybody = simulate(replace(config, concurrency=3), STEP, workload((0.0, 101, 3), (0.0, 1, 2)))
    assert [r.arrival_s for r in everybody.records] == [0.0, 0.0]


def test_latency_of_held_requests_counts_from_their_due_time() -> None:
    config = replace(CONFIG, concurrency=1)
    result = simulate(config, STEP, workload((0.01, 101, 3), (0.02, 1, 2), (0.5, 1, 1)))
    assert [r.arrival_s for r in result.records] == [0.01, 0.02, 0.5]
    assert [r.sent_s for r in result.records] == pytest.approx([0.01, 0.140, 0.5])
    assert result.records[1].first_token_s == pytest.approx(0.150)


def test_users_of_sessions_are_as_many_as_the_concurrency() -> None:
    timeless = Synthetic(60, Uniform(5, 300), Uniform(1, 60), num_turns=3).build(seed=5)
    result = simulate(replace(CONFIG, concurrency=4), STEP, timeless)
    changes = sorted([(r.sent_s, 1) for r in result.records] + [(r.end_s, -1) for r in result.records])
    at_once, most = 0, 0
    for _, change in changes:
        at_once += change
        most = max(most, at_once)
    assert (len(result.records), most) == (60, 4)
    assert all(r.status == "ok" for r in result.records)


def test_the_same_seed_gives_the_same_result_bit_for_bit() -> None:
    for routing in ("random", "prefix-hybrid"):
        first, second = (run(num_replicas=3, routing=routing, seed=3) for _ in range(2))
        assert first == second
        check_whole(first)
    assert run(num_replicas=3, routing="random", seed=4) != run(num_replicas=3, routing="random", seed=3)


def test_prefix_routing_hits_more_than_random() -> None:
    cached = {
        policy: summarize(run(num_replicas=4, routing=policy).records)["num_cached_tokens"]
        for policy in ("random", "least-loaded", "prefix-predicted", "prefix-reported", "prefix-hybrid")
    }
    for policy in ("prefix-predicted", "prefix-reported", "prefix-hybrid"):
        assert cached[policy] > 1.2 * max(cached["random"], cached["least-loaded"]), cached


def test_a_turn_waits_for_the_answer_before_it() -> None:
    requests = sorted(MIXED.build(seed=5).requests, key=lambda r: (r.session, r.turn))
    ends = {(requests[0].session, -1): 0.0}
    records = {r.index: r for r in run().records}
    for request in requests:
        record = records[request.index]
        if request.turn:
            assert record.sent_s == pytest.approx(ends[request.session, request.turn - 1] + request.think_s)
        ends[request.session, request.turn] = record.end_s


def test_clients_that_leave() -> None:
    cancelled = with_cancellations(MIXED.build(seed=5), 0.4, seed=1)
    result = simulate(CONFIG, STEP, cancelled)
    for record, asked in zip(result.records, sorted(cancelled.requests, key=lambda r: r.index), strict=True):
        leaves = asked.cancel_after_tokens is not None and asked.cancel_after_tokens < asked.num_output_tokens
        assert record.status == ("cancelled" if leaves else "ok")
        assert record.num_output_tokens == (asked.cancel_after_tokens if leaves else asked.num_output_tokens)
    assert result.replicas[0].stats.num_aborted == sum(r.status == "cancelled" for r in result.records)


def test_a_replica_dies_and_nothing_is_lost() -> None:
    calm = run(num_replicas=2)
    shaken = run(num_replicas=2, start_up_s=3.0, faults=(Kill(at=10.0, replica=0),))
    check_whole(shaken)
    assert [r.number for r in shaken.replicas] == [0, 0, 1]
    assert shaken.replicas[1].num_steps > 0  # the one that came in its place
    mean = [summarize(r.records)["e2el_ms"]["mean"] for r in (calm, shaken)]
    assert mean[1] > mean[0]


def test_all_replicas_die() -> None:
    waits = run(start_up_s=5.0, faults=(Kill(at=10.0, replica=0),))
    check_whole(waits)
    assert not any(10.0 < t < 15.0 for r in waits.records for t in (r.end_s, r.first_token_s or 0.0))
    with pytest.raises(ConfigError, match="no replica is alive"):
        run(faults=(Kill(at=10.0, replica=0, restart=False),))


def test_slow_and_added_replicas() -> None:
    def end_to_end(**change: object) -> float:
        result = run(**change)
        check_whole(result)
        return float(summarize(result.records)["e2el_ms"]["mean"])

    plain = end_to_end()
    assert end_to_end(faults=(Slow(at=0.0, until=20.0, replica=0, factor=2.0),)) > 1.3 * plain
    assert end_to_end(faults=(Add(at=0.0, count=1),)) < plain


def test_speculation_gives_the_tokens_that_theory_expects() -> None:
    spec = Speculation((0.8,), num_drafts=3)
    expected = 1 + 0.8 + 0.8**2 + 0.8**3
    assert spec.tokens_per_round == pytest.approx(expected)
    flat = CostModel(fixed_s=0.010)  # memory-bound: rows cost nothing
    long = workload(*[(0.0, 1, 1001)] * 4)
    plain = simulate(CONFIG, flat, long)
    drafted = simulate(replace(CONFIG, speculation=spec), flat, long)
    ratio = summarize(plain.records)["tpot_ms"]["mean"] / summarize(drafted.records)["tpot_ms"]["mean"]
    assert ratio == pytest.approx(expected, rel=0.03)
    stats = drafted.replicas[0].stats
    assert 1 + stats.num_accepted_tokens / stats.num_verifications == pytest.approx(expected, rel=0.03)


def test_drafts_take_time_and_their_rows_as_well() -> None:
    one = workload((0.0, 1, 1001))
    spec = Speculation((1.0,), num_drafts=4)
    plain = simulate(CONFIG, STEP, one).records[0].tpot_s
    assert plain is not None
    verify, decode = (
        STEP.seconds(StepFeatures(5, 1, 5, 500, 0, 0)),
        STEP.seconds(StepFeatures(1, 1, 1, 500, 0, 0)),
    )
    for cost, draft_s in ((0.25, 4 * 0.25 * decode), (DraftCost(0.001, 0.0002), 4 * 0.0012)):
        found = (
            simulate(replace(CONFIG, speculation=replace(spec, draft_cost=cost)), STEP, one).records[0].tpot_s
        )
        assert found == pytest.approx((verify + draft_s) / 5, rel=0.03)


def test_the_simulated_control_leaves_drafts_out_under_load() -> None:
    """The scheduler's own control: drafts for one sequence, none where rows are what a step takes."""
    steep = CostModel(0.010, Curve((1.0, 8.0, 1008.0), (0.0, 0.0, 2.0)))
    auto = replace(CONFIG, speculation=Speculation((0.8,), None, 0.05))
    for num, drafts in ((1, True), (24, False)):
        load = workload(*[(0.0, 1, 900)] * num)
        plain, chosen = (simulate(config, steep, load) for config in (CONFIG, auto))
        speedup = plain.end_s / chosen.end_s
        assert speedup > 2.0 if drafts else speedup > 0.98, (num, speedup)


def test_a_full_queue_refuses() -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_queue=2, max_num_seqs=1))
    result = simulate(config, STEP, workload(*[(0.0, 10, 5)] * 6))
    assert sorted(r.status for r in result.records) == ["error"] * 4 + ["ok"] * 2
    assert {r.error for r in result.records} == {None, "capacity"}


@pytest.mark.parametrize("gate", ["static", "dynamic"])
def test_gates_run_to_the_end(gate: str) -> None:
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, gate=gate, dynamic_max_wait_s=0.2))  # type: ignore[arg-type]
    check_whole(simulate(config, STEP, MIXED.build(seed=5)))


def test_faults_are_read_and_checked() -> None:
    assert parse_fault("kill:at=30,replica=0") == Kill(30.0, 0)
    assert parse_fault("kill:at=30,replica=0,restart=no") == Kill(30.0, 0, restart=False)
    assert parse_fault("slow:at=1,until=2,replica=1,factor=3") == Slow(1.0, 2.0, 1, 3.0)
    assert parse_fault("add:at=5,count=2") == Add(5.0, 2)
    for text in (
        "kill",
        "kill:at=x,replica=0",
        "slow:at=2,until=1,replica=0,factor=2",
        "add:at=1,count=0",
        "burn:at=1",
    ):
        with pytest.raises(ConfigError, match="is not understood"):
            parse_fault(text)
    with pytest.raises(ConfigError, match="replica 3 does not exist"):
        replace(CONFIG, faults=(Kill(1.0, 3),))


def test_a_swapped_sequence_is_copied_and_not_computed_again() -> None:
    """Two sequences in a pool for one and a half: the later is preempted, and comes back one way or the other."""
    tight = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=10, enable_prefix_caching=False))
    two = workload((0.0, 40, 60), (0.0, 40, 60))
    again = simulate(tight, STEP, two)
    copied = simulate(replace(tight, swap=Swap(1e-6)), STEP, two)
    for result in (again, copied):
        assert result.replicas[0].stats.num_preemptions > 0
        assert [r.num_output_tokens for r in result.records] == [60, 60]
    assert again.num_steps == copied.num_steps
    recomputed = again.replicas[0].stats.num_computed_tokens - 2 * (40 + 59)
    saved = again.end_s - copied.end_s
    assert recomputed > 40
    assert saved == pytest.approx(recomputed * 0.001, rel=0.1)  # 1 ms a row, and the copies are quick


def test_a_session_that_breaks_takes_its_later_turns_with_it() -> None:
    turns = tuple(
        WorkloadRequest(0.0, 10 + 20 * i, 5, index=2 * i + s, session=str(s), turn=i)
        for i in range(2)
        for s in range(2)
    )
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_queue=1, max_num_seqs=1))
    result = simulate(config, STEP, Workload(turns, {}, "by hand"))
    assert [(r.status, r.error) for r in result.records] == [
        ("ok", None), ("error", "capacity"), ("ok", None), ("error", "earlier turn failed"),
    ]  # fmt: skip
