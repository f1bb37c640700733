"""The step log: what an engine writes, read again, gives the times that its steps took."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.engine import FAKE

from quire.args import EngineArgs
from quire.clock import VirtualClock
from quire.cost.cost_model import CostModel, Curve, StepFeatures
from quire.cost.profile import fit_steps, read_steps
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.build import build_core
from quire.errors import ConfigError
from quire.executor.logged import LoggedExecutor
from quire.request import Request, SamplingParams
from quire.step import NewSeq, SeqPlan, StepPlan
from quire_lab.sim.latency import Latency, sim_executor

TRUTH = CostModel(0.002, Curve((1.0, 64.0), (0.0, 0.004)), per_decode_kv_s=3e-7, per_pair_s=2e-8)
LOOP_S, SEQ_S = 0.0003, 0.00001  # between steps


def logged(path: Path) -> list[StepFeatures]:
    """Run 16 sequences that join one by one, some time after each other; return what each step had to do."""
    clock = VirtualClock()
    executor = LoggedExecutor(sim_executor(Latency(TRUTH), clock, clock.advance_to), path, clock)
    starts: dict[int, int] = {}
    for step in range(120):
        new, plans = [], []
        if step % 7 == 0 and len(starts) < 16:
            seq_id = len(starts)
            length = 5 + 9 * seq_id
            new.append(NewSeq(seq_id, 0, tuple(range(length)), (), SamplingParams(max_tokens=None), 0))
            plans.append(SeqPlan(seq_id, 0, 0, length, (0,), ((seq_id,),)))
        plans += [SeqPlan(seq_id, 0, at, 1, (), ()) for seq_id, at in starts.items()]
        clock.advance(LOOP_S + SEQ_S * len(plans) if starts else 5.0)
        executor.submit(StepPlan(step, tuple(new), tuple(plans)))
        executor.collect()
        starts = {p.seq_id: p.num_computed_tokens + p.num_scheduled_tokens for p in plans}
    executor.close()
    return [s.step for s in read_steps(path)]


def test_the_log_of_steps_gives_their_times_and_the_loops(tmp_path: Path) -> None:
    steps = logged(tmp_path / "steps.jsonl")
    assert len(steps) == 120
    assert steps[0] == StepFeatures(5, 1, 1, 0, 5, 15)
    assert steps[7].num_seqs == 2
    found = fit_steps(read_steps(tmp_path / "steps.jsonl"))
    for step in steps:
        assert found.executor.seconds(step) == pytest.approx(TRUTH.seconds(step), rel=0.02)
    assert found.host.fixed_s == pytest.approx(LOOP_S, rel=0.02)  # idle before the first prompt is no work
    assert found.host.per_seq_s == pytest.approx(SEQ_S, rel=0.02)


def test_an_engine_writes_it_where_its_settings_say(tmp_path: Path) -> None:
    config, _ = configure(
        EngineArgs(step_log=str(tmp_path / "steps.jsonl"), num_kv_blocks=64, max_model_len=512),
        detect_device(),
    )
    core = build_core(config, FAKE, VirtualClock())
    core.put(Request("r", (5, 6, 7), SamplingParams(max_tokens=4, seed=1, ignore_eos=True), 0.0))
    while core.has_work:
        core.step()
    core.executor.close()
    steps = read_steps(tmp_path / "steps.jsonl")
    assert [(s.step.num_tokens, s.num_decodes) for s in steps] == [(3, 0), (1, 1), (1, 1), (1, 1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, a disk that is always full")
def test_a_full_disk_ends_the_log_and_not_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    executor = LoggedExecutor(sim_executor(Latency(TRUTH), clock, clock.advance_to), Path("/dev/full"), clock)
    seq = NewSeq(0, 0, (1, 2, 3), (), SamplingParams(max_tokens=None), 0)
    for step, plan in enumerate((SeqPlan(0, 0, 0, 3, (0,), ((0,),)), SeqPlan(0, 0, 3, 1, (), ()))):
        executor.submit(StepPlan(step, (seq,) if step == 0 else (), (plan,)))
        assert executor.collect().seqs[0].token_ids
    executor.close()
    assert caplog.text.count("the step log ends here") == 1


def test_what_is_wrong_with_a_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    logged(path)
    path.write_text(path.read_text() + '{"at_s": 1}\n')
    with pytest.raises(ConfigError, match=r"steps.jsonl, line 121: not a step: KeyError"):
        read_steps(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_steps(tmp_path / "none")
    with pytest.raises(ConfigError, match="there are none"):
        fit_steps([])
    with pytest.raises(ConfigError, match=r"step_log = .*cannot be written to"):
        logged(tmp_path / "no" / "folder")
