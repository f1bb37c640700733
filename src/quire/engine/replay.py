"""`Replay`: runs the plans of a recording on an executor, and finds the first result that differs.

Blocks are renamed to as few as the recording names. What a plan reads and no step of the recording has computed (of
sequences from before it, or of a cached prefix) is computed from the known tokens just before that plan: generation is
exact, so the keys and values are those that were there.

    recorded plan       new_seqs A      A: tokens 32…39 (0…31 were in the prefix cache)
    replayed            new_seqs A      A: tokens 0…31     then   A: tokens 32…39

Drafts are not recorded. A step is given the accepted ones and, where one was rejected, another token in its place; so
neither a proposer nor a draft model is needed, and every recorded token is computed by the target again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.cache.blocks import Windows
from quire.executor.base import Executor
from quire.executor.recorder import Recording, write_tables
from quire.request import TokenLogprobs
from quire.sampling.draft_tree import chain
from quire.step import AdapterMove, KvMove, NewSeq, SeqPlan, SeqResult, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Difference:
    """The first result that is another one. Without ``seq_id`` it is the whole step's."""

    step: int
    text: str
    seq_id: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = "" if self.seq_id is None else f", sequence {self.seq_id}"
        where += "" if self.position is None else f", position {self.position}"
        return f"step {self.step}{where}: {self.text}"


class Outcome(NamedTuple):
    """What a replay found."""

    num_steps: int  # with a result, that were compared
    num_tokens: int
    num_rebuilt: int  # tokens computed from known ids beside the recorded steps
    difference: Difference | None
    # Steps that had no result when the recording was saved, and what they give here.
    last: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seq:
    """A sequence of the replay."""

    new: NewSeq
    token_ids: list[int]  # known
    tables: list[list[int]]  # blocks of the replay, per cache group
    is_whole: bool = False  # whether all that its next plan reads was computed


class Replay:
    """One run of a recording. ``seqs`` of a worker are told their drafts."""

    def __init__(
        self, recording: Recording, executor: Executor, seqs: Any, *, block_size: int,
        windows: tuple[int | None, ...], max_num_batched_tokens: int, vocab_size: int, same_bits: bool,
    ) -> None:  # fmt: skip
        """``seqs``: the executor's `WorkerSeqs`. ``same_bits``: whether log-probabilities are to be equal, too."""
        self._recording, self._executor, self._worker_seqs = recording, executor, seqs
        self._block_size, self._windows = block_size, Windows(windows, block_size)
        self._budget, self._vocab_size, self._same_bits = max_num_batched_tokens, vocab_size, same_bits
        self._blocks = _block_names(recording)
        self._scratch: dict[
            tuple[int, int], int
        ] = {}  # (group, row) → block, for rows that no window sees any more
        self._filled: dict[int, int] = {}  # block → tokens that it holds
        self._seqs: dict[int, _Seq] = {}
        self._num_rebuilt = 0

    def run(self) -> Outcome:
        """Replay until the first difference, or to the end."""
        self._begin()
        num_steps = num_tokens = 0
        last: list[str] = []
        for step in self._recording.steps:
            got = self._step(step.plan, step.result)
            if step.result is None:
                last.append(f"step {step.plan.step} was out when the recording was saved; here: {_said(got)}")
                continue
            difference = self._compare(step.plan, step.result, got)
            if difference is not None:
                return Outcome(num_steps, num_tokens, self._num_rebuilt, difference)
            self._take(step.result)
            num_steps += 1
            num_tokens += sum(len(seq.token_ids) for seq in step.result.seqs)
        return Outcome(num_steps, num_tokens, self._num_rebuilt, None, tuple(last))

    def _begin(self) -> None:
        """Admit the sequences from before the recording, with what they had by then."""
        recording = self._recording
        admitted = []
        for live in recording.live:
            outputs = (*live.new.output_token_ids, *live.output_token_ids)
            new = replace(live.new, output_token_ids=outputs)
            tables = [[self._blocks[b] if b >= 0 else b for b in rows] for rows in live.tables]
            self._seqs[new.seq_id] = _Seq(new, [*new.prompt_token_ids, *outputs], tables)
            admitted.append(new)
        moves = tuple(AdapterMove(*pair) for pair in recording.adapters.items())
        if admitted or moves:
            self._execute(StepPlan(-1, new_seqs=tuple(admitted), adapter_moves=moves))

    def _step(self, recorded: StepPlan, result: StepResult | None) -> StepResult:
        """Run one plan, after what it needs."""
        plan = self._renamed(recorded)
        for seq_id in plan.gone:
            self._seqs.pop(seq_id, None)
        for move in plan.kv_moves:
            self._filled[move.dst_block_id] = self._filled.get(move.src_block_id, 0)
        for new in plan.new_seqs:
            self._seqs[new.seq_id] = _Seq(new, [*new.prompt_token_ids, *new.output_token_ids], [])
        for transfer in recorded.transfers:
            for block in transfer.blocks:  # a load brings nothing here: it is computed
                self._filled.pop(self._blocks.get(block.block_id, -1), None)
        rebuilt = self._rebuild(plan)
        if rebuilt:  # the state that the plan brings has to be there before
            before = replace(plan, seqs=())
            for earlier in (before, *rebuilt):
                self._execute(earlier)
            plan = StepPlan(plan.step, seqs=self._with_tables(plan))
        self._give_drafts(plan, result)
        return self._execute(plan)

    def _renamed(self, plan: StepPlan) -> StepPlan:
        """Return ``plan`` with the blocks of the replay, and without transfers and drafts to make."""
        names = self._blocks
        seqs = tuple(
            seq._replace(
                new_block_ids=tuple(
                    tuple(names[b] if b >= 0 else b for b in ids) for ids in seq.new_block_ids
                ),
                max_next_drafts=0,
            )
            for seq in plan.seqs
        )
        moves = tuple(KvMove(names[m.src_block_id], names[m.dst_block_id]) for m in plan.kv_moves)
        return replace(plan, seqs=seqs, kv_moves=moves, transfers=())

    def _rebuild(self, plan: StepPlan) -> list[StepPlan]:
        """Return plans that compute what ``plan`` reads and nothing has computed; note what ``plan`` computes."""
        fresh: list[SeqPlan] = []
        for seq in plan.seqs:
            known = self._seqs.get(seq.seq_id)
            if known is None or known.new.epoch != seq.epoch:
                continue
            write_tables(known.tables, seq.block_start, seq.new_block_ids)
            if any(start * self._block_size < seq.num_computed_tokens for start in seq.block_start):
                # Blocks of its own were given up for equal ones of the prefix cache.
                known.is_whole = False
            if seq.forced_token_ids:
                known.token_ids[-len(seq.forced_token_ids) :] = seq.forced_token_ids
            fresh.append(seq)
        after = dict(self._filled)
        for seq in fresh:
            self._fill(seq, after)
        plans: list[StepPlan] = []
        for seq in fresh:
            known, end = self._seqs[seq.seq_id], seq.num_computed_tokens
            if not known.is_whole and end and not self._has(known, end, after):
                plans += self._prefill(known, end)
                self._num_rebuilt += end
            known.is_whole = True
        for seq in fresh:
            self._fill(seq, self._filled)
        return plans

    def _has(self, seq: _Seq, end: int, filled: dict[int, int]) -> bool:
        """Whether all blocks that a query at position ``end`` sees of ``seq`` hold their tokens before ``end``."""
        size = self._block_size
        for rows, first in zip(seq.tables, self._windows.first_rows(end), strict=True):
            for row in range(first, -(-end // size)):
                if row >= len(rows) or filled.get(rows[row], 0) < min(size, end - row * size):
                    return False
        return True

    def _fill(self, plan: SeqPlan, filled: dict[int, int]) -> None:
        """Note what ``plan`` computes. A block whose tokens before it are not there does not count."""
        size, start = self._block_size, plan.num_computed_tokens
        end = start + plan.num_scheduled_tokens
        for rows in self._seqs[plan.seq_id].tables:
            for row in range(start // size, min(len(rows), -(-end // size))):
                if rows[row] >= 0 and filled.get(rows[row], 0) >= start - row * size:
                    filled[rows[row]] = min(size, end - row * size)

    def _prefill(self, seq: _Seq, end: int) -> Iterator[StepPlan]:
        """Yield plans that compute the tokens of ``seq`` before ``end``. Rows behind a window get scratch blocks."""
        tables = [list(rows) for rows in seq.tables]
        for group, first in enumerate(self._windows.first_rows(end)):
            for row in range(min(first, len(tables[group]))):
                tables[group][row] = self._scratch_block(group, row)
        starts, ids = (0,) * len(tables), tuple(map(tuple, tables))
        for start in range(0, end, self._budget):
            count = min(self._budget, end - start)
            chunk = SeqPlan(seq.new.seq_id, seq.new.epoch, start, count, starts, ids)
            yield StepPlan(-1, seqs=(chunk,))
            starts, ids = (), ()
        for rows in tables:
            for row in range(-(-end // self._block_size)):
                self._filled[rows[row]] = min(self._block_size, end - row * self._block_size)

    def _scratch_block(self, group: int, row: int) -> int:
        return self._scratch.setdefault((group, row), len(self._blocks) + len(self._scratch))

    def _with_tables(self, plan: StepPlan) -> tuple[SeqPlan, ...]:
        """Return the sequences of ``plan`` with all their rows: chunks that were put before it have sent others."""
        return tuple(
            seq
            if (known := self._seqs.get(seq.seq_id)) is None or known.new.epoch != seq.epoch
            else seq._replace(
                block_start=(0,) * len(known.tables), new_block_ids=tuple(map(tuple, known.tables))
            )
            for seq in plan.seqs
        )

    def _give_drafts(self, plan: StepPlan, result: StepResult | None) -> None:
        """Put in the drafts that ``plan`` verifies."""
        got = {} if result is None else {seq.seq_id: seq.token_ids for seq in result.seqs}
        for seq in plan.seqs:
            state = self._worker_seqs.find(seq.seq_id) if seq.num_draft_tokens else None
            if state is not None:
                *accepted, last = got.get(seq.seq_id) or (0,)
                wrong = [(last + 1) % self._vocab_size] * (seq.num_draft_tokens - len(accepted))
                drafts = chain((*accepted, *wrong))
                self._worker_seqs.drafting(state).propose(drafts.token_ids, drafts.parents)

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            self._executor.submit(plan)
            return self._executor.collect()
        except Exception as error:
            return StepResult(plan.step, error=f"{type(error).__name__}: {error}")

    def _take(self, result: StepResult) -> None:
        for seq in result.seqs:
            known = self._seqs.get(seq.seq_id)
            if known is not None and known.new.epoch == seq.epoch:
                known.token_ids += seq.token_ids

    def _compare(self, plan: StepPlan, expected: StepResult, got: StepResult) -> Difference | None:
        if (expected.error is None) != (got.error is None):
            return Difference(plan.step, f"expected {_said(expected)}, got {_said(got)}")
        results = {seq.seq_id: seq for seq in got.seqs}
        plans = {seq.seq_id: seq for seq in plan.seqs}
        for want in expected.seqs:
            have = results.get(want.seq_id)
            if have is None or want.out_of_memory:
                continue
            seq = plans[want.seq_id]
            first = seq.num_computed_tokens + seq.num_known_tokens
            text = _differ(want, have, same_bits=self._same_bits)
            if text is not None:
                place, what = text
                position = None if place is None else first + place
                return Difference(plan.step, what, want.seq_id, position)
        return None


def _block_names(recording: Recording) -> dict[int, int]:
    """Return a dense number for each block of a recording."""
    tables: list[Sequence[int]] = [rows for live in recording.live for rows in live.tables]
    tables += [ids for step in recording.steps for seq in step.plan.seqs for ids in seq.new_block_ids]
    tables += [move for step in recording.steps for move in step.plan.kv_moves]
    return {
        block: name for name, block in enumerate(dict.fromkeys(b for row in tables for b in row if b >= 0))
    }


def num_blocks(recording: Recording, num_groups: int) -> int:
    """Return how many blocks a replay needs at most, with those behind the windows of rows that are computed again."""
    longest = max((len(rows) for live in recording.live for rows in live.tables), default=0)
    for step in recording.steps:
        for seq in step.plan.seqs:
            for start, ids in zip(seq.block_start, seq.new_block_ids, strict=True):
                longest = max(longest, start + len(ids))
    return len(_block_names(recording)) + (longest * num_groups if num_groups > 1 else 1)


def _differ(want: SeqResult, have: SeqResult, *, same_bits: bool) -> tuple[int | None, str] | None:
    """Return (which of the tokens, text) where two results of a sequence differ."""
    if (want.error is None) != (have.error is None):
        return None, f"expected {_said_seq(want)}, got {_said_seq(have)}"
    for place, (expected, got) in enumerate(zip(want.token_ids, have.token_ids, strict=False)):
        if expected != got:
            chances = _chance(want.logprobs, place), _chance(have.logprobs, place)
            return place, f"expected token {expected}{chances[0]}, got {got}{chances[1]}"
    if len(want.token_ids) != len(have.token_ids):
        place = min(len(want.token_ids), len(have.token_ids))
        return place, f"expected {len(want.token_ids)} tokens, got {len(have.token_ids)}"
    if not same_bits:
        return None
    for name in ("logprobs", "prompt_logprobs", "pooled"):
        expected_values: Sequence[Any] = getattr(want, name) or ()
        for place, pair in enumerate(zip(expected_values, getattr(have, name) or (), strict=False)):
            if pair[0] != pair[1]:
                at = place if name == "logprobs" else None
                return at, f"{name}: expected {_value(pair[0])}, got {_value(pair[1])}"
    return None


def _chance(logprobs: tuple[TokenLogprobs, ...] | None, place: int) -> str:
    return "" if not logprobs else f" (log-probability {logprobs[place].logprob:.6f})"


def _value(entry: Any) -> str:
    return f"{entry.logprob!r} of token {entry.token_id}" if isinstance(entry, TokenLogprobs) else repr(entry)


def _said(result: StepResult) -> str:
    if result.error is not None:
        return f"the error {result.error!r}"
    return "; ".join(f"sequence {seq.seq_id} {_said_seq(seq)}" for seq in result.seqs) or "no tokens"


def _said_seq(result: SeqResult) -> str:
    if result.error is not None:
        return f"the error {result.error!r}"
    return f"tokens {list(result.token_ids)}" if result.token_ids else "no token"
