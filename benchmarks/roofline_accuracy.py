"""How far the planner's roofline is from engines on GPUs: median and p90 of |log(predicted / measured)|.

Prints Markdown tables of the shipped constants, or fits them on half of the configurations (`benchmarks.roofline_fit`);
see docs/planner.md.

    python -m benchmarks.roofline_accuracy [--data FILE] [--before FILE]
    python -m benchmarks.roofline_accuracy --fit > constants.toml

Points are ``measured_ttft_tpot.csv.gz`` (closed loop: so many clients, each with one request at a time). A
configuration is in the fitted half where the BLAKE2b hash of its id is even.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.roofline_fit import check, fit

from quire.cost.efficiency import FORMATS, GENERATIONS, MEASURED, Efficiency, efficiency_of, generation_of
from quire.cost.hardware import Hardware, find_hardware
from quire.cost.presets import preset_of, preset_spec, presets
from quire.cost.roofline import Roofline, Work, decoder_work
from quire.cost.split import Split
from quire.families import spec_from_config
from quire.modelspec import ModelSpec
from quire_lab.plan.estimate import Load, Replica
from quire_lab.plan.memory import plan_memory

DATA = Path(__file__).resolve().parents[2] / "shared/data/gpu_profiles/measured_ttft_tpot.csv.gz"
DEFAULT = Path("/work/shared/data/gpu_profiles/measured_ttft_tpot.csv.gz")
WEIGHTS = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4", "": "bf16"}
CHUNK = 8192  # tokens a step: the engines' own default on these GPUs
LEAST_POINTS = 6  # on the fitted half, for constants of their own
# Generation → the devices whose points its constants are fitted on.
FITTED = {"hopper": ("h100", "h200"), "blackwell": ("b200", "b300"), "b300": ("b300",)}
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
    spec: ModelSpec
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
    def kind(self) -> str:
        return "dense" if self.dense else "experts"

    @property
    def weights(self) -> str:
        """Format by which constants differ."""
        return {"fp8": "fp8", "fp4": "fp4"}.get(self.decode.precision, "bf16")

    @property
    def generation(self) -> str:
        return generation_of(self.hardware)

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
        _works[key] = decoder_work(spec, precision, "bf16", split)
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
        name=row["id"], engine=row["backend"], gpu=hardware.name, model=model, spec=spec, mode=row["mode"],
        hardware=hardware,
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
    ttft = e.first_s + prompt_s * e.wave * point.prefill_clients**e.wave_growth  # no decodes to wait for
    return ttft, replica.decode_s(min(point.load.concurrency, replica.max_requests), point.load)


Errors = tuple[float, float, float, float, float]


def errors(pairs: Iterable[tuple[Point, tuple[float, float]]]) -> Errors | None:
    """Return median and p90 of |log ratio| of TTFT, of TPOT, and the median of both together; None: no points."""
    ttft, tpot = [], []
    for point, predicted in pairs:
        ttft.append(abs(math.log(predicted[0] / point.ttft_s)))
        tpot.append(abs(math.log(predicted[1] / point.tpot_s)))
    if not ttft:
        return None
    ttft.sort()
    tpot.sort()
    both = sorted(ttft + tpot)
    at = lambda values, q: values[round(q * (len(values) - 1))]  # noqa: E731
    return at(ttft, 0.5), at(ttft, 0.9), at(tpot, 0.5), at(tpot, 0.9), at(both, 0.5)


def fit_all(points: list[Point], rounds: int, seeds: int) -> dict[str, Any]:
    """Return engine → generation → kind → format → constants, each from the fitted half of its points."""
    found: dict[str, Any] = {}
    half = [p for p in points if p.fitted_half and p.mode == "agg" and p.load.isl <= CHUNK]
    for engine in ("default", *MEASURED):  # default: all engines together
        for generation, devices in FITTED.items():
            own = [p for p in half if engine in ("default", p.engine) and p.gpu in devices]
            common: dict[str, Efficiency] = {}
            for kind, weights in sorted({(p.kind, p.weights) for p in own}):
                these = [p for p in own if (p.kind, p.weights) == (kind, weights)]
                if len(these) < LEAST_POINTS:
                    continue
                which = "all engines" if engine == "default" else engine
                how = f"fitted on {len(these)} points of {which}"
                if generation != "b300" and kind not in common:
                    common[kind] = fit([p for p in own if p.kind == kind], rounds, seeds, None, "")
                prior = common.get(kind) or nearest_set(found[engine], generation, kind, weights)
                e = fit(these, rounds, seeds, prior, how)
                check(these, e, [predict(p, e) for p in these])
                sets = found.setdefault(engine, {}).setdefault(generation, {}).setdefault(kind, {})
                sets[weights] = e
                print(f"# {engine} {generation} {kind} {weights}: {how}", file=sys.stderr, flush=True)
    return found


def nearest_set(sets: dict[str, Any], generation: str, kind: str, weights: str) -> Efficiency | None:
    """Return the set that takes the place of one that was not measured, as `quire.cost.efficiency` chooses it."""
    for near in GENERATIONS[generation]:
        for alike in FORMATS[weights]:
            if (e := sets.get(near, {}).get(kind, {}).get(alike)) is not None:
                assert isinstance(e, Efficiency)
                return e
    return None


def as_toml(found: dict[str, Any]) -> str:
    """Return the constants as data/efficiency.toml has them."""
    lines = []
    for engine, by_generation in found.items():
        for generation, by_kind in by_generation.items():
            for kind, by_weights in by_kind.items():
                for weights, e in by_weights.items():
                    lines.append(f"[{engine}.{generation}.{kind}.{weights}]")
                    row = asdict(e)
                    lines.append(f"compute = [{', '.join(f'{x:.4g}' for x in row.pop('compute'))}]")
                    how = row.pop("how")
                    pairs = [f"{name} = {value:.4g}" for name, value in row.items()]
                    lines += [*pairs, f'how = "{how}"', ""]
    return "\n".join(lines)


Of = Callable[[Point], Efficiency]
Known = dict[str, tuple[float, float]]  # predictions by id


def table(title: str, points: list[Point], key: Callable[[Point], str], of: Of, before: Known) -> None:
    print(f"\n{title}\n\n| | points | TTFT median, p90 | TPOT median, p90 | before: TTFT | TPOT |")
    print("|---|---|---|---|---|---|")
    for name in sorted({key(p) for p in points}):
        own = [p for p in points if key(p) == name]
        after = errors([(p, predict(p, of(p))) for p in own])
        earlier = errors([(p, before[p.name]) for p in own if p.name in before])
        cells = [f"{after[0]:.0%}, {after[1]:.0%}", f"{after[2]:.0%}, {after[3]:.0%}"]
        cells += [f"{earlier[0]:.0%}", f"{earlier[2]:.0%}"] if earlier else ["", ""]
        print(f"| {name} | {len(own)} | " + " | ".join(cells) + " |")


def range_table(points: list[Point]) -> None:
    """Print how often what was measured lies between the least and the most of three engines' constants."""
    print("\nWithout an engine: the range of the three engines' constants, the half that was not fitted\n")
    print(
        "| | points | TTFT within | TPOT within | TTFT, most over least | TPOT |\n|---|---|---|---|---|---|"
    )
    for kind in ("dense", "experts"):
        own = [p for p in points if p.kind == kind]
        inside, wide = ([0, 0], [[0.0], [0.0]])
        for p in own:
            found = [predict(p, efficiency_of(e, p.hardware, p.spec, p.decode.precision)) for e in MEASURED]
            for i, measured in enumerate((p.ttft_s, p.tpot_s)):
                low, high = (edge(each[i] for each in found) for edge in (min, max))
                inside[i] += low <= measured <= high
                wide[i].append(high / low)
        shares = (f"{n / len(own):.0%}" for n in inside)
        ratios = (f"{sorted(w)[len(w) // 2]:.2f} ×" for w in wide)
        print(f"| {kind} | {len(own)} | {' | '.join(shares)} | {' | '.join(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=DATA if DATA.is_file() else DEFAULT)
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them as TOML")
    parser.add_argument("--rounds", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=2, help="searches; the best on the fitted half is kept")
    parser.add_argument("--save", type=Path, help="write the predictions to this file")
    parser.add_argument(
        "--before", type=Path, help="a file of --save, of an earlier version, to compare with"
    )
    args = parser.parse_args()
    points, left_out = read_points(args.data)
    if args.fit:
        print(as_toml(fit_all(points, args.rounds, args.seeds)))
        return

    def of(p: Point) -> Efficiency:
        return efficiency_of(p.engine, p.hardware, p.spec, p.decode.precision)

    if args.save:
        args.save.write_text(json.dumps({p.name: predict(p, of(p)) for p in points}))
    before = json.loads(args.before.read_text()) if args.before else {}
    print(f"{len(points)} points predicted; left out: {dict(left_out)}")
    held = [p for p in points if not p.fitted_half and p.mode == "agg"]
    hopper = [p for p in held if p.dense and p.generation == "hopper"]
    title = "All aggregated points, the half that was not fitted"
    table(title, held, lambda _: "all", of, before)
    table("Dense models on H100 and H200, of that half", hopper, lambda _: "all", of, before)
    table("By GPU, engine and kind, of that half", held, lambda p: f"{p.gpu} {p.engine} {p.kind}", of, before)
    table(
        "By model and engine, of that half",
        held,
        lambda p: f"{p.model.rpartition('/')[2]} {p.engine}",
        of,
        before,
    )
    table("By clients, of that half", held, lambda p: clients_of(p), of, before)
    table("Constants of all engines together (default), of that half", held, lambda p: p.kind,
          lambda p: efficiency_of("default", p.hardware, p.spec, p.decode.precision), before)  # fmt: skip
    range_table(held)
    apart = [p for p in points if p.mode == "disagg"]
    table(
        "Disaggregated (both halves; nothing was fitted)", apart, lambda p: f"{p.gpu} {p.engine}", of, before
    )


def clients_of(point: Point) -> str:
    clients = point.load.concurrency or 1
    return f"{'≤ 8' if clients <= 8 else '9 … 64' if clients <= 64 else '> 64'} clients"


if __name__ == "__main__":
    main()
