"""`Sequence` and `RequestState`: the scheduler's own mutable state. No other package sees them.

    token_ids    │ prompt ……………………………… │ output ……… │ pending      pending: sampled by steps in flight, ids unknown
                 0                num_prompt      len(token_ids)  num_total       ≤ max_total
    planned      │ positions computed or in flight │ num_planned                  ≤ max_planned

Every sequence chases `num_total` with `num_planned`; the last token is never computed, except where the prompt is all
there is (`prompt_only`). While drafts are in flight, `num_planned` and `num_total` count them as if all were accepted.
"""

from __future__ import annotations

from enum import Enum

from quire.cache.block_table import BlockTable
from quire.request import Request, SampleTiming, Sampling
from quire.scheduler.beam import BeamSearch

SortKey = tuple[float, ...]
ENDED_EPOCH = -1


class SequenceState(Enum):
    ATTACHED = "attached"  # a sibling (n > 1) that waits to be forked from its leader
    PARKED = "parked"  # one of a request's beams, that has nothing to compute now
    WAITING = "waiting"
    LOADING_KV = "loading_kv"  # waits for a transfer that brings blocks of its prompt
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """One of the n outputs of a request."""

    __slots__ = (
        "epoch",
        "forced",
        "group",
        "is_beam",
        "key",
        "max_total",
        "min_total",
        "next_event_at",
        "num_chunks",
        "num_drafts",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "num_steps",
        "prompt_only",
        "registered",
        "request_id",
        "sample_index",
        "sampling",
        "seq_id",
        "siblings",
        "state",
        "stop_ids",
        "table",
        "token_ids",
        "told_first",
        "ttft_s",
        "turn",
    )

    def __init__(
        self, seq_id: int, group: RequestState, sample_index: int, table: BlockTable, max_model_len: int
    ) -> None:
        request = group.request
        sampling = request.sampling
        outputs = request.output_token_ids
        output = outputs[sample_index] if sample_index < len(outputs) else ()
        self.seq_id = seq_id
        self.request_id = request.request_id
        self.group = group
        self.sample_index = sample_index
        self.sampling: Sampling = sampling
        self.table = table
        self.token_ids: list[int] = [*request.prompt_token_ids, *output]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_planned = 0
        max_tokens = sampling.max_tokens if sampling.max_tokens is not None else max_model_len
        self.max_total = min(self.num_prompt + max_tokens, max_model_len)
        self.prompt_only = request.prompt_only
        if self.prompt_only:
            self.max_total = self.num_prompt
        self.is_beam = sampling.use_beam_search
        self.forced: tuple[int, ...] = ()  # of a beam: replaces what its worker sampled last
        self.min_total = self.num_prompt + sampling.min_tokens
        self.stop_ids = frozenset(sampling.eos_token_ids) | frozenset(sampling.stop_token_ids)
        self.state = SequenceState.WAITING
        self.epoch = 0  # + 1 at each admission after the first; ENDED_EPOCH when over
        self.registered = False  # the worker has had a NewSeq of this epoch
        # To be forked when all of the prompt but its last token is planned.
        self.siblings: list[Sequence] = []
        self.key: SortKey = ()  # rank: smaller comes first
        self.num_preemptions = 0
        self.num_steps = 0  # steps that computed something of it
        self.num_chunks = 0  # of these, steps that computed known tokens
        self.num_drafts = 0  # tokens that its worker proposes for the next step
        # Orders decodes that do not all fit a step: the one that waited longest comes first.
        self.turn = 0
        self.ttft_s: float | None = None  # arrival to first token
        self.told_first = False  # the first token since its last admission is out
        # A decode below this position appends one token and does nothing else; see `SchedulerState.find_next_event`.
        self.next_event_at = 0

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

    def timing(self) -> SampleTiming:
        """Return what the events of its first token and of its end tell."""
        group = self.group
        return SampleTiming(
            group.num_cached_tokens,
            self.num_preemptions,
            group.queued_s,
            self.ttft_s or 0.0,
            self.num_steps,
            self.num_chunks,
            group.cache_miss,
        )


class RequestState:
    """What the n sequences of a request have in common."""

    __slots__ = (
        "admitted",
        "beams",
        "cache_miss",
        "num_cached_tokens",
        "num_scored",
        "predicted_s",
        "queued_s",
        "request",
        "sequences",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences: list[Sequence] = []  # those not ended, by sample index
        self.admitted = False
        self.beams: BeamSearch[Sequence] | None = None
        self.num_cached_tokens = 0
        self.cache_miss = ""  # see `cache_miss`
        self.queued_s = 0.0
        self.predicted_s = 0.0  # arrival to first token, as predicted at its arrival; 0: not predicted
        # Prompt tokens whose log-probabilities were sent; a request with output has had them all.
        self.num_scored = len(request.prompt_token_ids) - 1 if any(request.output_token_ids) else 0

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
