"""`Sequence`, `RequestState`, `StepRecord`: the scheduler's own mutable state. No other package sees them.

    token_ids    │ prompt ……………………………… │ output ……… │ pending      pending: sampled by steps in flight, ids unknown
                 0                num_prompt      len(token_ids)  num_total       ≤ max_total
    planned      │ positions computed or in flight │ num_planned                  ≤ max_planned

Every sequence chases `num_total` with `num_planned`; the last token is never computed, except where the prompt is all
there is (`prompt_only`). While drafts are in flight, `num_planned` and `num_total` count them as if all were accepted.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from quire.cache.blocks import BlockTable
from quire.request import Request, SampleTiming, Sampling
from quire.spans import num_bytes
from quire.step import AdapterMove, KvTransfer, SeqPlan
from quire.units import ID_BYTES, POINTER_BYTES

if TYPE_CHECKING:
    from quire.scheduler.policies.beam_search import BeamSearch

_REQUEST_BYTES = 2048  # a waiting request without ids and texts

SortKey = tuple[float, ...]
ENDED_EPOCH = -1


class SequenceState(Enum):
    ATTACHED = "attached"  # a sibling (n > 1) that waits to be forked from its leader
    PARKED = "parked"  # one of a request's beams, that has nothing to compute now
    WAITING = "waiting"
    LOADING_KV = "loading_kv"  # waits for a transfer that brings blocks of its prompt
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One of the n outputs of a request."""

    seq_id: int
    group: RequestState
    sample_index: int
    table: BlockTable
    max_model_len: InitVar[int]
    # Of the request, at hand:
    request_id: str = field(init=False)
    sampling: Sampling = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    max_total: int = field(init=False)
    min_total: int = field(init=False)
    prompt_only: bool = field(init=False)
    is_beam: bool = field(init=False)
    # Whether the frontend may end it at any token, so that each of its events carries its timing.
    has_stop_strings: bool = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    # How far it is:
    state: SequenceState = SequenceState.WAITING
    epoch: int = 0  # + 1 at each admission after the first; ENDED_EPOCH when over
    registered: bool = False  # the worker has had a NewSeq of this epoch
    num_planned: int = 0
    adapter_slot: int = 0  # its LoRA adapter while it runs; 0: the base model
    forced: tuple[int, ...] = ()  # beams: replaces what the worker sampled last
    # To be forked when all of the prompt but its last token is planned.
    siblings: list[Sequence] = field(default_factory=list)
    key: SortKey = ()  # rank: smaller comes first
    late: bool = False  # cannot meet its deadline any more (`earliest_deadline`)
    num_preemptions: int = 0
    num_steps: int = 0  # steps that computed something of it
    num_chunks: int = 0  # steps that computed known tokens
    num_drafts: int = 0  # tokens that its worker proposes for the next step
    num_vain: int = 0  # steps in a row in which it was asked for drafts and had none
    num_drafted: int = 0  # tokens that were known when it had drafts last
    acceptance: float | None = None  # share of drafts; the last weigh most; None: none yet
    # Orders decodes that do not all fit a step: the one that waited longest comes first.
    turn: tuple[int, int] = (0, 0)  # step, and place in it
    num_charged: int = field(init=False)  # tokens that its tenant's share has been charged for
    recomputed_at: int = -1  # its number of tokens when it was last computed once more
    ttft_s: float | None = None  # arrival to first token
    engine_s: float = 0.0  # its share of the steps that were applied
    kv_block_s: float = 0.0  # up to `_blocks_since_s`
    _num_blocks: int = 0  # held since then
    _blocks_since_s: float = 0.0
    told_first: bool = False  # the first token since its last admission is out
    # A decode below this position appends one token and does nothing else; see `SchedulerState.find_next_event`.
    next_event_at: int = 0

    def __post_init__(self, max_model_len: int) -> None:
        request = self.group.request
        sampling, outputs = request.sampling, request.output_token_ids
        output = outputs[self.sample_index] if self.sample_index < len(outputs) else ()
        self.request_id = request.request_id
        self.sampling = sampling
        self.token_ids = [*request.prompt_token_ids, *output]
        self.num_charged = len(self.token_ids)
        self.num_prompt = len(request.prompt_token_ids)
        max_tokens = sampling.max_tokens if sampling.max_tokens is not None else max_model_len
        self.prompt_only = request.prompt_only
        self.max_total = min(self.num_prompt + max_tokens, max_model_len)
        if self.prompt_only:
            self.max_total = self.num_prompt
        self.min_total = self.num_prompt + sampling.min_tokens
        self.is_beam = sampling.use_beam_search
        self.has_stop_strings = bool(sampling.stop)
        self.stop_ids = frozenset(sampling.eos_token_ids) | frozenset(sampling.stop_token_ids)

    @property
    def num_undrafted(self) -> int:
        """Known tokens since it last had drafts."""
        return len(self.token_ids) - self.num_drafted

    @property
    def misses_first_token(self) -> bool:
        """Whether its first token, which just came, came after its limit."""
        request = self.group.request
        limit_s = None if request.terms.deadline is None else request.terms.deadline.first_token_s
        if limit_s is None or request.output_token_ids:
            return False
        return self.ttft_s is not None and self.ttft_s > limit_s

    @property
    def num_total(self) -> int:
        """Known tokens and those that steps in flight sample (drafts in flight: at most that many)."""
        return max(len(self.token_ids), self.num_planned + 1)

    @property
    def max_planned(self) -> int:
        """The token count up to which positions may be computed now.

        The next token of a beam is known when all beams of its depth have been looked at.
        """
        if self.is_beam:
            return len(self.token_ids)
        return self.num_prompt if self.prompt_only else self.max_total - 1

    @property
    def target(self) -> int:
        """The token count to chase now: a leader stops before the last prompt token until it has forked."""
        return self.num_prompt - 1 if self.siblings else min(self.num_total, self.max_planned)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt :])

    def note_blocks(self, now: float) -> None:
        """Count the KV blocks that it held until now; it holds those of its table from now on."""
        self.kv_block_s += self._num_blocks * (now - self._blocks_since_s)
        self._num_blocks, self._blocks_since_s = self.table.num_blocks, now

    def timing(self, now: float) -> SampleTiming:
        """Return what the events of its first token and of its end tell."""
        group = self.group
        return SampleTiming(
            group.num_cached_tokens, self.num_preemptions, group.queued_s, self.ttft_s or 0.0, self.num_steps,
            self.num_chunks, group.cache_miss, self.engine_s,
            self.kv_block_s + self._num_blocks * (now - self._blocks_since_s), group.num_loaded_tokens,
        )  # fmt: skip


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """What the n sequences of a request have in common."""

    request: Request
    sequences: list[Sequence] = field(default_factory=list)  # those not ended, by sample index
    admitted: bool = False
    beams: BeamSearch[Sequence] | None = None
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # loaded for its first admission
    cache_miss: str = ""  # see `CacheManager.miss_of`
    queued_s: float = 0.0
    predicted_s: float = 0.0  # arrival to first token; 0: not predicted
    # Spent on beams that are no answers: the answer that ends next takes it over.
    beams_engine_s: float = 0.0
    beams_kv_block_s: float = 0.0
    num_bytes: int = field(init=False)  # about, that the request takes while it waits
    num_scored: int = field(init=False)  # prompt tokens whose log-probabilities were sent

    def __post_init__(self) -> None:
        self.num_bytes = held_bytes(self.request)
        # A request with output has had them all.
        self.num_scored = len(self.request.prompt_token_ids) - 1 if any(self.request.output_token_ids) else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still missing."""
        request = self.request
        wanted = request.sampling.prompt_logprobs is not None
        return wanted and self.num_scored < len(request.prompt_token_ids) - 1

    @property
    def reads_prefix(self) -> bool:
        """Whether cached blocks may stand in for rows of the prompt: not while every row's output is wanted."""
        pooling = self.request.pooling
        return not self.wants_prompt_logprobs and (pooling is None or not pooling.whole_prompt)


@dataclass(slots=True)
class StepRecord:
    """A step in flight, as the scheduler remembers it. ``sequences`` are parallel to ``seqs``, the plan's."""

    step: int
    sequences: list[Sequence]
    seqs: tuple[SeqPlan, ...]
    gone: tuple[int, ...]
    planned_s: float = 0.0
    num_prompt_tokens: int = 0
    num_drafts: int = 0  # verified
    adapter_moves: tuple[AdapterMove, ...] = ()
    transfers: tuple[KvTransfer, ...] = ()  # begun by this step
    num_tokens: int = 0  # decodes and drafts as well


def held_bytes(request: Request) -> int:
    """Return about how many bytes a request takes while it waits."""
    sampling, pooling = request.sampling, request.pooling
    ids = (sampling.stop_token_ids, sampling.allowed_token_ids or (), *request.output_token_ids)
    num_ids = sum(map(len, (*ids, *sampling.bad_words_token_ids)))
    num_ids += 0 if pooling is None else len(pooling.token_ids)
    num_prompt = len(request.prompt_token_ids)  # also in the list of a sequence
    num_ids += num_prompt + 3 * len(sampling.logit_bias)  # an entry takes as much as three ids
    texts = len(request.grammar or "") + sum(map(len, sampling.stop))
    total = _REQUEST_BYTES + texts + POINTER_BYTES * num_prompt
    return total + ID_BYTES * num_ids + sum(map(num_bytes, request.spans))
