"""What each engine quantizes at each precision, and the bytes and operations that a workload must move.

Bits count scales and offsets: Q8_0 is 8.5 bits (a 16-bit scale for 32 weights), group 128 with a 16-bit scale 4.125.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fact:
    """Bits a weight of the linears and of the output matrix, bits of a cached number, and words for a person."""

    linear_bits: float
    head_bits: float
    kv_bits: float
    weights: str
    activations: str
    head: str
    kv: str = "bf16"


PLAIN = Fact(16, 16, 16, "bf16", "bf16", "bf16")
FACTS: dict[tuple[str, str], Fact] = {
    ("quire", "bf16"): PLAIN,
    ("quire", "int8"): Fact(8, 8, 16, "int8 a channel", "int8 a token", "int8 a channel"),
    ("quire", "int4"): Fact(4.25, 8, 16, "int4 g16, integer scales", "int8 a token", "int8 a channel"),
    ("transformers", "bf16"): PLAIN,
    ("vllm", "bf16"): PLAIN,
    ("vllm", "int8"): Fact(8, 16, 16, "int8 a channel (W8A8)", "int8 a token", "bf16"),
    ("vllm", "int4"): Fact(4.125, 16, 16, "int4 g128 (W4A16)", "bf16", "bf16"),
    ("llama.cpp", "bf16"): Fact(16, 16, 16, "bf16", "bf16", "bf16", "f16"),
    ("llama.cpp", "int8"): Fact(8.5, 8.5, 16, "Q8_0 (int8 g32)", "int8 g32", "Q8_0", "f16"),
    ("llama.cpp", "int4"): Fact(4.5, 6.5625, 16, "Q4_0 (int4 g32)", "int8 g32", "Q6_K", "f16"),
    ("openvino", "bf16"): Fact(16, 16, 8.5, "f16, run as bf16", "bf16", "f16", "u8"),
    ("openvino", "int8"): Fact(8, 8, 8.5, "u8 a channel", "int8, dynamic", "u8 a channel", "u8"),
    ("openvino", "int4"): Fact(4.25, 8, 8.5, "int4 g128", "int8, dynamic", "u8 a channel", "u8"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that bytes and operations follow from."""

    linear: int  # weights of all linears but the output matrix
    head: int  # weights of the output matrix
    kv: int  # numbers cached a token
    attention: int  # multiply-adds of one query with one key and its value, all heads and layers

    def operations(self, tokens: int, logits: int, pairs: int) -> float:
        """Operations (two a multiply-add) of ``tokens`` through the linears, ``logits`` rows, ``pairs`` attended."""
        return 2.0 * (tokens * self.linear + logits * self.head + pairs * self.attention)

    def weight_bytes(self, fact: Fact) -> float:
        return (self.linear * fact.linear_bits + self.head * fact.head_bits) / 8

    def kv_bytes(self, fact: Fact, tokens: int) -> float:
        return self.kv * tokens * fact.kv_bits / 8


def shape_of(folder: Path) -> Shape:
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Shape(
        linear=layers * (attention + mlp),
        head=config["vocab_size"] * hidden,
        kv=layers * 2 * kv_heads * head_dim,
        attention=layers * 2 * heads * head_dim,
    )


def peak(dots: dict[str, float], precision: str, isa: str) -> tuple[str, float]:
    """Return the fastest dot instruction for a precision, and its operations a second: the bound of the dot units.

    8-bit and 4-bit weights are bound by the int8 units, since activations may be int8 too.
    """
    if isa == "avx2":
        names = ["fma_avx2"] if precision == "bf16" else ["vpdpbusd_avx2", "fma_avx2"]
    elif isa == "avx512_vnni":
        names = ["fma_avx512"] if precision == "bf16" else ["vpdpbusd"]
    elif precision == "bf16":
        names = ["tdpbf16ps", "vdpbf16ps", "fma_avx512", "fma_avx2"]
    else:
        names = ["tdpbssd", "vpdpbusd", "vpdpbusd_avx2", "fma_avx512", "fma_avx2"]
    name = max((n for n in names if n in dots), key=lambda n: dots[n])
    return name, dots[name]


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a part of a workload by bandwidth and dot units."""

    shape: Shape
    fact: Fact
    weight_bytes: float
    bytes_s: float
    operations_s: float

    def step(self, tokens: int, logits: int, pairs: int, kv_tokens: int) -> float:
        moved = self.weight_bytes + self.shape.kv_bytes(self.fact, kv_tokens)
        return max(moved / self.bytes_s, self.shape.operations(tokens, logits, pairs) / self.operations_s)

    def prompts(self, count: int, length: int, shared: int = 0) -> float:
        """``count`` prompts of ``length`` new tokens after a ``shared`` part that is computed once."""
        pairs = count * (length * (length + 1) // 2 + length * shared) + shared * (shared + 1) // 2
        return self.step(count * length + shared, count, pairs, 0)

    def decode(self, count: int, context: int, steps: int) -> float:
        """``steps`` tokens for each of ``count`` sequences of ``context`` tokens on average."""
        return steps * self.step(count, count, count * context, count * context)

    def of(self, metric: str) -> float | None:
        """Return the bound of a metric of `table`, in its own unit; None where there is none."""
        if metric == "prefill":
            return 512 / self.prompts(1, 512)
        if metric == "decode":
            return 127 / self.decode(1, 576, 127)
        if metric == "B":
            return 32 * 128 / (self.prompts(32, 128) + self.decode(32, 192, 127))
        if metric == "C":
            return self.prompts(16, 32, 1024) + self.decode(16, 1072, 31)
        return None
