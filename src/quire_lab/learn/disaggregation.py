"""The same replicas colocated, and as pools for prefill and decode with K and V travelling over links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.executor.base import Executor
from quire_lab.bench.summary import RequestRecord
from quire_lab.learn.engine import Step, StepWatch
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Picture, Row, Span, Table, Timeline
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.sim.setup import prepare

_SHOWN_S = 1.5  # seconds of the time lines, from the first step on
_MODELS = ("llama-3.1-8b", "llama-2-7b", "llama-2-13b")
_DEVICES = ("a100", "h100", "h200", "b200", "mi300x")


def run(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[RequestRecord, ...], list[StepWatch]]:
    """Return the summary, the records, and the steps of each replica."""
    watches: list[StepWatch] = []

    def wrap(executor: Executor) -> Executor:
        watches.append(StepWatch(executor))
        return watches[-1]

    result, summary = prepare(settings, "learn").run(wrap)
    return summary, result.records, watches


def draw(
    model: str, device: str, prefill: int, decode: int, rate: float, prompt: int, output: int, link: float,
    tpot_ms: float,
) -> Picture:  # fmt: skip
    """Return both, under the same requests."""
    base = {
        "model": model, "hardware": device, "rate": rate, "limit": 80, "input_len": str(prompt), "max_in_flight": 1,
        "output_len": str(output), "slo": f"ttft=1s,tpot={tpot_ms:g}ms", "max_model_len": 4096,
    }  # fmt: skip
    together, records, watches = run(base | {"replicas": prefill + decode})
    pools = {"disaggregate": f"{prefill}:{decode}", "link_gb_s": link}
    apart, records_apart, watches_apart = run(base | pools)
    kinds = [f"prefill {n}" for n in range(prefill)] + [f"decode {n}" for n in range(decode)]
    lines = (
        _timeline(
            "colocated: steps of each replica", [f"replica {n}" for n in range(prefill + decode)], watches
        ),
        _timeline("disaggregated", kinds, watches_apart),
    )
    gaps = Lines("gaps between tokens", Axis("gap", "ms", log=True), Axis("share of gaps", "%"),
                 (_gaps("colocated", records), _gaps("disaggregated", records_apart)))  # fmt: skip
    rows = tuple(
        (name, s["ttft_ms"]["p50"], s["ttft_ms"]["p99"], s["tpot_ms"]["p50"], s["itl_ms"]["p95"], s["itl_ms"]["p99"],
         s["output_tokens_per_s"], s["goodput_per_s"])
        for name, s in (("colocated", together), ("disaggregated", apart))
    )  # fmt: skip
    header = ("", "TTFT p50, ms", "TTFT p99", "TPOT p50", "ITL p95", "ITL p99", "tokens/s", "goodput/s")
    total = apart["simulation"]["transferred"]
    num = max(1, total["num_transfers"])
    facts = (
        Fact("longest gap behind the second token, colocated", _longest(records), "ms"),
        Fact("longest gap behind the second token, disaggregated", _longest(records_apart), "ms"),
        Fact("bytes per transfer", total["num_bytes"] / num / 1e6, "MB"),
        Fact("on the link, mean", total["move_s"] / num * 1e3, "ms"),
        Fact("waiting for the link, mean", total["wait_s"] / num * 1e3, "ms"),
        Fact("goodput, disaggregated against colocated",
             apart["goodput_per_s"] / together["goodput_per_s"] if together["goodput_per_s"] else 1.0, "×"),
    )  # fmt: skip
    title = (
        f"{prefill + decode} replicas of {model} on {device}, {rate:g} requests/s of {prompt:,} + {output}"
    )
    return Picture(title, (*lines, gaps, Table("", header, rows), Facts("", facts)))


def _timeline(title: str, names: list[str], watches: list[StepWatch]) -> Timeline:
    start_s = min((watch.steps[0].start_s for watch in watches if watch.steps), default=0.0)
    rows = []
    for name, watch in zip(names, watches, strict=True):
        shown = [step for step in watch.steps if step.start_s < start_s + _SHOWN_S and step.rows]
        rows.append(Row(name, tuple(Span(s.start_s * 1e3, s.end_s * 1e3, _state(s)) for s in shown)))
    return Timeline(title, Axis("time", "ms"), tuple(rows))


def _state(step: Step) -> str:
    prompts = [row for row in step.rows if row.count > 1 or row.start == 0]
    return "decode" if not prompts else "prefill" if len(prompts) == len(step.rows) else "both"


def _gaps(name: str, records: tuple[RequestRecord, ...]) -> Line:
    ms = sorted(gap_s * 1e3 for r in records for gap_s in r.itl_s)
    every = max(1, len(ms) // 400)
    shown = [*range(0, len(ms), every), *([len(ms) - 1] if ms else [])]
    return Line(name, tuple(ms[i] for i in shown), tuple(100.0 * (i + 1) / len(ms) for i in shown), "steps")


def _longest(records: tuple[RequestRecord, ...]) -> float:
    return max((gap_s * 1e3 for r in records for gap_s in r.itl_s[1:]), default=0.0)


SIMULATION = Simulation(
    "disaggregation",
    "Colocated against disaggregated",
    "A prompt in a decode step makes every running request wait; separate pools pay with a transfer of K and V.",
    (
        choice("model", "model", "llama-3.1-8b", _MODELS),
        choice("device", "device", "h100", _DEVICES),
        number("prefill", "prefill replicas", 1, 1, 4),
        number("decode", "decode replicas", 3, 1, 4),
        number("rate", "requests per second", 10.0, 0.5, 60.0, 0.5, "1/s"),
        number("prompt", "prompt", 2000, 16, 3500, 16, "tokens"),
        number("output", "output", 60, 1, 200, 4, "tokens"),
        number("link", "link of a prefill replica", 50.0, 0.5, 900.0, 0.5, "GB/s"),
        number("tpot_ms", "SLO of TPOT", 8.0, 1.0, 200.0, 0.5, "ms"),
    ),
    draw,
)
