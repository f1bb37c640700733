"""A production server with all its settings: replicas, cache, speculation, batching and load, over time."""

from __future__ import annotations

from typing import Any

from quire.cost.hardware import find_hardware
from quire.models.checkpoint import spec_of
from quire.slo import Slo
from quire_lab.learn.disaggregation import run
from quire_lab.learn.engine import DEVICES, MODELS, Step
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Part, Picture, Table
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.laws import cost_per_million
from quire_lab.sim.setup import ModelDoesNotFit


def draw(
    model: str, device: str, tp: int, replicas: int, weights: str, rate: float, prompt: int, prefix: int, output: int,
    gate: str, slots: int, chunk: int, cache: str, acceptance: float, routing: str, slo: str,
) -> Picture:  # fmt: skip
    """Return load, latencies, goodput, utilization and cost."""
    Slo.parse(slo)
    settings: dict[str, Any] = {
        "model": model, "hardware": device, "tensor_parallel_size": tp, "replicas": replicas, "weights": weights,
        "rate": rate, "limit": 150, "input_len": f"lognormal:{prompt},0.7,3000", "prefix_len": prefix,
        "num_prefixes": 4, "output_len": f"lognormal:{output},0.7,600", "gate": gate, "max_num_seqs": slots,
        "max_num_batched_tokens": chunk, "enable_prefix_caching": cache == "on", "routing": routing, "slo": slo,
        "max_model_len": min(4096 + prefix, spec_of(model).max_position_embeddings), "max_in_flight": 1,
    }  # fmt: skip
    if acceptance:
        settings |= {"acceptance": acceptance, "num_drafts": 5, "draft_cost": 0.05}
    title = f"{replicas} × {tp} × {device}: {model} as {weights}, {rate:g} requests/s"
    try:
        summary, records, watches = run(settings)
    except ModelDoesNotFit as error:
        return Picture(title, (Facts("", (Fact("does not fit", str(error)),)),))
    sim = summary["simulation"]
    arrivals = sorted(r.arrival_s for r in records)
    firsts = sorted(r.first_token_s for r in records if r.first_token_s is not None)
    ends = sorted(r.end_s for r in records)
    counted = tuple(
        Line(name, tuple(times), tuple(float(i + 1) for i in range(len(times))), "steps")
        for name, times in (("arrived", arrivals), ("first token", firsts), ("done", ends))
    )
    batch = tuple(_occupancy(f"replica {n}", watch.steps) for n, watch in enumerate(watches))
    latency = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    table = Table("milliseconds", ("", "mean", "p50", "p90", "p95", "p99"), tuple(
        (key.removesuffix("_ms").upper(), *summary[key].values()) for key in latency
    ))  # fmt: skip
    busy = [r["busy_s"] / max(sim["end_s"], 1e-9) for r in sim["replicas"]]
    facts = [
        Fact("requests/s completed", summary["requests_per_s"]),
        Fact(f"goodput: requests/s within {slo}", summary["goodput_per_s"]),
        Fact("output tokens/s", summary["output_tokens_per_s"]),
        Fact("time in which replicas compute", 100.0 * sum(busy) / len(busy), "%"),
        Fact("KV blocks at their peak", 100.0 * sim["kv_peak"], "%"),
        Fact("prompt tokens from the cache",
             100.0 * summary["num_cached_tokens"] / max(1, summary["num_input_tokens"]), "%"),
        Fact("preemptions", sum(r["preemptions"] for r in sim["replicas"])),
    ]  # fmt: skip
    price = find_hardware(device).price
    if price is not None and summary["output_tokens_per_s"]:
        usd = cost_per_million(price.usd * tp * replicas, summary["output_tokens_per_s"])
        facts.append(Fact("cost of a million output tokens", usd, f"USD ({price.source})"))
    time = Axis("time", "s")
    parts: tuple[Part, ...] = (
        Lines("requests", time, Axis("requests"), counted),
        Lines("sequences in a step", time, Axis("sequences"), batch),
        table,
        Facts("", tuple(facts)),
    )
    return Picture(title, parts)


def _occupancy(name: str, steps: list[Step]) -> Line:
    shown = steps[:: max(1, len(steps) // 400)]
    return Line(name, tuple(s.start_s for s in shown), tuple(float(len(s.rows)) for s in shown), "steps")


SIMULATION = Simulation(
    "production-server",
    "The production server",
    "All settings of a service at once: turn one, and see what it does to latency, goodput and cost.",
    (
        choice("model", "model", "llama-3.1-8b", MODELS[:5]),
        choice("device", "device", "h100", DEVICES),
        number("tp", "devices per replica", 1, 1, 8),
        number("replicas", "replicas", 2, 1, 8),
        choice("weights", "weights", "bf16", ("bf16", "fp8", "int8", "int4")),
        number("rate", "requests per second", 12.0, 0.5, 100.0, 0.5, "1/s"),
        number("prompt", "prompt (median, own tokens)", 300, 1, 2000, 10, "tokens"),
        number("prefix", "shared prefix", 1000, 0, 4000, 16, "tokens"),
        number("output", "output (median)", 80, 1, 400, 8, "tokens"),
        choice("gate", "batching", "continuous", ("continuous", "dynamic", "static")),
        number("slots", "sequences at once per replica", 64, 1, 512),
        number("chunk", "tokens per step at most", 2048, 512, 8192, 128, "tokens"),
        choice("cache", "prefix cache", "on", ("on", "off")),
        number("acceptance", "acceptance of 5 drafts (0: no speculation)", 0.0, 0.0, 1.0, 0.05),
        choice("routing", "routing", "least-loaded", ("least-loaded", "random", "prefix-predicted", "prefix-hybrid")),
        choice("slo", "SLO", "ttft=500ms,tpot=50ms",
               ("ttft=500ms,tpot=50ms", "ttft=200ms,tpot=15ms", "ttft=2s,tpot=100ms", "ttft=1s,e2el=10s")),
    ),
    draw,
)  # fmt: skip
