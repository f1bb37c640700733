"""TTFT, TPOT and throughput of a load from step times, in closed form. `quire simulate` runs the scheduler instead.

With td the seconds of a decode step of b sequences, and tp what one prompt adds to the steps that compute it:

    closed loop, b clients     E2EL = osl · td(b) + b · tp                    (while one decodes, b prompts pass)
    open loop, rate r          TPOT = td(b) / (1 − r · tp),  b = r · osl · TPOT   (prompts take the share r · tp)

The first token comes after the step in flight, the prompts ahead, and the request's own prompt. In a closed loop
requests that end together return together, so more prompts are ahead (`Efficiency.ahead_s`). In an open loop
requests wait as in an M/D/1 queue: r · tp² / (2 (1 − r · tp)). Tokens cost the rent of the devices over their
throughput, shared between input and output by time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.cost.cost_model import StepFeatures, StepTime, chunk_pairs
from quire.cost.efficiency import IDEAL
from quire.cost.hardware import Hardware
from quire.cost.roofline import Roofline
from quire.slo import Slo
from quire_lab.plan.draft import Drafting
from quire_lab.plan.laws import MILLION


@dataclass(frozen=True, slots=True)
class Load:
    """Mean lengths in tokens; ``rate`` is that of one replica."""

    isl: int
    osl: int
    rate: float | None = None  # requests/s, open loop
    concurrency: int | None = None  # closed loop
    prefix: int = 0  # first tokens of every prompt that are in the cache


@dataclass(frozen=True, slots=True)
class Estimate:
    """The means of one replica, in seconds."""

    ttft_s: float
    tpot_s: float
    e2el_s: float
    concurrency: float  # requests running
    rate: float  # requests completed per second
    prefill_s: float  # tp
    decode_s: float  # td
    saturated: bool = False  # arrivals exceed capacity: the queue grows forever

    def meets(self, slo: Slo) -> bool:
        """Whether the means meet ``slo`` and the queue does not grow."""
        return not self.saturated and slo.met(self.ttft_s, self.tpot_s, self.e2el_s)


class Replica:
    """Estimates for one replica from its step times, the number of requests that fit, and the chunk size."""

    def __init__(
        self,
        steps: StepTime,
        max_requests: int,
        max_num_batched_tokens: int,
        drafting: Drafting | None = None,
    ) -> None:
        """``steps``: a roofline, or measured step times, to which nothing is added outside of the steps."""
        self.steps = steps
        self._stages = steps.work.split.pp if isinstance(steps, Roofline) else 1
        self._efficiency = steps.efficiency if isinstance(steps, Roofline) else IDEAL
        self.max_requests = max(1, max_requests)
        self.chunk = max_num_batched_tokens
        self.drafting = drafting
        self._known: dict[tuple[str, int, int, int, int], float] = {}  # seconds by (what, decodes, lengths)

    def decode_s(self, b: float, load: Load) -> float:
        """Return the seconds of a step of ``b`` decodes halfway through their output; each stage holds a part.

        With drafts: the seconds of a round by its tokens.
        """
        seqs, context = self._decodes(b, load)
        key = ("decode", seqs, load.isl, load.osl, load.prefix)
        if key not in self._known:
            self._known[key] = self._decode_s(seqs, context)
        return self._known[key]

    def _decode_s(self, seqs: int, context: int) -> float:
        verify = self.steps.seconds(self._step(seqs, context))
        if self.drafting is None:
            return verify
        return (self.drafting.propose_s(seqs, context) + verify) / self.drafting.tokens_per_round(seqs)

    def _decodes(self, b: float, load: Load) -> tuple[int, int]:
        """Return the sequences that decode together, and the keys that they read."""
        seqs = max(1, math.ceil(b / self._stages))
        return seqs, round(seqs * (load.isl + load.osl / 2))

    def _step(self, seqs: int, context: int) -> StepFeatures:
        if self.drafting is None:
            return StepFeatures(seqs, seqs, seqs, context, 0, 0)
        drafts, some = self.drafting.draft.num_drafts, self.drafting.num_drafted(seqs)
        rows = seqs + some * drafts
        return StepFeatures(rows, seqs, rows, context, 0, 0, drafts * context * some // seqs)

    def prefill_s(self, b: float, load: Load) -> float:
        """Return the seconds that one prompt adds to steps with ``b`` decodes."""
        seqs, context = self._decodes(b, load)
        key = ("prefill", seqs, load.isl, load.osl, load.prefix)
        if key not in self._known:
            self._known[key] = self._prefill_s(self._step(seqs, context), load)
        return self._known[key]

    def _prefill_s(self, decodes: StepFeatures, load: Load) -> float:
        rows, seqs, logits, context, *_, draft_pairs = decodes
        alone = self.steps.seconds(decodes)
        total = 0.0
        for start in range(load.prefix, load.isl, self.chunk):
            n = min(self.chunk, load.isl - start)
            keys, pairs = start + n, chunk_pairs(start, n)
            step = StepFeatures(n + rows, seqs + 1, logits + 1, context, keys, pairs, draft_pairs)
            total += self.steps.seconds(step) - alone
            if self.drafting is not None:
                total += self.drafting.prompt_s(StepFeatures(n, 1, 1, 0, keys, pairs))
        return total / self._stages

    def closed(self, load: Load) -> Estimate:
        """Estimate ``load.concurrency`` clients with one request each; requests beyond the memory wait."""
        assert load.concurrency is not None
        e = self._efficiency
        b = min(load.concurrency, self.max_requests)
        td, tp = self.decode_s(b, load), self.prefill_s(b, load)
        e2el = load.osl * td + b * tp
        ttft = e.first_s + td + e.ahead_s(tp, td, b, load.isl, load.osl)
        tpot = max(td, (e2el - ttft) / max(1, load.osl - 1))
        ttft += (load.concurrency - b) / b * e2el
        e2el_in_all = ttft + (load.osl - 1) * tpot
        return Estimate(ttft, tpot, e2el_in_all, b, load.concurrency / e2el_in_all, tp, td)

    def shared(self, load: Load, replicas: int) -> Estimate:
        """Return the means per replica where ``load.concurrency`` clients are spread over ``replicas``.

        Some replicas have one client more than the others; latencies are those of the mean request.
        """
        assert load.concurrency is not None
        few, num_more = divmod(load.concurrency, replicas)
        counts = ((few, replicas - num_more), (few + 1, num_more))
        parts = [(self.closed(replace(load, concurrency=c)), n) for c, n in counts if c and n]
        if len(parts) == 1 and parts[0][1] == replicas:
            return parts[0][0]
        rate = sum(n * part.rate for part, n in parts)

        def mean(value: Callable[[Estimate], float]) -> float:
            return sum(n * part.rate * value(part) for part, n in parts) / rate

        return Estimate(
            ttft_s=mean(lambda e: e.ttft_s),
            tpot_s=mean(lambda e: e.tpot_s),
            e2el_s=mean(lambda e: e.e2el_s),
            concurrency=sum(n * part.concurrency for part, n in parts) / replicas,
            rate=rate / replicas,
            prefill_s=mean(lambda e: e.prefill_s),
            decode_s=mean(lambda e: e.decode_s),
        )

    def open(self, load: Load) -> Estimate:
        """Estimate ``load.rate`` requests/s at random times."""
        assert load.rate is not None
        top = self.max_requests
        if self._rate_at(top, load) < load.rate:
            td, tp = self.decode_s(top, load), self.prefill_s(top, load)
            rate = self._rate_at(top, load)
            tpot = td / max(1e-9, 1 - rate * tp)
            return Estimate(math.inf, tpot, math.inf, top, rate, tp, td, saturated=True)
        low, high = 0.0, float(top)  # number running at which completions match arrivals
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self._rate_at(middle, load) >= load.rate else (middle, high)
        b = high
        td, tp = self.decode_s(b, load), self.prefill_s(b, load)
        busy = min(0.999, load.rate * tp)
        tpot = td / (1 - busy)
        wait = load.rate * tp * tp / (2 * (1 - busy)) + tpot / 2
        ttft = self._efficiency.first_s + wait + tp + td
        return Estimate(ttft, tpot, ttft + (load.osl - 1) * tpot, b, load.rate, tp, td)

    def capacity(self, load: Load, slo: Slo | None) -> float:
        """Return the most requests/s at random times, within ``slo``."""
        return self._rate_at(self.max_requests, load) if slo is None else self.knee(load, slo)

    def knee(self, load: Load, slo: Slo) -> float:
        """Return the highest rate, in requests/s, at which `open` meets ``slo``; 0 where none does."""
        low, high = 0.0, self._rate_at(self.max_requests, load)
        for _ in range(40):
            middle = (low + high) / 2
            good = self.open(replace(load, rate=middle)).meets(slo)
            low, high = (middle, high) if good else (low, middle)
        return low if low > 1e-6 else 0.0

    def _rate_at(self, b: float, load: Load) -> float:
        """Return the requests/s completed with ``b`` running: b / E2EL."""
        if b <= 0:
            return 0.0
        return b / (load.osl * self.decode_s(b, load) + b * self.prefill_s(b, load))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost in USD; None where the table has no price."""

    usd_per_hour: float | None
    usd_per_million_input: float | None
    usd_per_million_output: float | None
    price_source: str

    @classmethod
    def from_estimate(
        cls, hardware: Hardware, num_devices: int, replicas: int, load: Load, estimate: Estimate
    ) -> Cost:
        """Return the cost of ``replicas`` at ``estimate``: prompts take the share rate · tp of busy time."""
        price = hardware.price
        if price is None:
            return cls(None, None, None, "unknown")
        usd_per_s = price.usd * num_devices / 3600
        rate = estimate.rate * replicas
        decode_s = load.osl * estimate.decode_s / max(1.0, estimate.concurrency)  # device time per request
        share = estimate.prefill_s / (estimate.prefill_s + decode_s)
        per_request = usd_per_s / rate if rate else float("inf")
        return cls(
            usd_per_hour=price.usd * num_devices,
            usd_per_million_input=per_request * share / load.isl * MILLION,
            usd_per_million_output=per_request * (1 - share) / load.osl * MILLION,
            price_source=f"{price.source}, {price.date}",
        )
