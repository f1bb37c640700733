"""`FakeExecutor`: no model, but real pages. It is an oracle for scheduler and cache.

Every slot of every page holds a hash of the tokens up to its position, written when the row is computed from the
slot *before* it as read through the block table. A token is drawn from what all visible slots hold. So a wrong share,
a stale tail, a missing copy, a wrong window or an off-by-one changes the tokens, and is noted in `violations`.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.fakes.adapters import FakeAdapters
from tests.fakes.kv import FakePages, WorkerSeq
from tests.fakes.model import MASK, FakeModel, next_state
from tests.fakes.states import FakeStates
from tests.fakes.transfers import FakeTransferRates, FakeTransfers

from quire.config import CacheConfig
from quire.errors import StepError
from quire.request import TokenLogprobs
from quire.step import SeqPlan, SeqResult, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class FakeFaults:
    """Failures to inject, each with a probability per step (or sequence)."""

    step_error: float = 0.0  # the result carries an error; what the step wrote is garbage
    collect_raises: float = 0.0  # the same, but as an exception
    submit_raises: float = 0.0  # the plan is not accepted
    seq_error: float = 0.0  # one sequence fails, the others of the step do not
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FakeDrafts:
    """The worker proposes the tokens that it will sample, up to ``most`` of them; each is wrong at times."""

    most: int = 0
    wrong: float = 0.0  # probability
    seed: int = 0


class _Outstanding(NamedTuple):
    """A step that was computed and not collected yet."""

    result: StepResult
    raises: bool
    clean: bool  # nothing in it failed
    uses: dict[int, set[tuple[int, int]]]  # block id -> (seq_id, epoch) that read or write it
    slots: dict[int, tuple[int, int]]  # state slot -> (seq_id, epoch) that writes it


class FakeExecutor:
    """Computes plans with `FakeModel` over the pages of ``cache_config``."""

    def __init__(
        self,
        cache_config: CacheConfig,
        *,
        max_in_flight: int = 1,
        chains_steps: bool = True,
        model: FakeModel | None = None,
        faults: FakeFaults | None = None,
        drafts: FakeDrafts | None = None,
        transfers: FakeTransferRates | None = None,
    ) -> None:
        assert max_in_flight >= 1
        self.max_in_flight = max_in_flight
        self.chains_steps = chains_steps
        self.violations: list[str] = []  # contradictions between plans and pages; must stay empty
        self.num_rows = 0  # computed so far
        self._num_groups = len(cache_config.windows)
        self._pages = FakePages(cache_config.num_blocks, cache_config.block_size, cache_config.windows)
        self._model = model or FakeModel()
        self._faults = faults or FakeFaults()
        self._random = random.Random(self._faults.seed)
        self._drafts = drafts or FakeDrafts()
        self._draft_random = random.Random(self._drafts.seed)
        self.num_accepted = self.num_rejected = 0  # drafts
        self.transfers = FakeTransfers(self._pages, transfers or FakeTransferRates(), self.violations)
        self._seqs: dict[int, WorkerSeq] = {}
        self._adapters = FakeAdapters()
        self._states = FakeStates(cache_config.num_state_slots)
        self._out: deque[_Outstanding] = deque()

    @property
    def seq_ids(self) -> set[int]:
        """The sequences that the worker keeps state of."""
        return set(self._seqs)

    def submit(self, plan: StepPlan) -> None:
        """Take a plan. It is computed at once; what it gave is seen at `collect`."""
        assert len(self._out) < self.max_in_flight
        if self._happens(self._faults.submit_raises):
            raise StepError(f"injected: step {plan.step} was not accepted")
        raises = self._happens(self._faults.collect_raises)
        failed = {p.seq_id for p in plan.seqs if self._happens(self._faults.seq_error)}
        if raises or self._happens(self._faults.step_error):
            self._out.append(_Outstanding(self._fail(plan), raises, False, {}, {}))
        else:
            self._out.append(self._compute(plan, failed))

    def collect(self) -> StepResult:
        """Return the result of the oldest plan."""
        out = self._out.popleft()
        if out.raises:
            raise StepError(f"injected: step {out.result.step} raised")
        if out.result.error is not None:
            return out.result
        return replace(out.result, transfers_done=self.transfers.take_done())

    def tick(self) -> None:
        """Let time pass for the transfers."""
        self.transfers.tick(step_is_out=any(out.result.error is None for out in self._out))

    def die(self) -> None:
        """Lose the steps and the transfers that are out, and what the worker knows of their sequences."""
        for out in self._out:
            for result in out.result.seqs:
                self._seqs.pop(result.seq_id, None)
        self._out.clear()
        self.transfers.die()

    def close(self) -> None:
        """Forget everything."""
        self._out.clear()
        self._seqs.clear()

    def _compute(self, plan: StepPlan, failed: set[int]) -> _Outstanding:
        clean = not failed and all(out.clean for out in self._out)
        uses: dict[int, set[tuple[int, int]]] = {}
        for move in plan.kv_moves:
            self._check_reuse(plan, {move.dst_block_id}, None, clean)
        for transfer in plan.transfers:
            if transfer.direction == "load":
                self._check_reuse(plan, {block.block_id for block in transfer.blocks}, None, clean)
        self._begin(plan, clean)
        work = [(p, seq) for p in plan.seqs if (seq := self._accept(p, clean)) is not None]
        # A row may read what another sequence writes in this step: write first, whoever starts earlier first.
        slots = self._states.written([p for p, _ in work], self._seqs)
        if clean:
            self.violations += self._states.reused(plan, slots, [out.slots for out in self._out])
        for p, seq in sorted(work, key=lambda item: item[0].num_computed_tokens):
            start, end = p.num_computed_tokens, p.num_computed_tokens + p.num_scheduled_tokens
            if self.max_in_flight > 1:
                self._check_reuse(plan, self._pages.written(seq, start, end), (p.seq_id, p.epoch), clean)
                for block_id in self._pages.visible(seq, start, end):
                    uses.setdefault(block_id, set()).add((p.seq_id, p.epoch))
            self._pages.write(seq, start, end)
            if p.seq_id in failed:
                self._pages.spoil_rows(seq, start, end)
            wrong = self._states.advance(p, seq, fails=p.seq_id in failed)
            if wrong:
                self._note(clean, wrong)
            self.num_rows += p.num_scheduled_tokens
        accepted = {p.seq_id for p, _ in work}
        results = tuple(
            self._sample(p, clean)
            if p.seq_id in accepted and p.seq_id not in failed
            else self._lose(p, "injected" if p.seq_id in failed else "its state went with a failed step")
            for p in plan.seqs
        )
        result = StepResult(plan.step, results)
        return _Outstanding(result, False, not failed, uses, slots)

    def _fail(self, plan: StepPlan) -> StepResult:
        """Half of the step happened: nothing of it can be trusted."""
        for move in plan.kv_moves:
            self._pages.spoil(move.dst_block_id)
        self._states.spoil(slot for move in plan.state_moves for slot in move[1:])
        self._adapters.take_in(plan, self._seqs, self._num_groups)
        for p in plan.seqs:
            seq = self._accept(p, clean=False)
            if seq is not None:
                self._pages.spoil_rows(
                    seq, p.num_computed_tokens, p.num_computed_tokens + p.num_scheduled_tokens
                )
                self._states.spoil(self._states.written([p], self._seqs))
            self._seqs.pop(p.seq_id, None)
        return StepResult(plan.step, error="injected: the step failed")

    def _begin(self, plan: StepPlan, clean: bool) -> None:
        for seq_id in plan.gone:
            self._seqs.pop(seq_id, None)
        for move in plan.kv_moves:
            self._pages.copy(move.src_block_id, move.dst_block_id)
        self._states.move(plan.state_moves)
        for text in self._adapters.take_in(plan, self._seqs, self._num_groups):
            self._note(clean, text)
        for transfer in plan.transfers:
            self.transfers.begin(transfer)

    def _accept(self, p: SeqPlan, clean: bool) -> WorkerSeq | None:
        """Update the block table and check the plan against what the worker knows."""
        seq = self._seqs.get(p.seq_id)
        if seq is None or seq.new_seq.epoch != p.epoch:
            self._note(clean, f"sequence {p.seq_id} epoch {p.epoch} is planned but not known")
            return None
        seq.update_table(p)
        seq.force(p.forced_token_ids)
        start, end = p.num_computed_tokens, p.num_computed_tokens + p.num_scheduled_tokens
        if seq.computed not in (None, start):
            self._note(clean, f"sequence {p.seq_id} goes on at {start}, it was at {seq.computed}")
        if p.num_draft_tokens:
            if end - p.num_draft_tokens != len(seq.token_ids) or p.num_draft_tokens > len(seq.drafts):
                self._note(
                    clean, f"sequence {p.seq_id}: {p.num_draft_tokens} drafts at {end}, it has {seq.drafts}"
                )
                return None
            for token_id in seq.drafts[: p.num_draft_tokens]:
                seq.append(token_id)
        if not start < end <= len(seq.token_ids):
            self._note(clean, f"sequence {p.seq_id}: rows {start}…{end} of {len(seq.token_ids)} known tokens")
            return None
        open_blocks = self.transfers.open_blocks & self._pages.visible(seq, start, end)
        if open_blocks:
            self._note(clean, f"sequence {p.seq_id} uses blocks {open_blocks} that a transfer fills")
        seq.computed = end
        return seq

    def _sample(self, p: SeqPlan, clean: bool) -> SeqResult:
        seq = self._seqs[p.seq_id]
        start, end = p.num_computed_tokens, p.num_computed_tokens + p.num_scheduled_tokens
        drift = self._pages.read(seq, start, end) + self._states.drift(seq)
        if drift:
            self._note(clean, f"sequence {p.seq_id} sees wrong slots at rows {start}…{end}")
        new_seq = seq.new_seq
        scored = self._score(seq, start, end, drift) if new_seq.prompt_logprobs is not None else None
        if end < len(seq.token_ids):
            return SeqResult(p.seq_id, p.epoch, (), prompt_logprobs=scored)
        if new_seq.prompt_only:
            state = (seq.states[end - 1] + drift) & MASK
            pooled = None if new_seq.pooling is None else self._model.pooled(state, new_seq.pooling)
            return SeqResult(p.seq_id, p.epoch, (), prompt_logprobs=scored, pooled=pooled)
        token_ids, logprobs = self._verify(seq, end - p.num_draft_tokens, drift)
        seq.computed = len(seq.token_ids) - 1
        seq.drafts = self._propose(seq, p.max_next_drafts)
        return SeqResult(p.seq_id, p.epoch, token_ids, len(seq.drafts), logprobs, scored)

    def _verify(
        self, seq: WorkerSeq, num_known: int, drift: int
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
        """Sample behind the last known token and behind each draft, as long as the drafts are what is sampled."""
        sampling = seq.new_seq.sampling
        drafts = seq.token_ids[num_known:]
        seq.truncate(num_known)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for draft in [*drafts, None]:
            state = (seq.states[-1] + drift) & MASK
            token_id = self._model.token(state, sampling, seq.new_seq.sample_index, seq.num_output)
            if sampling.num_top_logprobs is not None:
                logprobs.append(self._model.logprobs(state, sampling.num_top_logprobs, token_id))
            seq.append(token_id)
            token_ids.append(token_id)
            if token_id != draft:
                break
        self.num_accepted += len(token_ids) - 1
        self.num_rejected += len(drafts) - len(token_ids) + 1
        return tuple(token_ids), None if sampling.num_top_logprobs is None else tuple(logprobs)

    def _propose(self, seq: WorkerSeq, most: int) -> list[int]:
        """Return the tokens that come next, at times wrong ones."""
        state, drafts = seq.states[-1], []
        for i in range(min(most, self._drafts.most)):
            sampling, index = seq.new_seq.sampling, seq.new_seq.sample_index
            token_id = self._model.token(state, sampling, index, seq.num_output + i)
            if self._drafts.wrong and self._draft_random.random() < self._drafts.wrong:
                token_id = (token_id + 1) % self._model.vocab_size
            drafts.append(token_id)
            state = next_state(state, len(seq.token_ids) + i, token_id)
        return drafts

    def _score(self, seq: WorkerSeq, start: int, end: int, drift: int) -> tuple[TokenLogprobs, ...]:
        """Score the prompt tokens that the rows ``start`` … ``end`` − 1 predict."""
        prompt, count = seq.new_seq.prompt_token_ids, seq.new_seq.prompt_logprobs or 0
        return tuple(
            self._model.logprobs((seq.states[row] + drift) & MASK, count, prompt[row + 1])
            for row in range(start, min(end, len(prompt) - 1))
        )

    def _lose(self, p: SeqPlan, why: str) -> SeqResult:
        self._seqs.pop(p.seq_id, None)
        return SeqResult(p.seq_id, p.epoch, (), error=f"sequence {p.seq_id} failed: {why}")

    def _check_reuse(
        self, plan: StepPlan, blocks: set[int], writer: tuple[int, int] | None, clean: bool
    ) -> None:
        """No block may be written by one sequence while a step that another one uses it in is out."""
        for out in self._out:
            for block_id in blocks & out.uses.keys():
                if out.uses[block_id] != {writer}:
                    self._note(
                        clean, f"step {plan.step} writes block {block_id}, in use by step {out.result.step}"
                    )

    def _note(self, clean: bool, text: str) -> None:
        if clean:
            self.violations.append(text)

    def _happens(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability
