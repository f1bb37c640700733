"""One request among others, from its arrival to its last token, step by step of the scheduler."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire_lab.learn.engine import MODELS, Step, requests_of, roofline, watch
from quire_lab.learn.picture import Axis, Fact, Facts, Picture, Row, Span, Table, Timeline
from quire_lab.learn.simulation import Simulation, choice, number

# What measured first tokens take beyond the planner's steps: a constant fitted to them, and nothing that was timed.
RESIDUE = "outside of the steps (fitted)"


def lifecycle_spans(steps: tuple[Step, ...], request: int, arrival_s: float) -> tuple[Span, ...]:
    """Return the parts of a request's life, in ms: waits, prefill chunks, decode steps."""
    spans: list[Span] = []
    at_s = arrival_s
    for step in steps:
        row = next((row for row in step.rows if row.request == request), None)
        if row is None:
            continue
        if step.start_s > at_s + 1e-9:
            spans.append(Span(at_s * 1e3, step.start_s * 1e3, "wait"))
        state = "decode" if row.count == 1 and row.start else "prefill"
        label = f"{row.count} tokens in a step of {step.num_tokens}"
        spans.append(Span(step.start_s * 1e3, step.end_s * 1e3, state, label))
        at_s = step.end_s
    return tuple(spans)


def draw(model: str, device: str, prompt: int, output: int, others: int, chunk: int) -> Picture:
    """Return the time line of request ``others`` (the last) and of those before it."""
    config = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=chunk, max_model_len=prompt + output + 8192
    )
    request_s = roofline(model, device).efficiency.first_s
    arrivals = [0.02 * i for i in range(others)] + [0.02 * others]
    workload = requests_of([prompt], [output] * (others + 1), arrivals)
    run = watch(workload, roofline(model, device), config, prefix_cache=False, request_s=request_s)
    steps, last = run.steps[0], run.result.records[-1]
    spans = lifecycle_spans(steps, last.index, last.arrival_s + request_s)
    way = Span(last.arrival_s * 1e3, (last.arrival_s + request_s) * 1e3, RESIDUE)
    rows = [Row(f"request {r.index}", lifecycle_spans(steps, r.index, r.arrival_s + request_s))
            for r in run.result.records[-8:-1]]  # fmt: skip
    rows.append(Row("this request", (way, *spans)))
    line = Timeline("", Axis("time", "ms"), tuple(rows))
    of: dict[str, list[Span]] = {}
    for span in (way, *spans):
        of.setdefault(span.state, []).append(span)
    table = tuple((state, len(group), sum(s.end - s.start for s in group)) for state, group in of.items())
    ttft, tpot = last.ttft_s, last.tpot_s
    facts = [Fact("TTFT", (ttft or 0.0) * 1e3, "ms"), Fact("TPOT", (tpot or 0.0) * 1e3, "ms")]
    facts += [
        Fact("E2EL", last.e2el_s * 1e3, "ms"),
        Fact("E2EL by the parts of the table", sum(row[2] for row in table), "ms"),
        Fact("steps that the scheduler planned", len(steps)),
    ]
    title = f"A request of {prompt:,} + {output} tokens behind {others} others"
    return Picture(title, (line, Table("", ("part", "times", "ms"), table), Facts("", tuple(facts))))


SIMULATION = Simulation(
    "request-lifecycle",
    "Request lifecycle",
    "A request is parsed, waits in the queue, is computed chunk by chunk, then decodes one token per step.",
    (
        choice("model", "model", "llama-3.1-8b", MODELS[:5]),
        choice("device", "device", "h200", ("a100", "h100", "h200", "b200", "mi300x")),
        number("prompt", "prompt", 2000, 1, 8000, 1, "tokens"),
        number("output", "output", 20, 1, 500, 1, "tokens"),
        number("others", "requests before it", 4, 0, 64),
        number("chunk", "tokens per step at most", 1024, 64, 8192, 64, "tokens"),
    ),
    draw,
)
