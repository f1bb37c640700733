"""`DraftControl`: how many drafts pay, from measured acceptance and measured step times.

With acceptance α per draft, a sequence with k drafts gets 1 + α + … + α^k tokens per step (Leviathan et al. 2023). A
step of B sequences with n drafts takes T(B, n), and proposing takes c per draft. The control looks for the cut that
gives the most tokens per second,

    (B + Σ gains) / (T(B, n) + c · n)        a sequence has its j-th draft if α^j is at least the cut

with B and α of the decodes of the last step. Beside cuts it looks at caps, a number of drafts for every sequence, since
kernels take rows in tiles and the learned α of one sequence fluctuates; at times a step tries another number. No cut is
an answer as well: then sequences decode as without speculation, on the scheduler's fast path, and one of them tries
drafts at times, so that speculation comes back by itself. A pure function of the steps that were applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.config import SchedulerConfig

CUTS = (0.85, 0.7, 0.55, 0.42, 0.32, 0.24, 0.18, 0.12)
LOW_CUT = 0.03  # beside a cap
REFRESH = 8  # decode steps after which the cut is chosen again
PROBE = 96  # without drafts: decode steps after which one sequence tries one, or more:
PROBE_SHARE = (
    0.004  # of the time may go into such drafts, since a draft model catches up with the sequence first
)
# With drafts: decode steps after which a step without is measured, first and later; between them the steps double.
FIRST_PROBE, PLAIN_PROBE = 4, 200
BETTER = 1.02  # another cut has to promise that much more
# With drafts: decode steps after which a step with another number of them is measured, while the control is new, later.
NEW, FIRST_TRY, TRY = 600, 14, 110
STALE = 2_000  # steps after which a time that was not measured again is forgotten
MAX_VAIN = 16  # steps in a row without a proposal, after which a sequence is asked at block boundaries only
PRIOR = 0.6  # acceptance before the first draft
SEQ_WEIGHT, ENGINE_WEIGHT, TIME_WEIGHT = 0.06, 0.02, 0.2  # of the newest observation
PROBE_WEIGHT = 0.12  # of a probe, in the engine's acceptance
FEW, OUTLIER = 3, 2.0  # measurements of which the least counts; beyond that much of the mean, one is cut
FORGET = 0.05  # per step without drafts
SLOPE = 0.12  # share of a plain step that one draft per sequence adds, before it was measured


def followed(rate: float, num_drafts: int, num_accepted: int, weight: float) -> float:
    """Return the mean acceptance ``rate`` after a verification: some accepted, then one rejected if any is left."""
    rate = 1.0 - (1.0 - rate) * (1.0 - weight) ** num_accepted
    return rate * (1.0 - weight) if num_accepted < num_drafts else rate


@dataclass(slots=True)
class _Time:
    drafts: float  # per sequence
    seconds: float
    step: int  # the last one measured
    count: int = 0  # measured


class StepTimes:
    """Seconds of decode steps by (sequences, drafts per sequence), learned."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, _Time]] = {}  # by bucket of sequences, by twice the drafts per sequence

    def note(self, num_seqs: int, num_drafts: int, seconds: float, step: int) -> None:
        """A step of ``num_seqs`` decodes with ``num_drafts`` drafts in all took ``seconds``."""
        ratio = num_drafts / num_seqs
        times = self._of.setdefault(_bucket(num_seqs), {})
        known = times.setdefault(round(2 * ratio), _Time(ratio, seconds, step))
        if step - known.step > STALE:
            known.seconds, known.count = seconds, 0
        known.drafts += (ratio - known.drafts) * TIME_WEIGHT
        known.count += 1
        if known.count <= FEW:  # one step that other processes held up must not decide
            known.seconds = min(known.seconds, seconds)
        else:
            known.seconds += (min(seconds, OUTLIER * known.seconds) - known.seconds) * TIME_WEIGHT
        known.step = step

    def seconds(self, num_seqs: int, ratio: float, step: int) -> float:
        """Return the seconds of a step with ``ratio`` drafts per sequence; unknown: in plain steps."""
        own = self._fresh(_bucket(num_seqs), step)
        if len(own) > 1:
            return _line(own, ratio)
        others = [bucket for bucket in self._of if len(self._fresh(bucket, step)) > 1]
        base = own[0] if own else _Time(0.0, 1.0, step)
        if not others:
            return base.seconds * (1 + SLOPE * ratio) / (1 + SLOPE * base.drafts)
        shape = self._fresh(min(others, key=lambda bucket: abs(bucket - _bucket(num_seqs))), step)
        return base.seconds * _line(shape, ratio) / _line(shape, base.drafts)

    def _fresh(self, bucket: int, step: int) -> list[_Time]:
        times = self._of.get(bucket, {})
        return sorted((t for t in times.values() if step - t.step <= STALE), key=lambda t: t.drafts)


def _bucket(num_seqs: int) -> int:
    return round(2 * math.log2(num_seqs))


def _line(points: Sequence[_Time], drafts: float) -> float:
    """The piecewise linear function through ``points``, extrapolated, and never below half of the first.

    A step may take less time with more drafts: kernels take rows in tiles. Beyond the points it does not.
    """
    after = next((i for i, p in enumerate(points) if p.drafts >= drafts), len(points) - 1)
    a, b = points[max(0, after - 1)], points[max(1, after)]
    slope = (b.seconds - a.seconds) / max(1e-6, b.drafts - a.drafts)
    if not a.drafts <= drafts <= b.drafts:
        slope = max(0.0, slope)
        a = b if drafts > b.drafts else a
    return max(a.seconds + slope * (drafts - a.drafts), points[0].seconds / 2)


class Drafted(Protocol):
    """A sequence, as far as the control sees it."""

    acceptance: float | None


class DraftControl:
    """One per scheduler. With ``config.adaptive_drafts`` off, every sequence has the most drafts always."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.configure(config)
        self.times = StepTimes()
        self.acceptance = PRIOR  # of the engine, which a new sequence begins with
        self.draft_s = 0.0  # of proposing one draft
        self.cut: float | None = CUTS[3]  # None: no drafts
        self.cap = self._most  # drafts per sequence, whatever the cut says
        self.predicted_gain = 1.0  # tokens per second with this cut, over those without drafts
        self.any_held = False  # whether a worker may hold drafts that no step has verified
        self._step = 0  # decode steps
        self._probe_at = FIRST_PROBE
        self._probed = False
        self._try_at, self._tried, self._next_try = FIRST_TRY, False, 0
        self._num_proposed = 0  # in the step being applied

    def configure(self, config: SchedulerConfig) -> None:
        """Take over the settings of ``config``; what was learned stays."""
        self._most, self._adaptive = config.max_num_drafts, config.adaptive_drafts

    def limit(self, acceptance: float | None) -> int:
        """Return how many drafts a sequence of this acceptance may have; None: it had none yet."""
        if not self._adaptive:
            return self._most
        if self.cut is None:
            return 0
        return self._drafts(self.acceptance if acceptance is None else acceptance, self.cut, self.cap)

    def ask(self, acceptance: float | None) -> int:
        """As `limit`, for a step that is planned now; at times the other choice, to learn what it does."""
        if self._adaptive and self._step >= self._probe_at:
            first, self._probed = not self._probed, True
            if self.cut is not None:
                return 0
            if first:  # one sequence is enough
                return 1
        elif self._adaptive and self.cut is not None and self._step >= self._try_at:
            self._tried = True
            return min(self._most, 1 + self._next_try % self._most)
        return self.limit(acceptance)

    def note_result(self, acceptance: float | None, num_drafts: int, num_accepted: int) -> float | None:
        """A sequence verified ``num_drafts``; return its acceptance now. Without drafts it tends to the engine's."""
        if not num_drafts:
            return None if acceptance is None else acceptance + (self.acceptance - acceptance) * FORGET
        weight = PROBE_WEIGHT if self.cut is None else ENGINE_WEIGHT
        self.acceptance = followed(self.acceptance, num_drafts, num_accepted, weight)
        before = self.acceptance if acceptance is None else acceptance
        return followed(before, num_drafts, num_accepted, SEQ_WEIGHT)

    def note_proposed(self, num_proposed: int) -> None:
        """The worker has so many drafts of a sequence in the step being applied."""
        self._num_proposed += num_proposed
        self.any_held = self.any_held or num_proposed > 0

    def note_mixed_step(self) -> None:
        """A step with prompt tokens was applied, in which a draft model may have computed a prompt as well."""
        self._num_proposed = 0

    def note_step(self, seqs: Sequence[Drafted], num_drafts: int, took_s: float, draft_s: float) -> None:
        """A step of decodes alone, of ``seqs``, was applied; it verified ``num_drafts`` in all."""
        self._step += 1
        if self._num_proposed:
            one_s = draft_s / self._num_proposed
            known_s = self.draft_s or one_s
            self.draft_s = known_s + (min(one_s, OUTLIER * known_s) - known_s) * TIME_WEIGHT
        self._num_proposed = 0
        if not self._adaptive:
            return
        self.times.note(len(seqs), num_drafts, max(1e-6, took_s - draft_s), self._step)
        if self._probed:
            wait = min(PLAIN_PROBE, max(2 * FIRST_PROBE, self._step))
            if self.cut is None:
                wait = max(PROBE, int(draft_s / (PROBE_SHARE * max(1e-6, took_s - draft_s))))
            self._probed, self._probe_at = False, self._step + wait
        if self._tried:
            self._tried, self._next_try = False, self._next_try + 3
            self._try_at = self._step + (FIRST_TRY if self._step < NEW else TRY)
        if self._step % REFRESH == 0:
            self._choose([self.acceptance if seq.acceptance is None else seq.acceptance for seq in seqs])

    def _drafts(self, acceptance: float, cut: float, cap: int) -> int:
        most = min(cap, self._most)
        if acceptance >= 0.999:
            return most
        return min(most, int(math.log(cut) / math.log(max(acceptance, 1e-3))))

    def _choose(self, rates: list[float]) -> None:
        plain = self._tokens_per_s(rates, None, 0)
        best: tuple[float | None, int] = (None, 0)
        best_rate = plain
        now = self._tokens_per_s(rates, self.cut, self.cap)
        choices = [(cut, self._most) for cut in CUTS] + [(LOW_CUT, cap) for cap in range(1, self._most + 1)]
        for cut, cap in choices:
            rate = self._tokens_per_s(rates, cut, cap)
            if rate > best_rate:
                best, best_rate = (cut, cap), rate
        if best_rate > now * BETTER:
            (self.cut, self.cap), now = best, best_rate
        elif plain >= now:
            self.cut, now = None, plain
        self.predicted_gain = now / plain

    def _tokens_per_s(self, rates: list[float], cut: float | None, cap: int) -> float:
        num_seqs, tokens, num_drafts = len(rates), float(len(rates)), 0.0
        if cut is not None:
            for rate in rates:
                count = self._drafts(rate, cut, cap)
                gain = count if rate >= 0.999 else rate * (1 - rate**count) / (1 - rate)
                tokens += gain
                num_drafts += count
        seconds = self.times.seconds(num_seqs, num_drafts / num_seqs, self._step)
        return tokens / (seconds + self.draft_s * num_drafts)
