"""`quire profile`: the steps it makes are the ones it says it measures; fitted times come back."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.args import EngineArgs
from quire.clock import VirtualClock
from quire.config import EngineConfig
from quire.cost.cost_model import CostModel, Curve, StepFeatures, chunk_pairs, features
from quire.cost.draft_cost import DraftCost, DraftLedger, fit_drafts
from quire.cost.fit import FitError, MeasuredStep, cut_mean, fit
from quire.cost.kept_profiles import kept, profile_folder, profile_path, profiled_settings
from quire.cost.profile import HostCost, Profile, Spread, load_profile
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.errors import ConfigError
from quire.request import SamplingParams
from quire.step import SeqResult, StepPlan, StepResult
from quire_lab.bench.args import ProfileArgs
from quire_lab.bench.profile import measure_steps, profile, report, warnings_of
from quire_lab.bench.profile_serving import _line
from quire_lab.bench.profile_steps import REPEATS, StepProfiler, cases
from quire_lab.bench.progress import ticking

TRUTH = CostModel(
    0.002, Curve((1.0, 32.0, 512.0), (0.0, 0.0, 0.05)), Curve((1.0, 64.0), (0.0, 0.003)), 1e-6, 4e-8, 1e-8,
    per_draft_pair_s=2e-8,
)  # fmt: skip
STEADY = Spread.of([(1.0, 1.02, 1.0)])
PROPOSING = DraftCost(0.0004, 0.00002, 0.000003, per_pair_s=5e-9, per_key_s=4e-9)


class Stopwatch:
    """An executor whose steps take what `TRUTH` says, on a virtual clock; keeps what each had to do.

    It proposes as many drafts as it may, which take what `PROPOSING` says, and accepts the first of them.
    """

    max_in_flight = 1

    def __init__(self, clock: VirtualClock) -> None:
        self.steps: list[StepFeatures] = []
        self._clock = clock
        self._known: dict[int, int] = {}
        self._drafts: dict[int, int] = {}
        self._ledger = DraftLedger(cached_prefix=False)
        self._out: StepResult | None = None

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new_seqs:
            self._known[new.seq_id] = len(new.prompt_token_ids)
        results = []
        for seq in plan.seqs:
            end = seq.num_computed_tokens + seq.num_known_tokens
            assert end <= self._known[seq.seq_id]  # as the worker demands
            assert seq.num_draft_tokens == self._drafts.pop(seq.seq_id, 0)
            token_ids = (7,) * (end == self._known[seq.seq_id]) * (1 + min(1, seq.num_draft_tokens))
            self._known[seq.seq_id] += len(token_ids)
            if seq.max_next_drafts:
                self._drafts[seq.seq_id] = seq.max_next_drafts
            results.append(SeqResult(seq.seq_id, 0, token_ids, seq.max_next_drafts))
        step = features(plan, {each.seq_id for each in results if each.token_ids})
        if plan.seqs:
            self.steps.append(step)
        result = StepResult(plan.step, tuple(results))
        draft_s = PROPOSING.seconds(self._ledger.take(plan, result))
        self._clock.advance(TRUTH.seconds(step) + draft_s)
        self._out = replace(result, draft_s=draft_s)

    def collect(self) -> StepResult:
        assert self._out is not None
        return self._out

    def close(self) -> None:
        self._out = None


def config_of(**settings: object) -> EngineConfig:
    given = {"max_model_len": 1024, "num_kv_blocks": 900, "max_num_seqs": 24, "max_num_batched_tokens": 512}
    return configure(EngineArgs(**(given | settings)), detect_device())[0]  # type: ignore[arg-type]


def test_a_profile_knows_how_long_prompts_were_cut() -> None:
    assert profiled_settings(config_of(long_prefill_token_threshold=77))["long_prefill_token_threshold"] == 77


def test_the_grid_keeps_within_the_engine_s_limits() -> None:
    config = config_of()
    found = cases(config, 500)
    assert len(found) > 60
    for case in found:
        assert case.num_seqs <= 24
        assert case.num_rows <= 512
        assert case.num_blocks(16) <= 500
    assert {c.num_decodes for c in found} >= {1, 2, 16, 24} - {24}
    assert max(c.num_rows for c in found) == 512
    assert any(c.num_decodes and c.num_chunks for c in found)


def test_steps_follow_their_cases_and_the_fit_finds_the_times() -> None:
    config, clock = config_of(), VirtualClock()
    executor = Stopwatch(clock)
    profiler = StepProfiler(executor, config, clock, SamplingParams(max_tokens=None, seed=1), max_blocks=500)
    profiler.fill()
    for case in cases(config, 500):
        executor.steps.clear()
        profiler.visit(case)
        if case.num_chunks:  # between them other pages are read, and nothing is drawn
            assert {(step.chunk_pairs, step.num_logits) for step in executor.steps[::2]} == {(0, 0)}
            del executor.steps[::2]
        assert len(executor.steps) == REPEATS
        first, last = executor.steps[0], executor.steps[-1]
        assert first == case.features
        assert last[:3] == first[:3]  # as many rows, sequences and tokens drawn
        assert last.decode_kv_tokens - first.decode_kv_tokens == case.num_decodes * (REPEATS - 1)
    points = profiler.measured()
    model = fit(points)
    for point in points:
        assert model.seconds(point.step) == pytest.approx(TRUTH.seconds(point.step), rel=0.03)


def test_steps_with_drafts_are_measured_apart_from_proposing() -> None:
    """Each verification has the drafts of its case; contexts grow by what was accepted."""
    config = config_of(speculate="draft", spec_tokens="4", max_num_batched_tokens=4096)
    executor = Stopwatch(clock := VirtualClock())
    profiler = StepProfiler(executor, config, clock, SamplingParams(max_tokens=None, seed=1), max_blocks=500)
    profiler.fill()
    drafted = [case for case in cases(config, 500) if case.num_drafts]
    assert {case.num_drafts for case in drafted} == {1, 2, 4}
    assert {case.num_decodes for case in drafted} == {1, 2, 4, 8, 16}
    assert not [case for case in cases(config_of(), 500) if case.num_drafts]
    for case in cases(config, 500):
        executor.steps.clear()
        profiler.visit(case)
        if not case.num_drafts:
            continue
        first, *verified = executor.steps
        assert first[:3] == (case.num_decodes,) * 3  # nothing to verify yet
        assert len(verified) == REPEATS - 1
        for place, step in enumerate(verified):
            keys = case.context + 1 + 2 * place
            assert step.num_tokens == step.num_logits == case.num_rows
            assert step.decode_kv_tokens == case.num_decodes * (keys + case.num_drafts)
            assert step.draft_pairs == case.num_decodes * chunk_pairs(keys, case.num_drafts)
    points = profiler.measured()
    model = fit(points)
    assert model.per_draft_pair_s == pytest.approx(TRUTH.per_draft_pair_s, rel=0.2)
    for point in points:
        assert model.seconds(point.step) == pytest.approx(TRUTH.seconds(point.step), rel=0.04)
    found = fit_drafts(profiler.measured_drafts())
    assert found is not None
    assert found.acceptance == ()  # random prompts say nothing of it
    for drafts in profiler.measured_drafts():
        assert found.seconds(drafts.work) == pytest.approx(PROPOSING.seconds(drafts.work), rel=0.02)
    made = Profile(
        "m", {"name": "x"}, {"threads": 1}, model, error=FitError(0.1, 0.1, 0.2, 5), points=tuple(points)
    )
    assert "drafts " not in report(made)
    assert f"{len(drafted)} steps that verify some" in report(replace(made, draft=found))


def test_a_line_of_two_costs() -> None:
    points = [(x, 0.001 + 0.0002 * x, 0.01 + 0.001 * x) for x in (1, 4, 16, 32)]
    assert _line(points) == pytest.approx((0.001, 0.0002))
    assert min(_line([(1, -0.5, 1.0), (4, -0.2, 1.0)])) >= 0.0


def test_a_line_through_tokens_that_arrived_together_is_flat() -> None:
    """A load generator that is late reads many tokens at once: most gaps, or all, are 0."""
    assert cut_mean([0.0, 0.0, 0.0, 0.4]) == pytest.approx(0.1)
    assert _line([(1, 0.0, 0.0), (2, 0.0, 0.0)]) == (0.0, 0.0)
    assert _line([(1, 0.0, 0.0), (2, 0.002, 0.01), (4, 0.004, 0.01)]) == pytest.approx((0.0, 0.001))


def test_it_says_where_the_file_cannot_go() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        profile(EngineArgs(), ProfileArgs(out="/no/such/folder/p.json"), [])


def test_settings_that_leave_nothing_to_fit_are_refused_before_measuring() -> None:
    with pytest.raises(ConfigError, match="only 0 kinds of steps fit max_model_len = 64"):
        measure_steps(
            config_of(max_model_len=64), SamplingParams(max_tokens=None, seed=1), 1.0, VirtualClock()
        )


def measured_at_once(monkeypatch: pytest.MonkeyPatch, folder: Path, spread: Spread | None = STEADY) -> None:
    """Have `quire profile` find the times of `TRUTH`, and keep its files in ``folder``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    steps = [case.features for case in cases(config_of(), 500)]
    points = [MeasuredStep(step, TRUTH.seconds(step)) for step in steps]
    monkeypatch.setattr("quire_lab.bench.profile.measure_steps", lambda *_: (points, [], spread))


@pytest.mark.parametrize("failure", [ZeroDivisionError("float division by zero"), KeyboardInterrupt()])
def test_steps_are_kept_whatever_comes_after_them(
    failure: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> HostCost:
        raise failure

    measured_at_once(monkeypatch, tmp_path)
    monkeypatch.setattr("quire_lab.bench.profile._serve", fails)
    assert profile(EngineArgs(), ProfileArgs(), []) == 1
    said = capsys.readouterr().err
    assert "the server around the steps could not be measured" in said
    assert "Ctrl-C" in said or "ZeroDivisionError: float division by zero" in said
    found = kept("quill")
    assert found is not None
    assert found[1].host == HostCost()
    assert found[1].executor.seconds(StepFeatures(8, 8, 8, 800, 0, 0)) == pytest.approx(
        TRUTH.seconds(StepFeatures(8, 8, 8, 800, 0, 0)), rel=0.05
    )
    assert f"written to {found[0]}. quire serve --slo, plan and simulate find it there." in said


def test_ctrl_c_fits_the_steps_measured_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_at_once(monkeypatch, tmp_path, spread=None)
    assert profile(EngineArgs(), ProfileArgs(), []) == 130
    assert kept("quill") is not None


def test_ctrl_c_in_a_step_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    core = SimpleNamespace(executor=Stopwatch(clock))
    core.executor.close = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr("quire_lab.bench.profile.build_core", lambda *_: core)
    visit, left = StepProfiler.visit, [30]

    def until(self: StepProfiler, *arguments: object, **more: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        visit(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(StepProfiler, "visit", until)
    points, _, spread = measure_steps(config_of(), SamplingParams(max_tokens=None, seed=1), 5.0, clock)
    assert spread is None
    assert 10 <= len(points) <= 30
    left[0] = 3
    with pytest.raises(KeyboardInterrupt):
        measure_steps(config_of(), SamplingParams(max_tokens=None, seed=1), 5.0, clock)


def test_the_kept_profile_of_a_model_and_its_settings_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = {"name": "x", "cores": 2, "isa": "amx"}
    for index, (model, quantize) in enumerate([("a/m", None), ("a/m", "int8"), ("b", None), ("a/m", None)]):
        settings = {"dtype": "bfloat16", "quantize": quantize, "threads": 2}
        Profile(
            model, machine, settings, CostModel(0.001 * (1 + index)), measured_at=f"2026-01-0{index + 1}"
        ).save(profile_path(model, machine, settings))
    (profile_folder() / "other.json").write_text("{}")
    assert len(list(profile_folder().glob("*.json"))) == 4  # the second of one kind replaced the first

    def fixed(*given: Any, **more: Any) -> float | None:
        found = kept(*given, **more)
        return None if found is None else found[1].executor.fixed_s

    assert fixed() == fixed("a/m") == 0.004
    assert fixed("a/m", machine, {"quantize": "int8"}) == 0.002
    assert fixed("b", settings={"threads": 2}) == 0.003
    assert fixed("a/m", machine | {"cores": 4}) is None
    assert fixed("c") is None


@pytest.mark.slow
def test_quill_is_profiled(tmp_path: Path) -> None:
    """The real executor and a real server, briefly: a file that loads, positive times, all terms finite."""
    out = tmp_path / "quill.json"
    settings = EngineArgs(
        max_model_len=512, num_kv_blocks=200, max_num_seqs=8, max_num_batched_tokens=128, speculate="draft"
    )
    flags = ["--max-model-len", "512", "--num-kv-blocks", "200", "--max-num-seqs", "8"]
    assert profile(settings, ProfileArgs(out=str(out), seconds=2.0), flags) == 0
    made = load_profile(out)
    assert made.error is not None
    assert made.settings["max_num_batched_tokens"] == 128
    assert made.step_time.seconds(StepFeatures(1, 1, 1, 10, 0, 0)) > 0.0
    assert json.loads(out.read_text())["points"]
    assert made.draft is not None
    assert made.draft.per_forward_s + made.draft.per_draft_s > 0.0
    assert made.settings["speculate"] == "draft"


def test_machine_that_changes_is_named_in_file_and_report(tmp_path: Path) -> None:
    steady, changed = Spread.of([(1.0, 1.02, 1.0)]), Spread.of([(1.0, 1.4, 1.0), (0.2, 0.19, 0.2)])
    assert (changed.fast, changed.slow) == (0.95, 1.4)
    error = FitError(0.01, 0.1, 0.2, 5)
    made = Profile("m", {"name": "x"}, {"threads": 1}, CostModel(0.001), error=error, spread=steady)
    assert warnings_of(made) == []
    worse = replace(made, error=FitError(0.05, 0.4, 1.14, 5), spread=changed)
    told = warnings_of(worse)
    assert len(told) == 2
    assert "0.95 … 1.40" in told[0]
    assert "114%" in told[1]
    worse.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").spread == changed
    assert "spread   0.95 … 1.40" in report(worse)


def test_long_work_says_so_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    with ticking(lambda s: "still" if not done.set() else "", every_s=0.01):
        assert done.wait(30)
    assert "still" in capsys.readouterr().err
