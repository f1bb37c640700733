"""The bytes that `uses` predicts for a step are those that ranks count while they serve."""

from __future__ import annotations

import pytest
from tests.engine.test_process import wait_for
from tests.exact.alone import AloneDriver
from tests.exact.models import MAX_MODEL_LEN
from tests.exact.suite import Case, truth_of
from tests.parallel.serving import QUILL, config_of

from quire.config import EngineConfig
from quire.device import detect_device
from quire.executor.ranks import RanksExecutor
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.parallel.traffic import BytesSent, step_bytes, uses
from quire.step import StepPlan, StepResult


class Counting:
    """An executor that counts the rows which were computed and those which were sampled from."""

    def __init__(self, inner: RanksExecutor) -> None:
        self._inner, self.max_in_flight, self.chains_steps = inner, inner.max_in_flight, inner.chains_steps
        self.num_tokens = self.num_logits = 0

    def submit(self, plan: StepPlan) -> None:
        self.num_tokens += sum(seq.num_scheduled_tokens for seq in plan.seqs)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self.num_logits += sum(bool(seq.token_ids) for seq in result.seqs)
        return result

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize(
    ("topology", "is_recorded"),
    [(Topology(tp=2), True), (Topology(tp=2), False), (Topology(pp=2), True)],
    ids=["tp2-recorded", "tp2-call-by-call", "pp2"],
)
def test_bytes_sent_are_within_5_percent_of_those_predicted(topology: Topology, is_recorded: bool) -> None:
    cpu_isa = detect_device().isa if is_recorded else "reference"
    case = Case(QUILL, "bfloat16", 71, num_requests=6, cpu_isa=cpu_isa)
    config = config_of(case, topology)
    executor = RanksExecutor(config)
    counting = Counting(executor)
    found = [uses(shard(config.model.spec, topology, rank), config.model.dtype) for rank in range(2)]
    try:
        run_traffic(case, counting, config)

        def ratios() -> list[float]:
            executor.submit(StepPlan(0))  # takes in the counts of the steps before
            executor.collect()
            predicted = [step_bytes(each, counting.num_tokens, counting.num_logits) for each in found]
            pairs = zip(executor.rank_stats().bytes_sent, predicted, strict=True)
            return [sent / wanted if wanted else 1.0 + sent for sent, wanted in pairs]

        wait_for(lambda: ratios() == pytest.approx([1.0, 1.0], rel=0.05))
    finally:
        executor.close()


def run_traffic(case: Case, executor: Counting, config: EngineConfig) -> None:
    """Serve each request of the case alone: chunks of prompts and decodes."""
    alone = AloneDriver(executor, config.kv_layout, case.block_size, MAX_MODEL_LEN)
    for job in truth_of(case).jobs:
        alone.run(job.request, 0)
    assert executor.num_tokens > executor.num_logits > 0


def test_calls_of_a_recorded_step_count_once_per_replay() -> None:
    sent = BytesSent()
    with sent.recording(max_tokens=64, max_logits=8):
        sent.add(64, 10.0)
        sent.add(64, 2.0)
        sent.add(8, 100.0)
    assert sent.total == 0.0
    sent.replayed(3, 1)
    sent.add(5, 1.0)
    assert sent.total == 3 * 12.0 + 100.0 + 5.0
