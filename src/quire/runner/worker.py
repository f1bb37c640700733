"""`Worker`: applies a `StepPlan` to its state in the order of effect of `quire.step`, and answers with a `StepResult`.

What goes wrong in one sequence fails that sequence; what goes wrong in a step is raised, and the executor makes it the
step's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.clock import Clock
from quire.config import EngineConfig
from quire.errors import StepError
from quire.parallel.shard import Shard
from quire.quant.stored import Weight
from quire.runner.base import PendingResult, Runner
from quire.runner.input_batch import InputBatch
from quire.runner.model_runner import ModelRunner
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.sampler import SeqSample
from quire.step import MIN_RETRY_TOKENS, SeqPlan, SeqResult, SeqTold, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.lora.slots import LoraSlots
    from quire.runner.drafting import Drafting
    from quire.runner.input_batch import PreparedStep
    from quire.runner.prompt_outputs import PromptOutput, PromptScorer
    from quire.runner.span_rows import SpanRows
    from quire.speculate.proposer import Proposer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Launched:
    """A step on its way."""

    plan: StepPlan
    # Sequences that sample, and the pending result that has theirs in that order.
    launches: list[tuple[Sequence[WorkerSeq], PendingResult]] = field(default_factory=list)
    prompts: dict[int, PromptOutput] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # not computed, with the reason
    # Where memory was too small: half of the fewest tokens that were too many, and which of ``refused`` may be tried
    # again with fewer tokens.
    max_tokens: int | None = None
    retryable: set[int] = field(default_factory=set)


class Worker:
    """One process's share of an engine: here the whole model. ``drafting`` is None without speculation."""

    def __init__(
        self, config: EngineConfig, weights: Iterable[tuple[str, Weight]], clock: Clock,
        runner: Callable[[EngineConfig, Iterable[tuple[str, Weight]]], Runner] = ModelRunner,
        *, answers: bool = True, shard: Shard | None = None, all_of: Callable[[bool], bool] = bool,
    ) -> None:  # fmt: skip
        """``answers``: whether this rank samples. One that does not is told with `settle`, in place of `finish`.

        ``shard``: what this rank has of the model; None: all of it. ``all_of``: as of `LoraSlots`.
        """
        self._clock = clock
        self.runner = runner(config, weights)
        self._lora = _adapters(config, self.runner, shard, all_of)
        scheduler, block_size = config.scheduler, config.cache.block_size
        vocab_size = config.model.spec.vocab_size
        # A block more than the context: the last token sampled may have no row left to be computed in.
        max_blocks = -(-config.model.max_model_len // block_size) + 1
        self.seqs = WorkerSeqs(
            vocab_size, scheduler.max_num_seqs, max_blocks * block_size, max_blocks=max_blocks,
            num_groups=len(config.kv_layout.groups), grammars=lambda: self.runner.grammars, lora=self._lora,
            samples=answers,
        )  # fmt: skip
        self._vision: SpanRows | None = None
        if config.model.spec.vision is not None:
            self._vision = import_module("quire.runner.span_rows").SpanRows(config, self.runner.decoder)
        self._drafting_settings = config, self.seqs, self.runner, shard, clock
        self._answers = answers
        self.drafting = None if config.speculate is None else self._make_drafting()
        self._inputs = InputBatch(
            self.seqs, block_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_loras,
            max_drafts=scheduler.max_num_drafts, stripe=None if shard is None else shard.stripe(block_size),
            states=self.runner.states,
        )  # fmt: skip
        self.runner.record(self._inputs.buffers)
        self._vocab_size = vocab_size

    @cached_property
    def scorer(self) -> PromptScorer:
        """What prompts' own tokens give; loaded with the first prompt of which something is wanted."""
        scorer = import_module("quire.runner.prompt_outputs").PromptScorer
        made: PromptScorer = scorer(self.runner.logits_of, self.runner.score, self._vocab_size)
        return made

    def draft_with(self, proposer: Proposer) -> None:
        """Let ``proposer`` make drafts, in place of what the settings say."""
        self.drafting = self.drafting or self._make_drafting()
        self.drafting.proposer = proposer

    def _make_drafting(self) -> Drafting:
        made: Drafting = import_module("quire.runner.drafting").Drafting(
            *self._drafting_settings, answers=self._answers
        )
        return made

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the model raises; the state stays usable."""
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step; the next may be launched before this one is finished. Raises what the model raises."""
        for seq_id in plan.gone:
            self.seqs.drop(seq_id)
        if plan.kv_moves:
            self.runner.kv.copy(plan.kv_moves)
            if self.drafting is not None:
                self.drafting.copy(plan.kv_moves)
        if plan.state_moves and self.runner.states is not None:
            self.runner.states.copy(plan.state_moves)
        for slot, adapter in plan.adapter_moves:
            if self._lora is None:
                raise StepError("This worker runs no adapters, and the plan moves some.")
            self._lora.load(slot, adapter)
        for new in plan.new_seqs:
            self.seqs.admit(new)
        launched = Launched(plan)
        named = [(seq_plan, self.seqs.find(seq_plan.seq_id)) for seq_plan in plan.seqs]
        fine = [(seq_plan, seq) for seq_plan, seq in named if seq is None or seq.refusal is None]
        plans = [seq_plan for seq_plan, _ in fine]
        seqs = [seq for seq_plan, seq in fine if seq is not None and seq.epoch == seq_plan.epoch]
        try:
            if len(seqs) < len(plans):
                raise _unknown(plans, seqs)
            if self._vision is not None:
                plans, seqs = self._vision.encode(plans, seqs)
            self._compute(plans, seqs, launched)
        except Exception as error:
            # Steps planned before this is known name these sequences too: they fail, and not those steps.
            for seq in seqs:
                seq.refusal = f"a step before failed: {error}"
            raise
        for _, named_seq in named:
            if named_seq is not None and (reason := named_seq.refusal or named_seq.failure):
                launched.refused[named_seq.seq_id] = reason
        return launched

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the oldest step launched, and return its result."""
        samples: dict[int, tuple[WorkerSeq, SeqSample]] = {}
        for seqs, pending in launched.launches:
            sampled = pending()
            if self.seqs.moves:
                self._copy_accepted()
            self.seqs.settle(seqs, sampled)
            samples.update((seq.seq_id, (seq, sample)) for seq, sample in zip(seqs, sampled, strict=True))
        plan = launched.plan
        results = tuple(self._result(seq, launched, samples.get(seq.seq_id)) for seq in plan.seqs)
        draft_s = 0.0
        if self.drafting is not None:
            results, draft_s = self.drafting.propose(plan, results, samples)
        return StepResult(plan.step, results, draft_s=draft_s, max_tokens=launched.max_tokens)

    def settle(self, launched: Launched, outcomes: Mapping[int, SeqTold]) -> None:
        """Take in what another rank sampled in the oldest step launched; ``told`` is by ``seq_id``."""
        for seqs, _ in launched.launches:
            samples = []
            for seq in seqs:
                outcome = outcomes[seq.seq_id]
                if seq.drafting is not None:
                    verifying = seq.drafting.verifying
                    if verifying and not outcome.failed and seq.row >= 0:
                        seq.drafting.accept(verifying.along(outcome.token_ids[:-1]))
                        self.seqs.expect(np.array([seq.row]))  # the token behind them, as after a launch
                    seq.drafting.forget()
                if seq.drafting is not None or outcome.drafts:
                    self.seqs.drafting(seq).propose(outcome.drafts, outcome.draft_parents)
                samples.append(SeqSample(outcome.token_ids, error="failed" if outcome.failed else None))
            if self.seqs.moves:
                self._copy_accepted()
            self.seqs.settle(seqs, samples)

    def _copy_accepted(self) -> None:
        """Copy blocks out of the branches that were accepted."""
        assert self.drafting is not None
        moves, self.seqs.moves = self.seqs.moves, []
        self.drafting.copy_branches(moves)

    def _compute(self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], launched: Launched) -> None:
        """Launch the tokens of ``plans``, whose sequences are ``seqs``."""
        if not plans:
            return
        for plan, seq in zip(plans, seqs, strict=True):
            if plan.forced_token_ids:
                self._inputs.force(plan, seq)
            if plan.num_draft_tokens:
                self.seqs.drafting(seq).take(plan)
        fresh = self._inputs.update_tables(plans, seqs)
        if fresh:
            self.runner.kv.note_used(fresh)
            if self.runner.kv.needs_clear:
                self.runner.kv.clear(fresh)
            if self.drafting is not None:
                self.drafting.forget(fresh)
        if self.drafting is not None:
            self.drafting.place_branches(seqs)
        self._compute_in_memory(plans, seqs, launched)

    def _compute_in_memory(
        self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], launched: Launched
    ) -> None:
        """Launch them in one go, or where memory does not suffice in halves, in their order."""
        try:
            launched.launches.append(self._launch(plans, seqs, launched))
            return
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(".")[0]
        self._compute_halves(plans, seqs, launched, reason)

    def _compute_halves(
        self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], launched: Launched, reason: str
    ) -> None:
        """Compute what was too much for the memory, for ``reason``, in two steps.

        The scheduler is told how many tokens were too many. A sequence that does not fit alone is refused, and planned
        again with fewer tokens if it had many.
        """
        self.runner.free_memory()
        num_tokens = sum(plan.num_scheduled_tokens for plan in plans)
        launched.max_tokens = num_tokens // 2
        if self.runner.states is not None:  # those of some layers have gone on: the sequences begin again
            for seq in seqs:
                seq.refusal = f"there is too little memory for a step of {num_tokens} rows: {reason}"
            launched.retryable.update(seq.seq_id for seq in seqs if num_tokens > MIN_RETRY_TOKENS)
            return
        _log.warning(
            "%d tokens are too many for the memory, steps have half of them from now on: %s",
            num_tokens,
            reason,
        )
        if len(plans) == 1:
            seqs[0].refusal = f"there is too little memory for its {num_tokens} rows: {reason}"
            if num_tokens > MIN_RETRY_TOKENS:
                launched.retryable.add(seqs[0].seq_id)
            return
        half = len(plans) // 2
        self._compute_in_memory(plans[:half], seqs[:half], launched)
        self._compute_in_memory(plans[half:], seqs[half:], launched)

    def _launch(
        self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], launched: Launched
    ) -> tuple[Sequence[WorkerSeq], PendingResult]:
        """Launch one forward over ``plans``."""
        prepared = self._inputs.prepare(plans, seqs)
        if self._vision is not None:
            prepared = self._vision.place(prepared, plans, seqs)
        if any(seq.prompt for seq in seqs):
            pending = self._launch_scored(plans, seqs, prepared, launched)
        else:
            pending = self.runner.launch(prepared)
        self.seqs.expect(prepared.rows)
        return prepared.sampling, pending

    def _launch_scored(
        self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], prepared: PreparedStep, launched: Launched
    ) -> PendingResult:
        """Launch a step in which some prompts' own tokens may give something."""
        scored_spans = import_module("quire.runner.prompt_outputs").scored_spans
        spans = scored_spans(plans, [seq.prompt for seq in seqs])
        if not spans:
            return self.runner.launch(prepared)
        tokens = np.concatenate([span.tokens for span in spans])
        pending, hidden = self.runner.run_with_hidden(prepared, tokens)
        if hidden is not None:
            launched.prompts.update(self.scorer.outputs(spans, hidden))
        return pending

    def _result(
        self, plan: SeqPlan, launched: Launched, sampled: tuple[WorkerSeq, SeqSample] | None
    ) -> SeqResult:
        if plan.seq_id in launched.refused:
            reason, again = launched.refused[plan.seq_id], plan.seq_id in launched.retryable
            return SeqResult(plan.seq_id, plan.epoch, (), error=reason, out_of_memory=again)
        result = SeqResult(plan.seq_id, plan.epoch, ())
        if sampled is not None:
            sample = sampled[1]
            if sample.error is not None:
                return result._replace(
                    error=sample.error, error_of_request=sample.of_request, recompute=sample.recompute
                )
            result = SeqResult(
                plan.seq_id, plan.epoch, sample.token_ids, 0, sample.logprobs, num_tried=sample.num_tried
            )
        prompt = launched.prompts.get(plan.seq_id)
        if prompt is not None:
            if prompt.error is not None:  # its hidden states are not finite
                return SeqResult(plan.seq_id, plan.epoch, (), error=prompt.error, recompute=True)
            result = result._replace(prompt_logprobs=prompt.logprobs, pooled=prompt.pooled)
        return result


def _unknown(plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]) -> StepError:
    known = {(seq.seq_id, seq.epoch) for seq in seqs}
    plan = next(plan for plan in plans if (plan.seq_id, plan.epoch) not in known)
    return StepError(
        f"The plan names sequence {plan.seq_id} in epoch {plan.epoch}; the worker does not have it."
    )


def _adapters(
    config: EngineConfig, runner: Runner, shard: Shard | None, all_of: Callable[[bool], bool]
) -> LoraSlots | None:
    """Return the slots for adapters, if there are any."""
    if config.lora is None:
        return None
    from quire.lora.slots import LoraSlots

    return LoraSlots(config.model.spec, config.lora, runner.decoder, shard, all_of)
