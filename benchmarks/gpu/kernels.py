"""Single kernels beside what they must move and compute: decode and prefill attention, W4A16, the fused norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu.other_attention import other_attention, over_our_blocks
from benchmarks.gpu.timing import DEVICE, seconds
from tests.kernels import cases

from quire.kernels.attention import attention
from quire.kernels.linear import QuantizedWeight, linear, pack_empty, write_rows
from quire.kernels.norm import add_rms_norm
from quire.kernels.registry import GPU_KERNELS
from quire.weight_format import PLAIN, WeightFormat

BF16 = torch.bfloat16
COLD_BYTES = 256 << 20  # more than any L2: calls rotate over copies
Row = dict[str, Any]


def row(name: str, taken_s: float, num_bytes: float, flops: float, limits: dict[str, float]) -> Row:
    """A measurement beside its bound: the slower of bytes over bandwidth and FLOPs over the matmul peak."""
    bound_s = max(num_bytes / limits["bandwidth_bytes_per_s"], flops / limits["matmul_flops_per_s"])
    return {
        "case": name, "microseconds": taken_s * 1e6, "bytes_per_s": num_bytes / taken_s,
        "flops_per_s": flops / taken_s, "share_of_bound": bound_s / taken_s,
    }  # fmt: skip


def attention_rows(case: cases.AttentionCase, limits: dict[str, float]) -> Iterator[Row]:
    """Quire's versions, and torch's own attention over contiguous keys as a yardstick."""
    made = cases.attention_inputs(case, BF16, torch.Generator().manual_seed(1))
    bits = torch.empty(0, dtype=torch.int8).set_(made.kv.pieces.untyped_storage())
    kv_bytes = (
        sum(length for _, length in case.lengths) * case.num_kv_heads * (case.head_dim + case.v_head_dim)
    )
    kv_bytes = kv_bytes * made.kv.pieces.dtype.itemsize + (
        kv_bytes // case.head_dim * 4 if made.kv.scaled else 0
    )
    num_bytes = kv_bytes + 2 * made.q.numel() * made.q.element_size()
    pairs = sum(q * length - q * (q - 1) // 2 for q, length in case.lengths)
    flops = 2 * pairs * case.num_heads * (case.head_dim + case.v_head_dim)
    pools = []
    for _ in range(max(1, min(8, COLD_BYTES // max(bits.numel(), 1)))):
        pieces = bits.to(DEVICE, copy=True).view(made.kv.pieces.dtype)
        shape = made.kv.pieces.shape, made.kv.pieces.stride(), made.kv.pieces.storage_offset()
        pools.append(replace(made.kv, pieces=pieces.as_strided(*shape)))
    q = made.q.to(DEVICE)
    for backend in GPU_KERNELS:
        made.batch.plans.clear()
        calls: list[Callable[[], object]] = [
            lambda kv=kv, backend=backend: attention.on(backend)(q, kv, made.batch, made.shape, None)  # type: ignore[misc]
            for kv in pools
        ]
        yield row(f"{case.name}, {backend}", seconds(calls), num_bytes, flops, limits)
    for name, call in over_our_blocks(q, pools[0], made.batch, made.shape).items():
        theirs, own = call(), attention.on("triton")(q, pools[0], made.batch, made.shape, None)
        assert isinstance(theirs, torch.Tensor)
        found = row(f"{case.name}, {name}", seconds([call]), num_bytes, flops, limits)
        yield {**found, "largest_difference": float((theirs.float() - own.float()).abs().max())}
    queries = {n for n, _ in case.lengths}
    lengths = {length for _, length in case.lengths}
    if len(queries) == len(lengths) == 1 and not case.int8 and not case.fp8:
        count, (n,), (length,) = len(case.lengths), queries, lengths
        ours = q.view(count, n, case.num_heads, -1).transpose(1, 2)
        k, v = (
            torch.randn(count, case.num_kv_heads, length, case.head_dim, device=DEVICE, dtype=BF16)
            for _ in "kv"
        )
        taken_s = seconds([
            lambda: torch.nn.functional.scaled_dot_product_attention(ours, k, v, is_causal=n == length, enable_gqa=True)
        ])  # fmt: skip
        yield row(f"{case.name}, torch SDPA over contiguous keys", taken_s, num_bytes, flops, limits)
        shape = (count, n, length, case.num_heads, case.num_kv_heads, case.head_dim)
        for name, call in other_attention(*shape, DEVICE).items():
            yield row(f"{case.name}, {name}", seconds([call]), num_bytes, flops, limits)


def decode_attention(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """64 contexts of 4k tokens, 32 heads over 8, in bf16, int8 and fp8; 1 and 256 of them too."""
    found: list[Row] = []
    for count, length in ((2, 70),) if tiny else ((64, 4096), (1, 4096), (256, 1024), (1, 32768)):
        heads, dim = (4, 16) if tiny else (32, 128)
        plain = cases.AttentionCase(
            f"{count} x {length}", ((1, length),) * count, heads, heads // 4, dim, dim
        )
        for case in (plain, replace(plain, name=plain.name + " int8", int8=True), replace(
            plain, name=plain.name + " fp8", fp8=True
        )):  # fmt: skip
            found += attention_rows(case, limits)
    return found


def prefill_attention(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """One prompt of 8k tokens, eight of 2k, and a chunk behind 8k."""
    found: list[Row] = []
    lengths = [((20, 20),)] if tiny else [((8192, 8192),), ((2048, 2048),) * 8, ((2048, 8192),)]
    for each in lengths:
        heads, dim = (4, 16) if tiny else (32, 128)
        name = f"{len(each)} x {each[0][0]} of {each[0][1]}"
        found += attention_rows(cases.AttentionCase(name, each, heads, heads // 4, dim, dim), limits)
    return found


SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # (out, in) of Llama-3.1-8B's linears


def linears(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """int4 in groups of 128 and 32, int8 and fp8, and bf16 beside them, from 1 row to 512."""
    found: list[Row] = []
    formats = (
        PLAIN,
        WeightFormat("int4", 128),
        WeightFormat("int4", 32),
        WeightFormat("int8"),
        WeightFormat("fp8"),
    )
    for out, size in ((48, 64),) if tiny else SHAPES:
        for format in formats:
            if tiny and format.group == 128:
                continue
            for backend in GPU_KERNELS:
                num_bytes = format.num_bytes(out, size, 2)
                copies = 1 if tiny else max(2, min(16, COLD_BYTES // num_bytes))
                packed = [random_matrix(out, size, format, backend) for _ in range(copies)]
                for rows in (1, 3) if tiny else (1, 8, 32, 128, 512):
                    x = torch.randn(rows, size, device=DEVICE).bfloat16()
                    taken_s = seconds([lambda p=p, x=x: linear(x, p) for p in packed])  # type: ignore[misc]
                    moved = num_bytes + 2 * rows * (out + size)
                    name = f"{format} {out} x {size}, {rows} rows, {backend}"
                    found.append(row(name, taken_s, moved, 2 * rows * out * size, limits))
    return found


def random_matrix(out: int, size: int, format: WeightFormat, backend: str) -> Any:
    """A matrix filled with a repeated block of rows: filling is not what is measured."""
    few = min(out, 256)
    with DEVICE:
        packed, block = (
            pack_empty(rows, size, BF16, bias=False, backend=backend, format=format)  # type: ignore[arg-type]
            for rows in (out, few)
        )
    if format.quantized:
        groups = 1 if format.group is None else size // format.group
        q = torch.randint(-8, 8, (few, size), dtype=torch.int8)
        q = q.to(torch.float8_e4m3fn) if format.kind == "fp8" else q
        weight: Any = QuantizedWeight(format, q, torch.rand(few, groups) * 0.01)
    else:
        weight = torch.randn(few, size).bfloat16()
    write_rows(block, 0, weight)
    for name, dim in (("data", 0), ("scale", 0), ("group_scale", 1)):  # of the rows of the matrix
        source = getattr(block, name)
        if source is not None:
            target = getattr(packed, name)
            for start in range(0, out, few):
                length = min(few, out - start)
                target.narrow(dim, start, length).copy_(source.narrow(dim, 0, length))
    return packed


def norms(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """Residual sum and RMSNorm of rows of 4,096."""
    found: list[Row] = []
    size = 64 if tiny else 4096
    weight = torch.ones(size, device=DEVICE)
    for rows in (1, 3) if tiny else (1, 32, 256, 2048, 16384):
        copies = 1 if tiny else max(2, min(64, COLD_BYTES // (rows * size * 4)))
        pairs = [(torch.randn(rows, size, device=DEVICE).bfloat16(),) * 2 for _ in range(copies)]
        calls = [lambda p=p: add_rms_norm.on("triton")(*p, weight, 1e-5) for p in pairs]  # type: ignore[misc]
        found.append(row(f"{rows} x {size}", seconds(calls), 4 * rows * size * 2, 0, limits))
    return found
