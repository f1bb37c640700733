"""`DraftControl`: how many drafts pay, from measured acceptance and measured step times.

With acceptance a_j of the j-th draft, a sequence with k drafts gets 1 + a_1 + a_1·a_2 + … tokens per step (Leviathan et
al. 2023). A step of B sequences with n drafts takes T(B, n), and proposing them D(B, n), both measured. The control
takes the choice with the most tokens per second,

    (B + Σ gains) / (T(B, n) + D(B, n))

among caps, a number of drafts for every sequence, and cuts, by which a sequence has its j-th draft if it is accepted
with at least that probability. No drafts is a choice as well: sequences then decode as without speculation.

The times of other numbers of drafts are learned from trials, of one round each. A trial is worth it where the rate
that the number may have, its estimate and two standard deviations, beats the choice; what trials lose is paid from a
small share of the time. While nothing is drafted, rounds with drafts are bought from that share as well, since their
acceptance may have changed. A draft model that was not asked for some time has to compute what it missed, which may
cost more than the trial itself. A pure function of the steps that were applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.config import SchedulerConfig
from quire.scheduler.policies.draft_times import (
    FEW,
    OUTLIER,
    PACE_WEIGHT,
    Acceptance,
    StepTimes,
    bucket_of,
    followed,
)

CUTS = (0.7, 0.5, 0.35, 0.25, 0.15)
NO_CUT = 0.0  # with a cap
BEHIND = 64  # tokens: of sequences equally far behind, each tries in turn
REFRESH = 16  # decode steps between two choices; fewer at first
BETTER = 1.02  # least ratio that another choice has to promise
SHARE = 0.008  # share of the time that trials may lose
GRACE = 3.0  # plain steps that trials may lose before they have saved them
WAIT = 8  # fewest steps until a trial is considered again
PLAIN_ROUNDS = FEW  # steps measured before drafts, and in a trial without
MOST_ROUNDS = 10  # verifications of a trial while nothing is drafted
PATIENCE = 12  # steps to wait for a proposal
# A time that was measured once is off by so much (two standard deviations). What it drifts by in a thousand steps.
NOISE, DRIFT = 0.2, 0.1
UNKNOWN = 0.5  # weight of an estimate from other numbers, in measurements
MAX_VAIN = 16  # steps in vain before it is asked at block boundaries only
# Of the newest verification: in a sequence's acceptance, in the engine's, and in that while nothing is drafted.
SEQ_WEIGHT, ENGINE_WEIGHT, PROBE_WEIGHT = 0.04, 0.01, 0.12
OWN_SHARE = 0.6  # share of a sequence's own, noisy difference that counts
FORGET = 0.02  # per step without drafts, towards the engine's acceptance


class Drafted(Protocol):
    """A sequence, as far as the control sees it."""

    acceptance: float | None

    @property
    def num_undrafted(self) -> int:
        """Known tokens since it last had drafts."""
        ...


@dataclass(slots=True)
class _Trial:
    """Steps with ``cap`` drafts, for all sequences or for one."""

    cap: int
    left: int  # steps, the last of which verifies only
    seq: Drafted | None  # the one that tries; None: all do
    patience: int = PATIENCE
    num_verified: int = 0


class DraftControl:
    """One per scheduler. With ``config.adaptive_drafts`` off, every sequence has the most drafts always."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.configure(config)
        self.times, self.draft_times = StepTimes(), StepTimes(slope=None)
        self.accepted = Acceptance()
        self.cut: float | None = None  # None: no drafts
        self.cap = 0  # drafts per sequence, whatever the cut says
        self.predicted_gain = 1.0  # tokens per second, over those without drafts
        self.any_held = False  # whether a worker may hold drafts that no step has verified
        self.wakes = False  # the next plan asks every sequence
        self._step = 0  # decode steps
        self._pace = 1.0
        self._bucket = -1  # at the last choice
        self._rate = 0.0  # tokens per second of the choice
        # Steps: when drafts were turned on, and when the choice is made again.
        self._since = self._next_choice = 0
        self._trial: _Trial | None = None
        self._next_try, self._num_trials = PLAIN_ROUNDS - 1, 0
        # Seconds that trials may lose; those that drafts have lost against plain decoding since they were turned on.
        self._saved_s = self._lost_s = 0.0
        # (bucket, cap) → step of the last trial, and how many there were.
        self._tried: dict[tuple[int, int], tuple[int, int]] = {}
        # In the step being applied, and whether the one before it had proposals: the draft model is not behind.
        self._num_proposed = self._num_accepted = 0
        self._warm = self._verified = False
        # Seconds per token that a draft model missed, and the tokens that a trial begins with.
        self._behind_s, self._num_behind = 0.0, 0

    def configure(self, config: SchedulerConfig) -> None:
        """Take over the settings of ``config``; what was learned stays."""
        self._most, self._adaptive = config.max_num_drafts, config.adaptive_drafts
        self._trial, self.wakes = None, True

    def limit(self, acceptance: float | None) -> int:
        """Return how many drafts a sequence of this acceptance may have; None: it had none yet."""
        if not self._adaptive:
            return self._most
        if self.cut is None:
            return 0
        return _num_drafts(self._positions(acceptance), self.cut, self.cap)

    def ask(self, seq: Drafted) -> int:
        """As `limit`, for a step that is planned now; in a trial the number that is tried."""
        trial = self._trial
        if trial is None or trial.left <= 1 or trial.seq not in (None, seq):
            return self.limit(seq.acceptance)
        return trial.cap

    def note_result(self, acceptance: float | None, num_drafts: int, num_accepted: int) -> float | None:
        """A sequence verified ``num_drafts``; return its acceptance now. Without drafts it tends to the engine's."""
        if not num_drafts or not self._adaptive:
            return None if acceptance is None else acceptance + (self.accepted.mean - acceptance) * FORGET
        self._num_accepted += num_accepted
        before = self.accepted.mean if acceptance is None else acceptance
        self.accepted.note(num_drafts, num_accepted, PROBE_WEIGHT if self.cut is None else ENGINE_WEIGHT)
        return followed(before, num_drafts, num_accepted, SEQ_WEIGHT)

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
        verify_s = max(1e-6, took_s - draft_s)
        # A step behind drafts finds the draft model's weights in the caches: plain decoding is faster than that.
        is_first, self._verified = self._verified and not num_drafts, num_drafts > 0
        known_s = 0.0 if is_first else self.times.note(num_seqs, num_drafts, verify_s / self._pace)
        if known_s:
            paced = min(max(verify_s / known_s, self._pace / OUTLIER), self._pace * OUTLIER)
            self._pace += (paced - self._pace) * PACE_WEIGHT
        if num_proposed and (was_warm or not self.draft_times.seconds(num_seqs, 1.0)):
            self.draft_times.note(num_seqs, num_proposed, draft_s / self._pace)
        if num_proposed and not was_warm and self._num_behind:
            more_s = draft_s / self._pace - self.draft_times.seconds(num_seqs, num_proposed / num_seqs)
            self._behind_s, self._num_behind = max(0.0, more_s) / self._num_behind, 0
        if self._step == PLAIN_ROUNDS - 1:
            self._saved_s = GRACE * self.times.seconds(num_seqs, 0.0) * self._pace
        self._saved_s += SHARE * took_s
        if self.cut is not None:
            self._lost_s += took_s - num_tokens * self.times.seconds(num_seqs, 0.0) * self._pace / num_seqs
        is_due = self._step >= self._next_choice and (
            self.cut is not None or (self._num_trials > 0 and bucket_of(num_seqs) != self._bucket)
        )
        if self._trial is not None:
            self._go_on(self._trial, seqs, num_proposed, took_s, num_tokens)
        elif is_due:
            self._choose(seqs)
        if self._trial is None and self._step >= self._next_try and self._saved_s >= 0.0:
            self._begin_trial(seqs)

    def _go_on(
        self, trial: _Trial, seqs: Sequence[Drafted], num_proposed: int, took_s: float, num_tokens: int
    ) -> None:
        """A step of ``trial`` is over: it took ``took_s`` seconds, for so many tokens."""
        rate = self._rate or len(seqs) / self.times.seconds(len(seqs), 0.0)
        self._saved_s -= took_s - num_tokens / rate * self._pace
        if trial.cap and not num_proposed and trial.left > 1 and trial.patience:
            trial.patience -= 1  # a proposer that found nothing
            return
        trial.left -= 1
        if self.cut is None and trial.num_verified:
            self._choose(seqs)
            if self.cut is not None:
                trial.left = 0
        trial.num_verified += 1
        if self._saved_s < 0.0 and trial.left:
            trial.left = 1
        if not trial.left:
            self._trial = None
            self._choose(seqs)
            self._next_try = self._step + WAIT if self.cut is None else self._next_choice

    def _begin_trial(self, seqs: Sequence[Drafted]) -> None:
        """Try the number of drafts that may be the best one, as far as is known and what was saved pays for."""
        num_seqs, off = len(seqs), self.cut is None
        now = self._rate or num_seqs / self.times.seconds(num_seqs, 0.0)
        bucket, best, best_rate = bucket_of(num_seqs), -1, 0.0 if off else now
        groups = Counter([self.accepted.mean]) if off else self._groups(seqs)
        for cap in range(off, self._most + 1):
            if off or cap != self.cap:
                rate = self._tokens_per_s(num_seqs, groups, NO_CUT if cap else None, cap)
                rate *= 1.0 + self._doubt(bucket, num_seqs, cap)
                if rate > best_rate:
                    best, best_rate = cap, rate
                    if not cap:  # drafts must be faster than this
                        break
        chosen, cost_s = None, 0.0
        if off and self.times.count(num_seqs, best) >= FEW:  # acceptance alone is to be learned
            turned = [*seqs[self._num_trials % num_seqs :], *seqs[: self._num_trials % num_seqs]]
            chosen = min(turned, key=lambda seq: seq.num_undrafted // BEHIND)
        num_behind = sum(seq.num_undrafted for seq in (seqs if chosen is None else (chosen,))) if off else 0
        if best >= 0 and self._num_trials:
            rate = self._tokens_per_s(num_seqs, groups, NO_CUT if best else None, best)
            cost_s = (self._behind_s * num_behind + max(0.0, num_seqs / rate - num_seqs / now)) * self._pace
        if best < 0 or self._saved_s < cost_s:
            missing = (cost_s - self._saved_s) / (SHARE * self._pace * num_seqs / now)
            self._next_try = self._step + max(WAIT, int(missing))
            return
        self._num_trials += 1
        self._tried[bucket, best] = self._step, self._tried.get((bucket, best), (0, 0))[1] + 1
        self._num_behind = num_behind
        rounds = PLAIN_ROUNDS if not best else MOST_ROUNDS if off else 1
        self._trial = _Trial(best, 1 + rounds, chosen)
        self.wakes = self.wakes or off

    def _doubt(self, bucket: int, num_seqs: int, cap: int) -> float:
        """Return by which share of it the time of ``cap`` drafts may be off."""
        step, num_trials = self._tried.get((bucket, cap), (0, 0))
        # Trials count as well: a proposer may have had fewer drafts in them.
        count = max(self.times.count(num_seqs, cap), num_trials, UNKNOWN)
        return math.sqrt(NOISE**2 / count + DRIFT**2 * (self._step - step) / 1000)

    def _positions(self, acceptance: float | None) -> list[float]:
        """Return the acceptance by position of a sequence whose mean is ``acceptance``."""
        more = 0.0 if acceptance is None else OWN_SHARE * (acceptance - self.accepted.mean)
        return [min(max(rate + more, 0.001), 1.0) for rate in self.accepted.by_position(self._most)]

    def _groups(self, seqs: Sequence[Drafted]) -> Counter[float]:
        """Return how many sequences have which mean acceptance, rounded."""
        mean = self.accepted.mean
        return Counter(
            [round(32 * (mean if seq.acceptance is None else seq.acceptance)) / 32 for seq in seqs]
        )

    def _choose(self, seqs: Sequence[Drafted]) -> None:
        num_seqs, groups = len(seqs), self._groups(seqs)
        self._bucket = bucket_of(num_seqs)
        plain = self._tokens_per_s(num_seqs, groups, None, 0)
        choices = [(NO_CUT, cap) for cap in range(1, self._most + 1)]
        if len(groups) > 1:
            choices += [(cut, self._most) for cut in CUTS]
        rated = [(self._tokens_per_s(num_seqs, groups, *choice), choice) for choice in choices]
        best_rate, best = max(rated)
        was_off = self.cut is None
        now = plain if was_off else self._tokens_per_s(num_seqs, groups, self.cut, self.cap)
        if best_rate > now * BETTER:
            (self.cut, self.cap), now = best, best_rate
        if now <= plain:  # also a cut that gives no sequence a draft
            self.cut, self.cap, now = None, 0, plain
        if was_off and self.cut is not None:
            self._since, self._lost_s, self.wakes = self._step, 0.0, True
        elif self.cut is None and not was_off:
            self._saved_s -= max(0.0, self._lost_s)
        self._next_choice = self._step + min(REFRESH, 1 + (self._step - self._since) // 2)
        self._rate, self.predicted_gain = now, now / plain

    def _tokens_per_s(self, num_seqs: int, groups: Counter[float], cut: float | None, cap: int) -> float:
        tokens, num_drafts = float(num_seqs), 0
        if cut is not None:
            share_of = num_seqs / groups.total()
            for acceptance, count in groups.items():
                positions = self._positions(acceptance)
                share = 1.0
                drafts = _num_drafts(positions, cut, cap)
                for rate in positions[:drafts]:
                    share *= rate
                    tokens += share * count * share_of
                num_drafts += round(drafts * count * share_of)
        ratio = num_drafts / num_seqs
        return tokens / (self.times.seconds(num_seqs, ratio) + self.draft_times.seconds(num_seqs, ratio))


def _num_drafts(positions: Sequence[float], cut: float, cap: int) -> int:
    share, count = 1.0, 0
    for rate in positions[:cap]:
        share *= rate
        if share < cut:
            break
        count += 1
    return count
