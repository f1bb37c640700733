"""Pipeline stages give the bits of one process, with a step in flight per stage."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.engine.test_process import gone, wait_for
from tests.exact.engine_run import Policy
from tests.exact.suite import Case
from tests.parallel.serving import CASE, FCFS, config_of, serve

from quire.clock import WallClock
from quire.executor.ranks import RanksExecutor
from quire.metrics.engine_stats import EngineStats, RankStats
from quire.metrics.prometheus import Exposition
from quire.metrics.server import ServerMetrics
from quire.parallel.topology import Topology
from quire.runner.stage_links import StageLinks
from quire.step import StepPlan
from quire_lab.cli.doctor_server import ranks_of, row_of
from quire_lab.diagnose.read import Reading, parse_metrics

TWO = Topology(pp=2)
OTHERS = (Policy("continuous", "priority", 48), Policy("dynamic", "fcfs", 48))


@pytest.fixture(scope="module")
def stages() -> Iterator[RanksExecutor]:
    executor = RanksExecutor(config_of(CASE, TWO))
    assert executor.max_in_flight == 2
    assert not executor.chains_steps
    yield executor
    pids = executor.pids
    executor.close()
    assert all(map(gone, pids))


@pytest.mark.parametrize("policy", [FCFS, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_two_stages_give_the_tokens_of_one_process(stages: RanksExecutor, policy: Policy) -> None:
    tally = serve(CASE, stages, config_of(CASE, TWO), policy).tally
    assert tally.num_forks > 0
    assert tally.num_moves > 0
    assert tally.num_chunked_prompts > 0


def settled(stages: RanksExecutor) -> RankStats:
    """Return the counts of every step so far: a rank that does not answer may send its own later than the answer."""

    def counted() -> tuple[int, ...]:
        stages.submit(StepPlan(0))  # takes in what has come
        stages.collect()
        return stages.rank_stats().num_steps

    num_steps = max(counted())
    wait_for(lambda: min(counted()) >= num_steps)
    return stages.rank_stats()


def test_bytes_sent_are_those_of_the_hidden_states(stages: RanksExecutor) -> None:
    config = config_of(CASE, TWO)
    before = settled(stages)
    run = serve(CASE, stages, config, FCFS)
    after = settled(stages)
    num_bytes = after.bytes_sent[0] - before.bytes_sent[0]
    num_tokens = run.num_computed_tokens
    # bf16 of a layer's output, fp32 of the residual stream.
    assert num_bytes == num_tokens * config.model.spec.hidden_size * (2 + 4)
    assert after.bytes_sent[1] == 0
    assert after.out_s > 0.0
    assert 0.0 <= after.bubbles < 1.0


def test_doctor_shows_the_ranks_of_a_running_server(stages: RanksExecutor) -> None:
    """From what they report to a line per rank, as /metrics passes it on."""
    stats = settled(stages)
    metrics = ServerMetrics("quill", lambda: EngineStats(ranks=stats), dict)
    found = parse_metrics(Exposition(metrics).page()[0].decode())
    reading = Reading("http://here", 2.0, {}, found)
    ranks = ranks_of(found)
    assert [(each["rank"], each["stage"], int(each["pid"])) for each in ranks] == [
        ("0", "0", stages.pids[0]),
        ("1", "1", stages.pids[1]),
    ]
    for number, rank in enumerate(ranks):
        row = row_of(reading, rank)
        assert row[2] == socket.gethostname()
        assert row[-2] == f"{stats.busy_s[number] / 2:.0%}"
        assert float(row[7].removesuffix(" GiB")) > 0.05
        assert found[f"quire:rank_weight_bytes{{rank={number}}}"] == stages.loaded[number].weight_bytes


@pytest.mark.parametrize(
    ("case", "drafts"),
    [
        (
            Case("sliding", "float32", 47, num_requests=24),
            "none",
        ),  # a stage has the layers of one cache group alone
        (Case("llama", "float32", 48, num_requests=24), "ngram"),
        (Case("llama", "float32", 48, num_requests=24), "self"),
    ],
    ids=["sliding", "ngram", "draft"],
)
@pytest.mark.slow
def test_two_stages_serve_every_kind_of_step(case: Case, drafts: str) -> None:
    policy = Policy("continuous", "fcfs", 48, drafts)  # type: ignore[arg-type]
    config = config_of(case, TWO, policy)
    executor = RanksExecutor(config)
    try:
        serve(case, executor, config, policy)
    finally:
        executor.close()


def test_stages_agree_in_both_directions() -> None:
    """What one of three stages refuses, none has: an adapter that one node cannot read."""
    ends = [socket.socketpair() for _ in range(2)]
    links = [
        StageLinks(before, after, 4, 8, torch.float32, WallClock())
        for before, after in ((None, ends[0][0]), (ends[0][1], ends[1][0]), (ends[1][1], None))
    ]
    with ThreadPoolExecutor(3) as pool:
        for said in ((True, True, True), (False, True, True), (True, False, True), (True, True, False)):
            assert list(pool.map(lambda link, fine: link.all_of(fine), links, said)) == [all(said)] * 3
    for end in (end for pair in ends for end in pair):
        end.close()


def test_a_recorded_step_reads_as_many_rows_as_its_buffers_have() -> None:
    """Else rows of tokens are taken for those that give logits, where a step may have as many of both."""
    ends = socket.socketpair()
    links, sender = (
        StageLinks(before, after, 4, 8, torch.float32, WallClock())
        for before, after in ((ends[0], None), (None, ends[1]))
    )
    room = links.room_for(5)
    assert room is not None
    assert [x.shape[0] for x in room] == [5, 5]
    sent = torch.randn(3, 8), torch.randn(3, 8)
    sender.send(sent, 3)
    received = links.receive(3)
    assert received is not None
    for x, place, expected in zip(received, room, sent, strict=True):
        assert x.data_ptr() == place.data_ptr()
        assert torch.equal(x, expected)
    for end in ends:
        end.close()


def test_a_rank_without_neighbours_agrees_with_itself() -> None:
    alone = StageLinks(None, None, 4, 8, torch.float32, WallClock())
    assert alone.all_of(True)
    assert not alone.all_of(False)
