"""The waist between core and worker: `StepPlan` down, `StepResult` up (DESIGN §2).

The worker keeps the state of each sequence (ids, block tables); a plan is a difference against it. Order of
effect inside a step: ``gone`` → ``kv_moves`` in list order → ``adapter_moves`` → ``new_seqs`` → forward over ``seqs``.

`SeqPlan` and `SeqResult` are made once a sequence and step, so they are named tuples: immutable like the
frozen dataclasses beside them, and cheaper to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.request import Adapter, Pooling, SamplingParams, TokenLogprobs

LEAST_ROWS = 16  # of a step: where these find no memory, fewer would not either, and the sequence fails


class KvMove(NamedTuple):
    """Copy the whole page ``src_block_id`` to ``dst_block_id`` (all layers of the page's group)."""

    src_block_id: int
    dst_block_id: int


class AdapterMove(NamedTuple):
    """Load an adapter into a slot (from 1 on), in the place of what was there."""

    slot: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class NewSeq:
    """What a worker needs to know of a sequence, sent at every admission.

    First admission, after preemption, after a restart and for a fork alike: the worker rebuilds all state of
    the sampler from ``prompt_token_ids`` and ``output_token_ids``, so rebuilding equals having continued.
    """

    seq_id: int
    epoch: int  # + 1 at each admission; results of an older epoch are dropped
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # not empty on resumption
    sampling: SamplingParams  # seed, eos_token_ids and max_tokens are set by now
    sample_index: int  # which of n: part of the RNG key
    adapter_slot: int = 0  # 0: the base model
    grammar: str | None = None  # source text, as `Request.grammar`
    prompt_logprobs: int | None = (
        None  # alternatives wanted beside each prompt token; None: not wanted (any more)
    )
    pooling: Pooling | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is drawn when the prompt is computed."""
        return self.pooling is not None or self.sampling.max_tokens == 0


class SeqPlan(NamedTuple):
    """What to compute of one sequence in this step.

    The rows computed are the absolute positions ``num_computed_tokens … num_computed_tokens +
    num_scheduled_tokens − 1``. A token is sampled when the last of them is the last known token of the
    sequence, i.e. when ``num_computed_tokens + num_scheduled_tokens == number of known tokens`` (+ drafts).
    """

    seq_id: int
    epoch: int
    num_computed_tokens: int  # exact, or an upper bound while drafts are in flight
    num_scheduled_tokens: int  # a prompt chunk, 1, or 1 + drafts
    block_start: tuple[int, ...] = ()  # per cache group: row index from which new_block_ids are written
    new_block_ids: tuple[tuple[int, ...], ...] = ()  # per cache group; both empty when no block changes
    num_draft_tokens: int = 0
    max_next_drafts: int = 0
    forced_token_ids: tuple[int, ...] = ()  # overrides the worker's last id (beams)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for the executor. A plan with moves and no seqs is legal."""

    step: int
    new_seqs: tuple[NewSeq, ...] = ()
    seqs: tuple[SeqPlan, ...] = ()
    gone: tuple[int, ...] = ()  # seq_ids whose state the worker drops first
    kv_moves: tuple[KvMove, ...] = ()
    adapter_moves: tuple[AdapterMove, ...] = ()


class SeqResult(NamedTuple):
    """What one sequence got out of a step. ``token_ids`` is empty for a prompt chunk that is not the last."""

    seq_id: int
    epoch: int
    token_ids: tuple[int, ...]
    num_next_drafts: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of token_ids, when asked for
    # Of the prompt tokens that the rows of this step predict: row p (absolute) gives that of token p + 1.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: tuple[float, ...] | None = None  # with the prompt's last row
    error: str | None = None  # this sequence failed; the others of the step did not
    out_of_memory: bool = (
        False  # the error was that fewer of its rows might fit: it is computed again, not ended
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a `StepPlan`. ``error`` fails every sequence of the step and withdraws its blocks."""

    step: int
    seqs: tuple[SeqResult, ...] = ()
    moves_done: int = 0  # how many of kv_moves took effect
    device_s: float = 0.0  # seconds the device (or the compute threads) worked
    max_rows: int | None = None  # found on the way: a step of more rows runs out of memory
    error: str | None = None
