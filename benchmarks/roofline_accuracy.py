"""How far the planner's roofline is from engines on GPUs: median and p90 of |log(predicted / measured)|.

Before and after fitting a handful of constants an engine on half of the configurations. Prints Markdown tables; see
docs/planner.md.

    python benchmarks/roofline_accuracy.py [--data FILE] [--fit]

Points are ``measured_ttft_tpot.csv.gz`` (closed loop: so many clients, each with one request at a time). A
configuration is in the fitted half where the BLAKE2b hash of its id is even. Without ``--fit`` the shipped
constants are evaluated.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from quire.families import spec_from_config
from quire.modelspec import ModelSpec
from quire.plan.estimate import Load, Replica
from quire.plan.hardware import Hardware, find_hardware
from quire.plan.presets import preset_of, preset_spec, presets
from quire.plan.roofline import IDEAL, Efficiency, Roofline, Work, efficiencies, work_of
from quire.plan.split import Split, plan_memory

DATA = Path(__file__).resolve().parents[2] / "shared/data/gpu_profiles/measured_ttft_tpot.csv.gz"
DEFAULT = Path("/work/shared/data/gpu_profiles/measured_ttft_tpot.csv.gz")
WEIGHTS = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4", "": "bf16"}
CHUNK = 8192  # tokens a step: the engines' own default on these GPUs
FITTED = ("compute", "memory", "experts", "layer_s", "step_s", "link_s", "first_s", "wave", "wave_growth")
START = Efficiency(0.5, 0.9, 0.7, 1e-5, 1e-3, 1.5e-5, 0.03, 1.0, 0.5, how="start of the search")
HALF_OF = ("compute", "memory", "experts")  # at most 1
DENSE = ("llama", "qwen3")
# A family that Quire does not run, by shapes: attention and experts are of a kind that it knows.
STAND_INS = {
    "MiniMaxAI/MiniMax-M2.5": presets()["qwen3-30b-a3b"] | {
        "num_hidden_layers": 62, "hidden_size": 3072, "num_attention_heads": 48, "num_key_value_heads": 8,
        "vocab_size": 200064, "num_experts": 256, "moe_intermediate_size": 1536, "intermediate_size": 1536,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    name: str
    engine: str
    gpu: str
    model: str
    mode: str
    hardware: Hardware
    prefill: Work
    decode: Work
    load: Load
    capacity: int  # requests that fit, half way through their output
    prefill_clients: float  # clients a prefill worker (disaggregated), else all
    ttft_s: float
    tpot_s: float

    @property
    def dense(self) -> bool:
        return not self.decode.num_experts

    @property
    def fitted_half(self) -> bool:
        return hashlib.blake2b(self.name.encode()).digest()[0] % 2 == 0


def read_points(
    path: Path, keep: Callable[[dict[str, str]], bool] = lambda _: True
) -> tuple[list[Point], Counter[str]]:
    """Return the points of rows to ``keep`` that can be predicted, and why others cannot."""
    left_out: Counter[str] = Counter()
    points = []
    with gzip.open(path, "rt") as file:
        for row in filter(keep, csv.DictReader(file)):
            spec = spec_of(row["model_path"])
            if spec is None:
                left_out[f"{row['model_path']}: no such family in Quire, and none of its shapes"] += 1
                continue
            points.append(point_of(row, spec))
    return points, left_out


_specs: dict[str, ModelSpec | None] = {}


def spec_of(model: str) -> ModelSpec | None:
    if model not in _specs:
        name = preset_of(model)
        _specs[model] = (
            spec_from_config(STAND_INS[model]) if model in STAND_INS else preset_spec(name) if name else None
        )
    return _specs[model]


_works: dict[tuple[str, str, Split], Work] = {}


def _work(model: str, spec: ModelSpec, precision: str, split: Split) -> Work:
    key = (model, precision, split)
    if key not in _works:
        _works[key] = work_of(spec, precision, "bf16", split)
    return _works[key]


def point_of(row: dict[str, str], spec: ModelSpec) -> Point:
    model, disagg = row["model_path"], row["mode"] == "disagg"
    experts = any(layer.mlp.moe for layer in spec.layers)
    precision = WEIGHTS[row["moe_quant_mode" if experts else "gemm_quant_mode"]]

    def split(prefix: str) -> Split:
        number = {
            name: int(row[f"{prefix}{name}_size"] or 1) or 1 for name in ("tp", "attention_dp", "moe_ep")
        }
        return Split(tp=number["tp"], attention_dp=number["attention_dp"], ep=number["moe_ep"])

    isl, osl = int(row["isl"]), int(row["osl"])
    decode = split("decode_" if disagg else "")
    clients = int(row["batch_size"]) * decode.attention_dp if row["batch_size"] else 1
    prefill_clients = float(clients)
    if disagg:
        clients = next(
            (int(p.partition("=")[2]) for p in row["silicon_data_source"].split("; ") if "concurrency=" in p),
            1,
        )
        prefill_clients = clients / int(row["prefill_num_workers"] or 1)
        clients = max(1, round(clients / int(row["decode_num_workers"] or 1)))
    hardware = find_hardware(row["system"])
    memory = plan_memory(spec, hardware, decode, precision=precision, kv_dtype="bf16", context=isl + osl // 2,
                         max_num_batched_tokens=CHUNK, max_num_seqs=min(clients, 512))  # fmt: skip
    return Point(
        name=row["id"], engine=row["backend"], gpu=hardware.name, model=model, mode=row["mode"], hardware=hardware,
        prefill=_work(model, spec, precision, split("prefill_") if disagg else decode),
        decode=_work(model, spec, precision, decode), load=Load(isl, osl, concurrency=clients),
        capacity=memory.max_requests, prefill_clients=prefill_clients,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3, tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )  # fmt: skip


def predict(point: Point, e: Efficiency) -> tuple[float, float]:
    """Return (TTFT, TPOT) in seconds. Disaggregated: prefill workers see prompts alone, decode workers no prompt."""
    replica = Replica(Roofline(point.decode, point.hardware, e), point.capacity, CHUNK)
    if point.mode == "agg":
        estimate = replica.closed(point.load)
        return estimate.ttft_s, estimate.tpot_s
    assert point.load.concurrency is not None
    alone = Replica(Roofline(point.prefill, point.hardware, e), 1, CHUNK)
    prompt_s = alone.prefill_s(1, point.load)
    ttft = e.first_s + prompt_s * e.wave * point.prefill_clients**e.wave_growth
    return ttft, replica.decode_s(min(point.load.concurrency, replica.max_requests), point.load)


Errors = tuple[float, float, float, float, float]


def errors(points: Iterable[Point], of: Callable[[Point], Efficiency]) -> Errors:
    """Return median and p90 of |log ratio| of TTFT, of TPOT, and the median of both together."""
    ttft, tpot = [], []
    for point in points:
        predicted = predict(point, of(point))
        ttft.append(abs(math.log(predicted[0] / point.ttft_s)))
        tpot.append(abs(math.log(predicted[1] / point.tpot_s)))
    ttft.sort()
    tpot.sort()
    both = sorted(ttft + tpot)
    at = lambda values, q: values[round(q * (len(values) - 1))]  # noqa: E731
    return at(ttft, 0.5), at(ttft, 0.9), at(tpot, 0.5), at(tpot, 0.9), at(both, 0.5)


def fit(
    points: list[Point], names: tuple[str, ...], start: Efficiency, rounds: int, seeds: int
) -> Efficiency:
    """Search from ``seeds`` seeds and keep the one with the least loss on the points that are fitted."""
    return min(
        (search(points, names, start, rounds, seed) for seed in range(seeds)), key=lambda found: found[1]
    )[0]


def search(
    points: list[Point], names: tuple[str, ...], start: Efficiency, rounds: int, seed: int
) -> tuple[Efficiency, float]:
    """Minimise the mean of |log ratio|, each cut at 1, by random steps that shrink (a (1 + 1) evolution strategy)."""
    rng = random.Random(seed)

    def loss(e: Efficiency) -> float:
        total = 0.0
        for point in points:
            ttft, tpot = predict(point, e)
            total += min(1.0, abs(math.log(ttft / point.ttft_s))) + min(
                1.0, abs(math.log(tpot / point.tpot_s))
            )
        return total / len(points)

    best, best_loss, spread = start, loss(start), 0.4
    for _ in range(rounds):
        moved = {n: getattr(best, n) * math.exp(rng.gauss(0, spread) * (rng.random() < 0.4)) for n in names}
        if any(moved.get(n, 0) > 1 for n in HALF_OF):
            continue
        trial = replace(best, **moved)
        trial_loss = loss(trial)
        better = trial_loss < best_loss
        best, best_loss = (trial, trial_loss) if better else (best, best_loss)
        spread = min(0.5, spread * 1.15) if better else max(0.02, spread * 0.99)
    return best, best_loss


def fit_all(points: list[Point], rounds: int, seeds: int) -> dict[str, Efficiency]:
    """Dense points give every constant but ``experts``, which points with experts give after them."""
    found = {}
    half = [p for p in points if p.fitted_half and p.mode == "agg"]
    for engine in ("default", *sorted({p.engine for p in points})):  # default: all engines together
        own = [p for p in half if engine in ("default", p.engine)]
        dense = [p for p in own if p.dense and p.gpu in ("h100", "h200")]
        e = fit(dense, tuple(n for n in FITTED if n != "experts"), START, rounds, seeds)
        moe = [p for p in own if not p.dense and p.gpu in ("h100", "h200")]
        e = fit(moe, ("experts",), e, rounds // 10, 1) if moe else e
        which = "all engines" if engine == "default" else engine
        count = f"{len(dense)} dense and {len(moe)} MoE points of {which} on H100 and H200"
        how = f"fitted on {count}, best of {seeds} seeds"
        found[engine] = replace(e, how=f"{how}, by benchmarks/roofline_accuracy.py --fit")
    return found


def table(
    title: str, points: list[Point], key: Callable[[Point], str], fitted: dict[str, Efficiency]
) -> None:
    print(
        f"\n{title}\n\n| | points | TTFT median, p90 | TPOT median, p90 | both | before: TTFT | before: TPOT |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in sorted({key(p) for p in points}):
        own = [p for p in points if key(p) == name]
        after, before = errors(own, lambda p: fitted[p.engine]), errors(own, lambda _: IDEAL)
        cells = (f"{after[0]:.0%}, {after[1]:.0%}", f"{after[2]:.0%}, {after[3]:.0%}", f"{after[4]:.0%}",
                 f"{before[0]:.0%}", f"{before[2]:.0%}")  # fmt: skip
        print(f"| {name} | {len(own)} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=DATA if DATA.is_file() else DEFAULT)
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them as TOML")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=4, help="searches; the best on the fitted half is kept")
    args = parser.parse_args()
    points, left_out = read_points(args.data)
    fitted = fit_all(points, args.rounds, args.seeds) if args.fit else dict(efficiencies())
    if args.fit:
        for engine, e in fitted.items():
            print(f"[{engine}]")
            for f in fields(e):
                value = getattr(e, f.name)
                print(f'how = "{value}"\n' if f.name == "how" else f"{f.name} = {value:.4g}")
    held = [p for p in points if not p.fitted_half]
    print(f"{len(points)} points predicted; left out: {dict(left_out)}")
    hopper = [p for p in held if p.dense and p.gpu in ("h100", "h200") and p.mode == "agg"]
    table(
        "Dense models on H100 and H200, the half that was not fitted",
        hopper,
        lambda p: f"{p.gpu} {p.engine}",
        fitted,
    )
    table("The same, all together", hopper, lambda _: "all", fitted)
    table("By model", hopper, lambda p: f"{p.model.rpartition('/')[2]} {p.engine}", fitted)
    table(
        "Everything, by GPU, engine and mode (both halves)",
        points,
        lambda p: f"{p.gpu} {p.engine} {p.mode}",
        fitted,
    )
    table(
        "Everything, by model (aggregated)", [p for p in points if p.mode == "agg"], lambda p: p.model, fitted
    )


if __name__ == "__main__":
    main()
