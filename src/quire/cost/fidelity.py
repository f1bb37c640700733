"""How far each way to multiply weights was measured from the same weights in fp32, on real models. Torch-free.

A figure is a class, not a promise: the least and the largest mean KL, in nats, of the models that were measured with
``quire eval --against fp32``. The files are in benchmarks/results, with machine, date and command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from quire.weight_format import WeightFormat

# plain: no rounding but bfloat16's. stored: numbers of a file times rows in int8 with a scale per 32 or 64 inputs.
# token: the same with one scale per row. The others are rounded on load; int4: all linears in two levels (int4-g16).
Way = Literal["plain", "stored", "token", "int8", "int8 in groups", "int4", "int4 in groups"]


class Measured(NamedTuple):
    """Mean KL from fp32, in nats: the least and the largest of the models measured."""

    low: float
    high: float
    source: str  # a file of benchmarks/results

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:.4f}"
        return f"{self.low:.4f} … {self.high:.4f}"


_FIDELITY, _ROTATION = "fidelity.md", "rotation-2026-11-27.md"
MODELS = "SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder-0.5B"
MEASURED: Mapping[Way, Measured] = {
    "plain": Measured(0.0004, 0.0005, _FIDELITY),
    "stored": Measured(0.0010, 0.0032, _FIDELITY),
    "int8": Measured(0.0020, 0.0051, _FIDELITY),
    "int8 in groups": Measured(0.0020, 0.0027, _ROTATION),
    "token": Measured(0.0370, 0.0370, _ROTATION),
    "int4": Measured(0.0487, 0.2388, _FIDELITY),
    "int4 in groups": Measured(0.2720, 0.2720, _ROTATION),
}
_KV = "kv-codes.md"
KV_MODELS = "SmolLM2-135M and Qwen2.5-Coder-0.5B"
# What K and V in codes of 8 and 4 bits add.
KV_CODES: Mapping[str, Measured] = {
    "int8": Measured(0.0002, 0.0002, _KV),
    "int8/int4": Measured(0.0067, 0.0067, _KV),
    "int4": Measured(0.0395, 0.1319, _KV),
}


def way_of(form: WeightFormat, *, is_stored: bool) -> Way:
    """Return how a CPU multiplies a matrix. ``is_stored``: its numbers are the file's, not rounded on load."""
    if not form.quantized:
        return "plain"
    if is_stored or form.rotation is None:
        return "token" if form.rows.block is None else "stored"
    if form.kind == "int8":
        return "int8" if form.group is None else "int8 in groups"
    return "int4" if form.two_level else "int4 in groups"


def measured_kl(ways: set[Way]) -> Measured | None:
    """Return the figure of a model whose matrices are multiplied in ``ways``: that of the way that loses most."""
    return max((MEASURED[way] for way in ways), key=lambda figure: figure.high, default=None)
