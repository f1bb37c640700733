"""How to cut a model over devices: a decision tree, with the reason for each decision.

1  it fits on one device, and holds the SLO there     → replicas (dp), one device each
2  else tensor parallelism, within one domain of links: the fewest ways that fit, then that hold the SLO
3  it fits in no domain                               → pipeline stages over domains
4  experts that are many and small                    → whole experts on each device (ep) instead of cut ones
5  what is left over                                  → replicas (dp)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.modelspec import ModelSpec
from quire.plan.estimate import Estimate
from quire.plan.hardware import GIB, Hardware
from quire.plan.memory import MemoryPlan
from quire.plan.split import Split
from quire.workload.slo import Slo


@dataclass(frozen=True, slots=True)
class Option:
    """One way to cut the model, with its estimate; None: it does not fit."""

    split: Split
    memory: MemoryPlan
    estimate: Estimate | None

    def holds(self, slo: Slo | None) -> bool:
        """Whether it fits, keeps up with the load, and meets ``slo``."""
        if self.estimate is None or self.estimate.saturated:
            return False
        return slo is None or self.estimate.meets(slo)


@dataclass(frozen=True, slots=True)
class Advice:
    """The chosen option (None: nothing fits), all options considered, and the reasons for the decisions."""

    chosen: Option | None
    options: tuple[Option, ...]
    reasons: tuple[str, ...]


def candidates(spec: ModelSpec, hardware: Hardware, count: int) -> list[Split]:
    """Return the splits of at most ``count`` devices to consider, those with the fewest devices per replica first.

    ``tp`` is a power of 2 that divides the query heads and stays within a domain of links.
    """
    heads = min(layer.attention.num_heads for layer in spec.layers)
    found = []
    tp = 1
    while tp <= min(count, hardware.domain) and heads % tp == 0:
        stages = 1
        while tp * stages <= count and stages <= spec.num_layers:
            found.append(Split(tp=tp, pp=stages, ep=_experts(spec, tp), dp=count // (tp * stages)))
            stages *= 2
        tp *= 2
    return sorted(found, key=lambda s: (s.tp * s.pp, s.pp))


def _experts(spec: ModelSpec, tp: int) -> int:
    """Whether experts stay whole: each device gets at least 4 of them. Cut experts would be thin matrices."""
    moe = next((layer.mlp.moe for layer in spec.layers if layer.mlp.moe is not None), None)
    return tp if moe is not None and moe.num_experts % tp == 0 and moe.num_experts // tp >= 4 else 1


def advise(
    spec: ModelSpec,
    hardware: Hardware,
    count: int,
    look: Callable[[Split], Option],
    slo: Slo | None,
) -> Advice:
    """Walk the tree. ``look`` sizes a split and estimates one of its replicas under its share of the load."""
    options = tuple(look(split) for split in candidates(spec, hardware, count))
    one = options[0]
    reasons = [
        f"1. One {hardware.title} has {one.memory.usable / GIB:.1f} GiB to use; the weights take "
        f"{one.memory.weights / GIB:.1f} GiB: " + ("they fit." if one.memory.fits else "they do not fit.")
    ]
    fitting = [o for o in options if o.memory.fits]
    if not fitting:
        most = max(options, key=lambda o: o.split.tp * o.split.pp)
        reasons.append(
            f"   Nor do they on {most.split.num_devices}: take more devices, larger ones, or --quantize."
        )
        return Advice(None, options, tuple(reasons))
    within = [o for o in fitting if o.split.pp == 1]
    if within and within[0] is not one:
        reasons.append(
            f"2. Tensor parallelism within a domain of {hardware.domain} ({hardware.link or 'no link known'}): "
            f"TP{within[0].split.tp} is the least that fits."
        )
    if not within:
        reasons.append("3. No tensor parallelism within one domain fits: pipeline stages over domains.")
    pool = within or fitting
    holding = [o for o in pool if o.holds(slo)]
    chosen = (
        holding[0]
        if holding
        else max(pool, key=lambda o: o.estimate.rate * o.split.dp if o.estimate else 0.0)
    )
    reasons += _turns(chosen, pool[0], bool(holding), slo)
    return Advice(chosen, options, tuple(reasons))


def _turns(chosen: Option, first: Option, holds: bool, slo: Slo | None) -> list[str]:
    reasons = []
    wish = f"the SLO ({slo})" if slo is not None else "the load"
    if chosen is not first and holds:
        reasons.append(f"   {first.split} does not hold {wish}: TP{chosen.split.tp} is the least that does.")
    elif not holds:
        reasons.append(f"   No split of these devices holds {wish}; {chosen.split} comes closest.")
    if chosen.split.ep > 1:
        reasons.append(
            f"4. Experts lie whole, on {chosen.split.ep} devices: cut ones would be thin matrices."
        )
    if chosen.split.dp > 1:
        reasons.append(f"5. {chosen.split.dp} replicas of {chosen.split.tp * chosen.split.pp} devices each.")
    return reasons
