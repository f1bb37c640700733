"""Ranks on several nodes have the bits of as many on one: their sums have one order, in memory or over Gloo."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.engine.test_process import gone, wait_for
from tests.exact.suite import Case
from tests.parallel.apart import start_apart
from tests.parallel.serving import CASE, FCFS, alone_on, config_of, serve
from tests.parallel.test_faults import save_mixtral

from quire.config import EngineConfig, ExpertsConfig
from quire.device import detect_device
from quire.errors import EngineDeadError
from quire.executor.ranks import RanksExecutor
from quire.parallel.topology import Topology
from quire.step import StepPlan

NATIVE = replace(CASE, cpu_isa=detect_device().isa, num_requests=12)


def tokens_over(config: EngineConfig, nodes: int, case: Case = NATIVE) -> None:
    """Serve traffic on ranks here and on ``nodes``; their tokens are the same."""
    here = RanksExecutor(config)
    try:
        truth = alone_on(case, here, config)
    finally:
        here.close()
    apart = RanksExecutor(config, start=partial(start_apart, nodes))
    pids = apart.pids
    try:
        serve(case, apart, config, FCFS, truth)
        assert all(sent > 0 for sent in apart.rank_stats().bytes_sent)
    finally:
        apart.close()
    wait_for(lambda: all(map(gone, pids)))
    assert not list(Path("/dev/shm").glob(f"quire-{os.getpid()}-*"))


@pytest.mark.parametrize(
    "topology", [Topology(ep=2), pytest.param(Topology(tp=2), marks=pytest.mark.slow)], ids=["rows", "sums"]
)
def test_tensor_ranks_on_two_nodes_have_the_bits_of_one(topology: Topology) -> None:
    tokens_over(config_of(NATIVE, topology), 2)


@pytest.mark.slow
def test_context_ranks_on_two_nodes_have_the_bits_of_one() -> None:
    tokens_over(config_of(NATIVE, Topology(cp=2)), 2)


@pytest.mark.slow
def test_memory_and_network_together_have_the_bits_of_one() -> None:
    tokens_over(config_of(NATIVE, Topology(tp=2, cp=2)), 2)


@pytest.mark.slow
def test_experts_on_two_nodes_have_the_bits_of_one(tmp_path: Path) -> None:
    case = replace(NATIVE, model=save_mixtral(tmp_path))
    config = replace(config_of(case, Topology(ep=2, redundant_experts=2)), experts=ExpertsConfig(True, 5))
    tokens_over(config, 2, case)


@pytest.mark.slow
def test_the_death_of_a_rank_on_another_node_ends_the_group() -> None:
    config = config_of(NATIVE, Topology(tp=2))
    executor = RanksExecutor(config, start=partial(start_apart, 2))
    pids = executor.pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"Rank 1 \(process \d+\) was killed by SIGKILL"):
        compute_until_it_fails(executor)
    wait_for(lambda: all(map(gone, pids)))


def compute_until_it_fails(executor: RanksExecutor) -> None:
    """The sockets of a process close a moment after it was killed."""
    for step in range(6000):
        executor.submit(StepPlan(step))
        executor.collect()
        time.sleep(0.005)
