"""`DraftGain`: tokens per second with drafts over those without, as measured.

A step of decodes that verified or proposed drafts is compared with the steps without them of about as many sequences.
Under a fixed number of drafts there are no steps without, and the gain is not known.
"""

from __future__ import annotations

from quire.scheduler.policies.draft_times import FEW, OUTLIER, RECENT, StepTimes
from quire.scheduler.predictor import Mean


class DraftGain:
    """Follows the steps of decodes alone, of one engine."""

    def __init__(self) -> None:
        self._plain = StepTimes()
        # Means of the steps with drafts: seconds that plain steps take for as many tokens, and their own.
        self._earned_s, self._spent_s = Mean(memory=RECENT), Mean(memory=RECENT)

    def note(self, num_seqs: int, num_tokens: int, took_s: float, *, drafted: bool) -> None:
        """A step gave ``num_tokens`` to ``num_seqs`` sequences in ``took_s``."""
        if not drafted:
            self._plain.note(num_seqs, 0, took_s)
        elif self._plain.count(num_seqs, 0.0) >= FEW:
            earned_s = self._plain.seconds(num_seqs, 0.0) * num_tokens / num_seqs
            if self._spent_s.count > FEW:  # one step that other processes held up must not decide
                took_s = min(took_s, OUTLIER * max(self._spent_s.value, earned_s))
            self._earned_s.add(earned_s)
            self._spent_s.add(took_s)

    @property
    def measured(self) -> float:
        """The gain; 0: it is not known."""
        return self._earned_s.value / self._spent_s.value if self._spent_s.value else 0.0
