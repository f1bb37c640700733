"""`Worker`: applies a `StepPlan` to its state in the order of effect of `quire.step`, and answers with a `StepResult`.

What goes wrong in one sequence fails that sequence; what goes wrong in a step is raised, and the executor makes it the
step's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.clock import Clock
from quire.config import EngineConfig
from quire.errors import StepError
from quire.parallel.shard import Shard
from quire.quant.stored import Weight
from quire.runner.branches import BranchBlocks, Move
from quire.runner.input_batch import InputBatch
from quire.runner.model_runner import ModelRunner, PendingResult, Runner
from quire.runner.prompt_outputs import PROMPT_NOT_FINITE, PromptOutput, PromptScorer, spans_of
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.draft_tree import NO_DRAFTS, Drafts
from quire.sampling.sampler import ALL_FORBIDDEN, NOT_FINITE, SeqSample
from quire.speculate.proposer import Proposer, Wanted
from quire.step import MIN_RETRY_TOKENS, SeqPlan, SeqResult, SeqTold, StepPlan, StepResult

if TYPE_CHECKING:
    from quire.lora.slots import LoraSlots
    from quire.runner.draft_model import DraftModel

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
    """One process's share of an engine: here the whole model. ``proposer`` makes drafts; None: without speculation."""

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
            release=self.runner.release, samples=answers,
        )  # fmt: skip
        self.draft_model, self.proposer = _drafting(config, self.seqs, self.runner, shard, answers=answers)
        self._has_drafts = False  # some sequence may have drafts of the last step
        num_branch_blocks = 0 if config.speculate is None else config.speculate.num_branch_blocks
        self._branch_blocks = BranchBlocks(config.cache.num_blocks, num_branch_blocks, block_size)
        self._inputs = InputBatch(
            self.seqs, block_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_loras,
            max_drafts=scheduler.max_num_drafts, stripe=None if shard is None else shard.stripe(block_size),
        )  # fmt: skip
        self.runner.record(self._inputs.buffers)
        self.scorer = PromptScorer(self.runner.logits_of, self.runner.score, vocab_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the model raises; the state stays usable."""
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step; the next may be launched before this one is finished. Raises what the model raises."""
        for seq_id in plan.gone:
            self.seqs.drop(seq_id)
        if plan.kv_moves:
            self.runner.kv.copy(plan.kv_moves)
            if self.draft_model is not None:
                self.draft_model.copy(plan.kv_moves)
        for slot, adapter in plan.adapter_moves:
            if self._lora is None:
                raise StepError("This worker runs no adapters, and the plan moves some.")
            self._lora.load(slot, adapter)
        for new in plan.new_seqs:
            self.seqs.admit(new)
        launched = Launched(plan)
        named = [(each, self.seqs.find(each.seq_id)) for each in plan.seqs]
        fine = [(each, seq) for each, seq in named if seq is None or seq.refusal is None]
        plans = [each for each, _ in fine]
        seqs = [seq for each, seq in fine if seq is not None and seq.epoch == each.epoch]
        try:
            if len(seqs) < len(plans):
                raise _unknown(plans, seqs)
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
            found = pending()
            self._copy_branches(self.seqs.take_moves())
            self.seqs.settle(seqs, found)
            samples.update((seq.seq_id, (seq, sample)) for seq, sample in zip(seqs, found, strict=True))
        plan = launched.plan
        results = tuple(self._result(seq, launched, samples.get(seq.seq_id)) for seq in plan.seqs)
        draft_s = 0.0
        if self.proposer is not None and (self._has_drafts or any(seq.max_next_drafts for seq in plan.seqs)):
            before_s = self._clock.now()
            results = self._propose(self.proposer, plan, results, samples)
            draft_s = self._clock.now() - before_s
        return StepResult(plan.step, results, draft_s=draft_s, max_tokens=launched.max_tokens)

    def settle(self, launched: Launched, told: Mapping[int, SeqTold]) -> None:
        """Take in what another rank sampled in the oldest step launched; ``told`` is by ``seq_id``."""
        for seqs, _ in launched.launches:
            samples = []
            for seq in seqs:
                of_seq = told[seq.seq_id]
                if seq.verifying and not of_seq.failed and seq.row >= 0:
                    self.seqs.accept(seq, seq.verifying.along(of_seq.token_ids[:-1]))
                    self.seqs.expect(np.array([seq.row]))  # the token behind them, as after a launch
                seq.verifying, seq.branches, seq.num_beside = NO_DRAFTS, (), 0
                seq.drafts = Drafts(of_seq.drafts, of_seq.draft_parents)
                samples.append(SeqSample(of_seq.token_ids, error="failed" if of_seq.failed else None))
            self._copy_branches(self.seqs.take_moves())
            self.seqs.settle(seqs, samples)

    def _copy_branches(self, moves: Sequence[Move]) -> None:
        """Copy blocks into branches, or out of accepted ones."""
        if moves:
            self.runner.kv.copy(moves)
            if self.draft_model is not None:
                self.draft_model.copy(moves, hidden_only=True)

    def _compute(self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], launched: Launched) -> None:
        """Launch the tokens of ``plans``, whose sequences are ``seqs``."""
        if not plans:
            return
        for plan, seq in zip(plans, seqs, strict=True):
            if plan.forced_token_ids:
                self._inputs.force(plan, seq)
            if plan.num_draft_tokens:
                self.seqs.take_drafts(plan, seq)
        fresh = self._inputs.update_tables(plans, seqs)
        if fresh:
            self.runner.kv.note_used(fresh)
            if self.runner.kv.needs_clear:
                self.runner.kv.clear(fresh)
            if self.draft_model is not None:
                self.draft_model.forget(fresh)
        if any(seq.num_beside for seq in seqs):
            copies = self.seqs.place_branches(seqs, self._branch_blocks)
            if self.runner.kv.needs_clear:
                self.runner.kv.clear(self._branch_blocks.used)
            self._copy_branches(copies)
        self._compute_in_memory(plans, seqs, launched)

    def _compute_in_memory(
        self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq], launched: Launched
    ) -> None:
        """Launch them in one go, or where memory does not suffice in halves, in their order.

        The scheduler is told how many tokens were too many. A sequence that does not fit alone is refused, and planned
        again with fewer tokens if it had many.
        """
        try:
            launched.launches.append(self._launch(plans, seqs, launched))
            return
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(".")[0]
        self.runner.free_memory()
        num_tokens = sum(plan.num_scheduled_tokens for plan in plans)
        launched.max_tokens = num_tokens // 2
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
        spans = spans_of(plans, [seq.prompt for seq in seqs]) if any(seq.prompt for seq in seqs) else []
        if spans:
            tokens = np.concatenate([span.tokens for span in spans])
            pending, hidden = self.runner.run_with_hidden(prepared, tokens)
            if hidden is not None:
                launched.prompts.update(self.scorer.outputs(spans, hidden))
        else:
            pending = self.runner.launch(prepared)
        self.seqs.expect(prepared.rows)
        return prepared.sampling, pending

    def _result(
        self, plan: SeqPlan, launched: Launched, sampled: tuple[WorkerSeq, SeqSample] | None
    ) -> SeqResult:
        if plan.seq_id in launched.refused:
            reason, again = launched.refused[plan.seq_id], plan.seq_id in launched.retryable
            return SeqResult(plan.seq_id, plan.epoch, (), error=reason, out_of_memory=again)
        prompt = launched.prompts.get(plan.seq_id)
        error = (sampled[1].error if sampled else None) or (prompt.error if prompt is not None else None)
        if error is not None:
            grammar = sampled[0].grammar if sampled else None
            of_request = error == ALL_FORBIDDEN or (grammar is not None and grammar.error == error)
            recompute = error in (NOT_FINITE, PROMPT_NOT_FINITE) or (
                grammar is not None and grammar.is_bystander
            )
            return SeqResult(
                plan.seq_id, plan.epoch, (), error=error, error_of_request=of_request, recompute=recompute
            )
        result = SeqResult(plan.seq_id, plan.epoch, ())
        if sampled:
            sample = sampled[1]
            result = SeqResult(
                plan.seq_id, plan.epoch, sample.token_ids, 0, sample.logprobs, num_tried=sample.num_tried
            )
        if prompt is not None:
            result = result._replace(prompt_logprobs=prompt.logprobs, pooled=prompt.pooled)
        return result

    def _propose(
        self,
        proposer: Proposer,
        step: StepPlan,
        results: tuple[SeqResult, ...],
        samples: dict[int, tuple[WorkerSeq, SeqSample]],
    ) -> tuple[SeqResult, ...]:
        """Let drafts of the next tokens be made, and note in ``results`` how many there are."""
        wanted: list[Wanted] = []
        owners: list[tuple[int, WorkerSeq]] = []  # place in ``results``
        for place, (plan, result) in enumerate(zip(step.seqs, results, strict=True)):
            if plan.seq_id not in samples:
                continue
            seq = samples[plan.seq_id][0]
            seq.drafts = NO_DRAFTS
            seq.draft_probs.clear()
            sampled, seq.sampled, seq.accepted = seq.sampled, (), ()
            if seq.row < 0 or result.error is not None or not plan.max_next_drafts:
                continue
            ids = self.seqs.known_ids(seq)
            limit = min(plan.max_next_drafts, self.seqs.max_tokens - len(ids))
            if limit > 0:
                if seq.draft_state is None:
                    seq.draft_state = proposer.begin()
                wanted.append(Wanted(seq.seq_id, ids, limit, seq.draft_state, step.max_draft_paths, sampled))
                owners.append((place, seq))
        self._has_drafts = bool(wanted)
        if not wanted:
            return results
        try:
            proposed = proposer.propose(wanted)
        except Exception:  # drafts are never needed, so no request fails for them
            _log.exception("The proposer of drafts failed; the engine goes on without speculation.")
            self.proposer = None
            return results
        counted = list(results)
        for (place, seq), drafts, each in zip(owners, proposed, wanted, strict=True):
            assert len(drafts) <= each.limit
            seq.drafts = drafts
            counted[place] = counted[place]._replace(num_next_drafts=len(drafts))
        return tuple(counted)


def _unknown(plans: Sequence[SeqPlan], found: Sequence[WorkerSeq]) -> StepError:
    known = {(seq.seq_id, seq.epoch) for seq in found}
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


def _drafting(
    config: EngineConfig, seqs: WorkerSeqs, runner: Runner, shard: Shard | None, *, answers: bool
) -> tuple[DraftModel | None, Proposer | None]:
    """Return what drafts in a worker whose rank samples if ``answers``."""
    if config.speculate is None:
        return None, None
    from quire.runner.draft_model import make_drafting

    return make_drafting(config, seqs, runner, shard, answers)
