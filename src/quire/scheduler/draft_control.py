"""`DraftControl`: how many drafts pay, from measured acceptance and measured step times.

With acceptance a_j of the j-th draft, a sequence with k drafts gets 1 + a_1 + a_1·a_2 + … tokens per step (Leviathan et
al. 2023). A step of B sequences with n drafts takes T(B, n), and proposing them D(B, n), both measured. The control
takes the choice with the most tokens per second,

    (B + Σ gains) / (T(B, n) + D(B, n))

among caps, a number of drafts for every sequence, and cuts, by which a sequence has its j-th draft if it is accepted
with at least that probability. No drafts is a choice as well: sequences then decode as without speculation.

Times that are not known and acceptance while nothing is drafted are learned from trials: a few steps with another
number of drafts. What a trial loses against the choice is paid from a small share of the time, which has to be saved
first, and each repetition waits twice as long. A draft model that was not asked for some time has to compute what it
missed, which may cost more than the trial itself. A pure function of the steps that were applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.config import SchedulerConfig
from quire.scheduler.draft_times import OUTLIER, PACE_WEIGHT, Acceptance, StepTimes, bucket_of, followed

CUTS = (0.7, 0.5, 0.35, 0.25, 0.15)
NO_CUT = 0.0  # with a cap
REFRESH = 16  # decode steps after which the choice is made again
# What another choice has to promise; what drafts have to, beside none; what keeps drafts on.
BETTER, ON, OFF = 1.02, 1.03, 1.01
FIRST_TRY, FIRST_CAP = 3, 3  # plain steps before the first trial, and its drafts
SHARE = 0.006  # of the time, which trials may lose
GRACE = 3.0  # plain steps that trials may lose before they have saved them
WAIT, LONGEST_WAIT = 8, 4096  # steps until a number of drafts is tried again: doubles each time
BEHIND = 64  # tokens: of sequences equally far behind, each tries in turn
PLAIN_ROUNDS, LONGEST_PLAIN_WAIT = 3, 256  # steps of a trial without drafts; steps until the next
OFF_WAIT = 24  # while nothing is drafted
MOST_FAILS = 3  # trials without success in a row that double what the next ones are said to cost
KNOWN = 3  # measurements of a time that is known
# While nothing is drafted: verifications in a trial, the fewest, and those without an accepted draft that end it.
OFF_VERIFIED, OFF_ROUNDS = 10, 3
PATIENCE = 12  # steps to wait for a proposal
# What an unmeasured time may be off by, one measured less than `KNOWN` times, and others.
UNKNOWN_MARGIN, NEW_MARGIN, MARGIN = 0.25, 0.1, 0.04
MAX_VAIN = 16  # steps in a row without a proposal, after which a sequence is asked at block boundaries only
# Of the newest verification: in a sequence's acceptance, in the engine's, and in that while nothing is drafted.
SEQ_WEIGHT, ENGINE_WEIGHT, PROBE_WEIGHT = 0.04, 0.01, 0.12
OWN_SHARE = 0.6  # of the difference between a sequence's acceptance and the engine's that counts: it is noisy
FORGET = 0.02  # per step without drafts: a sequence's acceptance tends to the engine's


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
    lost_s: float = 0.0
    num_steps: int = 0
    num_accepted: int = 0


class DraftControl:
    """One per scheduler. With ``config.adaptive_drafts`` off, every sequence has the most drafts always."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.configure(config)
        self.times, self.draft_times = StepTimes(), StepTimes(slope=None)
        self.accepted = Acceptance()
        self.cut: float | None = None  # None: no drafts
        self.cap = 0  # drafts per sequence, whatever the cut says
        self.predicted_gain = 1.0  # tokens per second with this choice, over those without drafts
        self.any_held = False  # whether a worker may hold drafts that no step has verified
        self.wakes = False  # the next plan asks every sequence
        self._step = 0  # decode steps
        self._pace = 1.0
        self._bucket = -1  # of the last choice
        self._rate = 0.0  # tokens per second of the choice
        self._trial: _Trial | None = None
        self._next_try, self._saved_s = FIRST_TRY, 0.0
        self._tried: dict[tuple[int, int], tuple[int, int]] = {}  # (bucket, cap) → step, steps to wait
        self._fails = self._num_probes = 0
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
        return self._drafts(self._positions(acceptance), self.cut, self.cap)

    def ask(self, seq: Drafted) -> int:
        """As `limit`, for a step that is planned now; in a trial the number that is tried."""
        trial = self._trial
        if trial is None or trial.left <= 1 or trial.seq not in (None, seq):
            return self.limit(seq.acceptance)
        return trial.cap

    def note_result(self, acceptance: float | None, num_drafts: int, num_accepted: int) -> float | None:
        """A sequence verified ``num_drafts``; return its acceptance now. Without drafts it tends to the engine's."""
        if not num_drafts:
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
        self._step += 1
        num_seqs, num_proposed, num_tokens = len(seqs), self._num_proposed, len(seqs) + self._num_accepted
        was_warm, self._warm = self._warm, num_proposed > 0
        self._num_proposed = self._num_accepted = 0
        if not self._adaptive:
            return
        verify_s = max(1e-6, took_s - draft_s)
        # A step behind drafts finds the draft model's weights in the caches: plain decoding is faster than that.
        is_first, self._verified = self._verified and not num_drafts, num_drafts > 0
        known_s = 0.0 if is_first else self.times.note(num_seqs, num_drafts, verify_s / self._pace)
        if known_s:
            paced = min(max(verify_s / known_s, self._pace / OUTLIER), self._pace * OUTLIER)
            self._pace += (paced - self._pace) * PACE_WEIGHT
        if num_proposed and was_warm:
            self.draft_times.note(num_seqs, num_proposed, draft_s / self._pace)
        elif num_proposed and self._num_behind:
            self._behind_s, self._num_behind = draft_s / self._pace / self._num_behind, 0
        self._saved_s += SHARE * took_s
        if self._trial is not None:
            self._go_on(self._trial, seqs, num_proposed, took_s / self._pace, num_tokens)
        elif self._step % REFRESH == 0 and (self.cut is not None or bucket_of(num_seqs) != self._bucket):
            self._choose(seqs)
        if self._trial is None and self._step >= self._next_try and self._saved_s >= 0.0:
            self._begin_trial(seqs)

    def _go_on(
        self, trial: _Trial, seqs: Sequence[Drafted], num_proposed: int, seconds: float, num_tokens: int
    ) -> None:
        """A step of ``trial`` is over: it took ``seconds`` of the machine's pace, for so many tokens."""
        rate = self._rate or len(seqs) / self.times.seconds(len(seqs), 0.0)
        trial.lost_s += (seconds - num_tokens / rate) * self._pace
        if trial.cap and not num_proposed and trial.left > 1 and trial.patience:
            trial.patience -= 1  # a proposer that found nothing
            return
        trial.left -= 1
        trial.num_steps += 1
        trial.num_accepted += num_tokens - len(seqs)
        if trial.cap and trial.num_steps == OFF_ROUNDS and trial.left > 1 and not trial.num_accepted:
            trial.left = 1
        if trial.left:
            return
        self._trial = None
        was_off = self.cut is None
        self._choose(seqs)
        if was_off:
            self._fails = 0 if self.cut is not None else min(self._fails + 1, MOST_FAILS)
            self._next_try = self._step + OFF_WAIT
        self._saved_s -= max(0.0, trial.lost_s) * 2**self._fails

    def _begin_trial(self, seqs: Sequence[Drafted]) -> None:
        """Try the number of drafts that may be the best one, as far as is known."""
        num_seqs, now = len(seqs), self._rate or 1e-9
        bucket = bucket_of(num_seqs)
        best, best_rate = None, now
        off = self.cut is None
        groups = Counter([self.accepted.mean]) if off else self._groups(seqs)
        for cap in range(off, self._most + 1):
            step, wait = self._tried.get((bucket, cap), (0, 0))
            if not off and (cap == self.cap or self._step < step + wait):
                continue
            count = self.times.count(num_seqs, cap)
            margin = MARGIN if count >= KNOWN else NEW_MARGIN if count else UNKNOWN_MARGIN
            rate = self._tokens_per_s(num_seqs, groups, NO_CUT if cap else None, cap) * (1.0 + margin)
            if not cap:  # whatever is known of it: drafts must be faster than this
                best = 0
                break
            if rate > best_rate or (off and best is None):
                best, best_rate = cap, rate
        if best is None:
            self._next_try = self._step + WAIT
            return
        if off and not self._tried:
            best, self._saved_s = min(FIRST_CAP, self._most), GRACE * self.times.seconds(num_seqs, 0.0)
        one = None
        if off and self.times.count(num_seqs, best) >= KNOWN:  # acceptance alone is to be learned
            self._num_probes += 1
            turned = [*seqs[self._num_probes % num_seqs :], *seqs[: self._num_probes % num_seqs]]
            one = min(turned, key=lambda seq: seq.num_undrafted // BEHIND)
        num_behind = sum(seq.num_undrafted for seq in (seqs if one is None else (one,))) if off else 0
        cost_s = self._behind_s * num_behind * self._pace
        if self._saved_s < cost_s and self._tried:
            self._next_try = self._step + WAIT
            return
        _, wait = self._tried.get((bucket, best), (0, WAIT // 2))
        self._tried[bucket, best] = self._step, min(2 * wait, LONGEST_WAIT if best else LONGEST_PLAIN_WAIT)
        self._num_behind = num_behind
        num_tried = num_seqs if one is None else 1
        rounds = max(OFF_ROUNDS, OFF_VERIFIED // num_tried) if off else 1 if best else PLAIN_ROUNDS
        self._trial = _Trial(best, 1 + rounds, one)
        self.wakes = self.wakes or off

    def _positions(self, acceptance: float | None) -> list[float]:
        """Return the acceptance by position of a sequence whose mean is ``acceptance``."""
        more = 0.0 if acceptance is None else OWN_SHARE * (acceptance - self.accepted.mean)
        return [min(max(rate + more, 0.001), 1.0) for rate in self.accepted.by_position(self._most)]

    def _drafts(self, positions: Sequence[float], cut: float, cap: int) -> int:
        share, count = 1.0, 0
        for rate in positions[:cap]:
            share *= rate
            if share < cut:
                break
            count += 1
        return count

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
        if self.cut is None:
            now, turns = plain, best_rate > plain * ON
        else:
            now = self._tokens_per_s(num_seqs, groups, self.cut, self.cap)
            turns = best_rate > now * BETTER
        if turns:
            self.wakes = self.wakes or self.cut is None
            (self.cut, self.cap), now = best, best_rate
        if now < plain * OFF:
            self.cut, self.cap, now = None, 0, plain
        self._rate, self.predicted_gain = now, now / plain

    def _tokens_per_s(self, num_seqs: int, groups: Counter[float], cut: float | None, cap: int) -> float:
        tokens, num_drafts = float(num_seqs), 0
        if cut is not None:
            share_of = num_seqs / groups.total()
            for acceptance, count in groups.items():
                positions = self._positions(acceptance)
                share = 1.0
                drafts = self._drafts(positions, cut, cap)
                for rate in positions[:drafts]:
                    share *= rate
                    tokens += share * count * share_of
                num_drafts += round(drafts * count * share_of)
        ratio = num_drafts / num_seqs
        return tokens / (self.times.seconds(num_seqs, ratio) + self.draft_times.seconds(num_seqs, ratio))
