"""`Efficiency`: the constants between a roofline and an engine, and `efficiency_of`, which finds those for a plan.

They were fitted on half of the published measurements of engines by ``benchmarks/roofline_accuracy.py --fit``, and are
data (data/efficiency.toml): by engine, generation of devices, kind of model (dense, or with experts) and format of the
weights. Where a set was not measured the nearest takes its place: first another format, then an older generation.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any

from quire.cost.hardware import Hardware
from quire.errors import ConfigError, nearest
from quire.modelspec import ModelSpec

ROWS = (128, 512, 2048)  # rows per step at which `Efficiency.compute` is given
MEASURED = ("vllm", "sglang", "trtllm")
ENGINES = (*MEASURED, "default", "cpu", "ideal")
# Generation of devices → where its constants may come from, the nearest first.
GENERATIONS = {
    "gb200": ("gb200", "blackwell", "hopper"),
    "b300": ("b300", "blackwell", "hopper"),
    "blackwell": ("blackwell", "hopper"),
    "hopper": ("hopper",),
}
_GENERATION = {
    "gb200": "gb200", "gb300": "gb200", "b300": "b300", "b200": "blackwell", "rtx-5090": "blackwell",
    "rtx-pro-6000": "blackwell",
}  # fmt: skip
# Format of the weights → the same, the nearest first; others are multiplied in bf16.
FORMATS = {"bf16": ("bf16", "fp8", "fp4"), "fp8": ("fp8", "bf16", "fp4"), "fp4": ("fp4", "fp8", "bf16")}
_ALIKE = {"int8": "fp8", "mxfp4": "fp4", "fp8": "fp8", "fp4": "fp4"}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares (0…1) of the data sheet's figures, seconds, and what a closed loop adds to a first token."""

    # Of the dense operations/s, in steps of `ROWS` rows; between them by the logarithm of the rows.
    compute: tuple[float, float, float] = (1.0, 1.0, 1.0)
    memory: float = 1.0  # share of the bandwidth, for weights
    kv_memory: float = 1.0  # share of the bandwidth, for K and V
    attention: float = 1.0  # share of the bf16 operations/s, for attention
    experts: float = 1.0  # factor on ``compute``, for experts
    expert_memory: float = 1.0  # factor on ``memory``, for experts
    link: float = 1.0  # share of the links' bandwidth
    layer_s: float = 0.0  # launches and small kernels, per layer and step
    step_s: float = 0.0  # scheduling and sampling, per step
    seq_s: float = 0.0  # the same, per sequence of a step
    link_s: float = 0.0  # latency of one collective
    first_s: float = 0.0  # arrival to first row, plus first token to client
    token_s: float = 0.0  # closed loop: the same per prompt token and client
    # Closed loop: prompts computed before a request's first token, at a concurrency of 1.
    wave: float = 1.0
    # Exponent of their growth with concurrency: requests that end together return together.
    wave_growth: float = 0.0
    # Closed loop: share of an answer's decode steps that a client waits for its turn.
    turn: float = 0.0
    turn_decay: float = 0.0  # exponent of its decrease with concurrency
    how: str = "the roofline itself: nothing is lost anywhere"  # how the constants were found

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            values = value if f.name == "compute" else (value,) if f.name != "how" else ()
            if len(values) not in (0, 1, len(ROWS)) or any(x < 0 for x in values):
                raise ConfigError(f"efficiency: {f.name} = {value!r} must be at least 0")

    def share(self, rows: float) -> float:
        """Return the share of the operations/s that a step of ``rows`` rows reaches."""
        place = min(max(rows, ROWS[0]), ROWS[-1])
        at = 0 if place <= ROWS[1] else 1
        low, high = self.compute[at], self.compute[at + 1]
        part = log(place / ROWS[at]) / log(ROWS[at + 1] / ROWS[at])
        return low * exp(part * log(high / low))

    def ahead_s(self, prompt_s: float, step_s: float, clients: float, isl: int, osl: int) -> float:
        """Return what a closed loop of ``clients`` adds to a first token, beside ``first_s`` and a step."""
        prompts_s = prompt_s * self.wave * clients**self.wave_growth
        turn_s = self.turn * osl * step_s / clients**self.turn_decay
        return float(prompts_s + turn_s + self.token_s * isl * clients)


IDEAL = Efficiency()


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((files("quire.cost") / "data" / "efficiency.toml").read_text())


def generation_of(hardware: Hardware) -> str:
    """Return the generation whose constants are the nearest to ``hardware``: Hopper's, where none was measured."""
    return _GENERATION.get(hardware.name, "hopper")


@cache
def cpu_efficiency() -> Efficiency:
    """Return Quire's own constants on CPUs."""
    return _read(_table()["cpu"])


def efficiency_of(engine: str, hardware: Hardware, spec: ModelSpec, precision: str) -> Efficiency:
    """Return the constants of ``engine`` (one of `ENGINES`) for a model's weights in ``precision``.

    Raises:
        ConfigError: there is no such engine; names those that there are.
    """
    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise ConfigError(
            f"--engine {engine!r} has no fitted constants{nearest(engine, ENGINES)}; there are {known}"
        )
    if engine in ("cpu", "ideal"):
        return cpu_efficiency() if engine == "cpu" else IDEAL
    kind = "experts" if any(layer.mlp.moe for layer in spec.layers) else "dense"
    return _fitted(engine, generation_of(hardware), kind, _ALIKE.get(precision, "bf16"))


@cache
def _fitted(engine: str, generation: str, kind: str, weights: str) -> Efficiency:
    for near in GENERATIONS[generation]:
        sets = _table()[engine].get(near, {}).get(kind, {})
        for alike in FORMATS[weights]:
            if alike in sets:
                return _read(sets[alike])
    raise AssertionError(f"{engine} has no constants of {kind} models on any generation")


def _read(row: Mapping[str, Any]) -> Efficiency:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return Efficiency(**values)
