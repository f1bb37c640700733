"""Tokens of a step: `Budget`. In a pipeline, steps share decodes and prompt tokens, so that no stage is idle."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from quire.config import SchedulerConfig, row_tile
from quire.metrics.engine_stats import LONG_SHARE, long_part

# Rows of a prompt that take a core as long as what a step costs whatever its rows. Measured: a step of c rows of a 1B
# model as int8 takes 17 ms + c * 4.4 ms on one thread, from 16 to 256 rows.
STEP_ROWS = 4.0
# Weights in bf16 that a core multiplies a row with in a millisecond, which is about the host's part of a step on a
# stage.
HOST_WEIGHTS = 1e8


@dataclass(frozen=True, slots=True)
class StageRows:
    """What decides the chunks of a pipeline: the rows that each step costs a stage, and those of a kernel's tile."""

    step: float = STEP_ROWS
    tile: int = 16


ONE_STAGE = StageRows()  # has no chunks of its own


def stage_rows(num_active_params: int, num_stages: int, kernels: str) -> StageRows:
    """Return the rows of a model's stages; small models have short rows. ``kernels``: as `RunnerConfig.kernels`."""
    return StageRows(STEP_ROWS + HOST_WEIGHTS * num_stages / num_active_params, row_tile(kernels))


def stage_chunk(num_tokens: int, num_stages: int, rows: StageRows) -> int:
    """Return the prompt tokens per step that get ``num_tokens`` of them through a pipeline soonest.

    A step of c takes each stage the time of ``rows.step`` + c rows. While n steps pass through p stages, each stage is
    idle for p - 1 of them (bubbles), so all takes n + p - 1 times as long, with n = ``num_tokens`` / c. The least is at
    n = sqrt(``num_tokens`` * (p - 1) / ``rows.step``).
    """
    num_chunks = max(1, round(sqrt(num_tokens * (num_stages - 1) / rows.step)))
    return max(rows.tile, -(-num_tokens // num_chunks))


def long_threshold(config: SchedulerConfig) -> int:
    """Return how many tokens a prompt may have left that is not long; 0: none is long."""
    return config.long_prefill_token_threshold if config.enable_chunked_prefill else 0


class Budget:
    """Tokens left in the step being planned."""

    __slots__ = ("_kept", "_limit", "_long", "_num_stages", "_stage_rows", "_whole_prompts", "left")

    def __init__(self, config: SchedulerConfig, num_stages: int = 1, rows: StageRows = ONE_STAGE) -> None:
        """``num_stages``: of a pipeline, whose steps share decodes and prompt tokens evenly, so that none is idle."""
        self._num_stages, self._stage_rows = num_stages, rows
        self._limit = config.max_num_batched_tokens
        self._whole_prompts = not config.enable_chunked_prefill
        self.left = self._limit
        # Of these, what long prompts may have, and what is kept for those that run.
        self._long, self._kept = self._limit, 0

    @property
    def long_room(self) -> int:
        """Tokens that long prompts may have."""
        return min(self.left, self._long)

    @property
    def short_room(self) -> int:
        """Tokens that other prompts may have."""
        return self.left - self._kept

    def decode_limit(self, num_running: int) -> int:
        """Return how many decodes the step may have."""
        return self.left if self._num_stages == 1 else min(self.left, -(-num_running // self._num_stages))

    def take_decodes(self, num_decodes: int, num_prompt_tokens: int) -> None:
        """Leave what prompts may have beside the decodes.

        ``num_prompt_tokens``: of the prompts that this step and those around it compute. Of these, as many count as one
        process takes in a step, which keeps steps short under constant load.
        """
        self.left -= num_decodes
        if self._num_stages > 1 and not self._whole_prompts:
            together = min(num_prompt_tokens, self._limit)
            rows = num_decodes + stage_chunk(together, self._num_stages, self._stage_rows)
            tile = self._stage_rows.tile
            whole_tiles = -(-rows // tile) * tile
            self.left = min(-(-self.left // self._num_stages), whole_tiles - num_decodes)

    def share_with_long(self, threshold: int, num_short: int, *, runs: bool) -> None:
        """Divide what is left among long prompts and short ones, which want ``num_short`` tokens.

        ``runs``: a long one does, and goes on whatever short ones want.
        """
        self._long = long_part(threshold, num_short, self.left)
        self._kept = min(self._long, self.left // LONG_SHARE) if runs else 0

    def spend(self, num_tokens: int, *, is_long: bool) -> None:
        """A prompt was given some of the step's tokens."""
        self.left -= num_tokens
        if is_long:
            self._long = max(0, self._long - num_tokens)
            self._kept = max(0, self._kept - num_tokens)

    def keep_nothing(self) -> None:
        """The long prompts that run have had theirs."""
        self._kept = 0

    def must_be_whole(self, num_tokens: int) -> bool:
        """Tell whether a chunk of ``num_tokens`` may not be cut.

        Without chunked prefill a prompt is computed in one step or waits. Only what can never fit a step is cut:
        a sequence preempted after its output outgrew the budget, which cannot be rejected any more.
        """
        return self._whole_prompts and num_tokens <= self._limit
