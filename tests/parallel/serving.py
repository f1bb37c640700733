"""Traffic through ranks, each in a process of its own, compared with every sequence alone in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.exact.alone import AloneDriver
from tests.exact.engine_run import EngineRun, Policy
from tests.exact.models import MAX_MODEL_LEN
from tests.exact.suite import Case, Truth, _check_client, truth_of

import quire
from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.parallel.rotations import rotated
from quire.parallel.topology import Topology

QUILL = str(Path(quire.__file__).parent / "models" / "quill_data" / "quill")
CASE = Case(QUILL, "bfloat16", 71, num_requests=24, cpu_isa="reference")
FCFS = Policy("continuous", "fcfs", 48)


def config_of(case: Case, topology: Topology, policy: Policy = FCFS, *, num_threads: int = 1) -> EngineConfig:
    """Return a configuration with so few blocks that sequences are preempted."""
    longest = -(-(case.max_prompt + case.max_output) // case.block_size)
    num_groups = len(case.spec.kv_layout(MAX_MODEL_LEN).groups)
    config = case.config(max(2, num_groups) * longest, policy, num_threads=num_threads)
    formats = rotated(config.model.spec, config.model.formats, {}, topology.tp)
    return replace(config, topology=topology, model=replace(config.model, formats=formats))


def alone_on(case: Case, executor: Executor, config: EngineConfig) -> Truth:
    """Run every sequence of the case by itself on ``executor``: the truth of a tensor-parallel size."""
    alone = AloneDriver(executor, config.kv_layout, case.block_size, MAX_MODEL_LEN)
    jobs = truth_of(case).jobs
    outputs = {
        (job.request.request_id, index): alone.run(job.request, index)
        for job in jobs
        for index in range(job.request.sampling.n)
    }
    return Truth(jobs, {}, outputs)


def serve(
    case: Case, executor: Executor, config: EngineConfig, policy: Policy, truth: Truth | None = None
) -> EngineRun:
    """Serve the case's traffic on ``executor``, which may have served before, and compare tokens and ends.

    ``truth``: None is that of one process.
    """
    scheduler = replace(config.scheduler, gate=policy.gate, order=policy.order)
    truth = truth or truth_of(case)
    run = EngineRun(replace(config, scheduler=scheduler), executor, policy)
    run.serve(truth.jobs)
    for (request_id, index), ended in run.ended.items():
        _check_client(f"{case}, {policy}, {request_id}[{index}]", ended, truth.outputs[request_id, index])
    return run
