"""`Worker`: applies a `StepPlan` to its state in the order of DESIGN §2, and answers with a `StepResult`.

gone → kv_moves → adapter_moves → new_seqs → forward. What goes wrong in one sequence fails that sequence; what goes
wrong in a step is raised, and the executor makes it the step's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from quire.clock import Clock
from quire.config import EngineConfig
from quire.errors import RequestError, StepError
from quire.lora.slots import LoraSlots
from quire.quant.stored import Weight
from quire.runner.input_batch import InputBatch
from quire.runner.model_runner import ModelRunner
from quire.runner.prompt_rows import PromptOutput, PromptRows, rows_of
from quire.runner.runner import Runner, Wait
from quire.sampling.sampler import SeqSample
from quire.step import MIN_RETRY_TOKENS, NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Shortage:
    """Memory that a step lacked. ``max_tokens``: half of the fewest that were too many; None where all fitted."""

    max_tokens: int | None = None
    seq_ids: set[int] = field(default_factory=set)  # refused, and worth another try with fewer rows


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way. ``parts``: sequences that sample, in the order of what the function beside them returns."""

    plan: StepPlan
    start_s: float
    parts: list[tuple[list[int], Wait]]
    prompts: dict[int, PromptOutput]
    refused: dict[int, str]  # sequences of the plan that were not computed, with the reason
    shortage: Shortage


class Worker:
    """One process's share of an engine: here the whole model."""

    def __init__(
        self,
        config: EngineConfig,
        weights: Iterable[tuple[str, Weight]],
        clock: Clock,
        runner: Callable[[EngineConfig, Iterable[tuple[str, Weight]]], Runner] = ModelRunner,
    ) -> None:
        self._clock = clock
        self._vocab_size = config.model.spec.vocab_size
        self.runner = runner(config, weights)
        self._inputs = InputBatch(
            config.scheduler.max_num_seqs,
            config.model.max_model_len,
            config.cache.block_size,
            len(config.kv_layout.groups),
            config.scheduler.max_num_batched_tokens,
            config.scheduler.max_loras,
        )
        self._lora: LoraSlots | None = None
        if config.lora is not None:
            self._lora = LoraSlots(config.model.spec, self.runner.decoder.lora_targets())
        self.runner.record(self._inputs.buffers)
        self._prompts = PromptRows(self.runner.logits_of_rows, self.runner.score, self._vocab_size)
        self._refused: dict[int, str] = {}  # sequences that cannot run or go on, with the reason
        self._shortage = Shortage()  # of the step that is being launched

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the model raises; the state stays usable."""
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step; the next may be launched before this one is finished. Raises what the model raises."""
        start_s = self._clock.now()
        for seq_id in plan.gone:
            self._drop(seq_id)
        if plan.kv_moves:
            self.runner.kv.copy(plan.kv_moves)
        for slot, adapter in plan.adapter_moves:
            if self._lora is None:
                raise StepError("This worker runs no adapters, and the plan moves some.")
            self._lora.load(slot, adapter)
        self._admit(plan)
        fine = plan.seqs
        if self._refused:
            fine = tuple(seq for seq in fine if seq.seq_id not in self._refused)
        prompts: dict[int, PromptOutput] = {}
        self._shortage = Shortage()
        try:
            parts = self._compute(fine, prompts)
        except Exception as error:
            # Steps planned before this is known name them too: those rows fail, and not the steps.
            here = [seq.seq_id for seq in fine if self._inputs.has(seq.seq_id, seq.epoch)]
            self._refused.update(dict.fromkeys(here, f"a step before failed: {error}"))
            raise
        refused = {seq.seq_id: self._refused[seq.seq_id] for seq in plan.seqs if seq.seq_id in self._refused}
        return Launched(plan, start_s, parts, prompts, refused, self._shortage)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the oldest step launched, and return its result."""
        samples: dict[int, SeqSample] = {}
        for seq_ids, wait in launched.parts:
            samples.update(zip(seq_ids, wait(), strict=True))
        plan = launched.plan
        results = tuple(self._result(seq, launched, samples.get(seq.seq_id)) for seq in plan.seqs)
        took_s = self._clock.now() - launched.start_s
        return StepResult(
            plan.step,
            results,
            moves_done=len(plan.kv_moves),
            device_s=took_s,
            max_tokens=launched.shortage.max_tokens,
        )

    def _drop(self, seq_id: int) -> None:
        if seq_id in self._inputs:
            self._inputs.remove(seq_id)
            self.runner.sampler.remove(seq_id)
            self.runner.grammars.remove(seq_id)
            self._prompts.remove(seq_id)
        self._refused.pop(seq_id, None)

    def _admit(self, plan: StepPlan) -> None:
        for new in plan.new_seqs:
            self._drop(new.seq_id)
            refusal = self._refusal(new)
            if refusal is None:
                self._inputs.add(new)
            else:
                self._refused[new.seq_id] = refusal

    def _refusal(self, new: NewSeq) -> str | None:
        """Give the sequence to the sampler; return why it cannot run here, or None."""
        if new.adapter_slot:
            if self._lora is None:
                return f"adapter slot {new.adapter_slot} is asked for; this worker runs no adapters."
            failure = self._lora.failure(new.adapter_slot)
            if failure is not None:
                return failure
        ids = (*new.prompt_token_ids, *new.output_token_ids)
        if not ids or not 0 <= min(ids) <= max(ids) < self._vocab_size:
            return f"prompt ids must be in 0…{self._vocab_size - 1}, at least one."
        try:
            self.runner.sampler.add(new)
        except RequestError as error:
            return str(error)
        self.runner.grammars.add(new)
        self._prompts.add(new)
        return None

    def _compute(
        self, plans: tuple[SeqPlan, ...], prompts: dict[int, PromptOutput]
    ) -> list[tuple[list[int], Wait]]:
        """Compute the rows of ``plans``: in one go, or where memory does not suffice in halves, in their order.

        The scheduler is told how many rows were too many. A sequence that does not fit alone is refused, and planned
        again with fewer rows if it had many.
        """
        if not plans:
            return []
        self.runner.kv.clear(self._inputs.update_tables(plans))
        return self._compute_in_memory(plans, prompts)

    def _compute_in_memory(
        self, plans: tuple[SeqPlan, ...], prompts: dict[int, PromptOutput]
    ) -> list[tuple[list[int], Wait]]:
        try:
            return [self._launch(plans, prompts)]
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(".")[0]
        self.runner.free_memory()
        num_rows = sum(plan.num_scheduled_tokens for plan in plans)
        self._shortage.max_tokens = num_rows // 2
        _log.warning(
            "%d rows are too many for the memory, steps have half of them from now on: %s", num_rows, reason
        )
        if len(plans) == 1:
            self._refused[plans[0].seq_id] = f"there is too little memory for its {num_rows} rows: {reason}"
            if num_rows > MIN_RETRY_TOKENS:
                self._shortage.seq_ids.add(plans[0].seq_id)
            return []
        half = len(plans) // 2
        return [
            *self._compute_in_memory(plans[:half], prompts),
            *self._compute_in_memory(plans[half:], prompts),
        ]

    def _launch(self, plans: tuple[SeqPlan, ...], prompts: dict[int, PromptOutput]) -> tuple[list[int], Wait]:
        """Launch one forward over ``plans``; ``prompts`` takes what their prompts give."""
        prepared = self._inputs.prepare(plans)
        seq_ids = [plans[index].seq_id for index in prepared.sampling]
        spans = self._prompts.spans(plans) if self._prompts else []
        if not spans:
            wait = self.runner.launch(prepared, seq_ids)
        else:
            samples, hidden = self.runner.run_with_rows(prepared, seq_ids, rows_of(spans))
            prompts.update(self._prompts.outputs(spans, hidden))

            def wait() -> list[SeqSample]:
                return samples

        for seq_id in seq_ids:
            self._inputs.expect(seq_id)
        return seq_ids, wait

    def _result(self, plan: SeqPlan, launched: Launched, sample: SeqSample | None) -> SeqResult:
        if plan.seq_id in launched.refused:
            again = plan.seq_id in launched.shortage.seq_ids
            return SeqResult(
                plan.seq_id, plan.epoch, (), error=launched.refused[plan.seq_id], out_of_memory=again
            )
        prompt = launched.prompts.get(plan.seq_id)
        error = (sample.error if sample is not None else None) or (
            prompt.error if prompt is not None else None
        )
        if error is not None:
            return SeqResult(plan.seq_id, plan.epoch, (), error=error)
        result = SeqResult(plan.seq_id, plan.epoch, ())
        if sample is not None:
            self._inputs.settle(plan.seq_id, plan.epoch, sample.token_id)
            logprobs = None if sample.logprobs is None else (sample.logprobs,)
            result = SeqResult(plan.seq_id, plan.epoch, (sample.token_id,), logprobs=logprobs)
        if prompt is not None:
            result = result._replace(prompt_logprobs=prompt.logprobs, pooled=prompt.pooled)
        return result
