"""TTFT, TPOT, ITL, E2EL and goodput of one run, from the records of its requests."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.slo import Slo
from quire_lab.bench.summary import RequestRecord, summarize, tail_ratio
from quire_lab.learn.engine import roofline, watch
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Picture, Table
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Fixed, parse_lengths

TAIL = 10.0  # P99 / P50 that shows a problem with the tail


def draw(
    rate: float, prompt: int, output: int, burstiness: float, ttft_ms: float, tpot_ms: float, tail: str
) -> Picture:
    """Return the distributions under an open load."""
    lengths = (
        Fixed(prompt) if tail == "equal lengths" else parse_lengths(f"lognormal:{prompt},1.0,16000", "prompt")
    )
    workload = Synthetic(200, lengths, Fixed(output), Arrivals(rate, burstiness)).build(0)
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=32768)
    records = watch(workload, roofline("llama-3.1-8b", "h100"), config, prefix_cache=False).result.records
    slo = Slo(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)
    summary = summarize(records, slo=slo)
    ttft = _cdf("TTFT", [r.ttft_s for r in records])
    tpot = _cdf("TPOT", [r.tpot_s for r in records])
    parts = [Lines("", Axis("time", "ms", log=True), Axis("share of requests", "%"), (ttft, tpot),
                   marks=((ttft_ms, "SLO of TTFT"), (tpot_ms, "SLO of TPOT")))]  # fmt: skip
    rows = tuple((key.removesuffix("_ms").upper(), *summary[key].values()) for key in
                 ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"))  # fmt: skip
    table = Table("milliseconds", ("", "mean", "p50", "p90", "p95", "p99"), rows)
    return Picture("Latency metrics", (*parts, table, Facts("", _facts(records, summary))))


def _cdf(name: str, seconds: list[float | None]) -> Line:
    ms = sorted(s * 1e3 for s in seconds if s is not None)
    return Line(name, tuple(ms), tuple(100.0 * (i + 1) / len(ms) for i in range(len(ms))), "steps")


def _facts(records: tuple[RequestRecord, ...], summary: dict[str, object]) -> tuple[Fact, ...]:
    one = records[len(records) // 2]
    ratio = tail_ratio(summary["ttft_ms"])  # type: ignore[arg-type]
    return (
        Fact("requests/s completed", float(summary["requests_per_s"])),  # type: ignore[arg-type]
        Fact("goodput: requests/s that met both limits", float(summary["goodput_per_s"])),  # type: ignore[arg-type]
        Fact("output tokens/s", float(summary["output_tokens_per_s"])),  # type: ignore[arg-type]
        Fact(f"P99 / P50 of TTFT ({'over' if ratio > TAIL else 'at most'} {TAIL:g})", ratio, "×"),
        Fact("one request: TTFT + (tokens − 1) · TPOT",
             ((one.ttft_s or 0) + (one.num_output_tokens - 1) * (one.tpot_s or 0)) * 1e3, "ms"),
        Fact("its E2EL", one.e2el_s * 1e3, "ms"),
    )  # fmt: skip


SIMULATION = Simulation(
    "latency-metrics",
    "Latency metrics",
    "The first token, the pace of the others and the whole answer are three figures, and means hide their tails.",
    (
        number("rate", "requests per second", 6.0, 0.1, 40.0, 0.5, "1/s"),
        number("prompt", "prompt", 512, 1, 4000, 16, "tokens"),
        number("output", "output", 64, 1, 500, 8, "tokens"),
        number("burstiness", "burstiness of arrivals (1: Poisson)", 1.0, 0.1, 10.0, 0.1),
        number("ttft_ms", "SLO of TTFT", 500.0, 1.0, 10000.0, 10.0, "ms"),
        number("tpot_ms", "SLO of TPOT", 50.0, 1.0, 1000.0, 1.0, "ms"),
        choice("tail", "prompts", "equal lengths", ("equal lengths", "log-normal lengths")),
    ),
    draw,
)
