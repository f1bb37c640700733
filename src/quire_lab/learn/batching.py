"""Slots of a batch over the time of static, dynamic and continuous batching, for given lengths."""

from __future__ import annotations

from quire.config import GateKind, SchedulerConfig
from quire_lab.learn.engine import Step, Watched, requests_of, roofline, watch
from quire_lab.learn.picture import Axis, Fact, Facts, Picture, Row, Span, Table, Timeline
from quire_lab.learn.simulation import Simulation, number, numbers_of, text

GATES: tuple[GateKind, ...] = ("static", "dynamic", "continuous")


def run_gate(
    gate: GateKind, prompts: list[int], outputs: list[int], slots: int, every_s: float, wait_s: float
) -> Watched:
    """Run the requests, which arrive ``every_s`` apart, through the scheduler with ``gate``."""
    config = SchedulerConfig(
        gate=gate,
        max_num_seqs=slots,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        dynamic_max_wait_s=wait_s,
    )
    workload = requests_of(prompts, outputs, [i * every_s for i in range(len(outputs))])
    return watch(workload, roofline("llama-3.1-8b", "h100"), config, prefix_cache=False)


def seats(steps: tuple[Step, ...], slots: int) -> list[list[tuple[int, int, int, bool]]]:
    """Return per slot (first step, last step + 1, request, whether it is the prompt's)."""
    free, seat_of = list(range(slots)), dict[int, int]()
    rows: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(slots)]
    for at, step in enumerate(steps):
        present = {row.request for row in step.rows}
        for request in [r for r in seat_of if r not in present]:
            free.append(seat_of.pop(request))
        free.sort()
        for row in step.rows:
            if row.request not in seat_of:
                seat_of[row.request] = free.pop(0)
            seat, prompt = rows[seat_of[row.request]], row.count > 1 or row.start == 0
            if seat and seat[-1][2:] == (row.request, prompt) and seat[-1][1] == at:
                seat[-1] = (seat[-1][0], at + 1, row.request, prompt)
            else:
                seat.append((at, at + 1, row.request, prompt))
    return rows


def idle_share(steps: tuple[Step, ...], slots: int) -> float:
    """Return the share of slots × steps in which a slot computes nothing."""
    return 1.0 - sum(len(step.rows) for step in steps) / (slots * len(steps))


def draw(lengths: str, prompts: str, slots: int, every_ms: float, wait_ms: float) -> Picture:
    """Return one time line per gate."""
    outputs = numbers_of("--lengths", lengths, 1, 1000)
    inputs = numbers_of("--prompts", prompts, 1, 4000)
    used = min(slots, len(outputs))
    parts: list[Timeline | Table | Facts] = []
    table, facts = [], []
    for gate in GATES:
        run = run_gate(gate, inputs, outputs, used, every_ms / 1e3, wait_ms / 1e3)
        steps = run.steps[0]
        rows = tuple(Row(f"slot {n}", _spans(spans, steps)) for n, spans in enumerate(seats(steps, used)))
        parts.append(Timeline(f"{gate}: slots over time", Axis("time", "ms"), rows))
        idle, end_s = idle_share(steps, used), max(r.end_s for r in run.result.records)
        ttft = [r.ttft_s for r in run.result.records if r.ttft_s is not None]
        table.append(
            (gate, len(steps), idle * 100, sum(outputs) / end_s, sum(ttft) / len(ttft) * 1e3, end_s * 1e3)
        )
        facts.append(Fact(f"{gate} batching: slots idle", idle * 100, "%"))
    parts.append(
        Table(
            "", ("gate", "steps", "slots idle, %", "tokens/s", "mean TTFT, ms", "all done, ms"), tuple(table)
        )
    )
    facts += _padding(inputs, outputs, used)
    return Picture("Batching strategies", (*parts, Facts("", tuple(facts))))


def _spans(seat: list[tuple[int, int, int, bool]], steps: tuple[Step, ...]) -> tuple[Span, ...]:
    """Return a slot's spans in milliseconds; between steps it waits for requests, and is left blank."""
    return tuple(
        Span(steps[a].start_s * 1e3, steps[b - 1].end_s * 1e3, "prefill" if p else "decode", f"request {r}")
        for a, b, r, p in seat
    )


def _padding(inputs: list[int], outputs: list[int], slots: int) -> list[Fact]:
    """Return what rectangular batches would pad: the engine's batches are ragged and pad nothing."""
    prompts = [inputs[i % len(inputs)] for i in range(len(outputs))]
    batches = [prompts[i : i + slots] for i in range(0, len(prompts), slots)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    share = 1.0 - sum(prompts) / padded
    return [
        Fact("prompt tokens that a rectangular batch would pad (this engine pads none)", share * 100, "%")
    ]


SIMULATION = Simulation(
    "batching",
    "Batching strategies",
    "A static batch keeps its slots until its longest answer ends; in a continuous one the next request takes them.",
    (
        text("lengths", "output tokens of each request", "20,28,14,50,30,12,40,8"),
        text("prompts", "prompt tokens (repeated as needed)", "64"),
        number("slots", "slots", 4, 1, 16),
        number("every_ms", "a request every", 20.0, 0.0, 1000.0, 5.0, "ms"),
        number("wait_ms", "longest wait of the dynamic gate", 50.0, 1.0, 1000.0, 5.0, "ms"),
    ),
    draw,
)
