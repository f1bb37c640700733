"""What continuous batching and the KV cache bring, on one engine: `python benchmarks/batching.py [MODEL]`.

The same requests run one at a time, in static batches, in dynamic batches and continuously: one model, one scheduler,
and only its gate changes. Nothing can join a static batch, so the slot of a request that has ended stays empty until
the longest request has ended; where lengths differ much, that is most of the time (Yu et al., Orca, OSDI 2022).

Decoding without a KV cache computes the whole context again for each token: the time of T tokens grows with T² (its
attention with T³), and with a cache with T (plus the attention over the context).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.args import EngineArgs, make_args
from quire.errors import ConfigError
from quire.metrics.engine_stats import EngineStats
from quire.scheduler.settings import PolicyChange
from quire_lab.bench.figures import Axis, Series, chart, colour, frame
from quire_lab.bench.offline import OfflineEngine
from quire_lab.bench.page import Section, console, html_page, print_table, write
from quire_lab.bench.summary import RequestRecord, summarize
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, parse_lengths
from quire_lab.workload.request import Workload, WorkloadRequest

# Decoding without a cache is timed at so many contexts, and interpolated between them.
NUM_CONTEXTS = 12
Span = tuple[float, float]  # (start, length) in seconds


@dataclass(frozen=True, slots=True)
class BatchingArgs:
    """What to run and where to write it."""

    limit: int = 64  # requests
    input_len: str = "64"
    output_len: str = "lognormal:48,1.0,512"
    rate: float | None = None  # requests per second; None: all at once
    slots: int = 16
    decode_len: int = 512  # tokens decoded with and without the KV cache
    json: str | None = None
    html: str | None = None


@dataclass(frozen=True, slots=True)
class GateRun:
    """One way of batching: its summary, its slots over time, and how many sequences ran after each step."""

    name: str
    summary: dict[str, Any]
    slots: list[list[Span]]
    times_s: list[float]
    running: list[int]
    num_steps: int


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Seconds until output token T was there, for growing T."""

    tokens: list[int]
    with_cache_s: list[float]
    without_cache_s: list[float]


def batching(engine_args: EngineArgs, args: BatchingArgs) -> int:
    """Run all gates, then both ways of decoding; print and write what came out."""
    # Random prompts share nothing, and a gate must not find the cached blocks of the previous gate's run.
    engine_args = replace(engine_args, max_num_seqs=args.slots, enable_prefix_caching=False)
    lengths = parse_lengths(args.input_len, "--input-len"), parse_lengths(args.output_len, "--output-len")
    arrivals = Arrivals() if args.rate is None else Arrivals(args.rate)
    engine = OfflineEngine(engine_args)
    workload = Synthetic(args.limit, *lengths, arrivals).build(engine_args.seed, engine.max_model_len)
    _warm_up(engine)
    gates = [run_gate(engine, workload, *way) for way in ways(args.slots)]
    curve = None
    if args.decode_len:
        if args.decode_len + 1 > engine.max_model_len:
            raise ConfigError(
                f"--decode-len {args.decode_len} does not fit the context of {engine.max_model_len}"
            )
        curve = decode_curve(engine, args.decode_len)
    engine.close()
    figures = as_dict(gates, curve) | {"run": {"kernels": engine.info.kernels, "workload": workload.source}}
    _print(figures)
    if args.json:
        write(args.json, json.dumps(figures, indent=2) + "\n")
    if args.html:
        write(args.html, report(engine_args.model, figures, gates, curve))
    return 0


def ways(slots: int) -> list[tuple[str, PolicyChange]]:
    """(name, settings) of each way of batching."""
    return [
        ("one at a time", PolicyChange(gate="continuous", max_num_seqs=1)),
        ("static", PolicyChange(gate="static", max_num_seqs=slots)),
        ("dynamic", PolicyChange(gate="dynamic", max_num_seqs=slots)),
        ("continuous", PolicyChange(gate="continuous", max_num_seqs=slots)),
    ]


def run_gate(engine: OfflineEngine, workload: Workload, name: str, change: PolicyChange) -> GateRun:
    """Run the workload one way."""
    engine.change(change)
    times_s: list[float] = []
    running: list[int] = []

    def note(now_s: float, stats: EngineStats) -> None:
        times_s.append(now_s)
        running.append(stats.num_running)

    done = engine.run(workload.requests, engine.prompts(seed=0), note)
    summary = summarize(done.records, duration_s=done.duration_s, refused_rows=workload.refused)
    slots = assign_slots(done.records, done.admitted_s)
    return GateRun(name, summary, slots, times_s, running, done.num_steps)


def assign_slots(records: Sequence[RequestRecord], admitted_s: dict[int, float]) -> list[list[Span]]:
    """Give each request the lowest slot that is free when it is admitted; the spans of each slot."""
    slots: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, slot)
    for record in sorted(records, key=lambda r: admitted_s[r.index]):
        start_s = admitted_s[record.index]
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot = len(slots)
            slots.append([])
        slots[slot].append((start_s, record.end_s - start_s))
        heapq.heappush(busy, (record.end_s, slot))
    return slots


def decode_curve(engine: OfflineEngine, num_tokens: int) -> DecodeCurve:
    """Time ``num_tokens`` of output behind a prompt of one token, with the cache and without.

    Without: a token at context T is a request with a prompt of T tokens that computes all of them and samples one.
    """
    engine.change(PolicyChange(gate="continuous", max_num_seqs=1))
    prompts = engine.prompts(seed=1)
    (cached,) = engine.run([WorkloadRequest(0.0, 1, num_tokens)], prompts).records
    assert cached.first_token_s is not None
    ends_s = [cached.first_token_s]
    for gap_s in cached.itl_s:
        ends_s.append(ends_s[-1] + gap_s)
    contexts = sorted(
        {max(1, round(num_tokens * (i / NUM_CONTEXTS) ** 1.5)) for i in range(NUM_CONTEXTS + 1)}
    )
    times_s = []
    for i, context in enumerate(contexts):
        tries = [engine.run([WorkloadRequest(0.0, context, 1, i)], prompts).duration_s for _ in range(3)]
        times_s.append(min(tries))
    tokens = list(range(1, len(ends_s) + 1))
    total_s, without_s = 0.0, []
    for token in tokens:
        total_s += interpolate(contexts, times_s, token)
        without_s.append(total_s)
    return DecodeCurve(tokens, ends_s, without_s)


def interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """The value at ``x`` on the straight line between its neighbours in ascending ``xs``."""
    for i in range(1, len(xs)):
        if x <= xs[i]:
            share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
            return ys[i - 1] + share * (ys[i] - ys[i - 1])
    return ys[-1]


def growth(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent p of seconds ~ T^p over the last half of T, by least squares of the logarithms."""
    half = len(tokens) // 2
    points = [(math.log(t), math.log(s)) for t, s in zip(tokens[half:], seconds[half:], strict=True)]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def as_dict(gates: Sequence[GateRun], curve: DecodeCurve | None) -> dict[str, Any]:
    """The figures for JSON: each gate's summary, its speed over static batching, and the decode curve's ends."""
    static = next(g for g in gates if g.name == "static").summary["output_tokens_per_s"]
    alone = gates[0].summary["output_tokens_per_s"]
    values: dict[str, Any] = {
        "gates": {
            g.name: g.summary
            | {
                "over_static": g.summary["output_tokens_per_s"] / static,
                "over_one_at_a_time": g.summary["output_tokens_per_s"] / alone,
                "num_steps": g.num_steps,
                "slots_busy": busy_share(g),
            }
            for g in gates
        }
    }
    if curve is not None:
        values["decode"] = {
            "num_tokens": curve.tokens[-1],
            "with_cache_s": curve.with_cache_s[-1],
            "without_cache_s": curve.without_cache_s[-1],
            "ratio": curve.without_cache_s[-1] / curve.with_cache_s[-1],
            "growth_with_cache": growth(curve.tokens, curve.with_cache_s),
            "growth_without_cache": growth(curve.tokens, curve.without_cache_s),
        }
    return values


def busy_share(run: GateRun) -> float:
    """Share of slots × time in which a slot had a request."""
    busy_s = sum(length_s for spans in run.slots for _, length_s in spans)
    return busy_s / (len(run.slots) * float(run.summary["duration_s"]))


def report(model: str, figures: dict[str, Any], gates: Sequence[GateRun], curve: DecodeCurve | None) -> str:
    """The HTML report: slots over time for each gate, what ran, and the two decode curves."""
    running = [Series(g.name, g.times_s, [float(n) for n in g.running], "steps") for g in gates]
    sections = [
        Section(text=f"{figures['run']['workload']}. {figures['run']['kernels']}"),
        Section(tables=[(_HEADER, _rows(figures))]),
        Section("Slots over time", plots=[bars(g.slots, g.name) for g in gates[1:]]),
        Section(plots=[chart(running, title="Running sequences", x="s", y="sequences")]),
    ]
    if curve is not None:
        lines = [
            Series("with the cache", curve.tokens, curve.with_cache_s),
            Series("without", curve.tokens, curve.without_cache_s),
        ]
        options = {"title": "Time to output token T", "x": "T", "y": "s"}
        plots = [chart(lines, **options), chart(lines, **options, log_x=True, log_y=True)]  # type: ignore[arg-type]
        title = "Decoding with and without the KV cache"
        sections += [Section(title, plots=plots), Section(text=_decode_words(figures["decode"]))]
    return html_page(f"Batching: {model}", sections)


def bars(slots: Sequence[Sequence[Span]], title: str) -> str:
    """The spans of each slot on its own row, as an ``<svg>`` element."""
    ends = [start + length for spans in slots for start, length in spans]
    across = Axis.over([0.0, *ends], 58, 548, log=False, from_zero=True)
    up = Axis.over([0.0, len(slots)], 270, 46, log=False, from_zero=True)
    drawn = [
        f'<rect x="{across.at(start):.1f}" y="{up.at(row + 0.92):.1f}" fill="{colour(i)}" '
        f'width="{across.at(length) - across.at(0):.2f}" height="{up.at(0) - up.at(0.84):.1f}"/>'
        for row, spans in enumerate(slots)
        for i, (start, length) in enumerate(spans)
    ]
    return frame(across, up, drawn, title=title, x="s", y="slot")


_HEADER = ("", "tokens/s", "× static", "× one at a time", "slots busy", "TTFT p50 ms", "E2EL p50 ms", "s")


def _rows(figures: dict[str, Any]) -> list[list[Any]]:
    return [
        [name, g["output_tokens_per_s"], g["over_static"], g["over_one_at_a_time"], g["slots_busy"],
         g["ttft_ms"]["p50"], g["e2el_ms"]["p50"], g["duration_s"]]
        for name, g in figures["gates"].items()
    ]  # fmt: skip


def _decode_words(decode: dict[str, Any]) -> str:
    return (
        f"{decode['num_tokens']} tokens: {decode['with_cache_s']:.2f} s with the KV cache (growing as "
        f"T^{decode['growth_with_cache']:.2f}), {decode['without_cache_s']:.2f} s without (T^"
        f"{decode['growth_without_cache']:.2f}): {decode['ratio']:.1f} times. Without it, {NUM_CONTEXTS + 1} contexts "
        "are measured and the sum is taken over the line between them."
    )


def _print(figures: dict[str, Any]) -> None:
    out = console()
    out.print(f"{figures['run']['workload']}. {figures['run']['kernels']}", highlight=False)
    print_table(out, _HEADER, _rows(figures))
    if "decode" in figures:
        out.print(_decode_words(figures["decode"]), highlight=False)


def _warm_up(engine: OfflineEngine) -> None:
    work = [WorkloadRequest(0.0, 16, 4, i) for i in range(4)]
    engine.run(work, engine.prompts(seed=2))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quill")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantize")
    parser.add_argument("--limit", type=int, default=64, help="requests")
    parser.add_argument(
        "--input-len", default="64", help="512, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"
    )
    parser.add_argument("--output-len", default="lognormal:48,1.0,512", help="as --input-len")
    parser.add_argument("--rate", type=float, help="requests per second, as a Poisson process [all at once]")
    parser.add_argument("--slots", type=int, default=16, help="requests in a batch at most")
    parser.add_argument("--decode-len", type=int, default=512, help="tokens decoded both ways; 0: none")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--html", help="file for a report with plots")
    given = vars(parser.parse_args())
    engine = {name: given.pop(name) for name in ("model", "threads", "quantize")}
    return batching(make_args(EngineArgs, engine, origin="flag"), BatchingArgs(**given))


if __name__ == "__main__":
    raise SystemExit(main())
