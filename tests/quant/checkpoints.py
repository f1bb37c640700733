"""Quantized safetensors checkpoints, written by hand from the published layouts.

A writer takes random integers, scales and zero points, and returns (tensors,
quantization_config, the plain weight they mean). Words are packed by plain loops over bit positions, so that reader and
writer share nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (160, 64),
    "mlp.up_proj": (160, 64),
    "mlp.down_proj": (64, 160),
}
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # output that lies at nibble 0, 1, … of a word


@dataclass
class Written:
    """What a writer made of one matrix."""

    tensors: dict[str, np.ndarray]  # suffix → array
    weight: np.ndarray  # fp32 [out, in]


@dataclass
class RandomMatrix:
    """Unsigned integers, scales and zero points of one matrix."""

    q: np.ndarray  # [out, in]
    scale: np.ndarray  # fp16 [out, groups]
    zero: np.ndarray  # [out, groups]
    order: np.ndarray | None = None  # the group of each input, where it is not the place

    @property
    def group_of(self) -> np.ndarray:
        in_ = self.q.shape[1]
        return np.arange(in_) // (in_ // self.scale.shape[1]) if self.order is None else self.order

    @property
    def weight(self) -> np.ndarray:
        scale = self.scale.astype(np.float32)[:, self.group_of]
        return (self.q - self.zero[:, self.group_of]).astype(np.float32) * scale


def random_matrix(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int | None, sym: bool
) -> RandomMatrix:
    out, in_ = shape
    groups = 1 if group is None else in_ // group
    zero = np.full((out, groups), 1 << bits - 1) if sym else rng.integers(1, 1 << bits, (out, groups))
    scale = (rng.uniform(0.5, 1.5, (out, groups)) * 2.0 ** (1 - bits) * 0.3).astype(np.float16)
    return RandomMatrix(rng.integers(0, 1 << bits, (out, in_)), scale, zero)


def pack_columns(values: np.ndarray, bits: int, places: list[int] | None = None) -> np.ndarray:
    """``[rows, n]`` → int32 ``[rows, n · bits / 32]``; ``places``: which of a word's numbers lies at each position."""
    per_word = 32 // bits
    places = places or list(range(per_word))
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    words = np.zeros((values.shape[0], padded.shape[1] // per_word), dtype=np.uint32)
    for position, place in enumerate(places):
        words |= padded[:, place::per_word].astype(np.uint32) << np.uint32(bits * position)
    return words.view(np.int32)


def gptq(source: RandomMatrix, bits: int, *, minus_one: bool = True) -> Written:
    zero = source.zero - 1 if minus_one else source.zero
    tensors = {
        "qweight": pack_columns(source.q, bits).T,
        "qzeros": pack_columns(zero.T, bits),
        "scales": source.scale.T,
        "g_idx": source.group_of.astype(np.int32),
    }
    return Written(tensors, source.weight)


def awq(source: RandomMatrix) -> Written:
    tensors = {
        "qweight": pack_columns(source.q.T, 4, AWQ_PLACES),
        "qzeros": pack_columns(source.zero.T, 4, AWQ_PLACES),
        "scales": source.scale.T,
    }
    return Written(tensors, source.weight)


def awq_gemv(source: RandomMatrix) -> Written:
    """Rows of words; a row's zero points and scales are padded with numbers that mean nothing."""
    groups = source.scale.shape[1]
    multiple = 8 * {32: 4, 64: 2}.get(source.q.shape[1] // groups, 1)
    padding = ((0, 0), (0, -groups % multiple))
    tensors = {
        "qweight": pack_columns(source.q, 4),
        "qzeros": pack_columns(np.pad(source.zero, padding, constant_values=3), 4),
        "scales": np.pad(source.scale, padding, constant_values=7),
    }
    return Written(tensors, source.weight)


def packed(source: RandomMatrix, bits: int, *, sym: bool) -> Written:
    tensors = {
        "weight_packed": pack_columns(source.q, bits),
        "weight_scale": source.scale,
        "weight_shape": np.array(source.q.shape, dtype=np.int64),
    }
    if source.order is not None:
        tensors["weight_g_idx"] = source.order.astype(np.int32)
    if not sym:
        tensors["weight_zero_point"] = pack_columns(source.zero.T, bits).T
    return Written(tensors, source.weight)


def int8(source: RandomMatrix) -> Written:
    return Written({"weight": (source.q - 128).astype(np.int8), "weight_scale": source.scale}, source.weight)


def fp8(rng: np.random.Generator, shape: tuple[int, int], scale: tuple[int, ...], name: str) -> Written:
    """e4m3 numbers as their bits (`as_fp8` gives them their type) and scales of shape ``scale``, one a block."""
    q = torch.from_numpy(rng.standard_normal(shape) * 100).to(torch.float8_e4m3fn)
    scales = rng.uniform(1e-3, 2e-3, scale).astype(np.float32)
    blocks = scales.reshape(scales.shape if scales.ndim == 2 else (-1, 1))
    if (len(scale) == 2 and scale[1] > 1) or scale == (-(-shape[0] // 128), 1):
        blocks = blocks.repeat(128, 0)[: shape[0]].repeat(128, 1)[:, : shape[1]]
    return Written({"weight": q.view(torch.uint8).numpy(), name: scales}, q.float().numpy() * blocks)


def as_fp8(stored: dict[str, torch.Tensor]) -> None:
    for name, tensor in stored.items():
        if tensor.dtype == torch.uint8:
            stored[name] = tensor.view(torch.float8_e4m3fn)


@dataclass
class Made:
    """A quantized checkpoint and the plain one that means the same."""

    quantized: Path
    plain: Path
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def make(
    folder: Path,
    write: Callable[[np.random.Generator, tuple[int, int]], Written],
    quantization: dict[str, Any],
    *,
    seed: int = 3,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **config: Any,
) -> Made:
    """Write ``folder/quantized`` and ``folder/plain``; ``change`` may spoil the tensors of the quantized one."""
    rng, hidden = np.random.default_rng(seed), CONFIG["hidden_size"]
    made = Made(folder / "quantized", folder / "plain")
    shared = {
        "model.embed_tokens.weight": rng.standard_normal((96, hidden)),
        "lm_head.weight": rng.standard_normal((96, hidden)) * 0.3,
        "model.norm.weight": rng.uniform(0.5, 1.5, hidden),
    }
    quantized: dict[str, np.ndarray] = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{prefix}{norm}.weight"] = rng.uniform(0.5, 1.5, hidden)
        for name, shape in LINEARS.items():
            written = write(rng, shape)
            made.weights[f"{prefix}{name}.weight"] = written.weight
            quantized |= {f"{prefix}{name}.{suffix}": array for suffix, array in written.tensors.items()}
    halves = {name: array.astype(np.float16) for name, array in shared.items()}
    stored = tensors(halves | quantized)
    if change is not None:
        change(stored)
    save(made.quantized, stored, {**CONFIG, **config, "quantization_config": quantization})
    save(made.plain, tensors(halves | made.weights), {**CONFIG, **config, "torch_dtype": "float32"})
    return made


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def save(folder: Path, stored: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def ct_config(form: str, bits: int, group: int | None, *, sym: bool = True, **weights: Any) -> dict[str, Any]:
    """``quantization_config`` as llm-compressor writes it."""
    w = {
        "num_bits": bits, "type": "int", "symmetric": sym, "group_size": group, "dynamic": False, "actorder": None,
        "strategy": "channel" if group is None else "group", "block_structure": None, "observer": "minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    a = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**w, **weights},
                "input_activations": a if form == "int-quantized" else None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "version": "0.9.1",
    }


def gptq_config(bits: int, group: int, *, sym: bool = True, **more: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False}
    return {**base, "damp_percent": 0.01, "true_sequential": True, **more}


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    base = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {**base, "modules_to_not_convert": None, **more}
