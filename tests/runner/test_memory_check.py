"""The trial step and its comparison, on a CPU with a meter that the test reads out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.runner.tiny import SPECS, engine_config, weights

from quire.clock import VirtualClock
from quire.errors import StepError
from quire.executor.local import LocalExecutor
from quire.runner.memory_check import Meter, check_memory, trial_plans
from quire.step import StepPlan, StepResult


class Readings(Meter):
    def held(self) -> int:
        return 5 << 30

    def peak(self) -> int:
        return 7 << 30

    def restart(self) -> None:
        pass

    def used(self) -> int:
        return 1 << 30


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("most", [8, 100, 300, 2048])
def test_the_largest_step_runs_and_is_forgotten(name: str, most: int) -> None:
    config = engine_config(SPECS[name])
    config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=most))
    executor = LocalExecutor(config, clock=VirtualClock(), weights=weights(config.model.spec))
    results: list[StepResult] = []

    def run(plan: StepPlan) -> StepResult:
        results.append(executor.worker.execute(plan))
        return results[-1]

    step, decode, _ = trial_plans(config)
    assert {seq.num_scheduled_tokens for seq in decode.seqs} == {1}
    rows = [seq.num_scheduled_tokens for seq in step.seqs]
    assert len(rows) <= config.scheduler.max_num_seqs
    assert sum(rows) == min(most, 8 * (config.model.max_model_len - 1))
    checked = check_memory(config, run, Readings())
    assert [len(result.seqs) for result in results] == [len(rows), len(rows), 0]
    assert all(seq.error is None and len(seq.token_ids) == 1 for result in results for seq in result.seqs)
    assert len(executor.worker.seqs) == 0
    assert checked.found.step == 2 << 30
    assert checked.found.weights + checked.found.kv == 5 << 30
    assert checked.expected.kv == checked.found.kv
    assert checked.fits
    assert "step 2.00 (0.00)" in str(checked)


def test_a_trial_that_fails_says_why() -> None:
    def run(plan: StepPlan) -> StepResult:
        return StepResult(plan.step, error="no memory at all")

    with pytest.raises(StepError, match="the trial step failed: no memory at all"):
        check_memory(engine_config(SPECS["llama"]), run, Readings())
