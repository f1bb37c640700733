"""Whole engines: decode at 1 and 256 sequences, prefill, throughput; beside bounds from the same run's ceilings.

`EngineCore` is driven with token ids, as `LLM.generate` does it, without text: no tokenizer is needed.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
from benchmarks.gpu.models import SPECS, configuration
from benchmarks.gpu.timing import DEVICE

from quire.clock import WallClock
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.executor.device import DeviceExecutor
from quire.request import Request, SamplingParams
from quire.scheduler.scheduler import Scheduler

Row = dict[str, Any]
SEEDS = count(20261121)


def build(config: EngineConfig) -> tuple[EngineCore, float]:
    """The engine, and the seconds it took: weights made on the device."""
    start_s = time.perf_counter()
    executor = DeviceExecutor(config)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    core = EngineCore(Scheduler(config.scheduler, config.cache), executor, WallClock())
    return core, time.perf_counter() - start_s


def generate(core: EngineCore, lengths: list[tuple[int, int]], vocab: int) -> Row:
    """Run prompts of ``lengths`` = (in, out) together; return seconds, and the speed while all of them decoded.

    That is from the last first token to the first end; 0 where a request ended before. Prompts differ from call to
    call: none is found in the prefix cache.
    """
    rng = random.Random(next(SEEDS))
    for i, (prompt, output) in enumerate(lengths):
        ids = tuple(rng.randrange(vocab) for _ in range(prompt))
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=output, ignore_eos=True)
        core.put(Request(f"{time.perf_counter_ns()}-{i}", ids, sampling, core.clock.now()))
    start_s = time.perf_counter()
    first: set[str] = set()
    all_first_s = start_s
    tokens = tokens_at_first = 0
    first_end: tuple[float, int] | None = None  # when the first request had ended, and the tokens until then
    while core.has_work:
        ended = False
        for event in core.step():
            assert event.error is None, event.error
            tokens += len(event.token_ids)
            if event.token_ids and event.request_id not in first:
                first.add(event.request_id)
                if len(first) == len(lengths):
                    all_first_s, tokens_at_first = time.perf_counter(), tokens
            ended |= event.finish_reason is not None
        if ended and first_end is None:
            first_end = time.perf_counter(), tokens
    assert first_end is not None
    together_s = first_end[0] - all_first_s
    return {
        "seconds": time.perf_counter() - start_s, "output_tokens": tokens, "prefill_s": all_first_s - start_s,
        "decode_tokens_per_s": max(0.0, (first_end[1] - tokens_at_first) / together_s) if together_s > 0 else 0.0,
    }  # fmt: skip


def decode_bound(config: EngineConfig, batch: int, context: int, limits: dict[str, float]) -> float:
    """Tokens/s if a step took the slower of its bytes over bandwidth and its FLOPs over the matmul peak."""
    spec = config.model.spec
    weights = spec.weight_bytes(config.model.dtype, config.model.formats)
    if not spec.tie_word_embeddings:
        weights -= spec.vocab_size * spec.hidden_size * 2  # of the embedding table a token reads a row
    kv = sum(spec.kv_bytes_per_token(g, config.model.kv_dtype) for g in spec.kv_layout(context).groups)
    seconds = (weights + batch * context * kv) / limits["bandwidth_bytes_per_s"]
    flops = 2 * batch * (spec.weight_bytes("bfloat16") / 2)
    return batch / max(seconds, flops / limits["matmul_flops_per_s"])


def measure(
    model: str, limits: dict[str, float], runs: list[tuple[str, list[tuple[int, int]]]], **settings: object
) -> list[Row]:
    """Build ``model`` once and run each of ``runs`` after a warm-up that captures its graphs."""
    config = configuration(model, **settings)
    core, load_s = build(config)
    memory = core.executor.memory  # type: ignore[attr-defined]
    if memory is not None:
        print(memory)
    rows = []
    for name, lengths in runs:
        warm = [(prompt, min(output, 24)) for prompt, output in lengths]
        generate(core, warm if model != "tiny" else lengths[:1], config.model.spec.vocab_size)
        row = generate(core, lengths, config.model.spec.vocab_size)
        context = sum(p + o // 2 for p, o in lengths) // len(lengths)
        bound = decode_bound(config, len(lengths), context, limits)
        rows.append(
            {"case": f"{model} {settings}, {name}", **row, "ready_s": load_s, "decode_bound_tokens_per_s": bound,
             "share_of_bound": row["decode_tokens_per_s"] / bound,
             "prefill_tokens_per_s": sum(p for p, _ in lengths) / row["prefill_s"],
             "memory": None if memory is None else asdict(memory),
             "determinism": config.determinism, "graphs": core.executor.worker.runner.num_graphs}  # type: ignore[attr-defined]
        )  # fmt: skip
    core.executor.close()
    del core
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def runs(*, tiny: bool) -> list[tuple[str, list[tuple[int, int]]]]:
    if tiny:
        return [("decode, 1", [(5, 3)]), ("decode, 2", [(5, 3)] * 2)]
    return [
        ("decode, 1", [(128, 256)]), ("decode, 256 of 1k", [(896, 256)] * 256), ("prefill, 8 x 2048", [(2048, 1)] * 8)
    ]  # fmt: skip


def end_to_end(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """Llama-3.1-8B's architecture in bf16, fp8, int4 and int8."""
    model = "tiny" if tiny else "llama-8b"
    found = measure(model, limits, runs(tiny=tiny))
    for quantize in ("fp8",) if tiny else ("fp8", "int4-g128", "int8"):
        found += measure(model, limits, runs(tiny=tiny)[:1], quantize=quantize)
    return found


def invariant(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """What batch invariance costs at 1 and 256 sequences: compare with `end_to_end`."""
    return measure("tiny" if tiny else "llama-8b", limits, runs(tiny=tiny)[:2], batch_invariant=True)


def mixture(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """Qwen3-30B-A3B's architecture in bf16."""
    return measure("tiny" if tiny else "qwen3-30b-a3b", limits, runs(tiny=tiny)[:2])


def throughput(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """256 requests of 100 … 1,024 tokens in and out (nano-vLLM's workload)."""
    rng = random.Random(1)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    found: list[Row] = []
    for model in ("tiny",) if tiny else ("qwen3-0.6b", "llama-8b"):
        case = [("throughput", [(7, 3), (4, 2)] if tiny else lengths)]
        for row in measure(model, limits, case):
            found.append({**row, "output_tokens_per_s": row["output_tokens"] / row["seconds"]})
    return found


assert set(SPECS) >= {"tiny", "llama-8b", "qwen3-0.6b", "qwen3-30b-a3b"}
