"""How many rows a step computes: decodes first, round robin where they do not all fit, the rest to prompt chunks."""

from __future__ import annotations

from quire.config import SchedulerConfig


class Budget:
    """Rows left in the step being planned."""

    __slots__ = ("_limit", "_whole_prompts", "left")

    def __init__(self, config: SchedulerConfig) -> None:
        self._limit = config.max_num_batched_tokens
        self._whole_prompts = not config.enable_chunked_prefill
        self.left = self._limit

    def must_be_whole(self, num_tokens: int) -> bool:
        """Tell whether a chunk of ``num_tokens`` may not be cut.

        Without chunked prefill a prompt is computed in one step or waits. Only what can never fit a step is cut:
        a sequence preempted after its output outgrew the budget, which cannot be refused any more.
        """
        return self._whole_prompts and num_tokens <= self._limit
