"""`Drafting`: what makes drafts in a worker, and what a step does for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from quire.clock import Clock
from quire.config import EngineConfig
from quire.parallel.shard import Shard
from quire.runner.base import Runner
from quire.runner.branches import BranchBlocks
from quire.runner.draft_model import make_drafting
from quire.runner.draft_state import DraftState
from quire.runner.sequences import Move, WorkerSeq, WorkerSeqs
from quire.sampling.draft_tree import NO_DRAFTS
from quire.sampling.sampler import SeqSample
from quire.speculate.proposer import Proposer, Wanted
from quire.step import SeqResult, StepPlan

_log = logging.getLogger(__name__)


class Drafting:
    """Drafts for the sequences of one worker. ``proposer`` makes them; None: this rank is told them, or it failed."""

    def __init__(
        self, config: EngineConfig, seqs: WorkerSeqs, runner: Runner, shard: Shard | None, clock: Clock, *,
        answers: bool,
    ) -> None:  # fmt: skip
        """``answers``: whether this rank samples."""
        self._seqs, self._runner, self._clock = seqs, runner, clock
        self.model, self.proposer = make_drafting(config, seqs, runner, shard, answers)
        num_branch_blocks = 0 if config.speculate is None else config.speculate.num_branch_blocks
        self._branch_blocks = BranchBlocks(
            config.cache.num_blocks, num_branch_blocks, config.cache.block_size
        )
        self._has_drafts = False  # some sequence may have drafts of the last step

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy blocks of the draft model too."""
        if self.model is not None:
            self.model.copy(moves)

    def forget(self, fresh: Sequence[int]) -> None:
        """These blocks hold nothing yet."""
        if self.model is not None:
            self.model.forget(fresh)

    def place_branches(self, seqs: Sequence[WorkerSeq]) -> None:
        """Give the branches of trees their blocks, filled as far as they begin as copies."""
        states = [state for seq in seqs if (state := seq.drafting) is not None and state.num_beside]
        if not states:
            return
        self._branch_blocks.begin_step()
        moves = [move for state in states for move in state.place(self._branch_blocks)]
        if self._runner.kv.needs_clear:
            self._runner.kv.clear(self._branch_blocks.used)
        self.copy_branches(moves)

    def copy_branches(self, moves: Sequence[Move]) -> None:
        """Copy blocks into branches, or out of accepted ones."""
        if moves:
            self._runner.kv.copy(moves)
            if self.model is not None:
                self.model.copy(moves, hidden_only=True)

    def propose(
        self,
        step: StepPlan,
        results: tuple[SeqResult, ...],
        samples: Mapping[int, tuple[WorkerSeq, SeqSample]],
    ) -> tuple[tuple[SeqResult, ...], float]:
        """Let drafts of the next tokens be made; return ``results`` with how many there are, and the seconds."""
        if self.proposer is None or not (self._has_drafts or any(plan.max_next_drafts for plan in step.seqs)):
            return results, 0.0
        before_s = self._clock.now()
        results = self._propose(self.proposer, step, results, samples)
        return results, self._clock.now() - before_s

    def _propose(
        self,
        proposer: Proposer,
        step: StepPlan,
        results: tuple[SeqResult, ...],
        samples: Mapping[int, tuple[WorkerSeq, SeqSample]],
    ) -> tuple[SeqResult, ...]:
        wanted: list[Wanted] = []
        owners: list[tuple[int, DraftState]] = []  # place in ``results``
        for place, (plan, result) in enumerate(zip(step.seqs, results, strict=True)):
            if plan.seq_id not in samples:
                continue
            seq = samples[plan.seq_id][0]
            sampled: tuple[int, ...] = ()
            if seq.drafting is not None:
                state = seq.drafting
                state.drafts = NO_DRAFTS
                state.probs.clear()
                sampled, state.sampled, state.accepted = state.sampled, (), ()
            if seq.row < 0 or result.error is not None or not plan.max_next_drafts:
                continue
            ids = self._seqs.known_ids(seq)
            limit = min(plan.max_next_drafts, self._seqs.max_tokens - len(ids))
            if limit > 0:
                state = self._seqs.drafting(seq)
                if state.remembered is None:
                    state.remembered = proposer.begin()
                wanted.append(Wanted(seq.seq_id, ids, limit, state.remembered, step.max_draft_paths, sampled))
                owners.append((place, state))
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
        for (place, state), drafts, request in zip(owners, proposed, wanted, strict=True):
            assert len(drafts) <= request.limit
            state.drafts = drafts
            counted[place] = counted[place]._replace(num_next_drafts=len(drafts))
        return tuple(counted)
