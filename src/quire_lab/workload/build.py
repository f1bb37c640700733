"""A `Workload` from a trace, or from distributions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from quire.errors import ConfigError
from quire_lab.workload.distributions import Arrivals, Fixed, Lengths, mean_rate, replay
from quire_lab.workload.request import Workload, WorkloadRequest
from quire_lab.workload.traces import Trace


def from_trace(
    trace: Trace,
    *,
    limit: int | None = None,
    max_model_len: int | None = None,
    arrivals: Arrivals | None = None,
    time_scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Return the first ``limit`` rows that fit ``max_model_len`` (prompt and output), at the trace's times from 0 on.

    ``time_scale`` stretches those times: 2 halves the load. ``arrivals`` replaces them. The requests of a trace
    without times arrive all at once, unless ``arrivals`` is given.

    Raises:
        ConfigError: no row remains, or a limit or scale is out of range.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit!r} must be at least 1 request")
    refused: Counter[str] = Counter()
    rows: list[WorkloadRequest] = []
    # The row at which the limit is reached: later rows are neither used nor refused.
    end = math.inf
    for row in trace.rows:
        if limit is not None and len(rows) == limit:
            end = row.index
            break
        if max_model_len is not None and row.num_tokens > max_model_len:
            refused["longer than the context"] += 1
            continue
        rows.append(row)
    refused.update(reason for number, reason in trace.refusals if number < end)
    if not rows:
        raise ConfigError(f"trace {trace.name}: no row is left; refused: {dict(refused)}")
    if arrivals is not None:
        how, times = str(arrivals), _session_times(rows, arrivals, seed)
    elif trace.timed:
        how, times = f"time × {time_scale:g}", replay([r.arrival_s for r in rows], time_scale)
    else:
        how, times = "all at once", [0.0] * len(rows)
    return Workload(_in_order(rows, times), dict(refused), f"{trace.name}, {how}")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A workload from distributions. Lengths in tokens."""

    num_requests: int
    # Of a later turn: the tokens that the user adds.
    prompt_lengths: Lengths = field(default_factory=lambda: Fixed(512))
    output_lengths: Lengths = field(default_factory=lambda: Fixed(128))
    arrivals: Arrivals = field(default_factory=Arrivals)  # first turns
    prefix_length: int = 0  # tokens of a shared prefix before the prompt's own
    num_prefixes: int = 1  # number of different prefixes, of equal probability
    num_turns: int = 1  # per session; ``num_requests`` counts turns
    think_s: float = 0.0  # mean seconds from answer to next turn, exponential

    def __post_init__(self) -> None:
        for name, low in (("num_requests", 1), ("prefix_length", 0), ("num_prefixes", 1), ("num_turns", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be at least {low}")
        if not 0.0 <= self.think_s < math.inf:
            raise ConfigError(f"think_s = {self.think_s!r} must be 0 or more seconds")

    def build(self, seed: int, max_model_len: int | None = None) -> Workload:
        """Return random requests. A turn that exceeds ``max_model_len`` ends its session and counts as refused."""
        rng = Random(f"workload {seed}")
        num_sessions = math.ceil(self.num_requests / self.num_turns)
        starts = self.arrivals.times(num_sessions, seed)
        added = self.prompt_lengths.draw(self.num_requests, rng)
        outputs = self.output_lengths.draw(self.num_requests, rng)
        refused: Counter[str] = Counter()
        requests: list[WorkloadRequest] = []
        for session, start_s in enumerate(starts):
            context, prefix = self.prefix_length, rng.randrange(self.num_prefixes)
            first = session * self.num_turns
            for i in range(first, min(first + self.num_turns, self.num_requests)):
                request = WorkloadRequest(
                    arrival_s=start_s,
                    num_prompt_tokens=context + added[i],
                    num_output_tokens=outputs[i],
                    hash_ids=(f"prefix {prefix}",) if self.prefix_length else (),
                    hash_block_size=self.prefix_length,
                    session=f"{session}" if self.num_turns > 1 else None,
                    turn=i - first,
                    think_s=rng.expovariate(1.0 / self.think_s) if self.think_s and i > first else 0.0,
                )
                if max_model_len is not None and request.num_tokens > max_model_len:
                    refused["longer than the context"] += min(first + self.num_turns, self.num_requests) - i
                    break
                context = request.num_tokens
                requests.append(request)
        if not requests:
            raise ConfigError(f"no request fits the context of {max_model_len} tokens")
        return Workload(_in_order(requests, [r.arrival_s for r in requests]), dict(refused), str(self))

    def __str__(self) -> str:
        parts = [f"prompt {self.prompt_lengths}", f"output {self.output_lengths}", str(self.arrivals)]
        if self.prefix_length:
            parts.append(f"{self.num_prefixes} shared prefixes of {self.prefix_length}")
        if self.num_turns > 1:
            parts.append(f"{self.num_turns} turns")
        return ", ".join(parts)


def at_rate(workload: Workload, rate: float) -> Workload:
    """Return the same requests with their arrival times stretched to a mean of ``rate`` per second.

    A Poisson process stays one; a trace keeps its bursts.

    Raises:
        ConfigError: the requests arrive all at once, so there is nothing to stretch.
    """
    starts = [r.arrival_s for r in workload.requests if r.turn == 0]
    now = mean_rate(starts)
    if math.isinf(now) or not 0.0 < rate < math.inf:
        raise ConfigError(f"requests that arrive at {now:g} per second cannot be stretched to {rate:g}")
    scale = now / rate
    requests = tuple(replace(r, arrival_s=r.arrival_s * scale) for r in workload.requests)
    return replace(workload, requests=requests, source=f"{workload.source}, at {rate:.4g}/s")


def with_cancellations(workload: Workload, share: float, seed: int) -> Workload:
    """Let the clients of a ``share`` (0…1) of the requests leave at a uniformly random place of their answers."""
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"cancel = {share!r} must be a share in 0…1")
    rng = Random(f"cancellations {seed}")
    requests = []
    for request in workload.requests:
        leaves, part = rng.random() < share, rng.random()
        after = max(1, math.ceil(part * request.num_output_tokens)) if leaves else None
        requests.append(replace(request, cancel_after_tokens=after))
    return replace(workload, requests=tuple(requests))


def _session_times(rows: Sequence[WorkloadRequest], arrivals: Arrivals, seed: int) -> list[float]:
    """Return the arrival times of the rows: one per session (for all its turns) or single request."""
    keys = [r.session if r.session is not None else i for i, r in enumerate(rows)]
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    times = arrivals.times(len(order), seed)
    return [times[order[key]] for key in keys]


def _in_order(rows: Sequence[WorkloadRequest], times: Sequence[float]) -> tuple[WorkloadRequest, ...]:
    placed = sorted((time, i) for i, time in enumerate(times))
    return tuple(replace(rows[i], arrival_s=t, index=index) for index, (t, i) in enumerate(placed))
