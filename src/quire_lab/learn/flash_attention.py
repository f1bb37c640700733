"""FlashAttention (arXiv:2205.14135): a prompt's attention tile by tile, its bytes counted as tiles are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.cost.hardware import find_hardware
from quire.models.checkpoint import spec_of
from quire_lab.learn.engine import DEVICES, MODELS
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Line, Lines, Picture, Table
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.laws import attention_traffic, transfer_s

_ELEMENT = 2  # bytes of bf16
_CHECKED = 96  # tokens whose attention is computed both ways


@dataclass
class Tiled:
    """Attention with a running maximum and sum per row; ``read`` and ``written`` count elements of slow memory."""

    q: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    k: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    v: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    read: int = 0
    written: int = 0

    def run(self, rows: int, columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return softmax(q kᵀ / √d) v, with tiles of ``rows`` queries and ``columns`` keys."""
        n, d = self.q.shape
        out = np.zeros((n, d))
        for i in range(0, n, rows):
            q = self.q[i : i + rows]
            self.read += q.size
            best, total = np.full(len(q), -np.inf), np.zeros(len(q))
            acc = np.zeros((len(q), d))
            for j in range(0, n, columns):
                k, v = self.k[j : j + columns], self.v[j : j + columns]
                self.read += k.size + v.size
                scores = q @ k.T / math.sqrt(d)
                higher = np.maximum(best, scores.max(axis=1))
                weights, shrink = np.exp(scores - higher[:, None]), np.exp(best - higher)
                total = total * shrink + weights.sum(axis=1)
                acc = acc * shrink[:, None] + weights @ v
                best = higher
            out[i : i + rows] = acc / total[:, None]
            self.written += len(q) * d
        return out


def check(rows: int, columns: int, head_dim: int) -> tuple[float, Tiled]:
    """Return the largest difference of tiled and naive attention on random numbers, and the counts."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, _CHECKED, head_dim))
    tiled = Tiled(q, k, v)
    output = tiled.run(rows, columns)
    scores = q @ k.T / math.sqrt(head_dim)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return float(np.abs(output - weights / weights.sum(axis=1, keepdims=True) @ v).max()), tiled


def draw(model: str, device: str, context: int, tile: int) -> Picture:
    """Return bytes and time of naive and tiled attention of one layer, by context."""
    a, hardware = spec_of(model).attentions[0], find_hardware(device)
    shape = a.num_heads, a.num_kv_heads, a.head_dim
    rate = hardware.rate("bf16") or 1.0
    lengths = [max(16, context >> i) for i in range(6)][::-1]
    rows, times = [], []
    for n in lengths:
        t = attention_traffic(n, *shape, _ELEMENT, tile=tile)
        stays = hardware.l2_bytes is not None and 2 * n * a.head_dim * _ELEMENT <= hardware.l2_bytes
        moved = t.once if stays else t.tiled
        naive_s = max(transfer_s(t.naive, hardware.bandwidth), t.operations / rate)
        tiled_s = max(transfer_s(moved, hardware.bandwidth), t.operations / rate)
        if stays and hardware.l2_bandwidth is not None:
            tiled_s = max(tiled_s, transfer_s(t.tiled, hardware.l2_bandwidth))
        times.append((naive_s * 1e3, tiled_s * 1e3))
        rows.append((f"{n:,}", t.scores / 1e9, t.naive / 1e9, moved / 1e9, naive_s * 1e3, tiled_s * 1e3))
    xs = tuple(float(n) for n in lengths)
    lines = (Line("naive", xs, tuple(x for x, _ in times), "points"),
             Line("tiled", xs, tuple(x for _, x in times), "points"))  # fmt: skip
    traffic = attention_traffic(context, *shape, _ELEMENT, tile=tile)
    steps = ("S written", "S read", "P written", "P read", "Q, K, V, output", "tiled, all of it")
    matrices = (traffic.scores / 1e9,) * 4
    bars = Bars(f"bytes of one layer at {context:,} tokens, by step", Axis("traffic", "GB"), steps,
                {"": (*matrices, (traffic.naive - 4 * traffic.scores) / 1e9, rows[-1][3])})  # fmt: skip
    error, counted = check(min(tile, _CHECKED), min(tile, _CHECKED), a.head_dim)
    layers = spec_of(model).num_layers
    facts = (
        Fact("one layer's matrix of scores", traffic.scores / 1e9, "GB"),
        Fact("device memory's traffic, naive against tiled", traffic.naive / 1e9 / rows[-1][3], "×"),
        Fact("time of all layers, naive", times[-1][0] * layers, "ms"),
        Fact("time of all layers, tiled", times[-1][1] * layers, "ms"),
        Fact("largest difference of the two, computed on 96 random tokens", error),
        Fact(
            "bytes that this computation counted",
            (counted.read + counted.written) * _ELEMENT,
            "bytes, one head",
        ),
        Fact("keys and values of a tile in SRAM", 2 * tile * a.head_dim * _ELEMENT / 1024, "KiB"),
    )
    header = ("context", "scores, GB", "naive, GB", "tiled, GB", "naive, ms", "tiled, ms")
    chart = Lines(
        "time of one layer", Axis("context", "tokens", log=True), Axis("time", "ms", log=True), lines
    )
    title = f"Attention of {model} on {hardware.title}, tiles of {tile}"
    return Picture(title, (chart, bars, Table("", header, tuple(rows)), Facts("", facts)))


SIMULATION = Simulation(
    "flash-attention",
    "FlashAttention tiling",
    "The matrix of scores never leaves the SRAM: the same operations with a fraction of the traffic.",
    (
        choice("model", "model", "llama-3.1-70b", MODELS[:6]),
        choice("device", "device", "a100", DEVICES),
        number("context", "prompt", 16384, 512, 131072, 512, "tokens"),
        number("tile", "rows and columns of a tile", 128, 16, 256, 16),
    ),
    draw,
)
