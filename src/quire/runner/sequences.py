"""`WorkerSeq`: all that a worker knows of one sequence, and `WorkerSeqs`: how it comes, grows and goes.

Numbers that a whole step gathers at once lie in numpy arrays with one row per sequence; the object owns its row, which
is taken at admission and given back when the sequence goes. A row of token ids:

    settled tokens                      │ drafts being verified      │ expected
    0 … num_settled − 1                   known to the worker alone    −(row + 1): sampled by a step in flight
                                          (of a tree: its trunk)       … num_tokens − 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.sampling.sampler import SeqSample, column_values, new_columns
from quire.spans import Span
from quire.step import NewSeq

if TYPE_CHECKING:
    from quire.lora.slots import LoraSlots
    from quire.runner.draft_state import DraftState
    from quire.runner.prompt_outputs import PromptState
    from quire.sampling.grammars import Grammars, GrammarState
    from quire.sampling.processors import LogitsProcessors
    from quire.sampling.seq_state import SeqState

Ints = npt.NDArray[np.int64]
Move = tuple[int, int]  # copy a block: (source, target)


@dataclass(slots=True, eq=False)
class WorkerSeq:
    """One sequence, from its admission until it goes or is admitted again. ``row`` is −1 from then on."""

    seq_id: int
    epoch: int
    row: int  # in the arrays of `WorkerSeqs`
    # Why it cannot run or go on; every rank finds the same.
    refusal: str | None = None
    # Why it cannot be sampled: it is computed nevertheless, as on the other ranks.
    failure: str | None = None
    # What optional features keep of it (`sampling.seq_state`), and the same by name.
    states: tuple[SeqState, ...] = ()
    prompt: PromptState | None = None
    processors: LogitsProcessors | None = None
    grammar: GrammarState | None = None
    drafting: DraftState | None = None
    spans: tuple[Span, ...] = ()
    # On a GPU: has the id that the next mask depends on.
    pending: Callable[[], list[SeqSample]] | None = None

    @property
    def num_logits(self) -> int:
        """Rows of logits in a step that samples: of the last known token, and of each draft being verified."""
        return 1 if self.drafting is None else 1 + len(self.drafting.verifying)


class WorkerSeqs:
    """The sequences of a worker, by id."""

    def __init__(
        self, vocab_size: int, max_num_seqs: int, max_tokens: int, *, max_blocks: int, num_groups: int,
        grammars: Callable[[], Grammars], lora: LoraSlots | None = None, samples: bool = True,
    ) -> None:  # fmt: skip
        """``max_tokens``: of one sequence. ``samples``: whether this rank samples; else it is told the tokens.

        ``grammars`` returns what builds grammars, and is called with the first.
        """
        self._vocab_size = vocab_size
        self._means = (vocab_size, grammars, lora, samples)  # `seq_state.Means`
        self.max_tokens = max_tokens
        # np.zeros maps untouched memory: rows and columns that are never used cost nothing.
        self.token_ids = np.zeros((max_num_seqs, max_tokens), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_settled = np.zeros(max_num_seqs, np.int64)
        # Whether the last token samples the next one.
        self.samples = np.zeros(max_num_seqs, np.bool_)
        self.adapter_slots = np.zeros(max_num_seqs, np.int64)  # 0: the base model
        self.state_slots = np.zeros(max_num_seqs, np.int64)  # −1: no layer has a state
        self.block_tables = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in range(num_groups)]
        self.columns = new_columns(max_num_seqs)  # the sampler's
        # Blocks to copy for the branches accepted since they were taken.
        self.moves: list[Move] = []
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
        ids = (*new.prompt_token_ids, *new.output_token_ids)
        seq.refusal = self._why_not(new.seq_id, ids)
        if seq.refusal is None and not new.is_plain:
            self._begin_states(seq, new)
        if seq.refusal is not None:
            return seq
        row, seq.spans = seq.row, new.spans
        self.token_ids[row, : len(ids)] = ids
        self.num_tokens[row] = self.num_settled[row] = len(ids)
        self.samples[row] = not new.prompt_only
        self.adapter_slots[row], self.state_slots[row] = new.adapter_slot, new.state_slot
        self.columns[row] = column_values(new, self._vocab_size, edited=seq.processors is not None)
        for table in self.block_tables:
            table[row] = 0
        return seq

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; one that is not here (gone before its first step) is no error."""
        seq = self._seqs.pop(seq_id, None)
        if seq is not None:
            for state in seq.states:
                state.end()
            self._free.append(seq.row)
            seq.row = -1

    def drafting(self, seq: WorkerSeq) -> DraftState:
        """Return what is kept of the drafts of ``seq``, from the first on."""
        if seq.drafting is None:
            seq.drafting = import_module("quire.runner.draft_state").DraftState(self, seq.seq_id, seq.row)
            seq.states = (*seq.states, seq.drafting)
        return seq.drafting

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

    def _begin_states(self, seq: WorkerSeq, new: NewSeq) -> None:
        """Begin what optional features keep of a sequence; what they are is loaded with the first that has one."""
        module = import_module("quire.sampling.seq_state")
        states, seq.refusal, seq.failure = module.begin(new, module.Means(*self._means))
        for name, state in states.items():
            setattr(seq, name, state)
        seq.states = tuple(states.values())

    def _why_not(self, seq_id: int, ids: tuple[int, ...]) -> str | None:
        """Tell why a sequence with these ids cannot run here, or return None."""
        if not ids or not 0 <= min(ids) <= max(ids) < self._vocab_size:
            return f"prompt ids must be in 0…{self._vocab_size - 1}, at least one."
        assert len(ids) <= self.max_tokens, f"sequence {seq_id} has {len(ids)} of {self.max_tokens} tokens"
        return None

    def _grow(self) -> None:
        """Double the rows: a plan may hold finished sequences next to their successors for one step."""
        size = len(self.num_tokens)
        names = "token_ids", "num_tokens", "num_settled", "samples", "adapter_slots", "state_slots", "columns"
        for name in names:
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self.block_tables = [np.concatenate((table, np.zeros_like(table))) for table in self.block_tables]
        self._free = list(range(size, 2 * size))[::-1]
