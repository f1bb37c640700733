"""The waist between core and worker: `StepPlan` down, `StepResult` up.

The worker keeps the state of each sequence (token ids, block tables); a plan is a difference against it. Order of
effect inside a step: ``gone`` → ``kv_moves``, then ``state_moves``, in list order → ``adapter_moves`` → ``new_seqs`` →
``transfers`` begin → forward over ``seqs``.

`SeqPlan` and `SeqResult` are made once per sequence and step, so they are named tuples: immutable like the frozen
dataclasses beside them, and cheaper to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.request import Adapter, Pooling, Sampling, TokenLogprobs
from quire.spans import Span

# Smallest step worth retrying after an out-of-memory error, in tokens.
MIN_RETRY_TOKENS = 16


class KvMove(NamedTuple):
    """Copy block ``src_block_id`` to ``dst_block_id``: K and V of all layers of the block's group."""

    src_block_id: int
    dst_block_id: int


class StateMove(NamedTuple):
    """Copy the recurrent state of all layers from one slot to another: a checkpoint is loaded, or a sequence forked."""

    src_slot: int
    dst_slot: int


class TransferBlock(NamedTuple):
    """One block of a `KvTransfer`; in the group −1, the state in a slot. ``block_hash`` names its content."""

    group: int
    block_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Bytes of blocks on their way from or to another tier or peer, for as many steps as they take.

    A transfer begins with the step that carries it, and no step waits for it. The scheduler holds references of its
    own to the blocks until a `TransferDone` with the same id arrives, in a `StepResult` or as a message to the core.
    """

    transfer_id: int
    direction: Literal["load", "store"]
    blocks: tuple[TransferBlock, ...]
    remote: str  # the tier ("host", "disk") or the peer (its address)
    seq_id: int | None = None  # the sequence that waits for a load
    epoch: int = 0
    handle: str = ""  # the other side's name for this transfer


class TransferDone(NamedTuple):
    """The end of a `KvTransfer`: its first ``num_blocks`` blocks are whole, and nothing more will be written."""

    transfer_id: int
    num_blocks: int
    error: str | None = None


class AdapterMove(NamedTuple):
    """Load an adapter into a slot (1, 2, …); it replaces what the slot held."""

    slot: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class NewSeq:
    """What a worker needs to know of a sequence, sent at every admission.

    First admission, readmission after a preemption or a restart, and a fork look alike: the worker rebuilds all state
    of the sampler from ``prompt_token_ids`` and ``output_token_ids``, so rebuilding equals having continued.
    """

    seq_id: int
    epoch: int  # + 1 at each admission; results of an older epoch are dropped
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # not empty on resumption
    sampling: Sampling
    sample_index: int  # index among n: part of the RNG key
    adapter_slot: int = 0  # 0: the base model
    grammar: str | None = None  # source text, as `Request.grammar`
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: none, or sent
    pooling: Pooling | None = None
    state_slot: int = -1  # where its recurrent state lies; −1: no layer has one
    spans: tuple[Span, ...] = ()

    @property
    def prompt_only(self) -> bool:
        """Whether no token is sampled when the prompt is computed."""
        return self.pooling is not None or self.sampling.max_tokens == 0

    @property
    def edits_logits(self) -> bool:
        """Whether its logits may be changed before the temperature (`sampling.processors`)."""
        s = self.sampling
        penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
        forbids = s.allowed_token_ids is not None or s.thinking_budget is not None or s.typical_p < 1.0
        changes = penalties != (0.0, 0.0, 1.0) or s.logit_bias or s.bad_words_token_ids or s.min_tokens
        return forbids or bool(changes)

    @property
    def is_plain(self) -> bool:
        """Whether the worker keeps nothing of it but its tokens; `sampling.seq_state` lists what else there may be."""
        prompt_alone = self.prompt_logprobs is None and self.pooling is None
        return prompt_alone and self.grammar is None and not self.adapter_slot and not self.edits_logits


class SeqPlan(NamedTuple):
    """What to compute of one sequence in this step.

    The tokens computed are those at the absolute positions ``num_computed_tokens … num_computed_tokens +
    num_scheduled_tokens − 1``. Tokens are sampled when the last known token of the sequence is among them:

        known tokens (prompt, output)             drafts of the worker
        … | num_computed_tokens … last known   |  num_draft_tokens of them

    The worker samples at the last known token and at each draft, and returns the accepted drafts and the one token
    that follows them: 1 … 1 + num_draft_tokens ids. Drafts of a tree count one by one.
    """

    seq_id: int
    epoch: int
    num_computed_tokens: int  # exact, or an upper bound while drafts are in flight
    num_scheduled_tokens: int  # a prompt chunk, 1, or 1 + drafts
    block_start: tuple[int, ...] = ()  # per cache group: row of the first of new_block_ids
    new_block_ids: tuple[tuple[int, ...], ...] = ()  # per cache group; both empty when no block changes
    num_draft_tokens: int = 0  # scheduled tokens that are drafts, known to the worker
    max_next_drafts: int = 0  # how many drafts the worker may propose for the next step
    forced_token_ids: tuple[int, ...] = ()  # overrides the worker's last id (beams)
    # (tokens of this chunk, slot): the recurrent state after so many of them is also written into that slot.
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def num_known_tokens(self) -> int:
        """Scheduled tokens that are no drafts: 1 for a decode."""
        return self.num_scheduled_tokens - self.num_draft_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for the executor. A plan with moves and no seqs is legal."""

    step: int
    new_seqs: tuple[NewSeq, ...] = ()
    seqs: tuple[SeqPlan, ...] = ()
    gone: tuple[int, ...] = ()  # seq_ids whose state the worker drops first
    kv_moves: tuple[KvMove, ...] = ()
    state_moves: tuple[StateMove, ...] = ()
    adapter_moves: tuple[AdapterMove, ...] = ()
    transfers: tuple[KvTransfer, ...] = ()
    max_draft_paths: int = 1  # paths per sequence's tree of drafts; 1: a chain


class SeqResult(NamedTuple):
    """What one sequence got out of a step.

    ``token_ids`` has k ≥ 0 ids: none for a prompt chunk that is not the last, one for a decode, more with drafts.
    """

    seq_id: int
    epoch: int
    token_ids: tuple[int, ...]
    num_next_drafts: int = 0  # drafts that the worker holds for the next step
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of token_ids, when asked for
    # Of the prompt tokens that this step predicts: position p gives the log-probability of token p + 1.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    pooled: tuple[float, ...] | None = None  # with the prompt's last token
    error: str | None = None  # this sequence failed; the others of the step did not
    # With error: the request asked for what cannot be done, as a grammar too complex.
    error_of_request: bool = False
    out_of_memory: bool = False  # with error: computed again, in case a smaller chunk fits
    # With error: NaN or infinite logits, or a fault beside it. It is computed once more, without its cached prefix.
    recompute: bool = False
    # Levels of drafts up to the first that was rejected; equal to those accepted if none was.
    num_tried: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a `StepPlan`. ``error`` fails every sequence of the step and withdraws its blocks."""

    step: int
    seqs: tuple[SeqResult, ...] = ()
    draft_s: float = 0.0  # seconds in which drafts for the next step were made
    max_tokens: int | None = None  # largest step that fits in memory, if learned in this step
    error: str | None = None
    transfers_done: tuple[TransferDone, ...] = ()


class SeqTold(NamedTuple):
    """What a sequence got out of a step, for the ranks that did not sample it."""

    seq_id: int
    epoch: int
    token_ids: tuple[int, ...]
    drafts: tuple[int, ...] = ()  # for the next step
    draft_parents: tuple[int, ...] = ()  # index of the draft before each; −1: the last token
    failed: bool = False
