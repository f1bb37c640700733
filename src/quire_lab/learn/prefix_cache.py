"""Prefix caching over time: what each request finds in the tree, with the cache and without."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire_lab.bench.summary import summarize
from quire_lab.learn.engine import Watched, roofline, watch
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Line, Lines, Picture, Row, Table, Timeline
from quire_lab.learn.request_lifecycle import lifecycle_spans
from quire_lab.learn.simulation import Simulation, number
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Fixed
from quire_lab.workload.request import Workload

_SHOWN = 12  # requests of the time line


def draw(
    prefix: int, own: int, output: int, prefixes: int, requests: int, rate: float, blocks: int
) -> Picture:
    """Return the first requests over time, and hits and TTFT with and without the cache."""
    arrivals = Arrivals(rate)
    workload = Synthetic(requests, Fixed(own), Fixed(output), arrivals, prefix, prefixes).build(0)
    on, off = (_run(workload, blocks, cached=cached) for cached in (True, False))
    shown = on.result.records[:_SHOWN]
    lines = tuple(
        Row(
            f"request {r.index}, {r.num_cached_tokens:,} cached",
            lifecycle_spans(on.steps[0], r.index, r.arrival_s),
        )
        for r in shown
    )
    cached = tuple(float(r.num_cached_tokens) for r in shown)
    computed = tuple(float(r.num_prompt_tokens - r.num_cached_tokens) for r in shown)
    bars = Bars("prompt tokens", Axis("prompt", "tokens"), tuple(str(r.index) for r in shown),
                {"found in the cache": cached, "computed": computed}, stacked=True)  # fmt: skip
    numbers = tuple(float(r.index) for r in on.result.records)
    ttft = Lines("", Axis("request"), Axis("TTFT", "ms"), tuple(
        Line(name, numbers, tuple((r.ttft_s or 0.0) * 1e3 for r in run.result.records))
        for name, run in (("with the cache", on), ("without", off))
    ))  # fmt: skip
    rows = tuple(_row(name, run) for name, run in (("with the cache", on), ("without", off)))
    header = ("", "prompt tokens computed", "mean TTFT, ms", "p95 TTFT, ms", "tokens/s", "blocks evicted")
    total = sum(r.num_prompt_tokens for r in on.result.records)
    hit = sum(r.num_cached_tokens for r in on.result.records)
    last = on.result.records[-1]
    facts = (
        Fact("prompt tokens found in the cache", 100.0 * hit / total, "%"),
        Fact("of the last request", 100.0 * last.num_cached_tokens / last.num_prompt_tokens, "%"),
        Fact("mean TTFT, without against with", rows[1][2] / rows[0][2], "×"),
        Fact("blocks evicted", on.result.replicas[0].stats.num_evicted_blocks),
    )
    title = f"{requests} requests of {prefix:,} shared and {own} own tokens"
    parts = (Timeline("", Axis("time", "ms"), lines), bars, ttft, Table("", header, rows), Facts("", facts))
    return Picture(title, parts)


def _run(workload: Workload, blocks: int, *, cached: bool) -> Watched:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16384)
    return watch(workload, roofline("llama-3.1-8b", "h100"), config, prefix_cache=cached, num_blocks=blocks)


def _row(name: str, run: Watched) -> tuple[str, int, float, float, float, int]:
    summary, records = summarize(run.result.records), run.result.records
    computed = sum(r.num_prompt_tokens - r.num_cached_tokens for r in records)
    evicted = run.result.replicas[0].stats.num_evicted_blocks
    ttft = summary["ttft_ms"]
    return name, computed, ttft["mean"], ttft["p95"], summary["output_tokens_per_s"], evicted


SIMULATION = Simulation(
    "prefix-cache",
    "Prefix cache time line",
    "The first request with a prefix computes it; those that follow find its blocks, until memory needs them.",
    (
        number("prefix", "shared prefix", 2000, 0, 8000, 16, "tokens"),
        number("own", "own tokens of a prompt", 80, 1, 2000, 8, "tokens"),
        number("output", "output", 40, 1, 500, 8, "tokens"),
        number("prefixes", "different prefixes", 3, 1, 32),
        number("requests", "requests", 40, 1, 200),
        number("rate", "requests per second", 10.0, 0.1, 100.0, 0.5, "1/s"),
        number("blocks", "blocks of the cache", 2000, 700, 20000, 100),
    ),
    draw,
)
