"""On a GPU: a trial of the memory that `quire.resolve` expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from quire.config import EngineConfig
from quire.cost.split import GRAPH_BYTES, RUNTIME_BYTES, Split, row_bytes
from quire.errors import StepError
from quire.request import Sampling
from quire.step import NewSeq, SeqPlan, StepPlan, StepResult

Run = Callable[[StepPlan], StepResult]


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes by class. ``other``: of the process, and not torch's tensors: context, libraries, captured graphs."""

    weights: int
    kv: int
    step: int  # at its largest, beyond weights and cache
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.step + self.other


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """``found`` is what the device reports."""

    expected: DeviceBytes
    found: DeviceBytes
    fits: bool  # else the largest step was computed in halves

    def __str__(self) -> str:
        measured, expected = asdict(self.found), asdict(self.expected)
        parts = (f"{name} {measured[name] / 2**30:.2f} ({expected[name] / 2**30:.2f})" for name in measured)
        totals = f"total {self.found.total / 2**30:.2f} ({self.expected.total / 2**30:.2f})"
        short = "" if self.fits else "; the largest step does not fit: see max_num_batched_tokens"
        return f"memory in GiB, found (expected): {', '.join(parts)}, {totals}{short}"


class Meter:
    """What torch and the driver say of the current GPU's memory."""

    def held(self) -> int:
        """Bytes of tensors."""
        return int(torch.cuda.memory_allocated())

    def peak(self) -> int:
        """The most of `held` since `restart`."""
        return int(torch.cuda.max_memory_allocated())

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def used(self) -> int:
        """Bytes that are not free, less what torch has in reserve."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())


def check_memory(config: EngineConfig, run: Run, meter: Meter) -> MemoryCheck:
    """Run the largest step and compare what it took with what was expected. No request was served yet.

    The trial has `max_num_batched_tokens` prompt tokens of `max_num_seqs` sequences at most, in blocks that no sequence
    owns yet, and one more token of each. What they run is compiled by then, and a step that finds too little memory is
    found before the first request. Raises `StepError` where the trial fails.
    """
    before = meter.held()
    meter.restart()
    step, decode, forget = trial_plans(config)
    result = run(step)
    error = result.error or run(decode).error
    if error is not None:
        raise StepError(f"the trial step failed: {error}")
    peak = meter.peak()
    run(forget)
    model, cache, scheduler = config.model, config.cache, config.scheduler
    kv = cache.num_blocks * config.kv_layout.block_bytes(cache.block_size, model.kv_dtype)
    expected = DeviceBytes(
        weights=model.spec.weight_bytes(model.dtype, model.formats),
        kv=kv,
        step=scheduler.max_num_batched_tokens * row_bytes(model.spec, Split())
        + 2 * scheduler.max_num_seqs * model.spec.vocab_size * 4,
        other=RUNTIME_BYTES["accelerator"] + GRAPH_BYTES["accelerator"],
    )
    measured = DeviceBytes(weights=before - kv, kv=kv, step=peak - before, other=meter.used())
    return MemoryCheck(expected, measured, fits=result.max_tokens is None)


def trial_plans(config: EngineConfig) -> tuple[StepPlan, StepPlan, StepPlan]:
    """The largest step, the next token of each of its sequences, and the step that forgets them."""
    size, num_groups = config.cache.block_size, len(config.kv_layout.groups)
    most = config.scheduler.max_num_batched_tokens
    longest = min(config.model.max_model_len, config.cache.num_blocks // num_groups * size) - 1
    count = min(config.scheduler.max_num_seqs, most)
    lengths = [min(longest, most * (i + 1) // count - most * i // count) for i in range(count)]
    rows = -(-(max(lengths) + 1) // size)
    blocks = tuple(tuple(range(group * rows, (group + 1) * rows)) for group in range(num_groups))
    plain = Sampling(temperature=0.0, seed=1, max_tokens=2)
    # What the first such request needs is compiled by then.
    everything = Sampling(
        temperature=1.0, seed=1, max_tokens=2, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0},
        allowed_token_ids=(0, 1), logprobs=1,
    )  # fmt: skip
    seqs = tuple(SeqPlan(i, 0, 0, n, (0,) * num_groups, blocks) for i, n in enumerate(lengths))
    new = tuple(NewSeq(i, 0, (0,) * n, (), plain if i else everything, 0) for i, n in enumerate(lengths))
    decode = tuple(SeqPlan(i, 0, n, 1) for i, n in enumerate(lengths))
    return StepPlan(0, new, seqs), StepPlan(1, seqs=decode), StepPlan(2, gone=tuple(range(count)))
