"""`Predictor`: how long steps take, by the steps that were applied.

It learns by the times that `plan` and `apply` are given, so a simulated run learns from its simulated steps. With
``--slo``, `policies.forecast` corrects a model of step times by it. What the scheduler smooths is a `Mean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.metrics.engine_stats import TtftStats
from quire.step import SeqPlan

FIRST_STEP_S = 30.0  # expected of a step before any was measured


@dataclass(slots=True)
class Mean:
    """A running mean: of all values at first, later the newest one weighs ``1 / memory``."""

    value: float = 0.0
    memory: int = 20
    count: int = 0  # values, up to ``memory``

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count

    def add_cut(self, value: float, outlier: float) -> None:
        """Take in a value of which what is more than ``outlier`` times the mean, or less than its inverse, is cut."""
        if self.count:
            value = min(max(value, self.value / outlier), self.value * outlier)
        self.add(value)


class Predictor:
    """One per scheduler."""

    def __init__(self) -> None:
        self._applied_s = 0.0
        self._step_s = Mean()
        # Per step with prompt tokens; the seconds are also those of the decodes in it.
        self._num_prompt_tokens, self._prompts_s = Mean(), Mean()
        self._output = Mean()  # tokens of a sequence that ended

    def note(
        self, seqs: Sequence[SeqPlan], planned_s: float, applied_s: float, *, num_prompt_tokens: int
    ) -> float:
        """A step that was planned at ``planned_s`` was applied; return how long it took."""
        took_s = self.spent_s(planned_s, applied_s)
        if self._step_s.count and (self._num_prompt_tokens.count or not num_prompt_tokens):
            # A process that was stopped for an hour says nothing of the next step.
            took_s = min(took_s, 2 * self.expected_s(num_prompt_tokens) + 1.0)
        self._applied_s = applied_s
        self._step_s.add(took_s)
        if num_prompt_tokens:
            self._num_prompt_tokens.add(num_prompt_tokens)
            self._prompts_s.add(took_s)
        return took_s

    def spent_s(self, planned_s: float, applied_s: float) -> float:
        """Return how long the oldest step in flight took; steps in flight wait for each other."""
        return max(0.0, applied_s - max(planned_s, self._applied_s))

    def note_end(self, num_output_tokens: int) -> None:
        """A sequence that ran has ended."""
        self._output.add(num_output_tokens)

    def note_failure(self, applied_s: float) -> None:
        """A step failed: its time says nothing of others."""
        self._applied_s = applied_s

    def note_ttft(self, predicted_s: float, measured_s: float) -> None:
        """A first token came ``measured_s`` after its request, which was predicted to take ``predicted_s``."""

    @property
    def step_s(self) -> float:
        """Seconds per step; 0 before the first."""
        return self._step_s.value

    def expected_s(self, num_prompt_tokens: int) -> float:
        """Return how long a step with so many prompt tokens may well take: generous, to tell a slow step from a hang.

        A mean step, and its prompt tokens on top. A first step may compile kernels and touch every weight.
        """
        if not self._step_s.count:
            return FIRST_STEP_S
        return self.step_s + num_prompt_tokens * self.prompt_token_s

    @property
    def prompt_token_s(self) -> float:
        """Seconds per prompt token; 0 before the first."""
        return self._prompts_s.value / (self._num_prompt_tokens.value or 1.0)

    @property
    def mean_output(self) -> float:
        """Output tokens of a sequence; 0 before the first end."""
        return self._output.value

    def first_token_s(self, num_before: int, wait_s: float, num_own: int) -> float:
        """Return in how many seconds a prompt with ``num_own`` tokens to compute has its first token, at this pace.

        The ``num_before`` tokens of the prompts before it and its own are computed one after another; where all seats
        are taken, it waits ``wait_s`` for one. Whichever takes longer decides, and a step is the least.
        """
        own_s = num_own * self.prompt_token_s
        return max(num_before * self.prompt_token_s + own_s, wait_s + own_s, self.step_s)

    def ttft_stats(self, num_decodes: int, budget: int, long_tokens: int = 0) -> TtftStats:
        """Return what a prediction of TTFT needs: ``budget`` tokens per step, beside so many decodes.

        ``long_tokens``: what long prompts may have of it.
        """
        return TtftStats(max(1, budget - num_decodes), token_s=self.prompt_token_s, long_tokens=long_tokens)
