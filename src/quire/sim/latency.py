"""`sim_executor`, and its seconds of a step: those of a profile or a roofline, plus speculation and swapping.

Speculation is an acceptance model (Leviathan et al. 2023, eq. 1): each of ``num_drafts`` drafted tokens is accepted
with probability ``acceptance``, independently, so a verification step gives

    E = (1 − αᵞ⁺¹) / (1 − α)         tokens per sequence (γ + 1 for α = 1)

The simulated scheduler plans no drafts, so a decode step is 1/E of a verification step: it gives one token and takes
1/E of the time that γ drafts and the verification of 1 + γ tokens per sequence add to the step. Means are right; the
gaps between tokens vary less than live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.clock import VirtualClock
from quire.errors import ConfigError, StepError
from quire.executor.timed import Taken, TimedExecutor
from quire.plan.cost_model import StepFeatures, StepTime


@dataclass(frozen=True, slots=True)
class Speculation:
    """``acceptance``: α in 0…1; ``num_drafts``: γ ≥ 1; ``draft_cost``: a draft step as a share of a decode step."""

    acceptance: float
    num_drafts: int
    draft_cost: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"acceptance = {self.acceptance} must be in 0…1")
        if self.num_drafts < 1:
            raise ConfigError(f"num_drafts = {self.num_drafts} must be at least 1")
        if not 0.0 <= self.draft_cost <= 1.0:
            raise ConfigError(f"draft_cost = {self.draft_cost} must be in 0…1")

    @property
    def tokens_per_step(self) -> float:
        """E: expected tokens of a verification step."""
        a, g = self.acceptance, self.num_drafts
        return float(g + 1) if a == 1.0 else (1.0 - a ** (g + 1)) / (1.0 - a)

    @property
    def speedup(self) -> float:
        """Tokens/s against plain decoding where verifying costs no more than a decode step (theorem 3.8)."""
        return self.tokens_per_step / (self.num_drafts * self.draft_cost + 1.0)


@dataclass(frozen=True, slots=True)
class Swap:
    """Preemption by copying K and V to host memory and back, instead of recomputing them.

    The scheduler plans the tokens as for recomputation, within its budget; each costs a copy out and a copy in.
    """

    seconds_per_token: float  # one way


def sim_executor(
    latency: Latency, clock: VirtualClock, on_submit: Callable[[float], None], *, max_in_flight: int = 1
) -> TimedExecutor:
    """Return an executor of modelled steps on a virtual clock; ``on_submit`` is told when each will be over."""

    def wait(left_s: float) -> None:
        raise StepError(f"the step will be over in {left_s} s, and its result is collected now")

    restores = latency.swaps
    return TimedExecutor(
        latency.seconds, clock, wait=wait, on_submit=on_submit, max_in_flight=max_in_flight, restores=restores
    )


class Latency:
    """Seconds of a step on one replica."""

    def __init__(
        self, step_time: StepTime, speculation: Speculation | None = None, swap: Swap | None = None
    ) -> None:
        self.swaps = swap is not None  # tokens computed before a preemption are copied, not recomputed
        self._plain = step_time.seconds
        self._speculation = speculation
        self._restore_s = 2.0 * swap.seconds_per_token if swap else 0.0

    def seconds(self, taken: Taken) -> float:
        """Return the time of a step."""
        seconds = self._restore_s * taken.num_restored
        if self._speculation is None or taken.num_decodes == 0:
            return seconds + self._plain(taken.step)
        return seconds + self._speculative(self._speculation, taken.step, taken.num_decodes)

    def _speculative(self, speculation: Speculation, step: StepFeatures, num_decodes: int) -> float:
        others = StepFeatures(
            step.num_tokens - num_decodes,
            step.num_seqs - num_decodes,
            step.num_logits - num_decodes,
            0,
            step.chunk_kv_tokens,
            step.chunk_pairs,
        )
        drafted = speculation.num_drafts * num_decodes
        verify = step._replace(num_tokens=step.num_tokens + drafted, num_logits=step.num_logits + drafted)
        decode = StepFeatures(num_decodes, num_decodes, num_decodes, step.decode_kv_tokens, 0, 0)
        drafts = speculation.num_drafts * speculation.draft_cost * self._plain(decode)
        without = self._plain(others)
        return without + (self._plain(verify) - without + drafts) / speculation.tokens_per_step
