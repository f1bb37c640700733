"""A loop around ``model.generate()`` against serving: padded batches, one after another, and a request at a time."""

from __future__ import annotations

from quire.config import SchedulerConfig
from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.roofline import Roofline
from quire_lab.learn.engine import DEVICES, MODELS, requests_of, roofline, watch
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Picture, Row, Span, Table, Timeline
from quire_lab.learn.prefill_decode import decode_step
from quire_lab.learn.simulation import Simulation, choice, number, numbers_of, text

# Per request: first token and end, in seconds after all requests had arrived.
Times = list[tuple[float, float]]


def draw(model: str, device: str, prompts: str, lengths: str, batch: int) -> Picture:
    """Return when each request has its first token and its last, by three ways of running all of them."""
    inputs, outputs = numbers_of("--prompts", prompts, 1, 4000), numbers_of("--lengths", lengths, 1, 1000)
    sizes = [(inputs[i % len(inputs)], output) for i, output in enumerate(outputs)]
    steps = roofline(model, device)
    ways = {
        "generate(), one at a time": _generated(steps, sizes, 1),
        f"generate(), batches of {batch}": _generated(steps, sizes, batch),
        "served": _served(steps, sizes),
    }
    timelines = tuple(
        Timeline(name, Axis("time", "ms"), tuple(_row(i, *times[i]) for i in range(len(sizes))))
        for name, times in ways.items()
    )
    total = sum(outputs)
    rows = tuple(
        (name, _last(times) * 1e3, total / _last(times), _mean([first for first, _ in times]) * 1e3,
         _mean([end for _, end in times]) * 1e3)
        for name, times in ways.items()
    )  # fmt: skip
    header = ("", "all done, ms", "tokens/s", "mean TTFT, ms", "mean E2EL, ms")
    bars = Bars(
        "output tokens per second", Axis("speed", "tokens/s"), tuple(ways), {"": tuple(r[2] for r in rows)}
    )
    facts = (
        Fact("served against one at a time, tokens/s", rows[2][2] / rows[0][2], "×"),
        Fact(f"served against batches of {batch}, tokens/s", rows[2][2] / rows[1][2], "×"),
        Fact("prompt tokens that the batches pad", _padding([p for p, _ in sizes], batch), "%"),
        Fact("decode steps of the batches for answers that had ended", _padding(outputs, batch), "%"),
    )
    title = f"{len(sizes)} requests at once, {model} on {device}"
    return Picture(title, (*timelines, bars, Table("", header, rows), Facts("", facts)))


def _generated(steps: Roofline, sizes: list[tuple[int, int]], batch: int) -> Times:
    """Run batches as ``model.generate()`` does: prompts padded to the longest, until the longest answer ends."""
    times, now = [], 0.0
    for start in range(0, len(sizes), batch):
        these = sizes[start : start + batch]
        count, prompt, output = len(these), max(p for p, _ in these), max(o for _, o in these)
        rows, pairs = count * prompt, count * chunk_pairs(0, prompt)
        now += steps.seconds(StepFeatures(rows, count, count, 0, rows, pairs))
        now += sum(steps.seconds(decode_step(count, prompt + i)) for i in range(1, output))
        times += [(now, now)] * count  # an answer is returned when the whole batch has ended
    return times


def _served(steps: Roofline, sizes: list[tuple[int, int]]) -> Times:
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
    workload = requests_of([p for p, _ in sizes], [o for _, o in sizes])
    records = watch(workload, steps, config, prefix_cache=False).result.records
    return [((r.ttft_s or 0.0) + r.arrival_s, r.end_s) for r in records]


def _row(index: int, first_s: float, end_s: float) -> Row:
    spans = [Span(0.0, first_s * 1e3, "wait")]
    if end_s > first_s:
        spans.append(Span(first_s * 1e3, end_s * 1e3, "decode"))
    return Row(f"request {index}", tuple(spans))


def _padding(lengths: list[int], batch: int) -> float:
    """Return the share of a rectangle of each batch that is not used, in percent."""
    parts = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    return 100.0 * (1.0 - sum(lengths) / sum(max(part) * len(part) for part in parts))


def _last(times: Times) -> float:
    return max(end for _, end in times)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


SIMULATION = Simulation(
    "generate-loop",
    "model.generate() against serving",
    "A loop around generate() pads its batches and returns nothing before the longest answer; a server streams each.",
    (
        choice("model", "model", "llama-3.1-8b", MODELS[:5]),
        choice("device", "device", "h100", DEVICES),
        text("prompts", "prompt tokens (repeated as needed)", "300,1200,60,700"),
        text("lengths", "output tokens of each request", "120,30,250,60,180,20,90,240,40,150,10,70"),
        number("batch", "requests in a batch of generate()", 4, 1, 32),
    ),
    draw,
)
