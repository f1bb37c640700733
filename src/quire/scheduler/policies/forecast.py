"""Predictions by a model of step times (``--slo``): how long a step that never ran would take, and when a request would
have its first token. The model's times are corrected by what steps like it really took.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.config import SchedulerConfig
from quire.cost.cost_model import StepFeatures, StepTime, features
from quire.metrics.engine_stats import TtftStats
from quire.scheduler.policy import Policy
from quire.scheduler.predictor import Mean, Predictor
from quire.scheduler.sequence import RequestState
from quire.scheduler.settings import long_threshold
from quire.scheduler.state import SchedulerState
from quire.step import SeqPlan, StepPlan


class ModelledPredictor(Predictor):
    """A `Predictor` with a model. ``num_seqs`` and ``num_decodes`` are those of the last step."""

    def __init__(self, config: SchedulerConfig, step_time: StepTime) -> None:
        super().__init__()
        self._step_time = step_time
        self.num_seqs = self.num_decodes = 0
        self._context = Mean(config.max_model_len / 4)  # keys that a decode reads
        self._chunk_keys = Mean(config.max_model_len / 4)  # keys that a token of a chunk sees
        self._decode_ratio = Mean(1.0)  # seconds measured / modelled, steps of decodes alone
        self._mixed_ratio = Mean(1.0)
        self._ttft_ratio = Mean(1.0, count=10)  # seconds measured / predicted

    def note(
        self, seqs: Sequence[SeqPlan], planned_s: float, applied_s: float, *, num_prompt_tokens: int
    ) -> float:
        took_s = super().note(seqs, planned_s, applied_s, num_prompt_tokens=num_prompt_tokens)
        self.num_seqs = len(seqs)
        self.num_decodes = sum(seq.num_known_tokens == 1 for seq in seqs)
        self._correct(seqs, took_s)
        return took_s

    def note_ttft(self, predicted_s: float, measured_s: float) -> None:
        """A first token came ``measured_s`` after its request, which was predicted to take ``predicted_s``."""
        if predicted_s > 0.0:
            ratio = measured_s / predicted_s * self._ttft_ratio.value
            self._ttft_ratio.add(min(max(ratio, 0.05), 20.0))

    def expected_s(self, num_prompt_tokens: int) -> float:
        learned_s = super().expected_s(num_prompt_tokens)
        if not self._step_s.count:
            return learned_s
        num_decodes = self.num_decodes
        modelled_s = (
            self.mixed_s(num_decodes, num_prompt_tokens) if num_prompt_tokens else self.decode_s(num_decodes)
        )
        return max(learned_s, modelled_s)

    def decode_s(self, num_decodes: int) -> float:
        """Return the seconds of a step of so many decodes."""
        keys = round(num_decodes * self._context.value)
        step = StepFeatures(num_decodes, num_decodes, num_decodes, keys, 0, 0)
        return self._step_time.seconds(step) * self._decode_ratio.value

    def mixed_s(self, num_decodes: int, num_tokens: int) -> float:
        """Return the seconds of a step with a chunk of ``num_tokens`` beside the decodes."""
        pairs = round(num_tokens * self._chunk_keys.value)
        chunk_kv = round(self._chunk_keys.value) + num_tokens
        keys = round(num_decodes * self._context.value)
        step = StepFeatures(num_decodes + num_tokens, num_decodes + 1, num_decodes + 1, keys, chunk_kv, pairs)
        return self._step_time.seconds(step) * self._mixed_ratio.value

    def ttft_stats(self, num_decodes: int, budget: int, long_tokens: int = 0) -> TtftStats:
        chunk = max(1, budget - num_decodes)
        least_s, most_s = self.mixed_s(num_decodes, 1), self.mixed_s(num_decodes, chunk)
        token_s = (most_s - least_s) / max(1, chunk - 1)
        return TtftStats(chunk, max(0.0, least_s - token_s), token_s, self._ttft_ratio.value, long_tokens)

    def _correct(self, seqs: Sequence[SeqPlan], took_s: float) -> None:
        step = features(StepPlan(0, seqs=tuple(seqs)), {seq.seq_id for seq in seqs})
        modelled_s = self._step_time.seconds(step)
        if modelled_s <= 0.0:
            return
        ratio = min(max(took_s / modelled_s, 0.1), 10.0)  # one page fault does not make a slower machine
        num_chunk_tokens = sum(seq.num_scheduled_tokens for seq in seqs if seq.num_known_tokens != 1)
        if num_chunk_tokens > 0:
            self._chunk_keys.add(step.chunk_pairs / num_chunk_tokens)
            self._mixed_ratio.add(ratio)
            if not self._decode_ratio.count:
                self._decode_ratio.value = self._mixed_ratio.value
        else:
            self._decode_ratio.add(ratio)
            if not self._mixed_ratio.count:
                self._mixed_ratio.value = self._decode_ratio.value
        if self.num_decodes:
            self._context.add(step.decode_kv_tokens / self.num_decodes)


class Rule(Policy):
    """Notes when the first token of a request that just came is predicted; the predictor learns from what comes."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def on_add(self, group: RequestState) -> None:
        state = self._state
        config, threshold = state.config, long_threshold(state.config)
        decoding = [seq for seq in state.running if seq.told_first]
        ahead = [
            seq.num_prompt
            for seq in (*state.running, *state.waiting)
            if not seq.told_first and seq.group is not group
        ]
        stats = state.predictor.ttft_stats(len(decoding), config.max_num_batched_tokens, threshold)
        num_long = sum(num for num in ahead if num > threshold > 0)
        num_prompt, is_busy = len(group.request.prompt_token_ids), bool(decoding or ahead)
        group.predicted_s = stats.seconds(sum(ahead) - num_long, num_prompt, busy=is_busy, num_long=num_long)
