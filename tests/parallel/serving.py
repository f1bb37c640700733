"""Traffic through ranks, each in a process of its own, compared with every sequence alone in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.exact.engine_run import EngineRun, Policy
from tests.exact.suite import Case, _check_client, truth_of

import quire
from quire.config import EngineConfig
from quire.executor.ranks import RanksExecutor
from quire.parallel.topology import Topology

QUILL = str(Path(quire.__file__).parent / "models" / "quill_data" / "quill")
CASE = Case(QUILL, "bfloat16", 71, num_requests=24, cpu_isa="reference")
FCFS = Policy("continuous", "fcfs", 48)


def config_of(case: Case, topology: Topology, policy: Policy = FCFS, *, num_threads: int = 1) -> EngineConfig:
    """Return a configuration with so few blocks that sequences are preempted."""
    longest = -(-(case.max_prompt + case.max_output) // case.block_size)
    config = case.config(2 * longest, policy, num_threads=num_threads)
    return replace(config, topology=topology)


def serve(case: Case, executor: RanksExecutor, config: EngineConfig, policy: Policy) -> EngineRun:
    """Serve the case's traffic on ``executor``, which may have served before, and compare tokens and ends."""
    scheduler = replace(config.scheduler, gate=policy.gate, order=policy.order)
    truth = truth_of(case)
    run = EngineRun(replace(config, scheduler=scheduler), executor, policy)
    run.serve(truth.jobs)
    for (request_id, index), ended in run.ended.items():
        _check_client(f"{case}, {policy}, {request_id}[{index}]", ended, truth.outputs[request_id, index])
    return run
