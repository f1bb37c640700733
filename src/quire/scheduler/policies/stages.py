"""In a pipeline, the steps in flight share decodes and prompt tokens evenly, so that no stage is idle."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from quire.config import row_tile
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import StepRecord
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom

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


def prompt_room(
    left: int, limit: int, num_decodes: int, num_prompt_tokens: int, num_stages: int, rows: StageRows
) -> int:
    """Return what prompts may have of the ``left`` tokens beside ``num_decodes``, in whole tiles of rows.

    ``num_prompt_tokens``: of the prompts that this step and those around it compute. Of these, as many count as one
    process takes in a step (``limit``), which keeps steps short under constant load.
    """
    num_rows = num_decodes + stage_chunk(min(num_prompt_tokens, limit), num_stages, rows)
    whole_tiles = -(-num_rows // rows.tile) * rows.tile
    return min(-(-left // num_stages), whole_tiles - num_decodes)


class Rule(Policy):
    """Divides prompts among the steps of one pipeline. The planner divides decodes."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.rows = StageRows()
        self._run = 0  # prompt tokens in the last steps, back to one without any

    def budget(self, room: StepRoom) -> None:
        state, config = self._state, self._state.config
        if config.enable_chunked_prefill:
            num_left = sum(seq.target - seq.num_planned for seq in room.prefills)
            room.left = prompt_room(
                room.left,
                config.max_num_batched_tokens,
                len(room.decodes),
                self._run + num_left + state.waiting.num_tokens,
                state.num_stages,
                self.rows,
            )

    def on_plan(self, record: StepRecord) -> None:
        self._run = self._run + record.num_prompt_tokens if record.num_prompt_tokens else 0
