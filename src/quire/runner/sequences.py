"""`WorkerSeq`: all that a worker knows of one sequence, and `WorkerSeqs`: how it comes, grows, goes back and goes.

Numbers that a whole step gathers at once lie in numpy arrays with one row per sequence; the object owns its row, which
is taken at admission and given back when the sequence goes. A row of token ids:

    settled tokens                      │ drafts being verified      │ expected
    0 … num_settled − 1                   known to the worker alone    −(row + 1): sampled by a step in flight
                                          (of a tree: its trunk)       … num_tokens − 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.errors import StepError
from quire.runner.branches import Branch, BranchBlocks, Move
from quire.runner.prompt_outputs import PromptState
from quire.sampling.draft_tree import NO_DRAFTS, Drafts
from quire.sampling.processors import LogitsProcessors
from quire.sampling.sampler import SeqSample, column_values, new_columns
from quire.step import NewSeq, SeqPlan

if TYPE_CHECKING:
    from quire.lora.slots import LoraSlots
    from quire.sampling.grammars import Grammars, GrammarState

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class WorkerSeq:
    """One sequence, from its admission until it goes or is admitted again. ``row`` is −1 from then on."""

    seq_id: int
    epoch: int
    row: int  # of the arrays of `WorkerSeqs`
    refusal: str | None = None  # why it cannot run or go on; every rank finds the same
    failure: str | None = None  # why it cannot be sampled: it is computed nevertheless, as on the other ranks
    processors: LogitsProcessors | None = None  # None: its logits are sampled as they are
    grammar: GrammarState | None = None
    prompt: PromptState | None = None  # where something of its prompt's own tokens is wanted
    drafts: Drafts = NO_DRAFTS  # proposed for the next step
    verifying: Drafts = NO_DRAFTS
    branches: tuple[Branch, ...] = ()  # of the tree being verified, beside its trunk
    num_beside: int = 0  # drafts planned that are not in the trunk
    # Of the last verification: the drafts that were accepted, and what each row sampled.
    accepted: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    # The distributions that ``drafts`` were sampled from; empty: not kept.
    draft_probs: list[Tensor] = field(default_factory=list)
    draft_state: Any = None  # of the proposer; None: it has not seen the sequence
    num_filled: int = 0  # leading tokens that have K and V of the draft model, as far as it has looked
    pending: Callable[[], list[SeqSample]] | None = None  # on a GPU: has the id that the next mask depends on


class WorkerSeqs:
    """The sequences of a worker, by id."""

    def __init__(
        self, vocab_size: int, max_num_seqs: int, max_tokens: int, *, max_blocks: int, num_groups: int,
        grammars: Callable[[], Grammars], lora: LoraSlots | None = None,
        release: Callable[[WorkerSeq], None] = lambda seq: None, samples: bool = True,
    ) -> None:  # fmt: skip
        """``max_tokens``: of one sequence. ``release`` frees what a runner keeps elsewhere of one that goes.

        ``grammars`` returns what builds grammars, and is called with the first. ``samples``: whether this rank samples;
        else it is told the tokens.
        """
        self._samples = samples
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._lora = lora
        self._release = release
        self.max_tokens = max_tokens
        # np.zeros maps untouched memory: rows and columns that are never used cost nothing.
        self.token_ids = np.zeros((max_num_seqs, max_tokens), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_settled = np.zeros(max_num_seqs, np.int64)
        self.samples = np.zeros(max_num_seqs, np.bool_)  # whether the last token samples the next one
        self.adapter_slots = np.zeros(max_num_seqs, np.int64)  # 0: the base model
        self.block_tables = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in range(num_groups)]
        self.columns = new_columns(max_num_seqs)  # of the sampler
        self._moves: list[Move] = []
        self._seqs: dict[int, WorkerSeq] = {}
        self._free = list(range(max_num_seqs))[::-1]

    def __len__(self) -> int:
        return len(self._seqs)

    def find(self, seq_id: int) -> WorkerSeq | None:
        return self._seqs.get(seq_id)

    def admit(self, new: NewSeq) -> WorkerSeq:
        """Take a sequence, or take it anew. One that cannot run has a ``refusal``, and no state but that."""
        self.drop(new.seq_id)
        if not self._free:
            self._grow()
        seq = self._seqs[new.seq_id] = WorkerSeq(new.seq_id, new.epoch, self._free.pop())
        seq.refusal = self._why_not(new)
        if seq.refusal is not None:
            return seq
        if self._samples:
            self._set_up_sampling(seq, new)
        if new.pooling is not None or new.prompt_logprobs is not None:
            seq.prompt = PromptState(new.prompt_token_ids, new.prompt_logprobs, new.pooling, new.adapter_slot)
        row, ids = seq.row, (*new.prompt_token_ids, *new.output_token_ids)
        self.token_ids[row, : len(ids)] = ids
        self.num_tokens[row] = self.num_settled[row] = len(ids)
        self.samples[row] = not new.prompt_only
        self.adapter_slots[row] = new.adapter_slot
        self.columns[row] = column_values(new, self._vocab_size, edited=seq.processors is not None)
        for table in self.block_tables:
            table[row] = 0
        return seq

    def _set_up_sampling(self, seq: WorkerSeq, new: NewSeq) -> None:
        try:
            processors = LogitsProcessors(new, self._vocab_size)
            seq.processors = processors if processors else None
            if new.grammar is not None:
                seq.grammar = self._grammars().begin(new)
        except Exception as error:  # whatever it is, the other sequences of the step go on
            seq.failure = f"its sampling cannot be set up: {type(error).__name__}: {error}"

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; one that is not here (gone before its first step) is no error."""
        seq = self._seqs.pop(seq_id, None)
        if seq is not None:
            self._release(seq)
            self._free.append(seq.row)
            seq.row = -1

    def take_drafts(self, plan: SeqPlan, seq: WorkerSeq) -> None:
        """Put the drafts that ``plan`` verifies behind the known tokens of ``seq``."""
        known, count = int(self.num_tokens[seq.row]), plan.num_draft_tokens
        end = plan.num_computed_tokens + plan.num_scheduled_tokens
        if count > len(seq.drafts) or end != known + count or end > self.max_tokens:
            raise StepError(
                f"Sequence {seq.seq_id}: the plan verifies {count} drafts up to token {end}; the worker has "
                f"{len(seq.drafts)} drafts after {known} tokens."
            )
        seq.verifying = seq.drafts.first(count)
        trunk = seq.verifying.trunk()
        seq.num_beside = count - len(trunk)
        self.token_ids[seq.row, known : known + len(trunk)] = trunk.token_ids
        self.num_tokens[seq.row] = known + len(trunk)

    def place_branches(self, seqs: Sequence[WorkerSeq], free: BranchBlocks) -> list[Move]:
        """Give the branches of trees their blocks; return what to copy. Where there are too few, trunks are left."""
        free.begin_step()
        moves: list[Move] = []
        for seq in seqs:
            if seq.num_beside:
                tables = [table[seq.row] for table in self.block_tables]
                placed = free.place(seq.verifying, int(self.num_settled[seq.row]), tables)
                if placed is None:
                    trunk = seq.verifying.paths()[0]
                    seq.verifying = seq.verifying.trunk()
                    seq.draft_probs = [seq.draft_probs[node] for node in trunk] if seq.draft_probs else []
                else:
                    seq.branches = tuple(placed[0])
                    moves += placed[1]
        return moves

    def accept(self, seq: WorkerSeq, path: Sequence[int]) -> None:
        """Keep the drafts on ``path`` (from the root) as the last tokens of ``seq``, and none of the others."""
        known, end = self.num_settled[seq.row], self.num_settled[seq.row] + len(path)
        self.token_ids[seq.row, known:end] = [seq.verifying.token_ids[node] for node in path]
        self.num_tokens[seq.row] = end
        if seq.grammar is not None:
            seq.grammar.accept(path)
        for branch in seq.branches:
            if path and path[-1] in branch.nodes:
                self._moves += branch.moves(len(path))
        seq.accepted, seq.verifying, seq.branches, seq.num_beside = tuple(path), NO_DRAFTS, (), 0

    def take_moves(self) -> list[Move]:
        """Return the blocks to copy for the branches accepted since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def expect(self, rows: Ints) -> None:
        """Count one more token of the sequences in ``rows``, which a step in flight samples; a GPU knows its id."""
        for row, end in zip(rows.tolist(), self.num_tokens[rows].tolist(), strict=True):
            if end < self.max_tokens:  # beyond it the scheduler ends the sequence
                self.token_ids[row, end] = -row - 1
                self.num_tokens[row] = end + 1

    def settle(self, seqs: Sequence[WorkerSeq], samples: Sequence[SeqSample]) -> None:
        """Put in what was sampled; a sequence that has gone, or come back since, is another object by now."""
        for seq, sample in zip(seqs, samples, strict=True):
            row = seq.row
            if row < 0 or sample.error is not None:
                continue
            # The accepted drafts before the last token are in place.
            place, end = int(self.num_settled[row]) + len(sample.token_ids) - 1, int(self.num_tokens[row])
            if place < end:
                self.token_ids[row, place] = sample.token_ids[-1]
            self.num_settled[row] = min(place + 1, end)

    def known_ids(self, seq: WorkerSeq) -> npt.NDArray[np.int32]:
        """The settled tokens of ``seq``, prompt and output: a view."""
        return self.token_ids[seq.row, : self.num_settled[seq.row]]

    def _why_not(self, new: NewSeq) -> str | None:
        """Tell why ``new`` cannot run here, or return None."""
        if new.adapter_slot:
            if self._lora is None:
                return f"adapter slot {new.adapter_slot} is asked for; this worker runs no adapters."
            failure = self._lora.failure(new.adapter_slot)
            if failure is not None:
                return failure
        ids = (*new.prompt_token_ids, *new.output_token_ids)
        if not ids or not 0 <= min(ids) <= max(ids) < self._vocab_size:
            return f"prompt ids must be in 0…{self._vocab_size - 1}, at least one."
        assert len(ids) <= self.max_tokens, (
            f"sequence {new.seq_id} has {len(ids)} of {self.max_tokens} tokens"
        )
        return None

    def _grow(self) -> None:
        """Double the rows: a plan may hold finished sequences beside their successors for one step."""
        size = len(self.num_tokens)
        for name in ("token_ids", "num_tokens", "num_settled", "samples", "adapter_slots", "columns"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self.block_tables = [np.concatenate((table, np.zeros_like(table))) for table in self.block_tables]
        self._free = list(range(size, 2 * size))[::-1]
