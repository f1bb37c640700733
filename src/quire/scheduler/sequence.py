"""`Sequence` and `RequestState`: the scheduler's own mutable state. Nobody else sees them.

    token_ids    │ prompt ……………………………… │ output ……… │ pending      pending: sampled by steps in flight, ids unknown
                 0                num_prompt      len(token_ids)  num_total        ≤ max_total
    planned      │ rows computed or in flight …… │ num_planned                    ≤ row_limit = max_total − 1

Every sequence chases `num_total` with `num_planned`; the last token is never computed, except where the prompt is all
there is (`prompt_only`: row_limit = max_total = num_prompt).
"""

from __future__ import annotations

from enum import Enum

from quire.cache.block_table import BlockTable
from quire.request import Request, Sampling, TokenEvent
from quire.scheduler.beam import BeamSearch
from quire.step import SeqResult

SortKey = tuple[float, ...]
ENDED_EPOCH = -1


class SequenceState(Enum):
    ATTACHED = "attached"  # a sibling (n > 1) that waits to be forked from its leader
    PARKED = "parked"  # one of a request's beams, that has nothing to compute now
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """One of the n outputs of a request."""

    __slots__ = (
        "epoch",
        "event_tail",
        "forced",
        "group",
        "is_beam",
        "key",
        "last_event",
        "last_result",
        "max_total",
        "min_total",
        "num_chunks",
        "num_planned",
        "num_preemptions",
        "num_prompt",
        "num_steps",
        "num_tokens_then",
        "num_total",
        "prompt_only",
        "quiet_until",
        "registered",
        "request_id",
        "row_limit",
        "sample_index",
        "sampling",
        "seq_id",
        "siblings",
        "state",
        "stop_ids",
        "table",
        "token_ids",
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
        self.num_total = len(self.token_ids)
        self.num_planned = 0
        max_tokens = sampling.max_tokens if sampling.max_tokens is not None else max_model_len
        self.max_total = min(self.num_prompt + max_tokens, max_model_len)
        self.row_limit = self.max_total - 1
        self.prompt_only = request.prompt_only
        if self.prompt_only:
            self.max_total = self.row_limit = self.num_prompt
        self.is_beam = sampling.use_beam_search
        if self.is_beam:
            self.row_limit = self.num_total  # what comes next is known when all beams have been looked at
        self.forced: tuple[int, ...] = ()  # of a beam: stands in for what its worker drew last
        self.min_total = self.num_prompt + sampling.min_tokens
        self.stop_ids = frozenset(sampling.eos_token_ids) | frozenset(sampling.stop_token_ids)
        self.state = SequenceState.WAITING
        self.epoch = 0  # + 1 at each admission after the first; ENDED_EPOCH when over
        self.registered = False  # the worker has had a NewSeq of this epoch
        self.siblings: list[
            Sequence
        ] = []  # to be forked when all of the prompt but its last token is planned
        self.key: SortKey = ()  # rank: smaller comes first
        self.num_preemptions = 0
        self.num_steps = 0  # that gave it something, up to its first token since its last admission
        self.num_tokens_then = 0  # tokens known at that; each since then took a step
        self.num_chunks = 0
        self.turn = (
            0  # orders decodes where they do not all fit a step: the longest without a row comes first
        )
        self.ttft_s: float | None = None  # arrival to first token
        self.event_tail: tuple[object, ...] = ()  # empty before its first token; see `outcome`
        self.quiet_until = 0  # see `find_quiet`
        self.last_result: SeqResult | None = None  # of those; and its event
        self.last_event: TokenEvent

    @property
    def target(self) -> int:
        """The token count to chase now: a leader stops before the last prompt token until it has forked."""
        return self.num_prompt - 1 if self.siblings else min(self.num_total, self.row_limit)

    def find_quiet(self) -> None:
        """It has its first token: find the token count below which a row needs no block and fills none.

        What is planned below is a row and no more, what is applied a token and no more, but for stop ids.
        """
        table = self.table
        self.quiet_until = 0 if table.unsent else min(table.due_at, table.capacity, self.row_limit)

    @property
    def num_steps_now(self) -> int:
        """Steps that gave it something; counted here, not in the loop that every token passes."""
        return self.num_steps + (len(self.token_ids) - self.num_tokens_then if self.event_tail else 0)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt :])


class RequestState:
    """What the n sequences of a request have in common."""

    __slots__ = (
        "admitted",
        "beams",
        "cache_miss",
        "num_cached_tokens",
        "num_scored",
        "queued_s",
        "request",
        "sequences",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences: list[Sequence] = []  # those not ended, by sample index
        self.admitted = False
        self.beams: BeamSearch | None = None
        self.num_cached_tokens = 0
        self.cache_miss = ""  # see `cache_miss`
        self.queued_s = 0.0
        # Rows of the prompt whose log-probabilities were sent; those who have output have them all.
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
