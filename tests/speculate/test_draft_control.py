"""The control of drafts, against machines whose step times are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from quire.config import SchedulerConfig
from quire.scheduler.draft_control import DraftControl

MOST = 8
StepSeconds = Callable[[int], float]  # of a step with so many rows


def memory_bound(rows: int) -> float:
    return 10e-3 + 0.4e-3 * rows


def compute_bound(rows: int) -> float:
    return 1e-3 + 1e-3 * rows


def in_tiles(rows: int) -> float:
    """Five rows are a tile of the kernel: they take less time than three, and six take much more."""
    return {1: 10e-3, 2: 10e-3, 3: 10e-3, 4: 9.5e-3, 5: 8.9e-3}.get(rows, 10e-3 + 0.4e-3 * rows)


@dataclass
class Seq:
    acceptance: float | None = None
    num_drafts: int = 0


class Machine:
    """Sequences whose drafts are right with probability ``alpha``; time passes as ``seconds`` says."""

    def __init__(
        self, control: DraftControl | None, fixed: int = 0, *, draft_s: float = 0.0, seed: int = 33
    ) -> None:
        self.control = control
        self.fixed = fixed
        self.draft_s = draft_s
        self.random = random.Random(seed)
        self.num_tokens = 0
        self.now_s = 0.0

    def run(self, num_seqs: int, alpha: float, seconds: StepSeconds, num_steps: int = 1500) -> float:
        """Return tokens per second."""
        seqs = [Seq() for _ in range(num_seqs)]
        before, start_s = self.num_tokens, self.now_s
        for _ in range(num_steps):
            self._step(seqs, alpha, seconds)
        return (self.num_tokens - before) / (self.now_s - start_s)

    def _step(self, seqs: list[Seq], alpha: float, seconds: StepSeconds) -> None:
        num_drafts = sum(seq.num_drafts for seq in seqs)
        asked = 0
        for seq in seqs:
            drafts, accepted = seq.num_drafts, 0
            while accepted < drafts and self.random.random() < alpha:
                accepted += 1
            self.num_tokens += 1 + accepted
            limit = self.fixed
            if self.control is not None:
                limit = self.control.ask(seq.acceptance)
                seq.acceptance = self.control.note_result(seq.acceptance, drafts, accepted)
                self.control.note_proposed(limit)
            seq.num_drafts = limit
            asked += limit
        took_s = seconds(len(seqs) + num_drafts) * self.random.uniform(0.95, 1.05)
        self.now_s += took_s + asked * self.draft_s
        if self.control is not None:
            self.control.note_step(seqs, num_drafts, took_s + asked * self.draft_s, asked * self.draft_s)


def control(adaptive: bool = True) -> DraftControl:
    return DraftControl(SchedulerConfig(max_num_drafts=MOST, adaptive_drafts=adaptive))


@pytest.mark.parametrize("draft_s", [0.0, 1e-3])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_seqs", [1, 8, 48])
@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
def test_auto_is_near_the_best_fixed_number(
    seconds: StepSeconds, num_seqs: int, alpha: float, draft_s: float
) -> None:
    fixed = [
        Machine(None, count, draft_s=draft_s).run(num_seqs, alpha, seconds, 400) for count in range(MOST + 1)
    ]
    machine = Machine(control(), draft_s=draft_s)
    machine.run(num_seqs, alpha, seconds, 300)
    found = machine.run(num_seqs, alpha, seconds)
    assert found >= 0.98 * fixed[0], f"{found / fixed[0]:.3f} of plain"
    assert found >= 0.93 * max(fixed), f"{found / max(fixed):.3f} of the best"


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8])
def test_a_number_that_suits_the_kernels_is_found(alpha: float) -> None:
    fixed = [Machine(None, count, draft_s=1e-3).run(1, alpha, in_tiles, 2_000) for count in range(MOST + 1)]
    machine = Machine(control(), draft_s=1e-3)
    machine.run(1, alpha, in_tiles, 500)
    found = machine.run(1, alpha, in_tiles, 3_000)
    print(f"α = {alpha}: {found / max(fixed):.3f} of the best")
    assert found >= 0.95 * max(fixed)


def test_drafts_stop_under_load_and_come_back() -> None:
    machine = Machine(control())

    def seconds(rows: int) -> float:
        return max(10e-3, 1e-3 * rows)

    assert machine.control is not None
    machine.run(1, 0.8, seconds, 200)
    assert machine.control.limit(0.8) >= 3
    machine.run(64, 0.8, seconds, 300)
    assert machine.control.limit(0.8) == 0
    machine.run(1, 0.8, seconds, 200)
    assert machine.control.limit(0.8) >= 3


def test_a_better_draft_model_is_noticed() -> None:
    machine = Machine(control(), draft_s=2e-3)
    machine.run(1, 0.0, memory_bound, 400)
    assert machine.control is not None
    assert machine.control.limit(None) == 0
    machine.run(1, 0.95, memory_bound, 8_000)
    assert machine.control.limit(0.95) > 0


def test_probes_take_a_small_share_of_the_time() -> None:
    """A draft model that is far behind computes a whole sequence before its first draft."""
    off = control()
    off.cut = None
    drafted_s, plain_s, num_probes = 0.0, 0.0, 0
    seqs = [Seq(), Seq()]
    for _ in range(20_000):
        asked = sum(off.ask(seq.acceptance) for seq in seqs)
        draft_s = 40e-3 * asked
        off.note_proposed(asked)
        off.note_step(seqs, 0, 1e-3 + draft_s, draft_s)
        drafted_s, plain_s, num_probes = drafted_s + draft_s, plain_s + 1e-3, num_probes + asked
    assert off.cut is None
    assert num_probes >= 2
    assert drafted_s < 0.01 * plain_s


def test_a_fixed_number_is_always_asked_for() -> None:
    fixed = control(adaptive=False)
    assert {fixed.ask(rate) for rate in (None, 0.0, 0.5, 1.0)} == {MOST}
