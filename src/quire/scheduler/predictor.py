"""`Pace`: how fast the engine has been lately, and from that when a new request would have its first token.

Measured from the times that `plan` and `apply` are given, so a simulated run measures its simulated steps. Sums decay
by a twentieth a step: the last twenty steps or so count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_KEPT = 0.95  # of what was summed up, at each step


class Backlog(NamedTuple):
    """What a new request finds before it."""

    num_rows: int  # of prompts that are to be computed first
    num_ends: int  # sequences that have to end before it has a seat


@dataclass(slots=True)
class Pace:
    """Decaying sums over the steps that were applied. Seconds unless named otherwise."""

    num_steps: float = 0.0
    steps_s: float = 0.0
    num_prompt_rows: float = 0.0  # of steps that computed rows of prompts
    prompts_s: float = 0.0  # … and what these took, the decodes beside them included
    num_ends: float = 0.0  # sequences that ended while others waited
    waits_s: float = 0.0  # … and how long others waited
    _applied_s: float = 0.0

    def note(
        self, planned_s: float, applied_s: float, *, num_prompt_rows: int, num_ends: int, waiting: bool
    ) -> None:
        """A step that was planned at ``planned_s`` was applied."""
        took_s = max(0.0, applied_s - max(planned_s, self._applied_s))
        self._applied_s = applied_s
        self.num_steps = self.num_steps * _KEPT + 1
        self.steps_s = self.steps_s * _KEPT + took_s
        if num_prompt_rows:
            self.num_prompt_rows = self.num_prompt_rows * _KEPT + num_prompt_rows
            self.prompts_s = self.prompts_s * _KEPT + took_s
        if waiting:
            self.num_ends = self.num_ends * _KEPT + num_ends
            self.waits_s = self.waits_s * _KEPT + took_s

    @property
    def step_s(self) -> float:
        """Seconds a step takes; 0 before the first."""
        return self.steps_s / self.num_steps if self.num_steps else 0.0

    @property
    def row_s(self) -> float:
        """Seconds a row of a prompt takes; 0 before the first."""
        return self.prompts_s / self.num_prompt_rows if self.num_prompt_rows else 0.0

    @property
    def end_s(self) -> float:
        """Seconds from one end to the next while others wait; 0 where none was seen."""
        return self.waits_s / self.num_ends if self.num_ends else 0.0


def first_token_s(pace: Pace, backlog: Backlog, num_rows: int) -> float:
    """Return in how many seconds a prompt with ``num_rows`` rows to compute has its first token, as things go.

    The prompts before it and its own are computed one after another; where all seats are taken, as many sequences end
    first as it needs. Whichever takes longer decides, and a step is the least.
    """
    own_s = num_rows * pace.row_s
    return max(backlog.num_rows * pace.row_s + own_s, backlog.num_ends * pace.end_s + own_s, pace.step_s)
