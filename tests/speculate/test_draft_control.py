"""The control of drafts, against machines whose step times are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from quire.config import SchedulerConfig
from quire.scheduler.policies.draft_control import DraftControl

MOST = 8
StepSeconds = Callable[[int], float]  # of a step with so many rows


def memory_bound(rows: int) -> float:
    return 10e-3 + 0.4e-3 * rows


def compute_bound(rows: int) -> float:
    return 1e-3 + 1e-3 * rows


def in_tiles(rows: int) -> float:
    """Five rows are a tile of the kernel: they take less time than three, and six take much more."""
    return {1: 10e-3, 2: 10e-3, 3: 10e-3, 4: 9.5e-3, 5: 8.9e-3}.get(rows, 10e-3 + 0.4e-3 * rows)


def edits_code(rows: int) -> float:
    """A model of 0.5B on two cores: eight more rows take as long as one."""
    return (25e-3 + 6e-3 * rows) if rows < 5 else 35e-3 + 3.5e-3 * rows


@dataclass
class Seq:
    alpha: float = 0.0
    acceptance: float | None = None
    num_drafts: int = 0
    num_undrafted: int = 0  # tokens that the draft model has not computed


class Machine:
    """Sequences whose drafts are right with probability ``alpha``; time passes as ``seconds`` says."""

    def __init__(
        self,
        control: DraftControl | None,
        fixed: int = 0,
        *,
        draft_s: float = 0.0,
        round_s: float = 0.0,
        behind_s: float = 0.0,
        noise: float = 0.05,
        busy: tuple[float, float] = (0.0, 1.0),
        seed: int = 33,
    ) -> None:
        """Proposing takes ``draft_s`` per draft and ``round_s`` per step; ``behind_s`` per token not drafted before.

        ``busy``: the share of steps that other processes hold up, and how many times as long those take.
        """
        self.control = control
        self.fixed = fixed
        self.draft_s = draft_s
        self.round_s, self.behind_s, self.noise = round_s, behind_s, noise
        self.busy = busy
        self.random = random.Random(seed)
        self.num_tokens = 0
        self.now_s = 0.0

    def run(self, num_seqs: int, alpha: float, seconds: StepSeconds, num_steps: int = 1500) -> float:
        """Return tokens per second."""
        return self.run_seqs([Seq(alpha) for _ in range(num_seqs)], seconds, num_steps)

    def run_seqs(self, seqs: list[Seq], seconds: StepSeconds, num_steps: int) -> float:
        before, start_s = self.num_tokens, self.now_s
        for _ in range(num_steps):
            self.step(seqs, seconds)
        return (self.num_tokens - before) / (self.now_s - start_s)

    def step(self, seqs: list[Seq], seconds: StepSeconds) -> None:
        num_drafts = sum(seq.num_drafts for seq in seqs)
        asked, behind = 0, 0
        for seq in seqs:
            drafts, accepted = seq.num_drafts, 0
            while accepted < drafts and self.random.random() < seq.alpha:
                accepted += 1
            self.num_tokens += 1 + accepted
            limit = self.fixed
            if self.control is not None:
                limit = self.control.ask(seq)
                seq.acceptance = self.control.note_result(seq.acceptance, drafts, accepted)
                self.control.note_proposed(limit)
            seq.num_drafts = limit
            asked += limit
            seq.num_undrafted += 1 + accepted
            if limit:
                behind, seq.num_undrafted = behind + seq.num_undrafted, 0
        took_s = seconds(len(seqs) + num_drafts) * self.random.uniform(1.0 - self.noise, 1.0 + self.noise)
        share, times_as_long = self.busy
        if share and self.random.random() < share:
            took_s *= times_as_long
        drafted_s = asked * self.draft_s + (asked > 0) * self.round_s + behind * self.behind_s
        self.now_s += took_s + drafted_s
        if self.control is not None:
            self.control.note_step(seqs, num_drafts, took_s + drafted_s, drafted_s)


def control(adaptive: bool = True) -> DraftControl:
    return DraftControl(SchedulerConfig(max_num_drafts=MOST, adaptive_drafts=adaptive))


def fixed_rates(
    num_seqs: int, alpha: float, seconds: StepSeconds, *, draft_s: float = 0.0, round_s: float = 0.0
) -> list[float]:
    """Return the expected tokens per second of 0 … `MOST` fixed drafts."""
    rates = []
    for count in range(MOST + 1):
        proposing_s = num_seqs * count * draft_s + (round_s if count else 0.0)
        tokens = num_seqs * sum(alpha**place for place in range(count + 1))
        rates.append(tokens / (seconds(num_seqs * (1 + count)) + proposing_s))
    return rates


# Of 48 sequences a step takes as long here as of all others together.
@pytest.mark.parametrize(
    ("num_seqs", "draft_s"),
    [(1, 0.0), (1, 1e-3), (8, 0.0), (8, 1e-3), (48, 0.0), pytest.param(48, 1e-3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
def test_auto_is_near_the_best_fixed_number(
    seconds: StepSeconds, num_seqs: int, alpha: float, draft_s: float
) -> None:
    fixed = fixed_rates(num_seqs, alpha, seconds, draft_s=draft_s)
    machine = Machine(control(), draft_s=draft_s)
    machine.run(num_seqs, alpha, seconds, 300)
    rate = machine.run(num_seqs, alpha, seconds, {1: 3_000, 8: 800, 48: 400}[num_seqs])
    assert rate >= 0.98 * fixed[0], f"{rate / fixed[0]:.3f} of plain"
    assert rate >= 0.95 * max(fixed), f"{rate / max(fixed):.3f} of the best"


@pytest.mark.parametrize("busy", [(0.1, 2.5), (0.3, 1.5), (0.3, 5.0)])
def test_busy_machine_hides_no_number_for_long(busy: tuple[float, float]) -> None:
    """Nearly all drafts of edited code are accepted, while other processes hold up some steps."""
    shares = []
    for seed in range(10):
        fixed = Machine(None, MOST, busy=busy, seed=seed).run(1, 0.99, edits_code, 300)
        shares.append(Machine(control(), busy=busy, seed=seed).run(1, 0.99, edits_code, 300) / fixed)
    print(f"{busy}: {min(shares):.2f} … {max(shares):.2f} of {MOST} drafts")
    assert sum(shares) / len(shares) >= 0.88
    assert min(shares) >= 0.7


def test_sequences_that_accept_more_have_more_drafts() -> None:
    """Of eight sequences, half repeat what they have seen: one number of drafts for all would waste rows."""
    machine = Machine(control())
    seqs = [Seq(alpha) for alpha in (0.95, 0.2) * 4]
    machine.run_seqs(seqs, memory_bound, 200)
    rate = machine.run_seqs(seqs, memory_bound, 600)
    fixed = max(
        (a + b) / 2 for a, b in zip(*(fixed_rates(8, a, memory_bound) for a in (0.95, 0.2)), strict=True)
    )
    assert rate >= 1.2 * fixed


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8])
def test_a_number_that_suits_the_kernels_is_found(alpha: float) -> None:
    fixed = fixed_rates(1, alpha, in_tiles, draft_s=1e-3)
    machine = Machine(control(), draft_s=1e-3)
    machine.run(1, alpha, in_tiles, 500)
    found = machine.run(1, alpha, in_tiles, 3_000)
    print(f"α = {alpha}: {found / max(fixed):.3f} of the best")
    assert found >= 0.95 * max(fixed)


@pytest.mark.parametrize("alpha", [0.5, 0.95])
def test_few_rounds_find_a_number_that_is_near_the_best(alpha: float) -> None:
    """With rows that cost little, the first 48 tokens lose the steps that measure, and the next 48 hardly any."""
    shares = []
    for seed in range(20):
        fixed = max(fixed_rates(1, alpha, memory_bound, draft_s=0.1e-3))
        machine, seq, taken = Machine(control(), draft_s=0.1e-3, seed=seed), Seq(alpha), []
        for end in (48, 96):
            before, start_s = machine.num_tokens, machine.now_s
            while machine.num_tokens < end:
                machine.step([seq], memory_bound)
            taken.append((machine.num_tokens - before) / (machine.now_s - start_s) / fixed)
        shares.append(taken)
    first, second = (sum(column) / len(column) for column in zip(*shares, strict=True))
    print(f"α = {alpha}: {first:.2f} of the best in the first 48 tokens, {second:.2f} in the next")
    assert first >= 0.68
    assert second >= 0.9


def test_a_large_batch_loses_little_to_its_first_trial() -> None:
    machine = Machine(control(), draft_s=0.1e-3)
    found = machine.run(64, 0.5, compute_bound, 300)
    assert found >= 0.97 * Machine(None).run(64, 0.5, compute_bound, 300)


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
    plain = Machine(None).run(2, 0.1, memory_bound, 20_000)
    machine = Machine(control(), draft_s=5e-3, behind_s=0.3e-3)
    machine.run(2, 0.1, memory_bound, 300)
    shares = [machine.run(2, 0.1, memory_bound, 1_000) / plain for _ in range(20)]
    assert machine.control is not None
    assert machine.control.limit(0.1) == 0
    assert sum(shares) / len(shares) > 0.99


def test_an_expensive_first_draft_is_reckoned_with() -> None:
    """Proposing costs something per step, whatever the number of drafts: two or more pay, one does not."""
    fixed = fixed_rates(1, 0.7, memory_bound, draft_s=0.2e-3, round_s=5e-3)
    machine = Machine(control(), round_s=5e-3, draft_s=0.2e-3)
    machine.run(1, 0.7, memory_bound, 300)
    assert machine.run(1, 0.7, memory_bound, 2_000) >= 0.95 * max(fixed)


def test_a_slower_machine_does_not_change_the_choice() -> None:
    machine = Machine(control(), draft_s=1e-3)
    machine.run(1, 0.8, in_tiles, 1_500)
    before = machine.run(1, 0.8, in_tiles, 600)
    machine.draft_s = 2e-3
    assert machine.run(1, 0.8, lambda rows: 2 * in_tiles(rows), 600) >= 0.97 * before / 2


def test_a_fixed_number_is_always_asked_for() -> None:
    fixed = control(adaptive=False)
    assert {fixed.ask(Seq(acceptance=rate)) for rate in (None, 0.0, 0.5, 1.0)} == {MOST}
