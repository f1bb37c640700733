"""What `DraftControl` learns: seconds of steps and of proposing, and how many drafts are accepted.

Seconds are kept in units of the machine's pace, which follows the steps that run. What is measured rarely, as a step
with another number of drafts, is so compared with the steps next to it, and not with those of a minute ago.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.config import MAX_DRAFTS
from quire.scheduler.predictor import Mean

FEW = 3  # measurements
OUTLIER = 1.1  # ratio to the mean at which a time is cut
RECENT = 100  # measurements that a mean remembers
SETTLED = 8  # steps in which the pace follows a change
PRIOR = 0.6  # acceptance before the first draft
# Before it was measured, the share of a plain step that one draft per sequence adds: so much per sequence, until a row
# costs what a row of a plain step does.
ROW = 0.12


class _Time:
    """A cell of the table, which begins with ``drafts`` per sequence that took ``seconds``."""

    def __init__(self, drafts: float, seconds: float) -> None:
        self._drafts, self._seconds = Mean(drafts, RECENT), Mean(seconds, RECENT)

    @property
    def drafts(self) -> float:
        """Drafts per sequence."""
        return self._drafts.value

    @property
    def seconds(self) -> float:
        return self._seconds.value

    @property
    def count(self) -> int:
        """How often it was measured."""
        return self._seconds.count

    def note(self, drafts: float, seconds: float) -> None:
        self._drafts.add(drafts)
        if self.count < FEW:  # one step that other processes held up must not decide
            seconds = min(seconds, self.seconds)
            self._seconds = Mean(seconds, RECENT, self.count + 1)
        else:
            self._seconds.add_cut(seconds, OUTLIER)


class StepTimes:
    """Seconds by (sequences, drafts per sequence), learned.

    ``row``: what an unmeasured draft adds, as a share of a step without; None: drafts alone take time.
    """

    def __init__(self, row: float | None = ROW) -> None:
        self._row = row
        # Bucket of sequences → twice the drafts per sequence → time.
        self._times: dict[int, dict[int, _Time]] = {}

    def note(self, num_seqs: int, num_drafts: int, seconds: float) -> float:
        """A step of ``num_seqs`` with ``num_drafts`` in all took ``seconds``; return the seconds known before, or 0."""
        ratio, seconds = num_drafts / num_seqs, max(seconds, 1e-9)
        times, key = self._times.setdefault(bucket_of(num_seqs), {}), _key(ratio)
        known = times.get(key)
        if known is None:
            known = times[key] = _Time(ratio, seconds)
        before = known.seconds if known.count >= FEW else 0.0
        known.note(ratio, seconds)
        return before

    def count(self, num_seqs: int, ratio: float) -> int:
        """Return how often a step with ``ratio`` drafts per sequence was measured."""
        known = self._times.get(bucket_of(num_seqs), {}).get(_key(ratio))
        return 0 if known is None else known.count

    def seconds(self, num_seqs: int, ratio: float) -> float:
        """Return the seconds with ``ratio`` drafts per sequence, as far as they are known."""
        if self._row is None and not ratio:
            return 0.0
        own = self._points(bucket_of(num_seqs))
        if len(own) > 1:
            return _line(own, ratio)
        others = [bucket for bucket, times in self._times.items() if len(times) > 1]
        if not own and self._row is None:
            known = [point for bucket in self._times for point in self._points(bucket)]
            return known[0].seconds * ratio / known[0].drafts if known else 0.0
        base = own[0] if own else _Time(0.0, 1.0)
        if others:
            shape = self._points(min(others, key=lambda bucket: abs(bucket - bucket_of(num_seqs))))
            return base.seconds * _line(shape, ratio) / _line(shape, base.drafts)
        if self._row is None:
            return base.seconds * ratio / base.drafts
        slope = min(self._row * num_seqs, 1.0)
        return base.seconds * (1 + slope * ratio) / (1 + slope * base.drafts)

    def _points(self, bucket: int) -> list[_Time]:
        return sorted(self._times.get(bucket, {}).values(), key=lambda t: t.drafts)


def bucket_of(num_seqs: int) -> int:
    """Numbers of sequences in one bucket share their times."""
    return round(2 * math.log2(num_seqs))


def _key(ratio: float) -> int:
    return max(1, round(2 * ratio)) if ratio else 0


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


class Acceptance:
    """The engine's acceptance: the mean over all drafts that were tried, and by position behind accepted ones."""

    def __init__(self) -> None:
        self.mean = PRIOR
        self._at = [Mean() for _ in range(MAX_DRAFTS)]

    def note(self, num_drafts: int, num_accepted: int, memory: int) -> None:
        """Some of ``num_drafts`` were accepted, then one was rejected if any is left. Remember ``memory`` of them."""
        self.mean = followed(self.mean, num_drafts, num_accepted, memory)
        for place in range(min(num_accepted + 1, num_drafts, MAX_DRAFTS)):
            self._at[place].memory = memory
            self._at[place].add(float(place < num_accepted))

    def by_position(self, most: int) -> list[float]:
        """Return the probability that a draft is accepted whose predecessors are, for ``most`` positions."""
        before, rates = PRIOR, []
        for right in self._at[:most]:
            before = (right.value * right.count + before * FEW) / (right.count + FEW)
            rates.append(before)
        return rates


def followed(rate: float, num_drafts: int, num_accepted: int, memory: int) -> float:
    """Return the mean acceptance ``rate`` after a verification: some accepted, then one rejected if any is left."""
    decay = 1.0 - 1.0 / memory
    rate = 1.0 - (1.0 - rate) * decay**num_accepted
    return rate * decay if num_accepted < num_drafts else rate
