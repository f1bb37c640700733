"""`plan_capacity`: one question, every figure that `quire plan` prints.

`advise` chooses how to cut the model over devices, by a decision tree, with the reason for each decision:

- it fits on one device: replicas (dp) of one device, or more devices a replica where that serves more
- else tensor parallelism within one domain of links
- the weights fit in a domain, and K and V of one request do not: these are shared out by position (cp)
- it fits in no domain: pipeline stages over domains
- experts that are many and small: whole experts on each device (ep) instead of cut ones

Of the splits that hold the load and the SLO it takes the best by the `Objective`: the one that serves the most requests
per second with these devices (of nearly equal ones the quickest), the one with the least mean latency, or the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from quire.cost.efficiency import Efficiency, efficiency_of
from quire.cost.hardware import Hardware
from quire.cost.links import Links
from quire.cost.roofline import Roofline, decoder_work
from quire.cost.split import Split, Stored
from quire.metrics.engine_stats import QUIET_TIMES
from quire.modelspec import ModelSpec
from quire.slo import Slo
from quire.units import GIB
from quire.weight_forms import Form
from quire_lab.plan.candidates import candidates, striped
from quire_lab.plan.draft import Draft, Drafting
from quire_lab.plan.estimate import Cost, Estimate, Load, Replica
from quire_lab.plan.memory import MemoryPlan, plan_memory

Objective = Literal["throughput", "latency", "cost"]
BEST = {"throughput": "serves the most", "latency": "answers soonest", "cost": "costs the least"}
NEAR = 0.95  # share of the best rate or goodput that counts as much as it


@dataclass(frozen=True, slots=True)
class Option:
    """One way to cut the model, with its estimate; None: it does not fit."""

    split: Split
    memory: MemoryPlan
    estimate: Estimate | None
    capacity: float = 0.0  # requests/s of all replicas that these devices can serve

    def holds(self, slo: Slo | None) -> bool:
        """Whether it fits, keeps up with the load, and meets ``slo``."""
        if self.estimate is None or self.estimate.saturated:
            return False
        return slo is None or self.estimate.meets(slo)

    @property
    def e2el_s(self) -> float:
        return self.estimate.e2el_s if self.estimate else math.inf

    @property
    def device_s(self) -> float:
        """Device-seconds that a served request costs: rent divides by them, whatever it is."""
        rate = self.estimate.rate * self.split.dp if self.estimate else 0.0
        return self.split.num_devices / rate if rate else math.inf


@dataclass(frozen=True, slots=True)
class Advice:
    """The chosen option (None: nothing fits), all options considered, and the reasons for the decisions."""

    chosen: Option | None
    options: tuple[Option, ...]
    reasons: tuple[str, ...]


def advise(
    spec: ModelSpec,
    hardware: Hardware,
    count: int,
    look: Callable[[Split], Option],
    slo: Slo | None,
    objective: Objective = "throughput",
    wanted: Split | None = None,
) -> Advice:
    """Walk the tree. ``look`` sizes a split and estimates one of its replicas under its share of the load.

    ``wanted``: the only split to consider.
    """
    options = tuple(look(split) for split in ([wanted] if wanted else candidates(spec, hardware, count)))
    one = options[0]
    subject = "One" if wanted is None else f"With {wanted}, one"
    reasons = [
        f"{subject} {hardware.title} has {one.memory.usable / GIB:.1f} GiB to use; the weights take "
        f"{one.memory.weights / GIB:.1f} GiB: " + _fits(one.memory)
    ]
    fitting = [o for o in options if o.memory.fits]
    inside = [o for o in options if o.split.pp == 1]
    if not wanted and not any(o.memory.fits for o in inside) and any(o.memory.kv_pool > 0 for o in inside):
        long = [look(split) for split in striped(spec, hardware, count)]
        fitting, options = [*(extra := [o for o in long if o.memory.fits]), *fitting], (*options, *long)
        reasons += _stripes(one.memory, extra)
    if not fitting:
        most = max(options, key=lambda o: o.split.tp * o.split.pp)
        where = f" Nor do they on {most.split.num_devices}: take" if wanted is None else " Take"
        reasons[0] += f"{where} more devices, larger ones, or --quantize."
        return Advice(None, options, _numbered(reasons))
    ranks = [o for o in fitting if o.split.pp == 1]
    within = [o for o in ranks if o.split.tp * o.split.cp <= hardware.domain]
    if wanted:
        chosen = fitting[0]
        does = "holds" if chosen.holds(slo) else "does not hold"
        reasons.append(f"{chosen.split}, as asked for, {does} {_wish(slo)}.")
        return Advice(chosen, options, _numbered(reasons))
    if within and within[0] is not one and within[0].split.cp == 1:
        reasons.append(
            f"Tensor parallelism within a domain of {hardware.domain} ({hardware.link or 'no link known'}): "
            f"TP{within[0].split.tp} is the least that fits."
        )
    if not within:
        rows = " or ranks over the network" * bool(ranks)
        reasons.append(f"No tensor parallelism within one domain fits: pipeline stages over domains{rows}.")
    pool = ranks if within else fitting
    holding = [o for o in pool if o.holds(slo)]
    first = pool[0]
    if objective == "cost":
        holding = [_fewest(option, look, slo) for option in holding]
    chosen = _best(holding or pool, objective)
    reasons += _turns(chosen, first, bool(holding), slo, objective)
    return Advice(chosen, options, _numbered(reasons))


def _fits(one: MemoryPlan) -> str:
    if one.kv_pool <= 0 or one.fits:
        return "they fit." if one.fits else "they do not fit."
    return (
        f"they fit, and a request's {one.kv_bytes_per_request / GIB:.1f} GiB of K and V do not beside them."
    )


def _stripes(one: MemoryPlan, fitting: Sequence[Option]) -> list[str]:
    if not fitting:
        return []
    first = fitting[0]
    ranks, share = first.split.tp * first.split.cp, first.memory.kv_request_share / GIB
    return [
        f"K and V of a request of {one.context:,} tokens take {one.kv_bytes_per_request / GIB:.1f} GiB, and no split "
        f"of heads has room for them: shared out by position, {ranks} devices have {share:.1f} GiB "
        f"each, beside {first.memory.weights / GIB:.1f} GiB of weights."
    ]


def _fewest(option: Option, look: Callable[[Split], Option], slo: Slo | None) -> Option:
    """Return ``option``, which holds, with the fewest replicas that still hold the load and the SLO."""
    low, best = 0, option
    while best.split.dp - low > 1:
        tried = look(replace(option.split, dp=(low + best.split.dp) // 2))
        low, best = (low, tried) if tried.holds(slo) else (tried.split.dp, best)
    return best


def _best(options: Sequence[Option], objective: Objective) -> Option:
    """Return the best option. Throughput: of those within `NEAR` of the most, the one with the shortest latency."""
    if objective == "latency":
        return min(options, key=lambda o: (o.e2el_s, -o.capacity))
    if objective == "cost":
        return min(options, key=lambda o: (o.device_s, o.e2el_s))
    most = max(option.capacity for option in options)
    near = [option for option in options if option.capacity >= most * NEAR]
    return min(near, key=lambda o: o.e2el_s)


def _numbered(reasons: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))


def _wish(slo: Slo | None) -> str:
    return f"the SLO ({slo})" if slo is not None else "the load"


def _turns(chosen: Option, first: Option, holds: bool, slo: Slo | None, objective: Objective) -> list[str]:
    reasons = []
    wish = _wish(slo)
    if not holds:
        reasons.append(f"No split of these devices holds {wish}; {chosen.split} comes closest.")
    elif chosen is not first and not first.holds(slo):
        reasons.append(
            f"{first.split} does not hold {wish}; of those that do {chosen.split} {BEST[objective]}."
        )
    elif objective != "throughput":
        reasons.append(
            f"{chosen.split}, {chosen.split.num_devices} in all, holds {wish} and {BEST[objective]}."
        )
    elif chosen is not first:
        assert chosen.estimate is not None
        assert first.estimate is not None
        more, quicker = chosen.capacity / first.capacity, first.estimate.e2el_s / chosen.estimate.e2el_s
        used, before = chosen.split.num_devices, first.split.num_devices
        devices = "with the same devices" if used == before else f"with {used} devices in place of {before}"
        reasons.append(
            f"{chosen.split} serves {more:.2f} times the requests of {first.split} {devices}, and "
            f"answers {quicker:.1f} times as fast."
        )
    if chosen.split.ep > 1:
        reasons.append(f"Experts lie whole, on {chosen.split.ep} devices: cut ones would be thin matrices.")
    if chosen.split.dp > 1:
        per_replica = chosen.split.tp * chosen.split.pp * chosen.split.cp
        reasons.append(f"{chosen.split.dp} replicas of {per_replica} device{'s' * (per_replica > 1)} each.")
    return reasons


@dataclass(frozen=True, slots=True)
class Question:
    """The model to serve, the devices, and the settings. ``load.rate`` is that of the whole service."""

    model: str
    spec: ModelSpec
    hardware: Hardware
    count: int
    load: Load
    max_num_batched_tokens: int
    max_num_seqs: int
    engine: str = "default"  # whose constants: one of `quire.cost.efficiency.ENGINES`
    slo: Slo | None = None
    precision: str = "bf16"
    own_precision: str = "bf16"  # the files' precision, served without --quantize
    stored: Stored | None = None  # formats of files that are here and served unchanged
    forms: tuple[Form, ...] = ()  # in which an engine on this CPU can hold files that are here
    kv_dtype: str = "bf16"
    context: int | None = None  # tokens per request; None: its prompt and output
    long_prefill_token_threshold: int = 0  # tokens per step for prompts longer than a step; 0: all
    objective: Objective = "throughput"
    split: Split | None = None  # the only one to consider; None: the best
    draft: Draft | None = None
    links: Links | None = None  # measured between ranks; None: the table's bandwidth

    @property
    def efficiency(self) -> Efficiency:
        """The constants between the roofline and the engine."""
        return efficiency_of(self.engine, self.hardware, self.spec, self.precision)

    def replica(self, split: Split, memory: MemoryPlan) -> Replica:
        """Return one replica of ``split``."""
        return Replica(self.steps(split), self.max_running(split), self.chunk, self._drafting(split))

    @property
    def chunk(self) -> int:
        """Tokens of a prompt in one step. Prompts are of one length: none is short, and those that fit are not cut."""
        long, most = self.long_prefill_token_threshold, self.max_num_batched_tokens
        is_cut = 0 < long < self.load.isl - self.load.prefix and self.load.isl > most
        return min(QUIET_TIMES * long, most) if is_cut else most

    def steps(self, split: Split) -> Roofline:
        """Return the step times of one replica of ``split``."""
        work = decoder_work(self.spec, self.precision, self.kv_dtype, split, self.stored)
        return Roofline(work, self.hardware, self.efficiency, self.links)

    def _drafting(self, split: Split) -> Drafting | None:
        if self.draft is None:
            return None
        if self.draft.spec is None:
            return Drafting(self.draft, self.spec, None)
        work = decoder_work(self.draft.spec, "bf16", self.kv_dtype, self.draft.split_under(split))
        efficiency = efficiency_of(self.engine, self.hardware, self.draft.spec, "bf16")
        return Drafting(self.draft, self.spec, Roofline(work, self.hardware, efficiency, self.links))

    def memory(self, split: Split, context: int | None = None) -> MemoryPlan:
        """Return the memory of one device of ``split``, with requests of ``context`` tokens."""
        context = context or self.context or self.load.isl + self.load.osl
        memory = plan_memory(
            self.spec, self.hardware, split, precision=self.precision, kv_dtype=self.kv_dtype, context=context,
            max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs,
            prefix=self.load.prefix, stored=self.stored,
        )  # fmt: skip
        return self.draft.beside(memory, split, self.kv_dtype, self.spec) if self.draft else memory

    def max_running(self, split: Split) -> int:
        """Return the requests that run at once: as many as fit halfway through their output, since blocks are
        allocated as sequences grow, and at most ``max_num_seqs``.
        """
        fit = self.memory(split, self.load.isl + self.load.osl // 2).max_requests
        return min(self.max_num_seqs, max(1, fit))

    def look(self, split: Split) -> Option:
        """Size one split and estimate its replica's share of the load. Replicas without a client are left out."""
        memory = self.memory(split)
        if not memory.fits:
            return Option(split, memory, None)
        replica = self.replica(split, memory)
        if self.load.rate is not None:
            share = replace(self.load, rate=self.load.rate / split.dp)
            return Option(split, memory, replica.open(share), replica.capacity(share, self.slo) * split.dp)
        clients = self.load.concurrency or 1
        if self.split is None and split.dp > clients:
            split = replace(split, dp=clients)
        estimate = replica.shared(self.load, split.dp)
        return Option(split, memory, estimate, estimate.rate * split.dp)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The answer. ``knee``: requests/s of all replicas up to which the SLO holds; None: no SLO, or no fit."""

    question: Question
    advice: Advice
    memory: MemoryPlan  # the chosen split's, or one device's where nothing fits
    knee: float | None
    cost: Cost | None
    devices_needed: int | None = None  # fewest over splits whose replicas hold the SLO

    @property
    def goodput(self) -> float | None:
        """Requests/s within the SLO: the offered rate, at most the knee."""
        if self.knee is None:
            return None
        rate = self.question.load.rate
        return self.knee if rate is None else min(rate, self.knee)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        q, chosen = self.question, self.advice.chosen
        estimate = chosen.estimate if chosen else None
        predicted: dict[str, Any] = {}
        if chosen and estimate:
            dp = chosen.split.dp
            predicted = {
                "ttft_ms": _number(estimate.ttft_s * 1e3),
                "tpot_ms": _number(estimate.tpot_s * 1e3),
                "e2el_ms": _number(estimate.e2el_s * 1e3),
                "prefill_ms": estimate.prefill_s * 1e3,
                "decode_step_ms": estimate.decode_s * 1e3,
                "running": estimate.concurrency * dp,
                "requests_per_s": estimate.rate * dp,
                "input_tokens_per_s": estimate.rate * dp * q.load.isl,
                "output_tokens_per_s": estimate.rate * dp * q.load.osl,
                "goodput_per_s": self.goodput,
                "knee_per_s": self.knee,
                "devices_needed": self.devices_needed,
                "saturated": estimate.saturated,
                "meets_slo": chosen.holds(q.slo),
                "max_batch": q.max_running(chosen.split),
            }
        split = chosen.split if chosen else None
        return {
            "model": q.model,
            "parameters": q.spec.num_params,
            "active_parameters": q.spec.num_active_params,
            "hardware": {"name": q.hardware.name, "title": q.hardware.title, "count": q.count},
            "weights": q.precision,
            "kv_dtype": q.kv_dtype,
            "memory": self.memory.as_dict(),
            "fits": chosen is not None,
            "split": {n: getattr(split, n) for n in ("tp", "pp", "ep", "cp", "dp")} if split else None,
            "reasons": list(self.advice.reasons),
            "load": asdict(q.load),
            "objective": q.objective,
            "draft": _draft_dict(q.draft) if q.draft else None,
            "slo": q.slo.as_dict() if q.slo else None,
            "predicted": predicted,
            "cost": asdict(self.cost) if self.cost else None,
        }


def _draft_dict(draft: Draft) -> dict[str, Any]:
    return {n: getattr(draft, n) for n in ("model", "acceptance", "num_drafts", "tokens_per_round")}


def _number(value: float) -> float | None:
    """Return infinity as None: JSON lacks it, and a queue that grows without bound has no latency."""
    return value if math.isfinite(value) else None


def choice(q: Question) -> Advice:
    """Choose a split for ``q``."""
    return advise(q.spec, q.hardware, q.count, q.look, q.slo, q.objective, q.split)


def plan_capacity(question: Question) -> CapacityPlan:
    """Answer ``question``."""
    q = question
    advice = choice(q)
    chosen = advice.chosen
    if chosen is None or chosen.estimate is None:
        return CapacityPlan(q, advice, q.memory(q.split or Split()), None, None)
    replica = q.replica(chosen.split, chosen.memory)
    knee = replica.knee(q.load, q.slo) * chosen.split.dp if q.slo is not None else None
    used = chosen.split.num_devices
    cost = Cost.from_estimate(q.hardware, used, chosen.split.dp, q.load, chosen.estimate)
    return CapacityPlan(q, advice, chosen.memory, knee, cost, _devices_needed(q, advice))


def _devices_needed(q: Question, advice: Advice) -> int | None:
    """Return the fewest devices over all splits, where each replica takes at most the rate of its knee."""
    if q.slo is None or q.load.rate is None:
        return None
    needed = []
    for option in advice.options:
        if option.memory.fits and (knee := q.replica(option.split, option.memory).knee(q.load, q.slo)):
            needed.append(math.ceil(q.load.rate / knee) * replace(option.split, dp=1).num_devices)
    return min(needed, default=None)
