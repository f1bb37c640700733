# ruff: noqa: E501, F401  (a table; its names are used by the calls in it)
"""The figures that texts on serving work through: what is exact, by a call into Quire, beside what the texts say.

``python tools/worked_figures_docs.py`` writes docs/learn.md from `ROWS`. A row's call is evaluated with the
names of this module, so each figure comes from the planner, the scheduler, the cache or the simulator.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.cost.cost_model import StepFeatures
from quire.cost.hardware import find_hardware as device
from quire.cost.presets import preset_spec
from quire.cost.split import Split, shard_of
from quire.models.checkpoint import spec_of
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.request import SamplingParams
from quire.sampling.accept import probabilities
from quire.sampling.sampler import column_values, new_columns
from quire.slo import Slo
from quire.step import NewSeq
from quire_lab.bench.summary import RequestRecord, distribution, summarize, tail_ratio
from quire_lab.learn.allocation import contiguous, paged
from quire_lab.learn.batching import idle_share, run_gate
from quire_lab.learn.engine import roofline
from quire_lab.learn.prefill_decode import decode_step, prefill_step
from quire_lab.learn.registry import SIMULATIONS
from quire_lab.plan.laws import (
    amdahl,
    attention_traffic,
    break_even,
    bubble,
    cost_per_million,
    fewest_devices,
    intensity,
    little,
    matrix_roofline,
    params_under,
    ridge_point,
    tiers,
    transfer_s,
)
from quire_lab.plan.memory import kv_bytes_per_request, with_all_kv_heads
from quire_lab.sim.drafts import Speculation

GIB, MIB = 2**30, 2**20


def kv(model: str, tokens: int, *, mha: bool = False, dtype: str = "bf16") -> int:
    """Bytes of K and V; ``mha``: with a KV head per query head."""
    spec = spec_of(model)
    return kv_bytes_per_request(with_all_kv_heads(spec) if mha else spec, tokens, dtype)


def weights(model: str, precision: str = "bf16", **split: int) -> float:
    """Bytes of the weights on the fullest device."""
    return shard_of(spec_of(model), precision, Split(**split)).weight_bytes


def decode_s(
    model: str, gpu: str, precision: str = "bf16", *, batch: int = 1, context: int = 0, tp: int = 1
) -> float:
    """Floor of a decode step: nothing is lost anywhere."""
    return roofline(model, gpu, precision, tp, ideal=True).seconds(decode_step(batch, context))


def prefill_s(model: str, gpu: str, prompt: int, precision: str = "bf16") -> float:
    """Floor of a prompt."""
    return roofline(model, gpu, precision, ideal=True).seconds(prefill_step(prompt))


def operations(model: str, step: StepFeatures) -> float:
    """Operations of a step."""
    return intensity(roofline(model, "h100", ideal=True), step).operations


def matrix(size: int, rows: int, gpu: str = "h100") -> Any:
    """Work of one square matrix in bf16: ``seconds``, ``per_byte``, ``utilization``."""
    return intensity(matrix_roofline(device(gpu), size, size), StepFeatures(rows, rows, 0, 0, 0, 0))


def gigabyte_ms(memory: str, gpu: str = "h100") -> float:
    """Milliseconds of 10⁹ bytes from one of a device's memories."""
    return next(transfer_s(1e9, t.bandwidth) * 1e3 for t in tiers(device(gpu)) if t.name.startswith(memory))


def attention(context: int, **options: int) -> Any:
    """Traffic of one layer of Llama 70B: 64 heads, 8 KV heads, head_dim 128."""
    return attention_traffic(context, 64, 8, 128, **options)


@cache
def idle(gate: str, *outputs: int) -> float:
    """Idle share of the slots of one batch."""
    run = run_gate(gate, [1], list(outputs), len(outputs), 0.0, 0.05)  # type: ignore[arg-type]
    return idle_share(run.steps[0], len(outputs))


def record(ttft_s: float, e2el_s: float, tokens: int, gap_s: float = 0.0) -> RequestRecord:
    """One request that arrived at 0."""
    return RequestRecord(0, 0.0, 0.0, e2el_s, 10, tokens, ttft_s, (gap_s,) * (tokens - 1))


def pace(*requests: tuple[int, float]) -> dict[str, Any]:
    """Summary of requests of (tokens, seconds per gap)."""
    return summarize([record(0.1, 0.1 + (n - 1) * gap, n, gap) for n, gap in requests])


def goodput(good: int, late: int, seconds: float) -> float:
    """Requests/s within an SLO of 500 ms."""
    records = [record(0.1, 1.0, 5)] * good + [record(0.9, 2.0, 5)] * late
    return float(summarize(records, slo=Slo(ttft_s=0.5), duration_s=seconds)["goodput_per_s"])


def drafting(acceptance: float, num_drafts: int, draft_cost: float = 0.0) -> Speculation:
    """Speculation with equal acceptance at each position: ``tokens_per_round``, ``speedup``."""
    return Speculation((acceptance,), num_drafts, draft_cost)


def sampled_from(*logits: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The distribution that the engine samples from."""
    columns = new_columns(1)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=0)
    columns[0] = column_values(NewSeq(0, 0, (0,), (), sampling, 0), len(logits), edited=False)
    return probabilities(torch.tensor([logits]), columns)[0].tolist()


@cache
def prefix_picture() -> Any:
    """A shared prefix of 2,000 tokens and 80 of each request."""
    return SIMULATIONS["prefix-cache"].run(prefix=2000, own=80, prefixes=1, requests=8)


@cache
def paging_picture() -> Any:
    """The page of block tables with its defaults."""
    return SIMULATIONS["paged-attention"].run()


class Row(NamedTuple):
    """One figure. ``says``: what texts say; ``verdict``: "=" they are right, "≈" near for the reason in ``why``, "✗"
    they are wrong, or contradict another text, "–" none has a figure, and ``says`` is empty.
    """

    id: str
    what: str
    call: str
    exact: float
    unit: str
    says: str
    verdict: str
    why: str = ""
    tolerance: float = 1e-3  # of ``exact``


ROWS = (
    # K and V
    Row("K1", "KV, Llama-3-70B, 4K, fp16", 'kv("llama-3-70b", 4096) / GIB', 1.25, "GiB", "1.07 GB", "✗", "that is 64 layers; the model has 80"),
    Row("K2", "the same, 128K", 'kv("llama-3-70b", 131072) / GIB', 40.0, "GiB", "34.4 GB", "✗", "64 layers again"),
    Row("K3", "32 users of 4K", '32 * kv("llama-3-70b", 4096) / GIB', 40.0, "GiB", "34.2 GB", "✗", "64 layers again"),
    Row("K4a", "70B with a KV head per query head, 4K", 'kv("llama-3-70b", 4096, mha=True) / GIB', 10.0, "GiB", "8.6 GB", "✗", "64 layers again"),
    Row("K4b", "the same, 128K", 'kv("llama-3-70b", 131072, mha=True) / GIB', 320.0, "GiB", "274 GB", "✗", "64 layers again"),
    Row("K4c", "what GQA saves on 70B", 'kv("llama-3-70b", 4096, mha=True) / kv("llama-3-70b", 4096)', 8.0, "×", "8×", "="),
    Row("K5", "Llama-3-8B, 4K", 'kv("llama-3-8b", 4096) / GIB', 0.5, "GiB", "0.25 GB", "✗", "K or V alone"),
    Row("K7", "Llama-3-8B, 8,192", 'kv("llama-3-8b", 8192)', 1_073_741_824, "bytes", "1.07 GB", "="),
    Row("K8a", "Llama-2-7B, one token", 'kv("llama-2-7b", 1)', 524_288, "bytes", "0.5 MB", "="),
    Row("K8b", "Llama-2-7B, 4K", 'kv("llama-2-7b", 4096) / GIB', 2.0, "GiB", "2 GB", "="),
    Row("K8c", "Llama-2-7B, 32K", 'kv("llama-2-7b", 32768) / GIB', 16.0, "GiB", "16 GB", "="),
    Row("K8d", "Llama-2-7B, 128K", 'kv("llama-2-7b", 131072) / GIB', 64.0, "GiB", "64 GB", "="),
    Row("K9a", "Llama-2-13B, one token", 'kv("llama-2-13b", 1)', 819_200, "bytes", "0.8 MB", "="),
    Row("K9b", "Llama-2-13B, 4K", 'kv("llama-2-13b", 4096) / GIB', 3.125, "GiB", "3.1 GB", "="),
    Row("K9c", "Llama-2-13B, 32K", 'kv("llama-2-13b", 32768) / GIB', 25.0, "GiB", "25 GB", "="),
    Row("K9d", "Llama-2-13B, 128K", 'kv("llama-2-13b", 131072) / GIB', 100.0, "GiB", "100 GB", "="),
    Row("K10a", "Llama-2-70B, one token", 'kv("llama-2-70b", 1)', 327_680, "bytes", "0.3 MB", "="),
    Row("K10b", "Llama-2-70B, 4K", 'kv("llama-2-70b", 4096) / GIB', 1.25, "GiB", "1.25 GB", "="),
    Row("K10c", "Llama-2-70B, 32K", 'kv("llama-2-70b", 32768) / GIB', 10.0, "GiB", "10 GB", "="),
    Row("K11a", "Llama-3-405B, one token", 'kv("llama-3.1-405b", 1)', 516_096, "bytes", "0.5 MB", "="),
    Row("K11b", "Llama-3-405B, 32K", 'kv("llama-3.1-405b", 32768) / GIB', 15.75, "GiB", "16 GB", "="),
    Row("K11c", "Llama-3-405B, 128K", 'kv("llama-3.1-405b", 131072) / GIB', 63.0, "GiB", "64 GB", "="),
    Row("K12", "Llama-3-405B, 4K", 'kv("llama-3.1-405b", 4096) / GIB', 1.96875, "GiB", "6.4 GB", "✗", "another text has 2 GB"),
    Row("K13", "32 requests of 4K on 70B, half an A100", '32 * kv("llama-2-70b", 4096) / GIB', 40.0, "GiB", "40 GB", "="),
    Row("K14", "70B, one token without GQA", 'kv("llama-2-70b", 1, mha=True)', 2_621_440, "bytes", "2.5 MB", "≈", "2.5 MiB; the model has GQA, and needs an eighth"),
    Row("K15a", "13B, 2,048 tokens reserved", 'kv("llama-2-13b", 2048) / 1e9', 1.678, "GB", "1.64 GB", "✗", "819,200 · 2,048 is 1.678e9"),
    Row("K15b", "reserved 2,048 against 50 used", 'kv("llama-2-13b", 2048) / kv("llama-2-13b", 50)', 40.96, "×", "40×", "="),
    Row("K16a", "70B, 2,048, one layer", 'kv("llama-3-70b", 2048) / 80 / MIB', 8.0, "MiB", "8 MB", "="),
    Row("K16b", "70B, 2,048, all layers", 'kv("llama-3-70b", 2048) / MIB', 640.0, "MiB", "640 MB", "="),
    Row("K17", "70B, 2,048, over 50 GB/s", 'transfer_s(kv("llama-3-70b", 2048), 50e9) * 1e3', 13.42, "ms", "26 ms (1.3 GB)", "✗", "contradicts the 640 MB of the same text"),
    Row("K18", "70B, a user of 4K with INT8 K and V", 'kv("llama-3-70b", 4096, dtype="int8") / GIB', 0.64453, "GiB", "0.16 GB", "✗", "a factor of 4; scales of 4 bytes per head and token are counted"),
    # Weights
    Row("W1", "70B in fp16", 'weights("llama-3-70b") / 1e9', 141.1, "GB", "140 GB", "=", tolerance=0.002),
    Row("W1b", "A100s for 70B in fp16", 'fewest_devices(weights("llama-3-70b"), device("a100"))', 2, "devices", "2", "="),
    Row("W2", "70B in INT4", 'weights("llama-3-70b", "int4") / 1e9', 41.7, "GB", "35 GB", "≈", "scales, an int8 output matrix and a bf16 table", 0.01),
    Row("W3a", "7B in fp32", 'weights("llama-2-7b", "fp32") / 1e9', 26.95, "GB", "28 GB", "≈", "6.74e9 weights, not 7e9"),
    Row("W3b", "7B in fp16", 'weights("llama-2-7b") / 1e9', 13.48, "GB", "14 GB", "≈", "6.74e9 weights"),
    Row("W3c", "7B in FP8", 'weights("llama-2-7b", "fp8") / 1e9', 7.0, "GB", "7 GB", "=", "", 0.01),
    Row("W3d", "7B in INT8", 'weights("llama-2-7b", "int8") / 1e9', 6.9, "GB", "7 GB", "=", "", 0.01),
    Row("W3e", "7B in INT4", 'weights("llama-2-7b", "int4") / 1e9', 4.0, "GB", "3.5 GB", "≈", "4.5 bits with scales; head and table are wider", 0.02),
    Row("W5a", "8B in fp16", 'weights("llama-3-8b") / 1e9', 16.06, "GB", "16 GB", "="),
    Row("W5b", "8B in INT8", 'weights("llama-3-8b", "int8") / 1e9', 8.6, "GB", "8 GB", "≈", "the table of 128,256 rows stays bf16", 0.01),
    Row("W5c", "8B in INT4", 'weights("llama-3-8b", "int4") / 1e9', 5.5, "GB", "4 GB", "≈", "the table, the head and the scales", 0.02),
    Row("W6a", "405B in fp16", 'weights("llama-3.1-405b") / 1e9', 811.7, "GB", "810 GB", "="),
    Row("W6b", "H100s for 405B in fp16, by memory alone", 'fewest_devices(weights("llama-3.1-405b"), device("h100"))', 10, "devices", "11", "≈", "80 GiB are 85.9 GB; 16 in powers of 2, with room for K and V"),
    Row("W6c", "405B in INT4", 'weights("llama-3.1-405b", "int4") / 1e9', 232.3, "GB", "202.5 GB", "≈", "scales and the head", 0.01),
    Row("W6d", "H100s for 405B in INT4, by memory alone", 'fewest_devices(weights("llama-3.1-405b", "int4"), device("h100"))', 3, "devices", "3", "="),
    Row("W7", "405B in FP8", 'weights("llama-3.1-405b", "fp8") / 1e9', 410.0, "GB", "405 GB", "≈", "the table and the head stay bf16", 0.01),
    Row("W8", "13B in INT4", 'weights("llama-2-13b", "int4") / 1e9', 7.64, "GB", "6.5 GB", "≈", "as W3e", 0.01),
    Row("W9a", "DeepSeek-V3 in fp16", 'weights("deepseek-v3") / 1e12', 1.342, "TB", "1.34 TB", "="),
    Row("W9b", "its active weights", 'preset_spec("deepseek-v3").num_active_params / 1e9', 36.6, "B", "37 B", "=", "", 0.005),
    Row("W9c", "routed experts of a token", '100 * preset_spec("deepseek-v3").layers[-1].mlp.moe.top_k / preset_spec("deepseek-v3").layers[-1].mlp.moe.num_experts', 3.125, "%", "3.1 %", "="),
    Row("W10a", "Mixtral 8x7B", 'preset_spec("mixtral-8x7b").num_params / 1e9', 46.70, "B", "46.7 B", "="),
    Row("W10b", "its active weights", 'preset_spec("mixtral-8x7b").num_active_params / 1e9', 12.75, "B", "12.9 B", "≈", "the embedding table is read, not multiplied", 0.005),
    Row("W11", "embedding of 128,256 × 8,192 in fp16", 'params_under(spec_of("llama-3-70b"), "embed.") * 2 / 1e9', 2.1013, "GB", "2.1 GB", "="),
    Row("W12a", "FFN of a layer of 70B", 'params_under(spec_of("llama-3-70b"), "layers.0.mlp.") / 1e6', 704.6, "M", "704 M", "="),
    Row("W12b", "attention of a layer of 70B", 'params_under(spec_of("llama-3-70b"), "layers.0.attn.") / 1e6', 151.0, "M", "268 M", "✗", "forgets GQA: K and V have 8 heads, not 64"),
    Row("W12c", "all layers of 70B", 'params_under(spec_of("llama-3-70b"), "layers.") / 1e9', 68.45, "B", "78 B", "✗", "follows from W12b"),
    Row("W14a", "405B on TP8 PP2, one GPU", 'weights("llama-3.1-405b", tp=8, pp=2) / 1e9', 50.99, "GB", "50.6 GB", "=", "", 0.01),
    Row("W14b", "405B on TP4 PP2, one GPU", 'weights("llama-3.1-405b", tp=4, pp=2) / 1e9', 102.0, "GB", "101 GB, does not fit", "=", "", 0.01),
    Row("W15", "a matrix of 4,096 × 14,336 on TP4", '2 * torch.Size(shard(spec_of("llama-3.1-8b"), Topology(tp=4), 0).shapes["layers.0.mlp.up.weight"]).numel() / 1e6', 29.36, "MB", "29.4 MB", "="),
    Row("W16", "70B on PP4, the fullest GPU", 'weights("llama-3-70b", pp=4) / 1e9', 36.3, "GB", "35 GB", "≈", "the last stage has the output matrix", 0.01),
    # Times
    Row("T1a", "70B fp16 on one A100's bandwidth: a token", 'decode_s("llama-3-70b", "a100") * 1e3', 68.2, "ms", "70 ms", "=", "", 0.003),
    Row("T1b", "the same in tokens/s", '1 / decode_s("llama-3-70b", "a100")', 14.67, "tokens/s", "14.3", "=", "2,039 GB/s, and the embedding is not read", 0.003),
    Row("T2", "70B INT4 on H100: a token", 'decode_s("llama-3-70b", "h100", "int4") * 1e3', 11.8, "ms", "10.4 ms", "≈", "as W2", 0.01),
    Row("T3", "32 of them at once", '32 / decode_s("llama-3-70b", "h100", "int4", batch=32)', 2708, "tokens/s", "3,063", "≈", "as W2", 0.01),
    Row("T4", "bytes read for a poem of 200 tokens by 70B", '200 * weights("llama-3-70b") / 1e12', 28.2, "TB", "28 TB", "=", "", 0.003),
    Row("T5", "70B fp16 on A100: a token, another chapter", 'decode_s("llama-3-70b", "a100") * 1e3', 68.2, "ms", "35 ms", "✗", "contradicts T1", 0.003),
    Row("T6a", "7B on H100: 1,000 tokens of prefill, at least", 'prefill_s("llama-2-7b", "h100", 1000) * 1e3', 13.6, "ms", "~50 ms", "≈", "a floor; with the planner's losses 18.8 ms", 0.01),
    Row("T6b", "7B on H100: a token after them, at least", 'decode_s("llama-2-7b", "h100", context=1050) * 1e3', 4.1, "ms", "~30 ms", "✗", "7 times above the roof", 0.02),
    Row("T8a", "70B INT4 on one A100: prefill of 512, at least", 'prefill_s("llama-3-70b", "a100", 512, "int4") * 1e3', 225.0, "ms", "150 ms", "✗", "below the floor: 2 · 68.5e9 · 512 operations", 0.02),
    Row("T8b", "the same, a token", 'decode_s("llama-3-70b", "a100", "int4") * 1e3', 19.4, "ms", "4 ms", "✗", "40 GB cannot be read in 4 ms", 0.02),
    # Roofline
    Row("R1a", "ridge point of A100", 'ridge_point(device("a100"))', 153.0, "operations/byte", "156", "=", "2,039 GB/s, not 2,000", 0.001),
    Row("R1b", "ridge point of H100", 'ridge_point(device("h100"))', 295.2, "operations/byte", "295", "="),
    Row("R1c", "ridge point of H200", 'ridge_point(device("h200"))', 206.0, "operations/byte", "206", "="),
    Row("R2a", "intensity of a matrix at batch 1", "matrix(8192, 1).per_byte", 1.0, "operations/byte", "1", "="),
    Row("R2b", "at batch 32", "matrix(8192, 32).per_byte", 32.0, "operations/byte", "32", "="),
    Row("R2c", "at batch 256", "matrix(8192, 256).per_byte", 256.0, "operations/byte", "256", "="),
    Row("R3", "at batch 128, in BF16", "matrix(8192, 128).per_byte", 128.0, "operations/byte", "256 (and 2 at batch 1)", "✗", "two bytes per weight and two operations: 1 per row"),
    Row("R4a", "8192² on H100, batch 1", "matrix(8192, 1).seconds * 1e6", 40.06, "µs", "38.2 µs", "≈", "8192² · 2 is 134 MB, not 128", 0.001),
    Row("R4b", "8192² on H100, batch 512", "matrix(8192, 512).seconds * 1e6", 69.48, "µs", "69.4 µs", "="),
    Row("R4c", "arithmetic used at batch 1", "100 * matrix(8192, 1).utilization", 0.339, "%", "0.4 %", "≈", "as R4a", 0.005),
    Row("R4d", "arithmetic used at batch 32", "100 * matrix(8192, 32).utilization", 10.84, "%", "11 %", "=", "", 0.005),
    Row("R4e", "arithmetic used at batch 256", "100 * matrix(8192, 256).utilization", 86.7, "%", "91 %", "≈", "as R4a", 0.005),
    Row("R4f", "arithmetic used at batch 512", "100 * matrix(8192, 512).utilization", 100.0, "%", "100 %", "="),
    Row("R5a", "4096² on H100, batch 1: read", "matrix(4096, 1).seconds * 1e6", 10.0, "µs", "9.6 µs", "≈", "33.6 MB", 0.005),
    Row("R5b", "4096² on H100, batch 1: computed", "matrix(4096, 1).operations / matrix(4096, 1).rate * 1e6", 0.0339, "µs", "0.017 µs", "✗", "a multiply and an add are two operations", 0.005),
    Row("R6a", "1 GB from H100's SRAM", 'gigabyte_ms("SRAM")', 0.0323, "ms", "0.03 ms", "=", "", 0.005),
    Row("R6b", "1 GB from H100's L2", 'gigabyte_ms("L2")', 0.111, "ms", "0.08 ms", "≈", "5,120 bytes a cycle; 12 TB/s are not documented", 0.01),
    Row("R6c", "1 GB from H100's memory", 'gigabyte_ms("device memory")', 0.2985, "ms", "0.30 ms", "="),
    Row("R6d", "1 GB over PCIe 5", 'gigabyte_ms("PCIe")', 15.625, "ms", "15.6 ms", "="),
    Row("R6e", "1 GB from NVMe", 'gigabyte_ms("NVMe")', 142.86, "ms", "143 ms", "="),
    Row("R7", "A100's arithmetic used by a decode of 32, against 1", 'matrix(8192, 32, "a100").utilization / matrix(8192, 1, "a100").utilization', 32.0, "×", "0.6 % → 20 %", "="),
    # Attention
    Row("F1a", "scores of one head, 4,096² in fp16", "attention(4096).scores / 64 / 1e6", 33.55, "MB", "32 MB", "=", "32 MiB"),
    Row("F1b", "scores of one head, 128K", "attention(131072).scores / 64 / GIB", 32.0, "GiB", "32 GB", "="),
    Row("F1c", "the same in 80 layers", "80 * attention(131072).scores / 64 / 1e12", 2.75, "TB", "2.5 TB", "=", "2.5 TiB", 0.002),
    Row("F2a", "traffic of the scores of a layer at 4,096, in 3 passes", "(attention(4096, passes=3).naive - attention(4096).once) / 1e9", 6.44, "GB", "6.4 GB", "≈", "the softmax reads and writes: 4 passes, 8.6 GB", 0.001),
    Row("F2b", "the same in 4 passes", "(attention(4096).naive - attention(4096).once) / 1e9", 8.59, "GB", "6.4 GB", "✗", "written, read, written, read", 0.001),
    Row("F2c", "80 layers of it at 2 TB/s, 3 passes", "80 * transfer_s(attention(4096, passes=3).naive - attention(4096).once, 2e12) * 1e3", 257.7, "ms", "256 ms", "="),
    Row("F3", "scores of one head at 8,192 in fp32", "attention(8192, element=4).scores / 64 / MIB", 256.0, "MiB", "256 MB", "="),
    Row("F4", "naive traffic at 16K against 4K", "attention(16384).naive / attention(4096).naive", 15.8, "×", "16× (15 → 240 ms)", "=", "", 0.01),
    # Batching and memory
    Row("B1a", "a static batch of 20, 28, 14, 50: idle", 'idle("static", 20, 28, 14, 50) * 200', 88.0, "slot-steps of 200", "88", "="),
    Row("B1b", "its utilization", '100 * (1 - idle("static", 20, 28, 14, 50))', 56.0, "%", "56 %", "="),
    Row("B2a", "a static batch of 12, 4, 8: idle", '100 * idle("static", 12, 4, 8)', 33.33, "%", "B 67 %, C 33 %", "="),
    Row("B3a", "160 reserved, 60 used: waste", "100 * contiguous([(60, 1)], 160, 160).waste", 62.5, "%", "62.5 %", "="),
    Row("B3b", "160 reserved, 80 used: waste", "100 * contiguous([(80, 1)], 160, 160).waste", 50.0, "%", "50 %", "="),
    Row("B3c", "60 tokens in blocks of 16: waste", "100 * paged([(60, 1)], 160, 16, 160).waste", 6.25, "%", "~4 %", "≈", "of one short request; under load 1.8 %, see B7"),
    Row("B4", "2,048 reserved, 50 used: waste", "100 * contiguous([(50, 1)], 2048, 2048).waste", 97.56, "%", "97.5 %", "="),
    Row("B5", "bytes left of 2 × 80 GB beside 140 GB", '(2 * 80e9 - weights("llama-3-70b")) / 1e9', 18.9, "GB", "20 GB", "=", "", 0.01),
    Row("B6", "waste of contiguous reservations under load", 'paging_picture().fact("waste of contiguous")', 80.1, "%", "60–80 %", "=", "48 log-normal requests, 2,048 reserved", 0.01),
    Row("B7", "waste of blocks under the same load", 'paging_picture().fact("waste of blocks")', 1.81, "%", "below 4 %", "=", "", 0.01),
    # Formulas of a cheat sheet, in figures
    Row("W18", "memory of the weights of 70B in fp16", 'weights("llama-3-70b") / 1e9', 141.1, "GB", "2 · P · bytes: 282 GB", "✗", "P · bytes; the 2 of fp16 is counted twice", 0.002),
    Row("T10", "TPOT of 70B in fp16 on A100, batch 1", 'decode_s("llama-3-70b", "a100") * 1e3', 68.2, "ms", "2 · P · bytes / bandwidth: 138 ms", "✗", "P · bytes / bandwidth, as T1a", 0.003),
    Row("T9a", "operations of a decoded token of 7B", 'operations("llama-2-7b", decode_step(1, 0)) / 1e9', 13.21, "Giga-operations", "2 · N: 13.5", "≈", "the embedding table is read, not multiplied", 0.002),
    Row("T9b", "operations of a prompt of 1,000 tokens of 7B", 'operations("llama-2-7b", prefill_step(1000)) / 1e12', 13.2, "Tera-operations", "2 · L · N: 13.5", "≈", "as T9a; attention adds 0.26, the output matrix is multiplied once", 0.01),
    # Prefixes and transfers
    Row("P1", "2,000 shared + 80 own tokens: found in the cache", 'prefix_picture().fact("of the last request")', 96.15, "%", "96 %", "="),
    Row("P2a", "640 MB over NVLink, 900 GB/s", 'transfer_s(kv("llama-3-70b", 2048), 900e9) * 1e3', 0.7457, "ms", "0.7 ms", "=", "450 GB/s in one direction would be 1.5 ms"),
    Row("P2b", "640 MB over 50 GB/s", "transfer_s(640e6, 50e9) * 1e3", 12.8, "ms", "12.8 ms", "="),
    Row("P2c", "640 MB over PCIe 5", "transfer_s(640e6, 64e9) * 1e3", 10.0, "ms", "10.0 ms", "="),
    # Metrics
    Row("M1a", "TTFT 200, E2EL 2,200 ms, 50 tokens: TPOT", "record(0.2, 2.2, 50).tpot_s * 1e3", 40.816, "ms", "40.8 ms", "="),
    Row("M1b", "the same in tokens/s", "1 / record(0.2, 2.2, 50).tpot_s", 24.5, "tokens/s", "24.5", "="),
    Row("M1c", "meets an SLO of 500 and 100 ms", 'float(Slo.parse("ttft=500ms,tpot=100ms").met(0.2, record(0.2, 2.2, 50).tpot_s, 2.2))', 1.0, "", "yes", "="),
    Row("M2a", "10 tokens at 30 ms and 1,000 at 50: mean TPOT", 'pace((10, 0.03), (1000, 0.05))["tpot_ms"]["mean"]', 40.0, "ms", "40 ms", "="),
    Row("M2b", "the same: mean ITL", 'pace((10, 0.03), (1000, 0.05))["itl_ms"]["mean"]', 49.82, "ms", "49.8 ms", "="),
    Row("M3", "1,000 requests/s of which 40 % are late: goodput", "goodput(600, 400, 1.0)", 600.0, "requests/s", "600", "="),
    Row("M4", "P99 of 4,200 ms over P50 of 120: the tail", 'tail_ratio({"p99": 4200.0, "p50": 120.0})', 35.0, "×", "> 10: a problem", "="),
    # Speculation
    Row("D1a", "α .8, γ 5: tokens per round", "drafting(0.8, 5).tokens_per_round", 3.689, "tokens", "3.69", "="),
    Row("D1b", "speed-up where 5 drafts cost 10 of 35 ms", "drafting(0.8, 5, 10 / 35 / 5).speedup", 2.869, "×", "2.87×", "="),
    Row("D2a", "α .5, γ 5", "drafting(0.5, 5).tokens_per_round", 1.969, "tokens", "1.97", "="),
    Row("D2b", "α .6, γ 5", "drafting(0.6, 5).tokens_per_round", 2.383, "tokens", "2.37", "="),
    Row("D2c", "α .7, γ 5", "drafting(0.7, 5).tokens_per_round", 2.941, "tokens", "2.94", "="),
    Row("D2d", "α .9, γ 5", "drafting(0.9, 5).tokens_per_round", 4.686, "tokens", "4.69", "="),
    Row("D2e", "α .8, γ 3", "drafting(0.8, 3).tokens_per_round", 2.952, "tokens", "2.95", "="),
    Row("D3", "α .8, γ 8", "drafting(0.8, 8).tokens_per_round", 4.329, "tokens", "4.46", "✗", "(1 − .8⁹) / .2"),
    Row("D3b", "α .8, γ 8: speed-up where 8 drafts cost 16 of 35 ms", "drafting(0.8, 8, 10 / 35 / 5).speedup", 2.971, "×", "3.06×", "✗", "follows from D3"),
    Row("D4a", "α .7, 4 drafts", "drafting(0.7, 4).tokens_per_round", 2.773, "tokens", "2.53", "✗", "αᵏ in place of αᵏ⁺¹"),
    Row("D4b", "α .8, 4 drafts", "drafting(0.8, 4).tokens_per_round", 3.362, "tokens", "3.00", "✗", "the same"),
    Row("D4c", "α .9, 4 drafts", "drafting(0.9, 4).tokens_per_round", 4.095, "tokens", "3.69", "✗", "the same"),
    Row("D4d", "α .95, 4 drafts", "drafting(0.95, 4).tokens_per_round", 4.524, "tokens", "4.24", "✗", "the same"),
    Row("D4e", "α .7, 8 drafts", "drafting(0.7, 8).tokens_per_round", 3.199, "tokens", "2.79", "✗", "between (1 − α⁸) / (1 − α), 3.14, and nothing"),
    Row("D4f", "α .8, 8 drafts", "drafting(0.8, 8).tokens_per_round", 4.329, "tokens", "3.57", "✗", "less than αᵏ in place of αᵏ⁺¹ gives, 4.16; another text has 4.46"),
    Row("D4g", "α .9, 8 drafts", "drafting(0.9, 8).tokens_per_round", 6.126, "tokens", "5.70", "✗", "αᵏ in place of αᵏ⁺¹"),
    Row("D4h", "α .95, 8 drafts", "drafting(0.95, 8).tokens_per_round", 7.395, "tokens", "7.30", "✗", "neither αᵏ (6.73) nor αᵏ⁺¹"),
    Row("D5a", "α .5, 5 drafts of .05: speed-up", "drafting(0.5, 5, 0.05).speedup", 1.575, "×", "1.5×", "✗", "(1 − α⁶) / (1 − α) / 1.25"),
    Row("D5b", "α .7, 5 drafts of .05: speed-up", "drafting(0.7, 5, 0.05).speedup", 2.353, "×", "2.0×", "✗", "the same"),
    Row("D5c", "α .8, 5 drafts of .05: speed-up", "drafting(0.8, 5, 0.05).speedup", 2.951, "×", "2.4×", "✗", "the same"),
    Row("D5d", "α .9, 5 drafts of .05: speed-up", "drafting(0.9, 5, 0.05).speedup", 3.749, "×", "2.9×", "✗", "the same"),
    Row("D5e", "α .95, 5 drafts of .05: speed-up", "drafting(0.95, 5, 0.05).speedup", 4.238, "×", "3.4×", "✗", "the same"),
    Row("D6", "(1 − α^{γ+1}) / (1 − α), not α / (1 − α^{γ+1})", "drafting(0.8, 4).tokens_per_round", 3.362, "tokens", "1.19", "✗", "never fewer than one token, and α = 0 gives 1"),
    Row("D7", "70B with a draft of 1B in fp16", '(weights("llama-3-70b") + weights("llama-3.2-1b")) / 1e9', 143.6, "GB", "143 GB on 2 × A100", "=", "", 0.003),
    # Cost and laws
    Row("C1a", "4 × A100 at $16/h each and 3,000 tokens/s", "cost_per_million(4 * 16.0, 3000)", 5.926, "USD per million", "5.93", "="),
    Row("C1b", "the same at $16/h for all four, as they are rented", "cost_per_million(16.0, 3000)", 1.4815, "USD per million", "", "–", "if $16/h were the rent of all four; the text's 5.93 is of C1a"),
    Row("C4", "tokens a day from which one H100 at $2.69/h beats an API at $0.60 a million", "break_even(2.69, 0.60) / 1e6", 107.6, "M tokens", "100 M+", "="),
    Row("A2a", "Amdahl: 95 % parallel, 8 devices", "amdahl(0.95, 8)", 5.926, "×", "", "–", "an experiment names the law and gives no share"),
    Row("A2b", "7B, batch 16: a decode step on 8 H100 against 1", 'roofline("llama-2-7b", "h100").seconds(decode_step(16, 2000)) / roofline("llama-2-7b", "h100", tp=8).seconds(decode_step(16, 2000))', 2.757, "×", "", "–", "the experiment on 1, 4, 8 GPUs gives none; links and launches are not divided", 0.02),
    Row("A3", "Little: 10 requests/s of 2 s each", "little(10.0, 2.0)", 20.0, "requests", "", "–", "the law is named without figures"),
    Row("A4", "bubble of 4 stages and 8 microbatches", "100 * bubble(4, 8)", 27.27, "%", "", "–", "bubbles are described without figures"),
    # Sampling
    Row("X1", "logits 8.2, 7.1, 6.9, 6.5, 6.3, top-k 3: the first", "sampled_from(8.2, 7.1, 6.9, 6.5, 6.3, top_k=3)[0]", 0.623, "", "0.61", "≈", "rounded twice", 0.002),
    Row("X2", "the same, T = 0.5", "sampled_from(8.2, 7.1, 6.9, 6.5, 6.3, temperature=0.5)[0]", 0.806, "", "0.72", "✗", "e^(−2.2) is 0.11", 0.002),
    Row("X3", "ids that top-p .9 keeps of them", "sum(p > 0 for p in sampled_from(8.2, 7.1, 6.9, 6.5, 6.3, top_p=0.9))", 4, "ids", "4", "="),
)  # fmt: skip

NAMES = dict(globals())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_call_into_quire_gives_the_exact_figure(row: Row) -> None:
    assert eval(row.call, NAMES) == pytest.approx(row.exact, rel=row.tolerance)


def test_at_least_90_figures_and_every_verdict_is_explained() -> None:
    assert len(ROWS) >= 90
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert all(row.why for row in ROWS if row.verdict != "=")
    assert all(bool(row.says) == (row.verdict != "–") for row in ROWS), "no word is put into a text's mouth"


def test_the_page_is_written_from_this_table() -> None:
    root = Path(__file__).resolve().parents[2]
    wrong = sum(row.verdict == "✗" for row in ROWS)
    assert (
        f"{len(ROWS)} figures from texts, {wrong} of which are wrong" in (root / "docs/README.md").read_text()
    )
    spec = importlib.util.spec_from_file_location("worked_docs", root / "tools" / "worked_figures_docs.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text()
    assert text == tool.page(text, ROWS), "python tools/worked_figures_docs.py"
