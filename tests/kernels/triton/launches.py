"""One call of every op's GPU versions at shapes of real models, to be compiled (`compile_ops`) and not run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tests.kernels import cases

import quire.kernels.triton_ops  # noqa: F401  registers
from quire.kernels.attention import attention
from quire.kernels.block_sizes import gpu_name, sizes_table
from quire.kernels.kv_blocks import KvView, view_layer
from quire.kernels.linear import linear, pack_empty, pack_many
from quire.kernels.lora import add_lora, group_rows, stack_empty
from quire.kernels.moe import ExpertStack, experts
from quire.kernels.norm import add_rms_norm, rms_norm
from quire.kernels.pointwise import gated
from quire.kernels.registry import GPU_KERNELS
from quire.kernels.rope import QkNorm, rope_store
from quire.kernels.sampling import COLUMNS, RANDOM, TRUNCATED
from quire.kernels.sampling.triton import edit_rows, facts_of, sample_rows
from quire.weight_format import WeightFormat

BF16 = torch.bfloat16
ATTENTION = (
    cases.AttentionCase("llama 8B", ((1, 600), (100, 200)), 32, 8, 128, 128),
    cases.AttentionCase("llama 8B, int8", ((1, 600), (100, 200)), 32, 8, 128, 128, int8=True),
    cases.AttentionCase("llama 8B, fp8", ((1, 600), (100, 200)), 32, 8, 128, 128, fp8=True),
    cases.AttentionCase("gemma", ((1, 600), (100, 200)), 8, 4, 256, 256, window=128, soft_cap=50.0),
    cases.AttentionCase("gpt-oss", ((1, 600), (100, 200)), 64, 8, 64, 64, window=128, sinks=True),
    cases.AttentionCase("deepseek", ((1, 200), (20, 30)), 16, 1, 576, 512, v_in_k=True),
)


def launch_attention(capability: int) -> None:
    for case in ATTENTION:
        if case.fp8 and capability < FP8_CAPABILITY:
            continue
        made = cases.attention_inputs(case, BF16, torch.Generator().manual_seed(1))
        for backend in GPU_KERNELS:
            attention.on(backend)(made.q, made.kv, made.batch, made.shape, made.sinks)


def launch_linears(capability: int) -> None:
    formats = (
        WeightFormat(), WeightFormat("int8"), WeightFormat("int8", 128, True), WeightFormat("int4", 32),
        WeightFormat("int4", 128, True), WeightFormat("fp8"), WeightFormat("fp8", 128),
    )  # fmt: skip
    for format in formats:
        if format.kind == "fp8" and capability < FP8_CAPABILITY:
            continue
        for backend in GPU_KERNELS:
            packed = pack_empty(1024, 4096, BF16, bias=format.has_offset, backend=backend, format=format)
            for rows in (1, 100):
                linear(torch.empty(rows, 4096, dtype=BF16), packed)
                linear(torch.empty(rows, 4096, dtype=BF16), packed, out_dtype=torch.float32)


def launch_few(capability: int) -> None:
    """Up to 16 rows with sizes of the H100's table."""
    for op, of_shapes in sizes_table("NVIDIA_H100_80GB_HBM3").items():
        if not op.endswith("_few") or (op == "fp8_few" and capability < FP8_CAPABILITY):
            continue
        kind, *group = op.removesuffix("_few").split("_g")
        sizes_table(gpu_name())[op] = {"all": next(sizes for sizes in of_shapes.values() if sizes["columns"])}
        for offset in (False, True) if group else (False,):
            format = (
                WeightFormat() if kind == "plain" else WeightFormat(kind, *map(int, group), has_offset=offset)  # type: ignore[arg-type]
            )
            packed = pack_empty(1024, 4096, BF16, bias=offset, backend="triton", format=format)
            linear(torch.empty(3, 4096, dtype=BF16), packed)
            linear(torch.empty(1, 4096, dtype=BF16), packed, out_dtype=torch.float32)


def cache(dtype: torch.dtype) -> KvView:
    storage = torch.zeros(4, 8 * 16 * (256 + 8) * 2 // dtype.itemsize, dtype=dtype)
    return view_layer(storage, 0, num_kv_heads=8, block_size=16, head_dim=128, v_head_dim=128)


def launch_rows(capability: int) -> None:
    weight = torch.ones(4096)
    x, angles = torch.zeros(3, 4096, dtype=BF16), torch.zeros(3, 64)
    rms_norm.on("triton")(x, weight, 1e-5)
    rms_norm.on("triton")(x.view(3, 32, 128), torch.ones(128), 1e-5)
    add_rms_norm.on("triton")(x, x, weight, 1e-5)
    for kind in cases.ACTIVATIONS:
        gated.on("triton")(x, kind)
    qkv, ids = torch.zeros(3, 48 * 128, dtype=BF16), torch.zeros(3, dtype=torch.int64)
    norm = QkNorm(torch.ones(128), torch.ones(128), 1e-5)
    for dtype in (BF16, torch.int8, torch.float8_e4m3fn):
        if dtype == torch.float8_e4m3fn and capability < FP8_CAPABILITY:
            continue
        for with_norm in (None, norm):
            rope_store.on("triton")(
                qkv, 32, (angles, angles), with_norm, cache(dtype), ids, ids, interleaved=dtype == torch.int8,
            )  # fmt: skip


FP8_CAPABILITY = 89


def launch_experts(capability: int) -> None:
    x, ids = torch.zeros(3, 512, dtype=BF16), torch.zeros(3, 2, dtype=torch.int64)
    for format in (WeightFormat(), WeightFormat("int4", 128), WeightFormat("fp8", 128)):
        if format.kind == "fp8" and capability < FP8_CAPABILITY:
            continue
        for backend in GPU_KERNELS:
            gate_up = pack_many(4, 1024, 512, BF16, bias=False, backend=backend, format=format)
            down = pack_many(4, 512, 512, BF16, bias=True, backend=backend, format=format)
            experts.on(backend)(x, torch.ones(3, 2), ids, ExpertStack(gate_up, down, "silu"))


def launch_adapters(capability: int) -> None:
    for dtype in (BF16, torch.float32):
        stack = stack_empty((4096, 1024, 1024), 4096, 4, 16, dtype, backend="triton")
        rows = group_rows(np.array([1, 0, 3, 1]), 4)
        add_lora(torch.zeros(4, 4096, dtype=dtype), torch.zeros(4, 6144, dtype=dtype), stack, rows)


def launch_sampling(capability: int) -> None:
    columns = np.zeros(3, COLUMNS)
    columns["features"], columns["temperature"] = RANDOM | TRUNCATED, 1.0
    logits, facts = torch.zeros(3, 128_256), torch.from_numpy(facts_of(columns))
    sample_rows(logits, facts, 0, cut=True)
    counts, ids = torch.zeros(1, 128_256, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    edit_rows[(3, 126)](
        logits, 128_256, logits, facts, counts, counts, ids, ids, 128_256, 4008, CHUNK=1024, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


ALL: tuple[Callable[[int], None], ...] = (
    launch_rows,
    launch_experts,
    launch_adapters,
    launch_sampling,
    launch_attention,
    launch_linears,
    launch_few,
)


def launch_all(capability: int) -> None:
    for launch in ALL:
        launch(capability)
