"""Prefill against decode on the roofline: arithmetic intensity, time and utilization of steps."""

from __future__ import annotations

from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.roofline import Roofline
from quire_lab.learn.engine import DEVICES, MODELS, roofline
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Picture, Row, Span, Table, Timeline
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.laws import intensity, ridge_point

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def decode_step(batch: int, context: int) -> StepFeatures:
    """Return a step of ``batch`` sequences with ``context`` tokens each."""
    return StepFeatures(batch, batch, batch, batch * context, 0, 0)


def prefill_step(prompt: int) -> StepFeatures:
    """Return a step that computes one prompt."""
    return StepFeatures(prompt, 1, 1, 0, prompt, chunk_pairs(0, prompt))


def draw(model: str, device: str, precision: str, tp: int, prompt: int, output: int, batch: int) -> Picture:
    """Return the roofline with decode steps of growing batches and one prefill, and a request's time line."""
    steps = roofline(model, device, precision, tp, ideal=True)
    hardware = steps.hardware
    ridge, rate = ridge_point(hardware, precision), hardware.rate(precision) or 0.0
    decodes = [(b, intensity(steps, decode_step(b, prompt))) for b in _BATCHES]
    prefill = intensity(steps, prefill_step(prompt))
    xs = sorted({1.0, ridge, ridge * 8, *(i.per_byte for _, i in decodes), prefill.per_byte})
    roof = Line("roof", tuple(xs), tuple(min(rate, x * hardware.bandwidth) / 1e12 for x in xs))
    points = sorted((i.per_byte, i.operations / i.seconds / 1e12) for _, i in decodes)
    at = Line("decode, batch 1 … 1024", tuple(x for x, _ in points), tuple(y for _, y in points), "points")
    prompts = Line(
        f"prefill of {prompt:,}",
        (prefill.per_byte,),
        (prefill.operations / prefill.seconds / 1e12,),
        "points",
    )
    x, y = (
        Axis("arithmetic intensity", "operations/byte", log=True),
        Axis("speed", "Tera-operations/s", log=True),
    )
    chart = Lines("", x, y, (roof, at, prompts), marks=((ridge, "ridge point"),))
    rows = [
        (f"decode of {b}", i.per_byte, i.seconds * 1e3, b / i.seconds, i.utilization * 100)
        for b, i in decodes
    ]
    rows.append((f"prefill of {prompt:,}", prefill.per_byte, prefill.seconds * 1e3, prompt / prefill.seconds,
                 prefill.utilization * 100))  # fmt: skip
    one, many = intensity(steps, decode_step(1, prompt)), intensity(steps, decode_step(batch, prompt))
    facts = (
        Fact("ridge point of the device", ridge, "operations/byte"),
        Fact("arithmetic used by the prefill", prefill.utilization * 100, "%"),
        Fact("arithmetic used by a decode of 1", one.utilization * 100, "%"),
        Fact(f"arithmetic used by a decode of {batch}", many.utilization * 100, "%"),
        Fact("a prompt token against an output token of one request, in time",
             one.seconds / (prefill.seconds / prompt), "×"),
    )  # fmt: skip
    header = ("step", "operations/byte", "ms", "tokens/s", "arithmetic used, %")
    title = f"{model} as {precision} on {tp} × {hardware.title}, nothing lost"
    line, spent = _request(steps, prompt, output, batch)
    return Picture(title, (chart, line, Table("", header, tuple(rows)), Facts("", (*facts, *spent))))


def _request(steps: Roofline, prompt: int, output: int, batch: int) -> tuple[Timeline, tuple[Fact, ...]]:
    """Return where the time of a request goes, alone and with ``batch`` sequences in each decode step."""
    first_ms = steps.seconds(prefill_step(prompt)) * 1e3
    rows, shares = [], []
    for b in dict.fromkeys((1, batch)):
        # A sum over growing contexts is that of the mean one: attention grows in a straight line.
        decodes_ms = (output - 1) * steps.seconds(decode_step(b, prompt + output // 2)) * 1e3
        spans = (Span(0.0, first_ms, "prefill", f"{prompt:,} tokens"),
                 Span(first_ms, first_ms + decodes_ms, "decode", f"{output - 1:,} steps"))  # fmt: skip
        rows.append(Row("alone" if b == 1 else f"among {b}", spans))
        shares.append((b, 100.0 * decodes_ms / (first_ms + decodes_ms)))
    facts = tuple(Fact(f"time of a request in decode steps of {b}", share, "%") for b, share in shares)
    title = f"a request of {prompt:,} + {output:,} tokens"
    return Timeline(title, Axis("time", "ms"), tuple(rows)), facts


SIMULATION = Simulation(
    "prefill-decode",
    "Prefill against decode",
    "A prompt's tokens share one reading of the weights; each output token of one request reads them again.",
    (
        choice("model", "model", "llama-3.1-8b", MODELS),
        choice("device", "device", "h100", DEVICES),
        choice("precision", "weights", "bf16", ("bf16", "fp8", "int8", "int4")),
        number("tp", "devices (tensor parallel)", 1, 1, 8),
        number("prompt", "prompt", 1024, 16, 131072, 16, "tokens"),
        number("output", "output", 256, 2, 8192, 1, "tokens"),
        number("batch", "sequences of a decode step", 32, 1, 1024),
    ),
    draw,
)
