"""Generation without a KV cache: each token computes all before it again, O(T²) positions against O(T)."""

from __future__ import annotations

from itertools import accumulate

from quire.models.checkpoint import spec_of
from quire.units import GIB
from quire_lab.learn.engine import DEVICES, MODELS, roofline
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Picture, Table
from quire_lab.learn.prefill_decode import decode_step, prefill_step
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.memory import kv_bytes_per_request

_ROWS = 8  # rows of the table


def draw(model: str, device: str, prompt: int, output: int) -> Picture:
    """Return positions and time by output token, with the cache and without."""
    steps = roofline(model, device)
    first_s = steps.seconds(prefill_step(prompt))
    with_s, without_s = [first_s], [first_s]
    with_n, without_n = [prompt], [prompt]  # positions computed
    for token in range(1, output):
        known = prompt + token
        with_s.append(steps.seconds(decode_step(1, known)))
        without_s.append(steps.seconds(prefill_step(known)))
        with_n.append(1)
        without_n.append(known)
    xs = tuple(float(i + 1) for i in range(output))
    sums = [list(accumulate(values)) for values in (with_n, without_n, with_s, without_s)]
    axis = Axis("output tokens")
    positions = Lines("positions computed", axis, Axis("positions"), (
        Line("with the cache: O(T)", xs, tuple(map(float, sums[0]))),
        Line("without: O(T²)", xs, tuple(map(float, sums[1]))),
    ))  # fmt: skip
    time = Lines("time", axis, Axis("time", "s"), (
        Line("with the cache", xs, tuple(sums[2])),
        Line("without", xs, tuple(sums[3])),
    ))  # fmt: skip
    shown = sorted({max(1, output * i // _ROWS) for i in range(1, _ROWS + 1)})
    rows = tuple(
        (f"{n:,} tokens", *(values[n - 1] for values in sums), sums[3][n - 1] / sums[2][n - 1]) for n in shown
    )
    header = ("output", "positions with", "without", "s with", "s without", "×")
    facts = (
        Fact("positions computed, without against with", sums[1][-1] / sums[0][-1], "×"),
        Fact("time, without against with", sums[3][-1] / sums[2][-1], "×"),
        Fact("a token alone, the last, without against with", without_s[-1] / with_s[-1], "×"),
        Fact("memory that the cache takes for it", kv_bytes_per_request(spec_of(model), prompt + output) / GIB, "GiB"),
    )  # fmt: skip
    title = f"{model} on {device}: {prompt:,} + {output:,} tokens of one request"
    return Picture(title, (positions, time, Table("", header, rows), Facts("", facts)))


SIMULATION = Simulation(
    "no-kv-cache",
    "Without a KV cache",
    "Without K and V each output token computes all tokens before it again: O(T²) positions in place of O(T).",
    (
        choice("model", "model", "llama-3.1-8b", MODELS[:5]),
        choice("device", "device", "h100", DEVICES),
        number("prompt", "prompt", 512, 1, 8192, 16, "tokens"),
        number("output", "output", 512, 2, 4096, 16, "tokens"),
    ),
    draw,
)
