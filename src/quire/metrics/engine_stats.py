"""`EngineStats`: the gauges (of now) and counters (since the start) of an engine; counts unless a unit is named.

`Histogram` is cheap enough for every chunk of every stream: one bisection and two additions per observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class Histogram:
    """Counts of observations at or below each bound. Belongs to one event loop."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds))
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one counts observations above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, observations ≤ bound) as Prometheus exposes them; the last bound is +Inf."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(bound, observations ≤ bound) of one more count than bounds."""
    names = [*(str(float(b)) for b in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of `step_tokens`


LONG_SHARE = 8  # long prompts have one token for so many of short ones
LEAST_LONG_SHARE = 16  # at least one in so many of the tokens they have alone
QUIET_TIMES = 4  # factor on the threshold while no short prompt came lately


def long_part(threshold: int, num_short: int, left: int) -> int:
    """Return what long prompts have of ``left`` tokens of a step in which short ones want ``num_short``."""
    most = min(left, threshold)
    return max(1, most // LEAST_LONG_SHARE, min(num_short, left) // LONG_SHARE) if num_short else most


def long_beside(threshold: int, num_short: int, num_long: int, chunk: int) -> int:
    """Return how many of ``num_long`` tokens of long prompts are computed until ``num_short`` of short ones are."""
    part = long_part(threshold, num_short, chunk)
    return min(num_long, -(-num_short // max(1, chunk - part)) * part) if threshold else num_long


@dataclass(frozen=True, slots=True)
class TtftStats:
    """What the engine's predictor knows of the way to a first token."""

    chunk_tokens: int = 1  # prompt tokens per step
    step_s: float = 0.0  # a step with a chunk, without the chunk's tokens
    token_s: float = 0.0  # per prompt token
    ratio: float = 1.0  # seconds measured / predicted, of the last requests
    long_tokens: int = 0  # tokens per step for all long prompts; 0: no limit

    def seconds(self, num_ahead: int, num_tokens: int, *, busy: bool, num_long: int = 0) -> float:
        """Return when a prompt of ``num_tokens`` behind ``num_ahead`` others' tokens has its first token.

        Half of the step in flight, if the engine is ``busy``, then as many steps as all these tokens take. Of
        ``num_long`` tokens of long prompts before it, a short one waits only for what each step has of them.
        """
        in_flight = min(self.chunk_tokens, max(1, num_ahead, min(num_long, self.long_tokens)))
        if num_tokens <= self.long_tokens:
            num_long = long_beside(self.long_tokens, num_ahead + num_tokens, num_long, self.chunk_tokens)
        todo = max(1, num_ahead + num_long + num_tokens)
        seconds = -(-todo // self.chunk_tokens) * self.step_s + todo * self.token_s
        if busy:
            seconds += (self.step_s + in_flight * self.token_s) / 2
        return max(seconds * self.ratio, 1e-6)


class LayerLoad(NamedTuple):
    """What the experts of a layer had in one interval, and what was done about it. Ratios are max / mean."""

    layer: int
    tokens: int  # times the experts per token
    of_experts: float
    of_ranks: float
    of_ranks_balanced: float  # the same tokens, with the experts' new places
    num_moved: int


class RankAbout(NamedTuple):
    """Where a rank runs, and what it holds."""

    host: str
    pid: int
    stage: int
    num_cores: int  # cores that it may use
    weight_bytes: int
    replays: bool = True  # steps are replayed, without Python between the calls


class RankStats(NamedTuple):
    """The ranks of an engine whose model is cut over several processes."""

    out_s: float = 0.0  # seconds with at least one step out
    busy_s: tuple[float, ...] = ()  # computing seconds of each rank
    bytes_sent: tuple[int, ...] = ()  # sent by each rank to the others
    experts: tuple[LayerLoad, ...] = ()  # in the last interval, where whole experts lie on ranks
    num_moved: int = 0  # experts, since the start
    about: tuple[RankAbout, ...] = ()
    peak_bytes: tuple[int, ...] = ()  # resident memory of each rank at its largest
    # Steps of each rank in these counts, which arrive after the answers.
    num_steps: tuple[int, ...] = ()

    @property
    def busy_shares(self) -> tuple[float, ...]:
        """Share of ``out_s`` in which each rank computed."""
        return tuple(busy_s / self.out_s if self.out_s else 0.0 for busy_s in self.busy_s)

    @property
    def bubbles(self) -> float:
        """Share of the ranks' time in which they had nothing to compute though a step was out."""
        shares = self.busy_shares
        return max(0.0, 1.0 - sum(shares) / len(shares)) if shares and self.out_s else 0.0


@dataclass(slots=True)
class EngineStats:
    """A snapshot of scheduler and cache: the scheduler's counters, and gauges. It crosses the process boundary."""

    order: str = ""  # in which sequences are admitted; "" until the first snapshot
    # Gauges
    num_running: int = 0
    num_waiting: int = 0
    num_in_flight: int = 0  # steps
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0  # in the prefix tree, used or idle
    num_idle_blocks: int = 0  # in the prefix tree and nowhere else: available on demand
    num_peak_blocks: int = 0  # held by sequences or steps at most, since the start
    num_unused_slots: int = 0  # slots without a token in running sequences' blocks
    kv_fragmentation: float = 0.0  # their share of these blocks' slots, 0…1
    ttft: TtftStats = TtftStats()
    num_chosen_drafts: int = 0  # per sequence and step, of mean acceptance
    draft_gain: float = 1.0  # predicted tokens/s with drafts over those without
    measured_draft_gain: float = 0.0  # the same as measured; 0: not known
    ranks: RankStats = field(default_factory=RankStats)
    num_state_slots: int = 0  # slots for recurrent states; 0: no layer has one
    num_live_states: int = 0  # slots that running sequences hold
    num_checkpoints: int = 0  # states kept at nodes of the prefix tree
    state_slot_bytes: int = 0
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)  # `StoreCounts` by name
    # Counters
    num_steps: int = 0
    num_requests: int = 0
    num_refused: int = 0
    num_finished: int = 0  # sequences that ended with stop or length
    num_aborted: int = 0
    num_expired: int = 0  # sequences that missed their deadline
    num_failed: int = 0
    num_prompt_tokens: int = 0  # in sequences admitted for the first time
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix tree
    num_computed_tokens: int = 0  # computed, again after a preemption too
    num_generated_tokens: int = 0
    num_chunks: int = 0  # prompt chunks that were not the last of their prompt
    num_preemptions: int = 0
    num_forks: int = 0
    num_zombie_results: int = 0  # dropped: their sequence had ended or was preempted
    num_failed_steps: int = 0
    num_restarted_readers: int = 0  # sequences that read from a failed step and started again
    num_evicted_blocks: int = 0
    num_checkpoint_loads: int = 0  # admissions that began from a checkpoint
    num_checkpoint_saves: int = 0
    num_evicted_checkpoints: int = 0
    num_loaded_blocks: int = 0  # loaded whole from another tier or peer
    num_stored_blocks: int = 0  # stored in another tier or peer
    num_failed_transfers: int = 0  # ended with an error, even if some blocks are whole
    num_reclaimed_blocks: int = 0  # blocks that nothing referred to, and that were not free
    num_recomputed: int = 0  # sequences computed again after bad logits or a fault
    num_recompute_failed: int = 0  # failed again at the same token
    num_verifications: int = 0  # verifications of drafts, per sequence and step
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0  # accepted drafts
    accepted_at: tuple[int, ...] = ()  # the same by position of the draft
    busy_s: float = 0.0  # seconds with a step in computation
    unshared_s: float = 0.0  # spent on sequences that ended before a step was applied
    kv_block_s: float = 0.0  # block-seconds of ended sequences
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)  # steps by their tokens, at most each bound

    @property
    def uncached_share(self) -> float:
        """Share of prompt tokens that had to be computed."""
        known = self.num_prompt_tokens
        return 1.0 - self.num_cached_tokens / known if known else 1.0

    @property
    def kv_usage(self) -> float:
        """Fraction of the blocks that sequences or steps hold."""
        num_used = self.num_blocks - self.num_free_blocks - self.num_idle_blocks
        return num_used / self.num_blocks if self.num_blocks else 0.0
