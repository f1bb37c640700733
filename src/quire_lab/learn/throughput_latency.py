"""Throughput against latency: batches of growing size, and the zone in which an SLO holds."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.slo import Slo
from quire_lab.bench.summary import summarize
from quire_lab.learn.engine import MODELS, requests_of, roofline, watch
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Picture, Table
from quire_lab.learn.simulation import Simulation, choice, number

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def draw(model: str, device: str, prompt: int, output: int, tpot_ms: float, ttft_ms: float) -> Picture:
    """Return tokens/s, TPOT and goodput of a closed loop of 1 … 256 requests at once."""
    slo, rows = Slo(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3), []
    for batch in _BATCHES:
        config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=2048, max_model_len=32768)
        workload = requests_of([prompt], [output] * batch)
        records = watch(workload, roofline(model, device), config, prefix_cache=False).result.records
        s = summarize(records, slo=slo)
        rows.append((batch, s["output_tokens_per_s"], s["tpot_ms"]["mean"] or 0.0, s["ttft_ms"]["mean"],
                     s["goodput_per_s"], 100.0 * s["num_good"] / batch))  # fmt: skip
    xs = tuple(float(row[0]) for row in rows)
    good = [row[0] for row in rows if row[5] >= 95.0]
    zone = (float(good[0]), float(good[-1]), "SLO held by 95 % of the requests") if good else None
    x = Axis("requests at once", log=True)
    tokens = Line("output tokens/s", xs, tuple(row[1] for row in rows), "points")
    goodput = Line("of requests within the SLO", xs, tuple(row[4] * output for row in rows), "points")
    tpot = Line("TPOT", xs, tuple(row[2] for row in rows), "points")
    parts = (
        Lines("throughput", x, Axis("output", "tokens/s"), (tokens, goodput), zone=zone),
        Lines("latency", x, Axis("TPOT", "ms"), (tpot,), zone=zone),
        Table(
            "",
            ("requests at once", "tokens/s", "TPOT, ms", "TTFT, ms", "goodput/s", "within SLO, %"),
            tuple(rows),
        ),
    )
    most = max(rows, key=lambda row: row[4])
    facts = (
        Fact("most requests at once within the SLO", good[-1] if good else 0),
        Fact("best goodput", most[4], f"requests/s, at {most[0]} at once"),
        Fact("tokens/s at 256 against 1", rows[-1][1] / rows[0][1], "×"),
        Fact("TPOT at 256 against 1", rows[-1][2] / rows[0][2] if rows[0][2] else 1.0, "×"),
    )
    return Picture(
        f"{model} on {device}: {prompt} + {output} tokens, all at once", (*parts, Facts("", facts))
    )


SIMULATION = Simulation(
    "throughput-latency",
    "Throughput against latency",
    "A larger batch gives more tokens per second and each of them later; goodput ends where the SLO does.",
    (
        choice("model", "model", "llama-3.1-8b", MODELS[:5]),
        choice("device", "device", "h200", ("a100", "h100", "h200", "b200", "mi300x")),
        number("prompt", "prompt", 512, 1, 4000, 16, "tokens"),
        number("output", "output", 64, 1, 256, 8, "tokens"),
        number("tpot_ms", "SLO of TPOT", 25.0, 1.0, 1000.0, 1.0, "ms"),
        number("ttft_ms", "SLO of TTFT", 1000.0, 1.0, 10000.0, 10.0, "ms"),
    ),
    draw,
)
