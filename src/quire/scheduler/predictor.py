"""`Predictor`: how long steps take, and from that when a request would have its first token.

It learns from every step that is applied, by the times that `plan` and `apply` are given, so a simulated run learns
from its simulated steps. Sums decay by a twentieth per step: the last twenty steps or so count. With a step-time model
(``--slo``) it also says how long a step that never ran would take: the model's time, corrected by what steps like it
really took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.config import SchedulerConfig
from quire.cost.cost_model import StepFeatures, StepTime, features
from quire.metrics.engine_stats import TtftStats
from quire.step import SeqPlan, StepPlan

_KEPT = 0.95  # share of the decaying sums that stays at each step
FIRST_STEP_S = 30.0  # expected of a step before any was measured
_WEIGHT = 0.1  # of the newest step in the running means


class Backlog(NamedTuple):
    """What a new request finds before it."""

    num_tokens: int  # of prompts that are to be computed first
    wait_s: float  # until sequences that run have ended, so that it has a seat


@dataclass(slots=True)
class _Mean:
    """An exponential mean that begins at its first value."""

    value: float
    seen: bool = False

    def add(self, value: float) -> None:
        self.value += (value - self.value) * (_WEIGHT if self.seen else 1.0)
        self.seen = True


class Predictor:
    """One per scheduler. ``num_seqs`` and ``num_decodes`` are those of the last step."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime | None = None) -> None:
        self.step_time = step_time
        self.num_seqs = self.num_decodes = 0
        self._applied_s = 0.0
        self._num_steps = self._steps_s = 0.0
        # Of steps with prompt tokens, the decodes beside them included.
        self._num_prompt_tokens = self._prompts_s = 0.0
        self._output = _Mean(0.0)  # tokens of a sequence that ended
        self._context = _Mean(config.max_model_len / 4)  # keys that a decode reads
        self._chunk_keys = _Mean(config.max_model_len / 4)  # keys that a token of a chunk sees
        self._decode_ratio = _Mean(1.0)  # seconds measured / modelled, steps of decodes alone
        self._mixed_ratio = _Mean(1.0)
        self._ttft_ratio = _Mean(1.0, seen=True)  # seconds measured / predicted

    def note(
        self,
        seqs: Sequence[SeqPlan],
        planned_s: float,
        applied_s: float,
        *,
        num_prompt_tokens: int,
    ) -> float:
        """A step that was planned at ``planned_s`` was applied; return how long it took."""
        took_s = self.spent_s(planned_s, applied_s)
        if self._num_steps and (self._num_prompt_tokens or not num_prompt_tokens):
            # A process that was stopped for an hour says nothing of the next step.
            took_s = min(took_s, 2 * self.expected_s(num_prompt_tokens) + 1.0)
        self._applied_s = applied_s
        self._num_steps = self._num_steps * _KEPT + 1
        self._steps_s = self._steps_s * _KEPT + took_s
        if num_prompt_tokens:
            self._num_prompt_tokens = self._num_prompt_tokens * _KEPT + num_prompt_tokens
            self._prompts_s = self._prompts_s * _KEPT + took_s
        if self.step_time is not None:
            self.num_seqs = len(seqs)
            self.num_decodes = sum(seq.num_known_tokens == 1 for seq in seqs)
            self._correct(self.step_time, seqs, took_s)
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
        if predicted_s > 0.0:
            ratio = measured_s / predicted_s * self._ttft_ratio.value
            self._ttft_ratio.add(min(max(ratio, 0.05), 20.0))

    @property
    def step_s(self) -> float:
        """Seconds per step; 0 before the first."""
        return self._steps_s / self._num_steps if self._num_steps else 0.0

    def expected_s(self, num_prompt_tokens: int) -> float:
        """Return how long a step with so many prompt tokens may well take: generous, to tell a slow step from a hang.

        A mean step, and its prompt tokens on top. A first step may compile kernels and touch every weight.
        """
        if not self._num_steps:
            return FIRST_STEP_S
        learned_s = self.step_s + num_prompt_tokens * self.prompt_token_s
        if self.step_time is None:
            return learned_s
        num_decodes = self.num_decodes
        modelled_s = (
            self.mixed_s(num_decodes, num_prompt_tokens) if num_prompt_tokens else self.decode_s(num_decodes)
        )
        return max(learned_s, modelled_s)

    @property
    def prompt_token_s(self) -> float:
        """Seconds per prompt token; 0 before the first."""
        return self._prompts_s / self._num_prompt_tokens if self._num_prompt_tokens else 0.0

    @property
    def mean_output(self) -> float:
        """Output tokens of a sequence; 0 before the first end."""
        return self._output.value

    def first_token_s(self, backlog: Backlog, num_tokens: int) -> float:
        """Return in how many seconds a prompt with ``num_tokens`` to compute has its first token, at this pace.

        The prompts before it and its own are computed one after another; where all seats are taken, it waits for one.
        Whichever takes longer decides, and a step is the least.
        """
        own_s = num_tokens * self.prompt_token_s
        computed_s = backlog.num_tokens * self.prompt_token_s + own_s
        return max(computed_s, backlog.wait_s + own_s, self.step_s)

    def decode_s(self, num_decodes: int) -> float:
        """Return the seconds of a step of so many decodes; needs the model."""
        assert self.step_time is not None
        keys = round(num_decodes * self._context.value)
        step = StepFeatures(num_decodes, num_decodes, num_decodes, keys, 0, 0)
        return self.step_time.seconds(step) * self._decode_ratio.value

    def mixed_s(self, num_decodes: int, num_tokens: int) -> float:
        """Return the seconds of a step with a chunk of ``num_tokens`` beside the decodes; needs the model."""
        assert self.step_time is not None
        pairs = round(num_tokens * self._chunk_keys.value)
        chunk_kv = round(self._chunk_keys.value) + num_tokens
        keys = round(num_decodes * self._context.value)
        step = StepFeatures(num_decodes + num_tokens, num_decodes + 1, num_decodes + 1, keys, chunk_kv, pairs)
        return self.step_time.seconds(step) * self._mixed_ratio.value

    def ttft_stats(self, num_decodes: int, budget: int, long_tokens: int = 0) -> TtftStats:
        """Return what a prediction of TTFT needs: ``budget`` tokens per step, beside so many decodes.

        ``long_tokens``: what long prompts may have of it.
        """
        chunk = max(1, budget - num_decodes)
        if self.step_time is None:
            return TtftStats(chunk, 0.0, self.prompt_token_s, self._ttft_ratio.value, long_tokens)
        least_s, most_s = self.mixed_s(num_decodes, 1), self.mixed_s(num_decodes, chunk)
        token_s = (most_s - least_s) / max(1, chunk - 1)
        return TtftStats(chunk, max(0.0, least_s - token_s), token_s, self._ttft_ratio.value, long_tokens)

    def _correct(self, step_time: StepTime, seqs: Sequence[SeqPlan], took_s: float) -> None:
        step = features(StepPlan(0, seqs=tuple(seqs)), {seq.seq_id for seq in seqs})
        modelled_s = step_time.seconds(step)
        if modelled_s <= 0.0:
            return
        ratio = min(max(took_s / modelled_s, 0.1), 10.0)  # one page fault does not make a slower machine
        num_chunk_tokens = sum(seq.num_scheduled_tokens for seq in seqs if seq.num_known_tokens != 1)
        if num_chunk_tokens > 0:
            self._chunk_keys.add(step.chunk_pairs / num_chunk_tokens)
            self._mixed_ratio.add(ratio)
            if not self._decode_ratio.seen:
                self._decode_ratio.value = self._mixed_ratio.value
        else:
            self._decode_ratio.add(ratio)
            if not self._mixed_ratio.seen:
                self._mixed_ratio.value = self._decode_ratio.value
        if self.num_decodes:
            self._context.add(step.decode_kv_tokens / self.num_decodes)
