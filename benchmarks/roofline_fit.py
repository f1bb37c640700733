"""The search behind ``roofline_accuracy.py --fit``: constants of `quire.cost.efficiency` from measured points.

The closed form of `quire_lab.plan.estimate` is written once more over arrays of all points, which a search evaluates in
a millisecond; `check` compares it with the planner's own figures. Bounds keep what a set of points does not show in the
range of real kernels: a step of more rows never takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.efficiency import IDEAL, ROWS, Efficiency
from quire.cost.roofline import Roofline

Array = NDArray[np.float64]
SCALARS = tuple(f.name for f in fields(Efficiency) if f.name not in ("compute", "how"))
NAMES = (*(f"compute{i}" for i in range(len(ROWS))), *SCALARS)
START = {
    "compute0": 0.5, "compute1": 0.6, "compute2": 0.6, "memory": 0.85, "kv_memory": 0.7, "attention": 0.5,
    "experts": 0.5, "expert_memory": 0.6, "link": 0.7, "layer_s": 1e-5, "step_s": 1e-3, "seq_s": 1e-5, "link_s": 1e-5,
    "first_s": 0.03, "token_s": 1e-6, "wave": 0.6, "wave_growth": 0.6, "turn": 1e-3, "turn_decay": 0.5,
}  # fmt: skip
LEAST = {
    "compute0": 0.1, "compute1": 0.1, "compute2": 0.1, "memory": 0.3, "kv_memory": 0.2, "attention": 0.1,
    "experts": 0.05, "expert_memory": 0.2, "link": 0.1,
}  # fmt: skip
# The best matrix products and attention kernels reach about 0.75 of the data sheet's operations.
MOST = dict.fromkeys(LEAST, 1.0) | dict.fromkeys(("compute0", "compute1", "compute2", "attention"), 0.8)
MOST |= {"wave": 10.0, "wave_growth": 1.2, "turn": 0.5, "turn_decay": 2.0}
# Of an engine whatever the format of the weights: else eight bits could be slower than sixteen.
SHARED = ("memory", "link", "layer_s", "step_s", "seq_s", "link_s")
PULL = 0.2  # of the squared logarithm of a constant over that of the prior, shared by the points
MANY = 30  # points from which on constants are not pulled to those of all formats
FEW = 15  # points below which none is taken for an outlier


def arrays(points: Sequence[Any]) -> dict[str, Array]:
    """Return the work of each point's decode step (d_…) and of the same step with a prompt in it (p_…)."""
    rows = []
    for point in points:
        steps, clients = (
            Roofline(point.decode, point.hardware, IDEAL),
            min(point.load.concurrency, max(1, point.capacity)),
        )
        isl, osl = point.load.isl, point.load.osl
        context = round(clients * (isl + osl / 2))
        decode = StepFeatures(clients, clients, clients, context, 0, 0)
        chunk = StepFeatures(clients + isl, clients + 1, clients + 1, context, isl, chunk_pairs(0, isl))
        row = {f"d_{k}": v for k, v in _work(steps, decode).items()}
        row |= {f"p_{k}": v for k, v in _work(steps, chunk).items()}
        row |= {"clients": clients, "waiting": point.load.concurrency - clients, "isl": isl, "osl": osl}
        rows.append(row | {"ttft_s": point.ttft_s, "tpot_s": point.tpot_s, "layers": point.decode.num_layers})
    return {name: np.array([row[name] for row in rows], float) for name in rows[0]}


def _work(steps: Roofline, step: StepFeatures) -> dict[str, float]:
    """Return the parts of a step with nothing lost: seconds of arithmetic and of reading apart."""
    work, hardware, split = steps.work, steps.hardware, steps.work.split
    shard, rows, logits = (
        work.shard,
        step.num_tokens / split.attention_dp,
        step.num_logits / split.attention_dp,
    )
    rate, bf16 = hardware.rate(work.precision) or 1.0, hardware.rate("bf16") or 1.0
    ways = split.tp * split.attention_dp
    decodes = max(1, step.num_seqs if not step.chunk_pairs else step.num_seqs - 1)
    mean = step.decode_kv_tokens / decodes
    read = work.kv_bytes * (step.decode_kv_tokens + step.chunk_kv_tokens)
    read += sum(b * (min(mean, w) * decodes + min(step.chunk_kv_tokens, w)) for w, b in work.windows)
    touched = 1.0 - (1.0 - work.top_k / work.num_experts) ** step.num_tokens if work.num_experts else 0.0
    links = steps.link_uses(rows, logits)
    return {
        "rows": rows,
        "logits": logits,
        "seqs": step.num_seqs / split.attention_dp,
        "linear_c": 2 * shard.dense_params * rows / rate,
        "linear_m": shard.dense_bytes / hardware.bandwidth,
        "head_c": 2 * shard.head_params * logits / bf16,
        "head_m": shard.head_bytes / hardware.bandwidth,
        "expert_c": 2 * shard.expert_params * step.num_tokens / rate,
        "expert_m": shard.expert_bytes * touched / hardware.bandwidth,
        "kv_m": read / (work.kv_ways * split.attention_dp) / hardware.bandwidth,
        "keys_c": work.decode_flops_per_key * step.decode_kv_tokens / ways / bf16,
        "pairs_c": work.flops_per_pair * step.chunk_pairs / ways / bf16,
        "link_n": sum(each.use.count for each in links),
        "link_b": sum(each.total_bytes / each.speed for each in links if each.speed),
    }


def predict(d: Mapping[str, Array], e: Mapping[str, float]) -> tuple[Array, Array]:
    """Return TTFT and TPOT of all points, as `Replica.closed` does."""
    step_s = _seconds(d, "d_", e)
    prompt_s = np.maximum(_seconds(d, "p_", e) - step_s, 1e-6)
    clients, osl = d["clients"], d["osl"]
    whole_s = osl * step_s + clients * prompt_s
    ahead_s = prompt_s * e["wave"] * clients ** e["wave_growth"]
    ahead_s += e["turn"] * osl * step_s / clients ** e["turn_decay"] + e["token_s"] * d["isl"] * clients
    ttft_s = e["first_s"] + step_s + ahead_s
    tpot_s = np.maximum(step_s, (whole_s - ttft_s) / np.maximum(1, osl - 1))
    return ttft_s + d["waiting"] / clients * whole_s, tpot_s


def _seconds(d: Mapping[str, Array], at: str, e: Mapping[str, float]) -> Array:
    shares = np.log([e[f"compute{i}"] for i in range(len(ROWS))])
    share, of_head = (np.exp(np.interp(np.log(d[at + n]), np.log(ROWS), shares)) for n in ("rows", "logits"))
    linears = np.maximum(d[at + "linear_c"] / share, d[at + "linear_m"] / e["memory"])
    head = np.maximum(d[at + "head_c"] / of_head, d[at + "head_m"] / e["memory"])
    expert_m = d[at + "expert_m"] / (e["memory"] * e["expert_memory"])
    experts = np.maximum(d[at + "expert_c"] / (share * e["experts"]), expert_m)
    keys = np.maximum(d[at + "kv_m"] / e["kv_memory"], d[at + "keys_c"] / e["attention"])
    links = d[at + "link_n"] * e["link_s"] + d[at + "link_b"] / e["link"]
    launches = d["layers"] * e["layer_s"] + e["step_s"] + e["seq_s"] * d[at + "seqs"]
    total: Array = linears + head + experts + keys + d[at + "pairs_c"] / e["attention"] + links + launches
    return total


def loss(d: Mapping[str, Array], e: Mapping[str, float], cut: float) -> float:
    """Return the mean of |log ratio| of TTFT plus that of TPOT, each cut, since some campaigns fit no formula."""
    ttft_s, tpot_s = predict(d, e)
    parts = (np.abs(np.log(ttft_s / d["ttft_s"])), np.abs(np.log(tpot_s / d["tpot_s"])))
    return float(sum(np.minimum(cut, part).mean() for part in parts))


def fit(points: Sequence[Any], rounds: int, seeds: int, prior: Efficiency | None, how: str) -> Efficiency:
    """Search from ``seeds`` seeds and return the constants with the least loss on ``points``.

    ``prior``: constants of the engine for all formats. Those that are `SHARED` are taken over; from the others few
    points do not go far, while with ``MANY`` they begin anew.
    """
    d = arrays(points)
    is_pulled = prior is not None and len(points) < MANY
    first = dict(START) if prior is None else _values(prior)
    if prior is not None and not is_pulled:
        first |= {name: value for name, value in START.items() if name not in SHARED}
    names = [name for name in NAMES if prior is None or name not in SHARED]
    found = [_search(d, dict(first), names, is_pulled, len(points), rounds, seed) for seed in range(seeds)]
    best = min(found, key=lambda pair: pair[1])[0]
    rounded = {name: float(f"{value:.4g}") for name, value in best.items()}
    compute = tuple(rounded.pop(f"compute{i}") for i in range(len(ROWS)))
    return Efficiency(compute=compute, **rounded, how=how)  # type: ignore[arg-type]


def _values(e: Efficiency) -> dict[str, float]:
    return {f"compute{i}": share for i, share in enumerate(e.compute)} | {n: getattr(e, n) for n in SCALARS}


def _search(
    d: Mapping[str, Array], e: dict[str, float], names: Sequence[str], pulled: bool, num_points: int, rounds: int,
    seed: int,
) -> tuple[dict[str, float], float]:  # fmt: skip
    """Take random steps that shrink, and keep those that improve (a (1 + 1) evolution strategy)."""
    rng, spread, prior = np.random.default_rng(seed), 0.4, dict(e)
    best = math.inf

    def total(trial: Mapping[str, float], cut: float) -> float:
        far = sum(math.log(trial[n] / prior[n]) ** 2 for n in NAMES if prior[n] > 0) if pulled else 0.0
        return loss(d, trial, cut) + PULL * far / num_points

    for cut in (1.0, 0.7) if num_points >= FEW else (3.0,):  # first near everything, then near most
        best = total(e, cut)
        for _ in range(rounds // 2):
            moved = [n for n in names if rng.random() < 0.2]
            trial = e | {n: _within(n, e[n] * math.exp(rng.normal(0, spread))) for n in moved}
            if any(trial[f"compute{i + 1}"] > trial[f"compute{i}"] * ROWS[i + 1] / ROWS[i] for i in (0, 1)):
                continue
            now = total(trial, cut)
            e, best, spread = (
                (trial, now, min(0.6, spread * 1.2)) if now < best else (e, best, spread * 0.992)
            )
            if spread < 0.01:
                spread = 0.3 if rng.random() < 0.02 else 0.01
    return e, best


def _within(name: str, value: float) -> float:
    return min(MOST.get(name, math.inf), max(LEAST.get(name, 0.0), value))


def check(points: Sequence[Any], e: Efficiency, planned: Sequence[tuple[float, float]]) -> None:
    """Assert that `predict` gives the planner's own figures."""
    ttft_s, tpot_s = predict(arrays(points), _values(e))
    for i, (ttft, tpot) in enumerate(planned):
        assert math.isclose(ttft_s[i], ttft, rel_tol=1e-3), (points[i].name, ttft_s[i], ttft)
        assert math.isclose(tpot_s[i], tpot, rel_tol=1e-3), (points[i].name, tpot_s[i], tpot)
