"""`DraftControl`: how many drafts pay, from measured acceptance and a table of measured step times.

With acceptance a_j of the j-th draft, a sequence with k drafts gets 1 + a_1 + a_1·a_2 + … tokens per step (Leviathan et
al. 2023). A step of B sequences with n drafts takes T(B, n), and proposing them D(B, n), both measured. The control
takes the number with the most tokens per second,

    (B + Σ gains) / (T(B, n) + D(B, n))

or none. Where sequences differ, it may instead give each one the drafts that are likely enough to pay for their rows.

A choice is kept for some steps, and for one that promises a little more. Between choices another number is probed, the
one whose measurement is oldest and that promises most. What probes lose is paid from a small share of the time, which
has to be saved first. While nothing is drafted, probes learn the acceptance as well. A draft model that was not asked
for some time has to compute what it missed, which may cost more than the probe itself. A pure function of the steps
that were applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.config import SchedulerConfig
from quire.scheduler.policies.draft_times import (
    FEW,
    OUTLIER,
    RECENT,
    SETTLED,
    Acceptance,
    StepTimes,
    bucket_of,
    followed,
)
from quire.scheduler.predictor import Mean

SEQ_RECENT = RECENT // 4  # a sequence remembers fewer drafts than the engine
REFRESH = 2 * SETTLED  # decode steps between two choices; fewer at first
BETTER = 1.01  # least ratio that another choice has to promise
SHARE = 0.008  # share of the time that probes may lose
MAX_VAIN = REFRESH  # steps in vain before it is asked at block boundaries only


class Drafted(Protocol):
    """A sequence, as far as the control sees it."""

    acceptance: float | None

    @property
    def num_undrafted(self) -> int:
        """Known tokens since it last had drafts."""
        ...


class _Choice(NamedTuple):
    """A sequence has up to ``cap`` drafts, each accepted with at least the probability ``cut``."""

    cap: int = 0
    cut: float = 0.0


@dataclass(slots=True)
class _Probe:
    """Steps with ``cap`` drafts, for all sequences or for one."""

    cap: int
    left: int  # steps, the last of which verifies only
    seq: Drafted | None  # the one that tries; None: all do
    patience: int = REFRESH
    num_verified: int = 0


class DraftControl:
    """One per scheduler. With ``config.adaptive_drafts`` off, every sequence has the most drafts always."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.configure(config)
        self.predicted_gain = 1.0  # tokens per second, over those without drafts
        self.any_held = False  # whether a worker may hold drafts that no step has verified
        self._times, self._draft_times = StepTimes(), StepTimes(row=None)
        # By what ratio steps take longer now than the table says.
        self._pace = Mean(1.0, SETTLED, SETTLED)
        self._accepted = Acceptance()
        self._choice = _Choice()
        self._step = 0  # decode steps
        self._bucket = -1  # at the last choice
        self._rate = 0.0  # tokens per second of the choice
        # Steps: when drafts were turned on, and when the choice is made again.
        self._since, self._next_choice = 0, FEW - 1
        self._num_probes = 0
        # Seconds that probes may lose; those that drafts have lost against plain decoding since they were turned on.
        self._saved_s = self._lost_s = 0.0
        self._measured: dict[tuple[int, int], int] = {}  # (bucket, drafts) → step
        # In the step being applied, and whether the one before it had proposals: the draft model is not behind.
        self._num_proposed = self._num_accepted = 0
        self._warm = self._verified = False

    def configure(self, config: SchedulerConfig) -> None:
        """Take over the settings of ``config``; what was learned stays."""
        self._most, self._adaptive = config.max_num_drafts, config.adaptive_drafts
        self._probe: _Probe | None = None
        self.wakes = True  # the next plan asks every sequence

    def limit(self, acceptance: float | None) -> int:
        """Return how many drafts a sequence of this acceptance may have; None: it had none yet."""
        if not self._adaptive:
            return self._most
        return self._num_drafts(self._positions(acceptance), self._choice)

    def ask(self, seq: Drafted) -> int:
        """As `limit`, for a step that is planned now; in a probe the number that is tried."""
        probe = self._probe
        if probe is None or probe.left <= 1 or probe.seq not in (None, seq):
            return self.limit(seq.acceptance)
        return probe.cap

    def note_result(self, acceptance: float | None, num_drafts: int, num_accepted: int) -> float | None:
        """A sequence verified ``num_drafts``; return its acceptance now. Without drafts it tends to the engine's."""
        mean = self._accepted.mean
        if not num_drafts or not self._adaptive:
            return None if acceptance is None else acceptance + (mean - acceptance) / SEQ_RECENT
        self._num_accepted += num_accepted
        before = mean if acceptance is None else acceptance
        # What is known of drafts is old while there are none.
        self._accepted.note(num_drafts, num_accepted, RECENT if self._choice.cap else SETTLED)
        return followed(before, num_drafts, num_accepted, SEQ_RECENT)

    def note_proposed(self, num_proposed: int) -> None:
        """The worker has so many drafts of a sequence in the step being applied."""
        self._num_proposed += num_proposed
        self.any_held = self.any_held or num_proposed > 0

    def note_mixed_step(self) -> None:
        """A step with prompt tokens was applied, in which a draft model may have computed a prompt as well."""
        self._warm = self._num_proposed > 0
        self._num_proposed = self._num_accepted = 0

    def note_step(self, seqs: Sequence[Drafted], num_drafts: int, took_s: float, draft_s: float) -> None:
        """A step of decodes alone, of ``seqs``, was applied; it verified ``num_drafts`` in all."""
        num_seqs, num_proposed, num_tokens = len(seqs), self._num_proposed, len(seqs) + self._num_accepted
        was_warm, self._warm = self._warm, num_proposed > 0
        self._num_proposed = self._num_accepted = 0
        if not self._adaptive:
            return
        self._step += 1
        took_s = draft_s + self._note_times(num_seqs, num_drafts, took_s - draft_s)
        if num_proposed and (was_warm or not self._draft_times.seconds(num_seqs, 1.0)):
            self._draft_times.note(num_seqs, num_proposed, draft_s / self._pace.value)
        plain_s = self._times.seconds(num_seqs, 0.0) * self._pace.value
        if self._step == FEW - 1:
            self._saved_s = FEW * plain_s
        self._saved_s += SHARE * took_s
        if self._choice.cap:
            self._lost_s += took_s - num_tokens * plain_s / num_seqs
        if self._probe is not None:
            self._go_on(self._probe, seqs, num_proposed, took_s, num_tokens)
            return
        is_due, is_other = self._step >= self._next_choice, bucket_of(num_seqs) != self._bucket
        # While nothing is drafted, only a probe or another number of sequences can change the choice.
        if (is_due and self._choice.cap) or (is_other and (self._num_probes or is_due)):
            self._choose(seqs)
        if is_due and self._saved_s >= 0.0:
            self._begin_probe(seqs)

    def _note_times(self, num_seqs: int, num_drafts: int, verify_s: float) -> float:
        """Return the seconds of the step without what other processes held it up."""
        # A step behind drafts finds the draft model's weights in the caches: plain decoding is faster than that.
        is_first, self._verified = self._verified and not num_drafts, num_drafts > 0
        if is_first:
            return verify_s
        verify_s, ratio = max(1e-6, verify_s), num_drafts / num_seqs
        expected_s = self._times.seconds(num_seqs, ratio) * self._pace.value
        if known_s := self._times.note(num_seqs, num_drafts, verify_s / self._pace.value):
            self._pace.add_cut(verify_s / known_s, OUTLIER)
        self._measured[bucket_of(num_seqs), round(ratio)] = self._step
        return min(verify_s, OUTLIER * expected_s)

    def _begin_probe(self, seqs: Sequence[Drafted]) -> None:
        """Probe a number of drafts, if what was saved pays for it."""
        num_seqs, off = len(seqs), not self._choice.cap
        groups = Counter([self._accepted.mean]) if off else self._groups(seqs)
        rates = {
            cap: self._rated(num_seqs, groups, _Choice(cap))[0]
            for cap in range(int(off), self._most + 1)
            if off or cap != self._choice.cap
        }
        if off:
            cap = max(rates, key=rates.__getitem__)
            seq = None
            if self._times.count(num_seqs, cap) >= FEW:  # acceptance alone is to be learned
                start = self._num_probes % num_seqs
                turned = [*seqs[start:], *seqs[:start]]
                seq = min(turned, key=lambda seq: seq.num_undrafted.bit_length())
            self._probe = _Probe(cap, 1 + REFRESH, seq)
            self.wakes = True
        else:
            cap = max(rates, key=lambda cap: rates[cap] * self._age(num_seqs, cap))
            num_rounds = 1 if cap else FEW - 1
            loss_s = self._rated(num_seqs, groups, _Choice(cap))[1] * (1.0 - rates[cap] / self._rate)
            if self._saved_s < num_rounds * loss_s * self._pace.value:
                return
            self._probe = _Probe(cap, 1 + num_rounds, None)
        self._num_probes += 1

    def _age(self, num_seqs: int, cap: int) -> int:
        return self._step - self._measured.get((bucket_of(num_seqs), cap), 0)

    def _go_on(
        self, probe: _Probe, seqs: Sequence[Drafted], num_proposed: int, took_s: float, num_tokens: int
    ) -> None:
        """A step of ``probe`` is over: it took ``took_s`` seconds, for so many tokens."""
        self._saved_s -= took_s - num_tokens / self._rate * self._pace.value
        if probe.cap and not num_proposed and probe.left > 1 and probe.patience:
            probe.patience -= 1  # a proposer that found nothing
            return
        probe.left -= 1
        if not self._choice.cap and probe.num_verified:
            self._choose(seqs)
            if self._choice.cap:
                probe.left = 0
        probe.num_verified += 1
        if self._saved_s < 0.0 and probe.left:
            probe.left = 1
        if not probe.left:
            self._probe = None
            self._choose(seqs)

    def _positions(self, acceptance: float | None) -> list[float]:
        """Return the acceptance by position of a sequence whose mean is ``acceptance``."""
        more = 0.0 if acceptance is None else acceptance - self._accepted.mean
        return [min(max(rate + more, 0.001), 1.0) for rate in self._accepted.by_position(self._most)]

    def _groups(self, seqs: Sequence[Drafted]) -> Counter[float]:
        """Return how many sequences have which mean acceptance, rounded."""
        mean = self._accepted.mean
        return Counter(
            [round(32 * (mean if seq.acceptance is None else seq.acceptance)) / 32 for seq in seqs]
        )

    def _choose(self, seqs: Sequence[Drafted]) -> None:
        num_seqs, groups, before = len(seqs), self._groups(seqs), self._choice
        self._bucket = bucket_of(num_seqs)
        rates = {
            choice: self._rated(num_seqs, groups, choice)[0] for choice in map(_Choice, range(self._most + 1))
        }
        plain, best = rates[_Choice()], max(rates, key=rates.__getitem__)
        if len(groups) > 1:  # a draft pays for its row if it is accepted as often as this
            more_s = self._seconds(num_seqs, self._most) - self._seconds(num_seqs, 0.0)
            choice = _Choice(self._most, rates[best] * more_s / (self._most * num_seqs))
            rates[choice] = self._rated(num_seqs, groups, choice)[0]
            best = max(best, choice, key=rates.__getitem__)
        now = rates[before] if before in rates else self._rated(num_seqs, groups, before)[0]
        if rates[best] > now * BETTER:
            self._choice, now = best, rates[best]
        if now <= plain:  # also a cut that gives no sequence a draft
            self._choice, now = _Choice(), plain
        if self._choice.cap and not before.cap:
            self._since, self._lost_s, self.wakes = self._step, 0.0, True
        elif before.cap and not self._choice.cap:
            self._saved_s -= max(0.0, self._lost_s)
        self._next_choice = self._step + max(FEW, min(REFRESH, (self._step - self._since) // 2))
        self._rate, self.predicted_gain = now, now / plain

    def _seconds(self, num_seqs: int, ratio: float) -> float:
        return self._times.seconds(num_seqs, ratio) + self._draft_times.seconds(num_seqs, ratio)

    def _rated(self, num_seqs: int, groups: Counter[float], choice: _Choice) -> tuple[float, float]:
        """Return tokens per second, and the seconds of a step."""
        tokens, num_drafts = float(num_seqs), 0.0
        share_of = num_seqs / groups.total()
        for acceptance, count in groups.items():
            positions = self._positions(acceptance)
            drafts = self._num_drafts(positions, choice)
            share = 1.0
            for rate in positions[:drafts]:
                share *= rate
                tokens += share * count * share_of
            num_drafts += drafts * count * share_of
        seconds = self._seconds(num_seqs, num_drafts / num_seqs)
        return tokens / seconds, seconds

    def _num_drafts(self, positions: Sequence[float], choice: _Choice) -> int:
        share, count = 1.0, 0
        for rate in positions[: choice.cap]:
            share *= rate
            if share < choice.cut:
                break
            count += 1
        return count
