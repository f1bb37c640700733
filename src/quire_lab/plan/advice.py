"""What to turn on next, and what it brings: a plan made again with one thing changed, in the order of the effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quire.args import defaults
from quire.cost.fidelity import KV_CODES, MEASURED
from quire.cost.presets import preset_spec, presets
from quire.cost.split import Split
from quire.modelspec import ModelSpec
from quire_lab.bench.args import SimulateArgs
from quire_lab.plan.capacity import CapacityPlan, Objective, Option, Question, choice
from quire_lab.plan.draft import Draft

LEAST = 1.02  # effects below are not worth a line
DRAFTS = defaults(SimulateArgs)["num_drafts"]  # a round, of the draft model that is suggested
ACCEPTANCE = 0.7  # taken for a draft model of the same vocabulary
LOOKED_UP = 0.3  # taken for n-grams
SMALLER = 8  # a draft model has at most this share of the weights


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to change. ``effect``: how many times better the objective gets; infinity: what failed now works."""

    what: str  # with the assumption that it rests on
    flag: str  # a flag of `quire plan`
    effect: float
    # The objective: requests/s, seconds, or device-seconds per request; None: no figure.
    before: float | None
    after: float | None
    holds: bool  # the load and the SLO, afterwards

    def as_dict(self) -> dict[str, Any]:
        names = ("what", "flag", "before", "after", "holds")
        return {n: getattr(self, n) for n in names} | {
            "effect": self.effect if math.isfinite(self.effect) else None
        }


def advice(plan: CapacityPlan) -> list[Step]:
    """Return the changes that improve the objective of ``plan`` by 2 % or more, those with the largest effect first.

    Each is planned like the question itself. Changes that hold the load and the SLO come before those that do not,
    where the plan itself does not hold them.
    """
    q, now = plan.question, plan.advice.chosen
    holds_now = now is not None and now.holds(q.slo)
    steps = []
    for what, flag, changed in _changes(q, now):
        then = choice(changed).chosen
        if then is None:
            continue
        holds = then.holds(q.slo)
        before, after = _score(now, q.objective), _score(then, q.objective)
        effect = _effect(before, after, q.objective)
        if effect >= LEAST and (holds or not holds_now):
            steps.append(Step(what, flag, effect, _finite(before), _finite(after), holds))
    return sorted(steps, key=lambda s: (not s.holds, -s.effect))


def _score(option: Option | None, objective: Objective) -> float:
    """Return the figure of the objective: capacity in requests/s, E2EL in seconds, or device-seconds a request."""
    if objective == "throughput":
        return option.capacity if option else 0.0
    if objective == "latency":
        return option.e2el_s if option else math.inf
    return option.split.num_devices / option.capacity if option and option.capacity else math.inf


def _effect(before: float, after: float, objective: Objective) -> float:
    better, worse = (after, before) if objective == "throughput" else (before, after)
    if better == worse:
        return 1.0
    return better / worse if worse and math.isfinite(worse) else (math.inf if better > worse else 0.0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _changes(q: Question, now: Option | None) -> Iterator[tuple[str, str, Question]]:
    """Yield (what, flag, question) with one thing changed each."""
    plain = ("bf16", "fp16", "fp32")
    wide = q.precision in plain
    is_cpu = q.hardware.kind == "cpu"
    eight = "fp8" if "fp8" in q.hardware.flops else "int8"
    if _rounds(q, eight) and wide:
        lost = f", {MEASURED['int8']} nats from fp32" if is_cpu else ""
        yield (
            f"weights in 8 bits ({eight}){lost}",
            f"--quantize {eight}",
            replace(q, precision=eight, stored=None),
        )
    if _rounds(q, "int4") and (wide or q.precision in ("fp8", "int8")):
        lost = f", {MEASURED['int4']} nats from fp32" if is_cpu else ""
        yield f"weights in 4 bits (int4){lost}", "--quantize int4", replace(q, precision="int4", stored=None)
    if q.kv_dtype == "bf16" and _caches_in_8_bits(q.spec):
        more = f", {KV_CODES['int8']} nats more from fp32" if eight == "int8" else ""
        yield f"K and V in 8 bits ({eight}){more}", f"--kv-dtype {eight}", replace(q, kv_dtype=eight)
    if not q.load.prefix and q.load.isl > 1:
        shared = q.load.isl // 2
        what = f"a prefix cache, if half of each prompt ({shared:,} tokens) is in it"
        yield what, f"--prefix {shared}", replace(q, load=replace(q.load, prefix=shared))
    if q.draft is None:
        yield _drafted(q)
    yield from _sizes(q, now)


def _rounds(q: Question, kind: str) -> bool:
    """Whether an engine rounds the weights to ``kind``: it rounds none that a file holds rounded."""
    if q.forms:
        return any(form.flag == f"--quantize {kind}" for form in q.forms)
    return q.own_precision in ("bf16", "fp16", "fp32")


def _caches_in_8_bits(spec: ModelSpec) -> bool:
    """Whether an engine holds K and V of ``spec`` in 8 bits: not latents, nor beside fp32, nor heads of an odd size."""
    return spec.dtype != "float32" and not any(a.is_mla or a.head_dim % 2 for a in spec.attentions)


def _drafted(q: Question) -> tuple[str, str, Question]:
    """Return speculation with the largest preset of the same vocabulary that is small enough, or with n-grams."""
    model, spec = "ngram", None
    for name in presets():
        one = preset_spec(name)
        small = one.num_params * SMALLER <= q.spec.num_params and one.vocab_size == q.spec.vocab_size
        small = small and not one.state_layers
        if small and (spec is None or one.num_params < spec.num_params):
            model, spec = name, one
    rate = LOOKED_UP if spec is None else ACCEPTANCE
    what = f"speculation with {model}, if {rate:.0%} of its drafts are accepted"
    return what, f"--draft {model},{rate:g},{DRAFTS}", replace(q, draft=Draft(model, spec, rate, DRAFTS))


def _sizes(q: Question, now: Option | None) -> Iterator[tuple[str, str, Question]]:
    """Yield larger batches, chunks of another size, more tensor parallelism, and twice the devices."""
    if now is not None:
        split = now.split
        if q.max_running(split) == q.max_num_seqs:
            seqs = 2 * q.max_num_seqs
            yield f"a batch of {seqs:,}", f"--max-num-seqs {seqs}", replace(q, max_num_seqs=seqs)
        heads = min(a.num_heads for a in q.spec.attentions)
        wider = replace(
            split, tp=2 * split.tp, ep=2 * split.ep if split.ep > 1 else 1, dp=max(1, split.dp // 2)
        )
        if wider.num_devices <= q.count and wider.tp <= q.hardware.domain and heads % wider.tp == 0:
            named = ",".join(str(wider).split())
            yield (
                f"more tensor parallelism ({wider}, the same devices)",
                f"--split {named}",
                replace(q, split=wider),
            )
    for chunk in (q.max_num_batched_tokens * 2, q.max_num_batched_tokens // 4):
        what = f"steps of {chunk:,} tokens"
        yield what, f"--max-num-batched-tokens {chunk}", replace(q, max_num_batched_tokens=chunk)
    more = f"--count {2 * q.count}"
    if q.split is None:
        yield f"{2 * q.count} devices in place of {q.count}", more, replace(q, count=2 * q.count)
    else:
        doubled: Split = replace(q.split, dp=2 * q.split.dp)
        more += f" --split {','.join(str(doubled).split())}"
        yield f"twice the replicas ({doubled})", more, replace(q, count=2 * q.count, split=doubled)
